"""Does the embedded model show what the prompt says, still after 200 chunks, and at once after a prompt change?

    python -m benchmarks.tiny_quality            # 200 prompts, all contexts, 4 and 2 steps: hours on a CPU
    python -m benchmarks.tiny_quality --contexts clean --steps 4 --prompts 40
    python -m benchmarks.tiny_quality --contexts anchored --sink 2 --anchor-every 2
    python -m benchmarks.tiny_quality --quick    # minutes: does it run, roughly how good is it

What is done is kept beside the result until all is done: the same command goes on after an interruption.
Judged from decoded pixels alone; benchmarks/README.md defines every figure. Knows nothing about how latents are made:
a `Subject` makes them and decodes them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report, world_clips
from benchmarks.world_judge import Verdict, as_frames, judge, wrapped
from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.errors import StreamdiffError
from streamdiff.models.spec import with_anchors, with_window
from streamdiff.models.tiny import world
from streamdiff.models.tiny.prompts import canonical

SUMMARY = "Judge what the embedded model shows, at chosen chunks and after a prompt change."
RUN_UP = 2
"""Chunks decoded before a judged one: the decoder remembers frames, so it needs them to be in its stride."""
DECODE_STREAMS = 8
SHEET_STREAMS = 10
CONTEXTS = ("clean", "staircase", "matched", "anchored")
WITHOUT_BAR = ("matched", "anchored")
PLAIN = ModelConfig()
BARS = {"color": 0.98, "background": 0.98, "motion": 0.95, "shape": 0.90}
DRIFT_BAR, CHANGE_BAR = 0.02, 0.95


class Rollout(Protocol):
    """Makes the latents of many streams at once, from chunk 0 on."""

    def __call__(
        self,
        prompts: list[str],
        *,
        chunks: int,
        steps: int,
        kv_context: str,
        seed: int,
        switch: dict[int, list[str]] | None = None,
        keep: set[int],
    ) -> dict[int, Tensor]:
        """Normalised latents `[N, F, C, h, w]` of the chunks in `keep`; `switch[k]` replaces the prompts at chunk k."""


@dataclass(frozen=True)
class Subject:
    """What is measured. `decode` turns latents `[N, F, C, h, w]`, a stream's first, into frames `[N, T, 3, H, W]`."""

    rollout: Rollout
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What to run. `marks`: the chunks that are judged, rising, counted from 0; prompts change at `change_at`."""

    prompts: int = 200
    marks: tuple[int, ...] = (5, 50, 200)
    contexts: tuple[str, ...] = CONTEXTS[:3]
    steps: tuple[int, ...] = (4, 2)
    change_at: int = 6
    seed: int = 0
    batch: int = 50

    @property
    def configurations(self) -> list[tuple[str, int]]:
        return [(context, steps) for context in self.contexts for steps in self.steps]

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks per stream of the long run and of the run with a prompt change."""
        return self.marks[-1] + 1, self.change_at + 2


