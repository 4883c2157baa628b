"""`streamdiff doctor`: reports what was found on this machine and what will be used; each part is tried out.

Knows nothing about sessions or streams; it starts neither the engine nor the server.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from streamdiff.commands import models
from streamdiff.config import EMBEDDED, Config, ModelConfig
from streamdiff.device import host_memory
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, resolve
from streamdiff.models.catalogue import Files
from streamdiff.models.resolve import Defaults, settle
from streamdiff.models.spec import choose_steps
from streamdiff.models.weight_files import ENDINGS
from streamdiff.pipeline.planner.model_sizes import sizes_of, sizes_with_window
from streamdiff.version import __version__

if TYPE_CHECKING:
    import torch

    from streamdiff.server.media.encoder import Library

_HEAD_DIM = 128
"""Width of a head of Wan's."""
_SHARED = Path("/dev/shm")
_ENCODERS: dict[Library, str] = {"h264_nvenc": "H.264", "libx264": "H.264", "libvpx": "VP8"}
Grade = Literal["ok", "note", "FAIL"]


class Finding(NamedTuple):
    """One line of the report. What is graded `FAIL` is needed and missing."""

    grade: Grade
    topic: str
    text: str


def examine(config: Config) -> list[Finding]:
    """Look at everything `config` needs. A part that cannot be found out is a finding, not an error."""
    looks = (
        _look_at_machine, _look_at_torch, _look_at_kernels, _look_at_weights, _look_at_steps, _look_at_codecs,
        _look_at_webrtc, _look_at_address, _look_at_display,
    )  # fmt: skip
    return [finding for look in looks for finding in look(config)]


def report(config: Config) -> int:
    """Print the findings and what will be used. Returns 1 when something that is needed is missing, else 0."""
    print(f"streamdiff {__version__}, {sys.executable}\n")
    print("found")
    findings = examine(config)
    uses = list(_uses(config, findings))
    width = max(len(topic) for topic in [*(topic for topic, _ in uses), *(each.topic for each in findings)])
    for grade, topic, text in findings:
        print(f"  {grade:4}  {topic:{width}}  {text}")
    print("\nwill be used")
    for topic, text in uses:
        print(f"        {topic:{width}}  {text}")
    bad = list(dict.fromkeys(finding.topic for finding in findings if finding.grade == "FAIL"))
    print(f"\nMissing: {', '.join(bad)}." if bad else "\nReady: streamdiff serve")
    return 1 if bad else 0


# ---- the machine -----------------------------------------------------------------------------------------------


def _look_at_machine(config: Config) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    share = "" if usable == cores else f", {usable} of them for this process"
    yield Finding("ok", "cpu", f"{_cpu_name()}, {cores} cores{share}")
    free, memory = host_memory()
    size = f"{memory / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    yield Finding("ok", "memory", size) if memory > 2e9 else Finding("note", "memory", f"{size}; 2 are advised")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform's own word follows
    return platform.processor() or platform.machine()


