"""`streamdiff doctor`: reports what was found on this machine and what will be used; each part is tried out.

Knows nothing about sessions or streams; it starts neither the engine nor the server.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamdiff.commands import doctor_compute, models
from streamdiff.commands.doctor_compute import Finding, Grade
from streamdiff.config import EMBEDDED, Config
from streamdiff.device import host_memory
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, resolve
from streamdiff.models.catalogue import Files
from streamdiff.models.spec import choose_steps
from streamdiff.models.weight_files import PICKLES, SAFETENSORS
from streamdiff.pipeline.planner import model_sizes
from streamdiff.version import __version__

if TYPE_CHECKING:
    from streamdiff.server.media.codecs import Library


def examine(config: Config) -> list[Finding]:
    """Look at everything `config` needs. A part that cannot be found out is a finding, not an error."""
    looks: tuple[Callable[[Config], Iterator[Finding]], ...] = (
        _look_at_machine,
        doctor_compute.look_at_torch,
        doctor_compute.look_at_kernels,
        doctor_compute.look_at_quantisation,
        doctor_compute.look_at_trials,
        _look_at_weights,
        _look_at_steps,
        _look_at_codecs,
        _look_at_webrtc,
        _look_at_address,
        _look_at_display,
    )
    return [finding for look in looks for finding in look(config)]


def report(config: Config) -> int:
    """Print the findings and what will be used. Returns 1 when something that is needed is missing, else 0."""
    print(f"streamdiff {__version__}, {sys.executable}\n")
    print("found")
    findings = examine(config)
    uses = list(_uses(config, findings))
    width = max(len(topic) for topic, _ in [*uses, *((finding.topic, "") for finding in findings)])
    for finding in findings:
        print(f"  {finding.grade.value:4}  {finding.topic:{width}}  {finding.text}")
    print("\nwill be used")
    for topic, text in uses:
        print(f"        {topic:{width}}  {text}")
    bad = [finding.topic for finding in findings if finding.grade is Grade.BAD]
    print(f"\nMissing: {', '.join(bad)}." if bad else "\nReady: streamdiff serve")
    return 1 if bad else 0


# ---- the machine -----------------------------------------------------------------------------------------------


def _look_at_machine(config: Config) -> Iterator[Finding]:
    yield Finding("python", Grade.GOOD, f"{platform.python_version()} on {platform.platform(terse=True)}")
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    share = "" if usable == cores else f", {usable} of them for this process"
    yield Finding("cpu", Grade.GOOD, f"{_cpu_name()}, {cores} cores{share}")
    free, memory = host_memory()
    grade = Grade.GOOD if memory > 2e9 else Grade.NOTE
    size = f"{memory / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    yield Finding("memory", grade, size + ("" if grade is Grade.GOOD else "; 2 are advised"))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform's own word follows
    return platform.processor() or platform.machine()


# ---- the model ----------------------------------------------------------------------------------------------------


def _look_at_weights(config: Config) -> Iterator[Finding]:
    yield from _look_at_given(config)
    entry = catalogue.entries().get(config.model.name)
    if entry is not None and entry.weights is not None:
        if config.model.weights is None:
            yield _of_published(entry.name, entry.weights)
        return
    if catalogue.is_random(config.model.name):
        yield Finding("model", Grade.NOTE, f"{config.model.name}: weights are drawn, pictures mean nothing")
        return
    folder = resolve.EMBEDDED_WEIGHTS if config.model.name == EMBEDDED else Path(config.model.name)
    kinds = (SAFETENSORS, *PICKLES)
    files = [each for each in (folder, *sorted(folder.rglob("*"))) if each.is_file() and each.suffix in kinds]
    if not files and resolve.is_repository(config.model.name):
        yield Finding("model", Grade.NOTE, f"{config.model.name}: what is missing of it will be fetched from the hub")
        return
    if not files:
        yield Finding("model", Grade.BAD, f"{config.model.name}: no weights ({', '.join(kinds)}) at {folder}")
        return
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    yield Finding(
        "model", Grade.GOOD, f"{config.model.name}: {len(files)} weight files, {megabytes:.1f} MB in {folder}"
    )


def _look_at_steps(config: Config) -> Iterator[Finding]:
    """Findings on the number of denoise steps per chunk, as far as it is known before the model is loaded."""
    wanted, own = config.model.step_count, "what the model was made for"
    fast = config.model.preset == "fast" and wanted is None
    try:
        sizes = model_sizes.sizes_of(config.model)
    except ConfigError:  # neither a known model nor a folder of the embedded kind: its files say it when it is loaded
        yield Finding("steps", Grade.NOTE, own if wanted is None else f"{wanted} per chunk, if the model has so many")
        return
    try:
        least = min(sizes.spec.steps, default=None)
        steps = choose_steps(least if fast else wanted, sizes.spec.steps, sizes.spec.name)
    except ConfigError as error:
        yield Finding("steps", Grade.BAD, str(error))
    else:
        yield Finding("steps", Grade.GOOD, f"{steps} per chunk" + (f" ({own})" if steps == sizes.spec.steps[0] else ""))


def _look_at_given(config: Config) -> Iterator[Finding]:
    """Findings on the weights, VAE and text encoder that the configuration names: on disk, to be fetched or missing."""
    given = {"weights": config.model.weights, "vae": config.model.vae, "text encoder": config.model.text_encoder}
    for part, path in given.items():
        if path is not None:
            published = catalogue.autoencoders().get(path) if part == "vae" else None
            if Path(path).exists():
                yield Finding("model", Grade.GOOD, f"{part}: {path}")
            elif published is not None:
                yield _of_published(f"{part}: {path}", published)
            else:
                yield Finding("model", Grade.BAD, f"{part}: {path} is missing")


def _of_published(what: str, files: Files) -> Finding:
    missing = [name for name, path in models.on_disk(files).items() if path is None]
    grade, state = (Grade.NOTE, "will be fetched: " + ", ".join(missing)) if missing else (Grade.GOOD, "on disk")
    return Finding("model", grade, f"{what}, {files.repo}: {state}")


# ---- what is sent ----------------------------------------------------------------------------------------------

# Title, library, and the value of serve.codec that cannot do without it.
_ENCODERS: tuple[tuple[str, Library, str], ...] = (
    ("H.264", "h264_nvenc", ""),
    ("H.264", "libx264", ""),
    ("VP8", "libvpx", "vp8"),
)


def _look_at_codecs(config: Config) -> Iterator[Finding]:
    try:
        import av

        from streamdiff.server.media import codecs
    except (ImportError, OSError) as error:
        yield Finding("codecs", Grade.BAD, f"PyAV cannot be imported: {error}")
        return
    library = ".".join(str(part) for part in av.library_versions.get("libavcodec", ()))
    yield Finding("pyav", Grade.GOOD, f"{av.__version__} with libavcodec {library}")
    faults = {encoder: codecs.fault(encoder) for _, encoder, _ in _ENCODERS}
    for title, encoder, value in _ENCODERS:
        fault = faults[encoder]
        if fault is None:
            yield Finding("encoder", Grade.GOOD, f"{title} by {encoder} (one picture encoded)")
        else:
            grade = Grade.BAD if value == config.serve.codec else Grade.NOTE
            yield Finding("encoder", grade, f"{title} by {encoder} cannot be opened: {fault}")
    if config.serve.codec == "h264" and faults["h264_nvenc"] and faults["libx264"]:
        yield Finding("encoder", Grade.BAD, "H.264 is asked for and cannot be encoded")
    if all(faults.values()):
        yield Finding("encoder", Grade.BAD, "neither H.264 nor VP8 can be encoded: no browser can be served")


def _look_at_webrtc(config: Config) -> Iterator[Finding]:
    try:
        from streamdiff.server.webrtc import aiortc_compat

        version = importlib.metadata.version("aiortc")
    except (ImportError, OSError) as error:
        yield Finding("webrtc", Grade.BAD, f"aiortc cannot be imported: {error}")
        return
    low, high = (".".join(str(part) for part in version) for version in aiortc_compat.TESTED)
    yield Finding("webrtc", Grade.GOOD, f"aiortc {version}; tested from {low} to below {high}")


def _look_at_address(config: Config) -> Iterator[Finding]:
    host, port = config.serve.host, config.serve.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of a name that none can have
        why = getattr(error, "strerror", None) or error
        yield Finding("port", Grade.BAD, f"{host}:{port} cannot be listened on: {why}; choose with --port")
        return
    yield Finding("port", Grade.GOOD, f"{host}:{port} is free" if port else f"{host}, any free port")


def _look_at_display(config: Config) -> Iterator[Finding]:
    if has_display():
        yield Finding("display", Grade.GOOD, "there is one")
    else:
        yield Finding("display", Grade.NOTE, "none; open the printed address yourself")


def has_display() -> bool:
    """Whether a browser window could appear."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# ---- the verdict -----------------------------------------------------------------------------------------------