class Kept:
    """Figures of the batches that are done, in a file, so that hours of work survive an interruption.

    `stamp` says what they belong to (plan, weights); figures of anything else are forgotten.
    """

    def __init__(self, path: Path | None, stamp: str = "") -> None:
        self.path, self.stamp = path, stamp
        self.parts: dict[str, Any] = {}
        if path is not None and path.is_file():
            stored = json.loads(path.read_text())
            self.parts = stored["parts"] if stored["stamp"] == stamp else {}

    def put(self, name: str, part: Any) -> None:
        """Keep a batch. Mutates: self, the file."""
        self.parts[name] = part
        if self.path is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps({"stamp": self.stamp, "parts": self.parts}))
            fresh.replace(self.path)

    def done(self) -> None:
        """The result is written; the parts are not needed any more. Mutates: the file, which goes."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """One context and number of steps: figures for the JSON and the table, strips for the contact sheet."""

    figures: dict[str, Any]
    strips: list[world_clips.Strip]


def decode(subject: Subject, latents: dict[int, Tensor], chunks: Sequence[int]) -> Tensor:
    """Decode neighbouring chunks as one stream: float32 `[N, len(chunks), T, 3, H, W]` in [0, 1], on the CPU."""
    joined = torch.cat([latents[chunk] for chunk in chunks], 1)
    frames = torch.cat([subject.decode(part).float().cpu() for part in joined.split(DECODE_STREAMS)])
    whole: Tensor = frames.clamp(0, 1).unflatten(1, (len(chunks), -1))
    return whole


def _at_mark(scenes: Tensor, frames: Tensor) -> tuple[dict[str, float], Verdict]:
    """Figures of the last of `frames` `[N, chunks, T, ...]`, whose forerunner shows the seam between the two."""
    before, now = judge(frames[:, -2]), judge(frames[:, -1])
    speed = world.velocities()[scenes[:, 2]].float()
    seam = wrapped(now.position[:, 0] - before.position[:, -1])
    return {
        **world_clips.shares(now.right(scenes)),
        "displacement_px": torch.linalg.vector_norm(now.step - speed[:, None], dim=2).mean().item(),
        "seam_px": torch.linalg.vector_norm(seam - speed, dim=1).mean().item(),
        "fit": now.fit.mean().item(),
    }, now


def _weighted(parts: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    total = sum(count for count, _ in parts)
    return {name: sum(count * part[name] for count, part in parts) / total for name in parts[0][1]}


def long_run(
    subject: Subject, plan: Plan, context: str, steps: int, advance: Callable[[int], object], kept: Kept
) -> Outcome:
    """Streams that keep their prompt, judged at the marks. `advance` is told the stream-chunks done."""
    generator = torch.Generator().manual_seed(plan.seed)
    scenes = world_clips.draw_scenes(plan.prompts, generator)
    parts: list[dict[str, Any]] = []
    strips: list[world_clips.Strip] = []
    for first in range(0, plan.prompts, plan.batch):
        some, name = scenes[first : first + plan.batch], f"{context} {steps} steady {first}"
        if name not in kept.parts:
            kept.put(name, _steady_part(subject, plan, context, steps, some, plan.seed + first, strips))
        parts.append(kept.parts[name])
        advance(len(some) * plan.chunks[0])
    marks = {mark: _weighted([(part["count"], part["marks"][str(mark)]) for part in parts]) for mark in plan.marks}
    start, end = marks[plan.marks[0]], marks[plan.marks[-1]]
    drift = {name: end[name] - start[name] for name in start}
    wrong = [text for part in parts for text in part["wrong"]]
    return Outcome({"marks": {str(mark): part for mark, part in marks.items()}, "drift": drift, "wrong": wrong}, strips)


def _steady_part(
    subject: Subject,
    plan: Plan,
    context: str,
    steps: int,
    scenes: Sequence[world.Scene],
    seed: int,
    strips: list[world_clips.Strip],
) -> dict[str, Any]:
    """Figures of one batch of streams at all marks. Mutates: strips, until there are enough."""
    keep = {chunk for mark in plan.marks for chunk in range(max(0, mark - RUN_UP), mark + 1)}
    prompts = [canonical(scene) for scene in scenes]
    latents = subject.rollout(prompts, chunks=plan.chunks[0], steps=steps, kv_context=context, seed=seed, keep=keep)
    part: dict[str, Any] = {"count": len(scenes), "marks": {}, "wrong": []}
    rows, pictures = world_clips.rows_of(scenes), []
    for mark in plan.marks:
        frames = decode(subject, latents, range(max(0, mark - RUN_UP), mark + 1))
        part["marks"][str(mark)], verdict = _at_mark(rows, frames)
        part["wrong"] += [f"chunk {mark} {text}" for text in world_clips.mistakes(verdict, rows)]
        pictures.append(frames[:, -1, [0, frames.shape[2] // 2, -1]])
    right, seen = verdict.right(rows).all(1), torch.cat(pictures, 1)
    for row in range(min(len(scenes), SHEET_STREAMS - len(strips))):
        text = f"{prompts[row]} | chunks {plan.marks}, last judged: {world_clips.describe(verdict, row)}"
        strips.append(world_clips.Strip(text, seen[row], bool(right[row])))
    return part


def _changed(scenes: Sequence[world.Scene], generator: torch.Generator) -> list[world.Scene]:
    """For every scene another one with another color and another background; shape and motion as they come."""

    def other(names: tuple[str, ...], name: str) -> str:
        rest = [n for n in names if n != name]
        return rest[int(torch.randint(len(rest), (), generator=generator))]

    return [
        replace(
            drawn,
            color=other(world.COLOR_NAMES, scene.color),
            background=other(world.BACKGROUNDS, scene.background),
        )
        for scene, drawn in zip(scenes, world_clips.draw_scenes(len(scenes), generator), strict=True)
    ]


def prompt_change(
    subject: Subject, plan: Plan, context: str, steps: int, advance: Callable[[int], object], kept: Kept
) -> Outcome:
    """Streams whose prompt changes at chunk `change_at`; the first two chunks under the new prompt are judged."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    old = world_clips.draw_scenes(plan.prompts, generator)
    new = _changed(old, generator)
    shown: list[Tensor] = []
    strips: list[world_clips.Strip] = []
    for first in range(0, plan.prompts, plan.batch):
        span, name = slice(first, first + plan.batch), f"{context} {steps} change {first}"
        if name not in kept.parts:
            part = _change_part(subject, plan, context, steps, (old[span], new[span]), plan.seed + first, strips)
            kept.put(name, part.tolist())
        shown.append(torch.tensor(kept.parts[name]))
        advance(len(old[span]) * plan.chunks[1])
    return Outcome(_change_figures(torch.cat(shown)), strips)