def _look_at_torch(config: Config) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of its own is missing
        yield Finding("FAIL", "torch", f"cannot be imported: {error}")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("ok", "torch", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads by default")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        device = torch.cuda.get_device_properties(index)
        yield Finding("ok", "gpu", f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB")
    if gpus > 1 and _SHARED.is_dir() and (size := shutil.disk_usage(_SHARED).total) < 2**30:
        less = f"{_SHARED} has {size / 2**20:.0f} MiB; NCCL between ranks may need 1024: docker run --shm-size 1g"
        yield Finding("note", "gpu", less)
    if not torch.cuda.is_available():
        unusable = "there is an NVIDIA device, but this torch cannot use it: make distclean serve"
        none = unusable if Path("/dev/nvidiactl").exists() else "none; the embedded model runs on the CPU"
        wanted = Finding("FAIL", "gpu", "none, but the device is set to cuda; use --device auto")
        yield wanted if config.model.device == "cuda" else Finding("note", "gpu", none)


# ---- what the transformer computes with ------------------------------------------------------------------------


def _look_at_kernels(config: Config) -> Iterator[Finding]:
    """Attention kernels, ways to quantise, and the trials of a start."""
    try:
        from streamdiff.models import checkpoint
        from streamdiff.models.transformer import attention_backend, quantization
        from streamdiff.pipeline import load_plan
    except (ImportError, OSError):
        return  # torch or diffusers: said elsewhere, or by what needs it
    device, dtype = _computes_in(config)
    chosen, found = config.model.attention, attention_backend.survey(device, dtype, heads=2, head_dim=_HEAD_DIM)
    right, case = [name for name in found if found[name] is None], f"{device}, {str(dtype).removeprefix('torch.')}"
    yield Finding("ok", "attention", f"{', '.join(right)}: compared with the formula, right here ({case})")
    if found[chosen] is not None:
        yield Finding("FAIL", "attention", f"{chosen} {found[chosen]}")
    for what, absent in (("not installed", True), ("not for this machine", False)):
        others = {name: fault for name, fault in found.items() if fault is not None and name != chosen}
        if names := [name for name, fault in others.items() if ("is not installed" in fault) == absent]:
            yield Finding("note", "attention", f"{what}: {', '.join(names)}")
    absent_library = None if importlib.util.find_spec("torchao") else f"takes torchao; {quantization.INSTALL}"
    faults = {mode: quantization.unsuited(mode, device, dtype) or absent_library for mode in quantization.MODES[1:]}
    if right := [mode for mode, fault in faults.items() if fault is None]:
        yield Finding("ok", "quantize", f"{' and '.join(right)} by torchao {importlib.metadata.version('torchao')}")
    for mode, fault in faults.items():
        if fault is not None:
            yield Finding("FAIL" if config.model.quantize == mode else "note", "quantize", f"{mode} {fault}")
    if importlib.util.find_spec("gguf"):
        yield Finding("ok", "gguf", f"{importlib.metadata.version('gguf')}, reads {', '.join(checkpoint.gguf_kinds())}")
    else:
        yield Finding("note", "gguf", f"such files take the package gguf; {checkpoint.GGUF_INSTALL}")
    model = _settled(config).config
    if "auto" not in (model.attention, model.quantize):
        return
    try:
        sizes = sizes_with_window(config.model)
    except ConfigError:  # its files say it when it is loaded
        yield Finding("note", "trial", "at the start: how large the model is is not known before")
        return
    for choice in load_plan.try_kernels(model, sizes, device, dtype)[1]:
        yield Finding("ok", choice.setting, f"{choice.value}, {choice.reason}")


def _settled(config: Config) -> Defaults:
    """The model configuration with defaults filled in for the device of this machine."""
    from streamdiff.pipeline.runner.graphs import compile_fault

    device, _ = _computes_in(config)
    try:
        steps = sizes_with_window(config.model).spec.steps
    except ConfigError:
        steps = ()
    return settle(config.model, device.type, steps, lambda: compile_fault(device))


def _computes_in(config: Config) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the transformer."""
    from streamdiff.device import pick_device, pick_dtype

    device = pick_device("cpu" if config.model.device == "cpu" else "auto")  # not what is missing: that is said above
    return device, pick_dtype(config.model.dtype, device)


# ---- the model -------------------------------------------------------------------------------------------------


def _look_at_weights(config: Config) -> Iterator[Finding]:
    yield from _look_at_given(config)
    name = config.model.name
    entry = catalogue.entries().get(name)
    if entry is not None and entry.weights is not None:
        if config.model.weights is None:
            yield _of_published(name, entry.weights)
        return
    folder = resolve.EMBEDDED_WEIGHTS if name == EMBEDDED else Path(name)
    files = [each for each in (folder, *sorted(folder.rglob("*"))) if each.is_file() and each.suffix in ENDINGS]
    if catalogue.is_random(name):
        yield Finding("note", "model", f"{name}: weights are drawn, pictures mean nothing")
    elif files:
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        yield Finding("ok", "model", f"{name}: {len(files)} weight files, {megabytes:.1f} MB in {folder}")
    elif resolve.is_repository(name):
        yield Finding("note", "model", f"{name}: what is missing of it will be fetched from the hub")
    else:
        yield Finding("FAIL", "model", f"{name}: no weights ({', '.join(ENDINGS)}) at {folder}")


def _look_at_given(config: Config) -> Iterator[Finding]:
    """Findings on the parts that the configuration names, and on the model's own that are on disk: to be fetched, or
    what loading would refuse."""
    faults = _faults(config.model)
    for name in ("weights", "lora", "vae", "text_encoder"):
        given, part = getattr(config.model, name), name.replace("_", " ")
        published = catalogue.autoencoders().get(given) if name == "vae" else None
        if given and published is not None and not Path(given).exists():
            yield _of_published(f"{part}: {given}", published)
        elif name in faults:
            yield Finding("FAIL", "model", faults[name])
        elif given and not (name == "lora" and faults):
            yield Finding("ok", "model", f"{part}: {given if isinstance(given, str) else ', '.join(given)}")


def _faults(model: ModelConfig) -> dict[str, str]:
    """What loading would refuse of the files that are here, by part; found out from headers, as `serve` does."""
    try:
        import torch

        from streamdiff.models.loader import PARTS, ModelLoader
    except (ImportError, OSError):  # said elsewhere
        return {}
    entry, faults = catalogue.entries().get(model.name), dict[str, str]()
    if entry is None and resolve.is_repository(model.name) and not Path(model.name).exists():
        return {}
    needed = {} if entry is None else catalogue.files_of(entry)
    absent = [part for part, files in needed.items() if None in models.on_disk(files).values()]
    if "lora" in absent:  # it would be fetched
        model = model.model_copy(update={"lora": (resolve.NO_LORA, *model.lora)})
    if entry is not None and "weights" in absent and model.weights is None:  # their sizes stand for them
        if catalogue.parts_of(entry)[0].image_dim is not None:  # such are not drawn
            return {}
        model = model.model_copy(update={"name": f"{catalogue.RANDOM}{entry.architecture}", "steps": None})
    loader = ModelLoader(model, torch.device("cpu"))
    for part in PARTS:
        try:
            loader.check_files(part)
            loader.live_spec()
        except ConfigError as error:
            if str(error) not in faults.values():
                faults[part] = str(error)
    return faults


def _of_published(what: str, files: Files) -> Finding:
    if missing := [name for name, path in models.on_disk(files).items() if path is None]:
        return Finding("note", "model", f"{what}, {files.repo}: will be fetched: {', '.join(missing)}")
    return Finding("ok", "model", f"{what}, {files.repo}: on disk")


def _look_at_steps(config: Config) -> Iterator[Finding]:
    """Findings on the number of denoise steps per chunk, as far as it is known before the model is loaded."""
    wanted, own = config.model.step_count, "what the model was made for"
    try:
        spec = sizes_of(config.model).spec
    except ConfigError:  # neither a known model nor a folder of the embedded kind: its files say it when it is loaded
        yield Finding("note", "steps", own if wanted is None else f"{wanted} per chunk, if the model has so many")
        return
    if config.model.preset == "fast" and wanted is None:
        wanted = min(spec.steps, default=None)
    try:
        steps = choose_steps(wanted, spec.steps, spec.name)
    except ConfigError as error:
        yield Finding("FAIL", "steps", str(error))
    else:
        yield Finding("ok", "steps", f"{steps} per chunk" + (f" ({own})" if steps == spec.steps[0] else ""))


# ---- what is sent ----------------------------------------------------------------------------------------------


def _look_at_codecs(config: Config) -> Iterator[Finding]:
    try:
        import av

        from streamdiff.server.media import encoder as codecs
    except (ImportError, OSError) as error:
        yield Finding("FAIL", "codecs", f"PyAV cannot be imported: {error}")
        return
    library = _dotted(av.library_versions.get("libavcodec", ()))
    yield Finding("ok", "pyav", f"{av.__version__} with libavcodec {library}")
    faults = {encoder: codecs.fault(encoder) for encoder in _ENCODERS}
    for encoder, title in _ENCODERS.items():
        if (fault := faults[encoder]) is None:
            yield Finding("ok", "encoder", f"{title} by {encoder} (one picture encoded)")
        else:
            grade: Grade = "FAIL" if config.serve.codec == "vp8" and title == "VP8" else "note"
            yield Finding(grade, "encoder", f"{title} by {encoder} cannot be opened: {fault}")
    if config.serve.codec == "h264" and faults["h264_nvenc"] and faults["libx264"]:
        yield Finding("FAIL", "encoder", "H.264 is asked for and cannot be encoded")
    if all(faults.values()):
        yield Finding("FAIL", "encoder", "neither H.264 nor VP8 can be encoded: no browser can be served")


def _look_at_webrtc(config: Config) -> Iterator[Finding]:
    try:
        from streamdiff.server.webrtc import aiortc_compat

        version = importlib.metadata.version("aiortc")
    except (ImportError, OSError) as error:
        yield Finding("FAIL", "webrtc", f"aiortc cannot be imported: {error}")
        return
    low, high = map(_dotted, aiortc_compat.TESTED)
    yield Finding("ok", "webrtc", f"aiortc {version}; tested from {low} to below {high}")


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _look_at_address(config: Config) -> Iterator[Finding]:
    host, port = config.serve.host, config.serve.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of a name that none can have
        why = getattr(error, "strerror", None) or error
        yield Finding("FAIL", "port", f"{host}:{port} cannot be listened on: {why}; choose with --port")
        return
    yield Finding("ok", "port", f"{host}:{port} is free" if port else f"{host}, any free port")


def _look_at_display(config: Config) -> Iterator[Finding]:
    there = Finding("ok", "display", "there is one")
    yield there if _has_display() else Finding("note", "display", "none; open the printed address yourself")


def _has_display() -> bool:
    """Whether a browser window could appear."""
    on_desktop = sys.platform in ("darwin", "win32")
    return on_desktop or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# ---- the verdict -----------------------------------------------------------------------------------------------


def _uses(config: Config, findings: list[Finding]) -> Iterator[tuple[str, str]]:
    good = {topic: [each.text for each in findings if each[:2] == ("ok", topic)] for topic in ("gpu", "encoder")}
    threads = f"{config.model.threads} thread{'s' if config.model.threads > 1 else ''}"
    on_gpu = good["gpu"] and config.model.device != "cpu"
    yield "device", good["gpu"][0] if on_gpu else f"cpu, {threads} for the transformer and one for decoding"
    steps = next(finding.text for finding in findings if finding.topic == "steps")
    yield "model", f"{config.model.name}, steps: {steps}, KV context {config.model.kv_context}"
    if not any(finding[:2] == ("FAIL", "torch") for finding in findings):
        for choice in _settled(config).choices:
            if choice.setting not in ("device", "steps"):  # they stand above
                yield choice.setting, f"{choice.value} ({choice.reason})"
    yield "codec", _codec_in_use(config, [text.split(" (")[0] for text in good["encoder"]])
    yield "playback", f"{config.playback.fps:g} frames per second, at most {config.playback.max_ahead_s:g} s ahead"
    host = config.serve.host
    audience = "this machine only" if host in ("127.0.0.1", "::1", "localhost") else "everyone who can reach it"
    yield "address", f"http://{host}:{config.serve.port or '(any)'} for {audience}"
    yield "browser", "opened by serve" if config.serve.open_browser and _has_display() else "not opened"


def _codec_in_use(config: Config, found: list[str]) -> str:
    h264 = [text for text in found if "H.264" in text][:1]
    vp8 = [text for text in found if "VP8" in text]
    wanted = {"auto": h264 + vp8, "h264": h264, "vp8": vp8}[config.serve.codec]
    return " first, then ".join(wanted) or "none"
