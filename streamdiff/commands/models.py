"""What `streamdiff models` does: lists the catalogue, says what is on disk and what each model needs. Prints; asks no
network. Knows nothing about the command line itself."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamdiff.commands.jobs import ModelsJob
from streamdiff.models import catalogue, hub
from streamdiff.models.catalogue import CatalogueEntry, Files
from streamdiff.pipeline.planner.memory import Memory, in_gb, stage_memory
from streamdiff.pipeline.planner.model_sizes import entry_sizes, small_of

STAGES = (1, 2, 4)
_UNKNOWN = "unknown"
_EMBEDDED_LICENCE = "Apache-2.0"
_USES = {"lora": "LoRA", "vae": "autoencoder", "text_encoder": "text encoder"}
_WIDTH = 118


def run(job: ModelsJob) -> int:
    """Print the list, or all of one model; returns the exit status.

    Raises:
        ConfigError: no model is called so.
    """
    chosen = [catalogue.find(job.name)] if job.name is not None else catalogue.listed()
    if job.as_json:
        trees = [as_tree(entry) for entry in chosen]
        print(json.dumps(trees if job.name is None else trees[0], indent=2))
    else:
        print("\n".join(_list(chosen) if job.name is None else _one(chosen[0])))
    return 0


# ---- on disk -----------------------------------------------------------------------------------------------------


def on_disk(files: Files) -> dict[str, Path | None]:
    """Where each file lies in the hub's cache (`HF_HOME`), None where it does not. Looks at folders only."""
    from huggingface_hub import try_to_load_from_cache

    if any("*" in name for name in files.files):
        return dict.fromkeys(files.files, hub.folder_on_disk(files))
    found: dict[str, Path | None] = dict.fromkeys(files.files)
    for file in files.files:
        path = try_to_load_from_cache(files.repo, file)
        # Anything else says that the file is not there, or is known not to exist.
        found[file] = Path(path) if isinstance(path, str) else None
    return found


def _needed(entry: CatalogueEntry) -> list[tuple[str, Files]]:
    """Files that running the model needs, as (use, files)."""
    return [(_USES.get(name, name), files) for name, files in catalogue.files_of(entry).items()]


def _presence(entry: CatalogueEntry) -> str:
    """Of weights and LoRA: yes, no, or how many files."""
    if entry.weights is None:
        return "yes, embedded"
    found = [path for use, files in _needed(entry) if use in ("weights", "LoRA") for path in on_disk(files).values()]
    there = sum(path is not None for path in found)
    return {0: "no", len(found): "yes"}.get(there, f"{there} of {len(found)} files")


# ---- as JSON -----------------------------------------------------------------------------------------------------


def as_tree(entry: CatalogueEntry) -> dict[str, Any]:
    """A catalogue entry as a JSON tree, with its computed schedules, its files on disk, and bytes per stage."""
    tree = entry.model_dump(mode="json")
    if entry.sampling is not None:
        for key, chunk in (("schedule", 1), ("first_chunk_schedule", 0)):
            made = entry.sampling.schedule().of(chunk)
            tree[key] = {name: getattr(made, name) for name in ("timesteps", "sigmas", "noise_scale")}
    parts = zip(("architecture", "autoencoder", "text_encoder"), catalogue.parts_of(entry), strict=True)
    tree["parts"] = {name: part.model_dump(mode="json") for name, part in parts}
    tree["embedded"] = entry.weights is None
    tree["on_disk"] = {
        use: {file: str(path) if path else None for file, path in on_disk(files).items()}
        for use, files in _needed(entry)
    }
    tree["memory"] = {"note": _memory_note(entry)}
    for name, quantize in (("bytes_per_stage", "none"), ("bytes_per_stage_quantized", "int8")):
        tree["memory"][name] = {
            str(stages): [{**each.parts, "total": each.total} for each in stage_memory(entry, stages, quantize)]
            for stages in STAGES
        }
    return tree


def _memory_note(entry: CatalogueEntry) -> str:
    seen = "no session"
    if entry.stream is not None and entry.context is not None:
        kv_context = entry.context.default
        seen = f"one session (window {entry.stream.window(kv_context)}, KV context {kv_context})"
    return f"an estimate: bfloat16, {seen} at {entry.height}x{entry.width}, all but the text encoder"