def _uses(config: Config, findings: list[Finding]) -> Iterator[tuple[str, str]]:
    gpus = [finding.text for finding in findings if finding.topic == "gpu" and finding.grade is Grade.GOOD]
    on_gpu = bool(gpus) and config.model.device != "cpu"
    threads = f"{config.model.threads} thread{'s' if config.model.threads > 1 else ''}"
    yield "device", gpus[0] if on_gpu else f"cpu, {threads} for the transformer and one for decoding"
    steps = next(finding.text for finding in findings if finding.topic == "steps")
    yield "model", f"{config.model.name}, steps: {steps}, KV context {config.model.kv_context}"
    if not any(finding.topic == "torch" and finding.grade is Grade.BAD for finding in findings):
        for choice in doctor_compute.settled(config).choices:
            if choice.setting not in ("device", "steps"):  # they stand above
                yield choice.setting, f"{choice.value} ({choice.reason})"
    yield "codec", _codec_in_use(config, findings)
    yield "playback", f"{config.playback.fps:g} frames per second, at most {config.playback.max_ahead_s:g} s ahead"
    host = config.serve.host
    audience = "this machine only" if host in ("127.0.0.1", "::1", "localhost") else "everyone who can reach it"
    yield "address", f"http://{host}:{config.serve.port or '(any)'} for {audience}"
    yield "browser", "opened by serve" if config.serve.open_browser and has_display() else "not opened"


def _codec_in_use(config: Config, findings: list[Finding]) -> str:
    good = [each.text for each in findings if each.topic == "encoder" and each.grade is Grade.GOOD]
    found = [text.split(" (")[0] for text in good]
    h264 = [text for text in found if "H.264" in text][:1]
    vp8 = [text for text in found if "VP8" in text]
    wanted = {"auto": h264 + vp8, "h264": h264, "vp8": vp8}[config.serve.codec]
    return " first, then ".join(wanted) or "none"