def _change_part(
    subject: Subject,
    plan: Plan,
    context: str,
    steps: int,
    scenes: tuple[Sequence[world.Scene], Sequence[world.Scene]],
    seed: int,
    strips: list[world_clips.Strip],
) -> Tensor:
    """Verdicts bool `[N, 2, 4]` on one batch whose scenes change from the first to the second of `scenes`. Mutates:
    strips, until there are enough."""
    old, new = ([canonical(scene) for scene in each] for each in scenes)
    chunks = range(max(0, plan.change_at - RUN_UP), plan.change_at + 2)
    latents = subject.rollout(
        old,
        chunks=plan.chunks[1],
        steps=steps,
        kv_context=context,
        seed=seed,
        switch={plan.change_at: new},
        keep=set(chunks),
    )
    frames, rows = decode(subject, latents, chunks), world_clips.rows_of(scenes[1])
    right = torch.stack([judge(frames[:, position]).right(rows) for position in (-2, -1)], 1)
    last = len(frames[0, 0]) - 1
    for row in range(min(len(rows), SHEET_STREAMS - len(strips))):
        pictures = torch.cat([frames[row, -3, [last]], *(frames[row, c, [0, 3, last // 2, last]] for c in (-2, -1))])
        strips.append(world_clips.Strip(f"{old[row]} -> {new[row]}", pictures, bool(right[row, -1].all())))
    return right


def _change_figures(right: Tensor) -> dict[str, Any]:
    """Shares of bool `[N, 2, 4]`: the new scene's attributes in the first and in the second chunk."""
    color, background = (world_clips.ATTRIBUTES.index(name) for name in ("color", "background"))
    both = right[..., color] & right[..., background]
    return {
        "first chunk": world_clips.shares(right[:, 0]),
        "second chunk": world_clips.shares(right[:, 1]),
        "color_and_background_at_once": both[:, 0].float().mean().item(),
        "color_and_background_within_2": both.any(1).float().mean().item(),
    }


def bars_met(context: str, steady: dict[str, Any], change: dict[str, Any]) -> dict[str, bool]:
    """Which bars are met; none are set for some contexts."""
    if context in WITHOUT_BAR:
        return {}
    marks, drift = steady["marks"], steady["drift"]
    met = {f"{name} >= {bar:.2f}": all(part[name] >= bar for part in marks.values()) for name, bar in BARS.items()}
    met[f"drift within {DRIFT_BAR:.2f}"] = all(drift[name] >= -DRIFT_BAR - 1e-9 for name in BARS)
    met[f"change within 2 chunks >= {CHANGE_BAR:.2f}"] = change["color_and_background_within_2"] >= CHANGE_BAR
    return met


def table_rows(context: str, steps: int, figures: dict[str, Any]) -> list[dict[str, report.Value]]:
    """The lines of the printed table for one context and number of steps."""
    columns = ("color", "background", "motion", "shape", "all", "displacement_px", "seam_px")
    rows = [("chunk " + mark, part) for mark, part in figures["steady"]["marks"].items()]
    rows.append(("drift", figures["steady"]["drift"]))
    head = {"context": context, "steps": steps}
    lines = [{**head, "at": name, **{column: part[column] for column in columns}} for name, part in rows]
    change = figures["change"]
    rest = {column: change["second chunk"].get(column) for column in columns}
    return [*lines, {**head, "at": "2nd chunk after change", **rest}]


def estimate_s(subject: Subject, plan: Plan) -> float:
    """Seconds the plan will take, from a trial of two lengths (so that start-up does not count)."""
    count = min(plan.batch, plan.prompts, 8)
    spent = []
    for chunks in (2, 2, 4):  # the first warms up
        began = clock.monotonic_s()
        prompts = [canonical(scene) for scene in world.all_scenes()[:count]]
        latents = subject.rollout(prompts, chunks=chunks, steps=4, kv_context="clean", seed=0, keep={0, 1})
        spent.append(clock.monotonic_s() - began)
    per_pass = max(1e-6, spent[2] - spent[1]) / 2 / count / 5
    began = clock.monotonic_s()
    judge(decode(subject, latents, (0, 1)).flatten(0, 1))
    per_look = (clock.monotonic_s() - began) / 2 / count
    looks = plan.prompts * len(plan.configurations) * (len(plan.marks) * (RUN_UP + 1) + RUN_UP + 2)
    passes = sum(plan.prompts * sum(plan.chunks) * (steps + 1) for _, steps in plan.configurations)
    return per_pass * passes + per_look * looks


def run(subject: Subject, plan: Plan, out: Path, head: report.Header, kept: Kept | None = None) -> dict[str, Any]:
    """Carry out what `kept` does not hold of the plan; write `out` (JSON) anew and contact sheets beside it after every
    configuration."""
    kept = kept or Kept(None)
    results: dict[str, Any] = {}
    lines: list[dict[str, report.Value]] = []
    total = len(plan.configurations) * plan.prompts * sum(plan.chunks)
    with tqdm(total=total, unit="chunk", smoothing=0.05) as bar:
        for context, steps in plan.configurations:
            bar.set_description(f"{context} {steps} steps")
            steady = long_run(subject, plan, context, steps, bar.update, kept)
            change = prompt_change(subject, plan, context, steps, bar.update, kept)
            met = bars_met(context, steady.figures, change.figures)
            figures: dict[str, Any] = {"steady": steady.figures, "change": change.figures, "met": met}
            results[f"{context} {steps}"] = figures
            lines += table_rows(context, steps, figures)
            for kind, outcome in (("steady", steady), ("change", change)):
                name = f"{out.stem}_{context}_{steps}_{kind}.png"
                if outcome.strips:  # none when the first batch was done before an interruption
                    world_clips.contact_sheet(out.with_name(name), outcome.strips)
            report.write_json(out, head, results, plan=vars(plan))
    kept.done()
    print(report.table(lines))
    for name, figures in results.items():
        for bar_name, ok in figures["met"].items():
            print(f"{'met   ' if ok else 'MISSED'}  {name} steps: {bar_name}")
    return results


def load_subject(
    folder: Path,
    device: torch.device,
    frames: Callable[[Tensor], Tensor] = as_frames,
    config: ModelConfig = PLAIN,
) -> Subject:
    """The model in a folder with the sink and the anchors of `config`, ready to be measured; `frames` turns uint8
    `[N, T, H, W, 3]` into what the judge looks at.

    Raises:
        ConfigError: the folder is no model, or sink, anchors and KV context do not go together.
    """
    from benchmarks.rollout import rollout
    from streamdiff.models.tiny import model as tiny

    loaded = tiny.load_model(folder, device)
    loaded = replace(loaded, spec=with_anchors(with_window(loaded.spec, None, config.sink, None), config))
    decoder = loaded.decoder
    assert decoder is not None, "the whole model was loaded"

    def decode_each(latents: Tensor) -> Tensor:
        """The very pictures a viewer gets: one stream at a time, rounded to bytes."""
        streams = latents.transpose(1, 2).to(device).split(1)
        return frames(torch.stack([decoder.decode(stream, decoder.new_memory()) for stream in streams]))

    def frames_first(prompts: list[str], **wanted: Any) -> dict[int, Tensor]:
        made = rollout(loaded, prompts, **wanted)
        return {chunk: latents.transpose(1, 2) for chunk, latents in made.items()}

    return Subject(frames_first, decode_each)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Plan, ModelConfig]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny_quality", description=SUMMARY)
    plain = Plan()
    parser.add_argument("--weights", type=Path, help="model folder (default: the packaged one)")
    parser.add_argument("--prompts", type=int, default=plain.prompts)
    parser.add_argument("--marks", type=int, nargs="+", default=plain.marks, help="chunks to judge, rising")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=plain.contexts)
    parser.add_argument("--sink", type=int, metavar="LATENTS", help="latent frames of the sink (default: the model's)")
    parser.add_argument("--anchor-every", type=int, metavar="N", help="with anchored: every Nth chunk is an anchor too")
    parser.add_argument("--steps", type=int, nargs="+", choices=plain.steps, default=plain.steps)
    parser.add_argument("--seed", type=int, default=plain.seed)
    parser.add_argument("--batch", type=int, default=plain.batch, help="streams at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/tiny_quality[_quick].json)")
    parser.add_argument("--quick", action="store_true", help="16 prompts, chunks 5 and 12, contexts as given, 4 steps")
    options = parser.parse_args(argv)
    marks = tuple(options.marks)
    if marks != tuple(sorted(set(marks))) or marks[0] < 1:
        parser.error(f"--marks {' '.join(map(str, marks))}: rising chunk numbers from 1 on")
    if options.prompts < 1 or options.batch < 1:
        parser.error("--prompts and --batch: at least 1")
    config = ModelConfig(
        kv_context="anchored" if "anchored" in options.contexts else "clean",
        sink=options.sink,
        anchor_every=options.anchor_every,
    )
    if config.kv_context == "anchored" and len(options.contexts) > 1:
        parser.error("--contexts: anchored goes alone, since its sink would change the others")
    plan = Plan(
        options.prompts, marks, tuple(options.contexts), tuple(options.steps), seed=options.seed, batch=options.batch
    )
    if options.quick:
        plan = replace(plan, prompts=16, marks=(5, 12), steps=(4,), batch=16)
    return options, plan, config


def main(argv: list[str] | None = None) -> int:
    options, plan, config = parse(argv)
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    head = report.header(warm_up="none: nothing here is timed")
    from streamdiff.models.tiny.model import WEIGHTS

    try:
        subject = load_subject(options.weights or WEIGHTS, torch.device(name), config=config)
    except StreamdiffError as error:
        print(f"error: {error}")
        return 2
    streams = f"{len(plan.configurations)} x {plan.prompts} streams to chunk {plan.marks[-1]}"
    print(f"{streams} on {name}; this takes about {report.duration(estimate_s(subject, plan))}", flush=True)
    out = options.out or report.RESULTS / f"tiny_quality{'_quick' if options.quick else ''}.json"
    weights = (options.weights or WEIGHTS) / "transformer" / "diffusion_pytorch_model.safetensors"
    stamp = f"{plan} {options.sink} {options.anchor_every} {hashlib.sha256(weights.read_bytes()).hexdigest()}"
    run(subject, plan, out, head, Kept(out.with_suffix(".parts"), stamp))
    print(f"written: {report.public_path(str(out.resolve()))} and contact sheets beside it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