# ---- for people --------------------------------------------------------------------------------------------------


def _list(entries: Sequence[CatalogueEntry]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("name", "base", "steps", "chunk", "window", "sink", "KV context", "GB at 1/2/4 stages", "on disk", "licence")
    ]
    for entry in entries:
        memory = " / ".join(in_gb(_largest(entry, stages).total) for stages in STAGES)
        licence = entry.weights.licence if entry.weights else _EMBEDDED_LICENCE
        rows.append((entry.name, entry.architecture, *_cells(entry), memory, _presence(entry), licence or _UNKNOWN))
    return [
        *aligned(rows),
        "",
        "Chunk, window and sink in latent frames. GB is an estimate for the GPU that takes most: weights in bfloat16,",
        "the caches of one session at the model's own picture and window, and working memory; the text encoder apart.",
        "A licence is that of the weights. All of one model: streamdiff models NAME",
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells as wide as the column's widest."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def counted(number: int, what: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cells(entry: CatalogueEntry) -> tuple[str, ...]:
    """Steps, chunk, window, sink, KV context."""
    assert entry.sampling is not None and entry.stream is not None and entry.context is not None, "it streams"
    stream, kv_context = entry.stream, entry.context.default
    window = stream.window(kv_context)
    return *map(str, (entry.sampling.schedule().steps, stream.chunk_latents, window, stream.sink_latents)), kv_context


def _one(entry: CatalogueEntry) -> list[str]:
    lines = [f"{entry.name}: {entry.title}", *_wrapped(entry.use, "  ")]
    for title, section in (
        ("files", _file_lines(entry)),
        ("how it runs", _run_lines(entry)),
        (f"memory per stage, {_memory_note(entry)}", _memory_lines(entry)),
    ):
        pairs = list(section)
        width = max(len(key) for key, _ in pairs)
        lines += ["", title, *(f"  {key:{width}}  {text}" for key, text in pairs)]
    if entry.notes:
        lines += ["", "worth knowing", *(line for note in entry.notes for line in _wrapped(note, "  - "))]
    return [*lines, "", "source", *(f"  {source}" for source in entry.sources)]


def _file_lines(entry: CatalogueEntry) -> Iterator[tuple[str, str]]:
    if entry.weights is None:
        yield "weights", f"embedded, always there; licence {_EMBEDDED_LICENCE}"
        return
    for use, files in _needed(entry):
        found = on_disk(files)
        here = sum(path is not None for path in found.values())
        state = {0: "not on disk", len(found): "on disk"}.get(here, f"{here} of {len(found)} files on disk")
        yield use, f"{files.repo}  {_short(files.files)}: {state}"
        yield "", hub.download_command(files.repo, files.files)
        note = f" ({files.licence_note})" if files.licence_note else ""
        yield "", f"licence {files.licence or _UNKNOWN}{note}"
    yield "container", entry.weights.container or f"{_UNKNOWN}: found out when it is loaded"
    if entry.lora is not None:
        lora = entry.lora
        yield "LoRA", f"container {lora.container or _UNKNOWN}, rank {lora.rank}, scale {lora.scale:g}"
    for tiny in catalogue.parts_of(entry)[1].tiny:
        space = {"model": "as the transformer makes them", "vae": "with mean and deviation put back"}[tiny.latents]
        licence = tiny.licence or _UNKNOWN
        yield "small one", f"--vae {tiny.name}: {tiny.repo}  {_short(tiny.files)}"
        yield "", f"takes latents {space}; licence {licence}"
    for file, text in entry.weights.others.items():
        yield "also there", f"{file}: {text}"


def _run_lines(entry: CatalogueEntry) -> Iterator[tuple[str, str]]:
    _, pictures, text = catalogue.parts_of(entry)
    yield "picture", f"{entry.height}x{entry.width}, {_number(entry.native_fps)} frames per second"
    yield "text", f"{text.title}: {text.tokens} tokens of width {text.width}"
    left_out = "not by the authors' code, see below (as theirs: encode --raw)"
    encode = {True: "yes", False: left_out, None: _UNKNOWN}[entry.encode_normalised]
    yield "latents", f"{pictures.channels} channels, 1:{pictures.temporal} in time, normalised when encoded: {encode}"
    sampling, stream, context = entry.sampling, entry.stream, entry.context
    if sampling is None or stream is None or context is None or entry.switches is None or entry.positions is None:
        yield "streams", "no: it makes whole clips"
        return
    warp = ", warped" if sampling.warp else ", as they stand"
    yield "steps", f"{_numbers(sampling.steps)}; shift {sampling.shift:g}{warp}"
    for key, chunk in (("", 1), ("first chunk", 0)):
        if chunk or sampling.first_chunk_steps:
            made = sampling.schedule().of(chunk)
            scale = f"; begins with noise times {made.noise_scale:.6g}" if made.noise_scale != 1 else ""
            renoise = f"; noise added again at {_numbers(made.renoise)}" if made.renoise is not None else ""
            yield key, f"timesteps {_numbers(made.timesteps)}; sigmas {_numbers(made.sigmas)}{renoise}{scale}"
    if sampling.keep_end:
        yield "", f"the step at timestep 0 may be left out: --steps {sampling.schedules()[-1].steps}"
    first_chunk = f", the first {stream.first_chunk_latents}" if stream.first_chunk_latents else ""
    yield "chunk", f"{_latents(stream.chunk_latents)}{first_chunk}"
    sink = f", a sink of {stream.sink_latents} in it" if stream.sink_latents else ""
    value = f" {stream.sink_value:g}" if stream.sink_value is not None else ""
    policy = f" ({stream.sink_policy}{value})" if stream.sink_policy else ""
    clean = f" ({stream.clean_window_latents} with KV context clean)" if stream.clean_window_latents else ""
    alone = " and sees its chunk alone" if context.alone else ""
    reencoded = ", its first latent frame encoded again from its picture" if context.pictures else ""
    clean_pass = f"the clean pass gets timestep {_number(context.noise)}{alone}{reencoded}"
    yield from (
        ("window", f"{_latents(stream.window_latents)}{clean}{sink}{policy}"),
        ("trained on", f"streams of {_latents(stream.trained_latents)}" if stream.trained_latents else _UNKNOWN),
        ("KV context", f"trained for {context.trained or _UNKNOWN}; also known to work: {_names(context.works)}"),
        ("", clean_pass if context.noise is not None else "no clean pass"),
        *((("", f"read in {context.source}"),) if context.source is not None else ()),
        (
            "prompt change",
            f"trained for {entry.switches.trained or _UNKNOWN}; known to work: {_names(entry.switches.works)}; reset "
            "always does",
        ),
        ("positions", f"{entry.positions.published}; also: {_names(entry.positions.works)}"),
    )
    for number, control in enumerate(entry_sizes(entry).spec.controls):
        keys = ", ".join(key.removeprefix("Key") for key in control.keys)
        yield "" if number else "keys", f"{control.name}: {keys}"


def _memory_lines(entry: CatalogueEntry) -> Iterator[tuple[str, str]]:
    text = catalogue.parts_of(entry)[2]
    for stages in STAGES:
        largest = _largest(entry, stages)
        sizes = " + ".join(f"{in_gb(size)} {part}" for part, size in largest.parts.items() if size)
        yield counted(stages, "stage"), f"{in_gb(largest.total)} GB at most = {sizes.replace('_', ' ')}"
        name = small_of(entry.autoencoder)
        small = f", {in_gb(_largest(entry, stages, vae=name).total)} with {name}" if name else ""
        yield "", f"{in_gb(_largest(entry, stages, 'int8').total)} GB quantised{small}"
    if text.gigabytes is not None:
        yield "beside it", f"{text.gigabytes:g} GB text encoder, where it is kept on the device"


def _largest(entry: CatalogueEntry, stages: int, quantize: str = "none", vae: str = "") -> Memory:
    """Of the stage that takes most."""
    return max(stage_memory(entry, stages, quantize, vae), key=lambda stage: stage.total)


def _wrapped(text: str, start: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _latents(count: int) -> str:
    return counted(count, "latent frame")


def _short(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _names(words: Sequence[str]) -> str:
    return ", ".join(words) or "none known"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:g}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
