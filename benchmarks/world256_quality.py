"""Does the 256 pixel model show what the prompt says, still after 200 chunks, and at once after a prompt change?

    python -m benchmarks.world256_quality --weights runs/world256/model
    python -m benchmarks.world256_quality --weights DIR --quick       # 24 prompts to chunk 50: minutes of a core
    python -m benchmarks.world256_quality --weights DIR --prompts 4 --marks 5 3000 12000 --contexts clean   # an hour

Judged from decoded pixels alone. Uses the streams and decoders of `tiny_quality`; the world and its judge are others.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d
from tqdm import tqdm

from benchmarks import report, world_clips
from benchmarks.tiny_quality import RUN_UP, Subject, decode, load_subject
from benchmarks.world256_autoencoder import shares
from benchmarks.world256_judge import Verdict, describe, judge
from streamdiff.errors import StreamdiffError
from streamdiff.models.tiny.world256.prompts import canonical, draw
from streamdiff.models.tiny.world256.scene import COLOR_NAMES, PLACES, Scene, plain

SUMMARY = "Judge what the model of the 256 pixel world shows, at chosen chunks and after a prompt change."
BARS = {"color": 0.98, "place": 0.98, "motion": 0.95, "shape": 0.92, "camera": 0.90}
BOTH_BAR, CHANGE_BAR, DRIFT_BAR = 0.85, 0.95, 0.02
CHANGE_AT = 6
SEEN = "color_and_place"
"""Share of changes whose second chunk has the new color and the new place."""
SHEET_STREAMS = 8
STILLS = (0, 6, -1)


@dataclass(frozen=True)
class Plan:
    """What to run. `marks`: the chunks that are judged, rising, counted from 0."""

    prompts: int = 200
    marks: tuple[int, ...] = (5, 50, 200)
    contexts: tuple[str, ...] = ("clean", "staircase")
    steps: tuple[int, ...] = (4, 2)
    seed: int = 0
    batch: int = 20


def as_floats(pictures: Tensor) -> Tensor:
    """uint8 `[N, T, H, W, 3]` as float32 `[N, T, 3, H, W]` in [0, 1]."""
    return pictures.movedim(-1, 2).float() / 255


def changed(scene: Scene, chance: random.Random) -> Scene:
    """Another color of the first thing and another place; the rest stays."""

    def other(names: tuple[str, ...], name: str) -> str:
        return chance.choice([each for each in names if each != name])

    first = replace(scene.first, color=other(COLOR_NAMES, scene.first.color))
    return plain(replace(scene, first=first, place=other(PLACES, scene.place)))


def figures_of(verdicts: list[Verdict], scenes: list[Scene]) -> dict[str, float]:
    """Shares of right verdicts; `both` of those scenes that have two things, whether all of both is right."""
    rights = [verdict.right(scene) for verdict, scene in zip(verdicts, scenes, strict=True)]
    things = ("color", "shape", "motion", "size", "speed", "count")
    two = [all(right[name] for name in things) for right, scene in zip(rights, scenes, strict=True) if scene.second]
    return {**shares(rights), **({"both": sum(two) / len(two)} if two else {})}


def _weighted(parts: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in {name for _, part in parts for name in part}:
        having = [(count, part[name]) for count, part in parts if name in part]
        found[name] = sum(count * value for count, value in having) / sum(count for count, _ in having)
    return found


def steady(
    subject: Subject, plan: Plan, context: str, steps: int, scenes: list[Scene], strips: list[world_clips.Strip]
) -> dict[str, dict[str, float]]:
    """Figures at the marks of streams that keep their prompt. Mutates: strips, until there are enough."""
    found: dict[int, list[tuple[int, dict[str, float]]]] = {mark: [] for mark in plan.marks}
    keep = {chunk for mark in plan.marks for chunk in range(max(0, mark - RUN_UP), mark + 1)}
    for begin in tqdm(range(0, len(scenes), plan.batch), desc=f"{context} {steps} steps", unit="batch"):
        some = scenes[begin : begin + plan.batch]
        texts = [canonical(scene) for scene in some]
        latents = subject.rollout(
            texts, chunks=plan.marks[-1] + 1, steps=steps, kv_context=context, seed=plan.seed + begin, keep=keep
        )
        pictures = []
        for mark in plan.marks:
            frames = decode(subject, latents, range(max(0, mark - RUN_UP), mark + 1))[:, -1]
            verdicts = [judge(each) for each in frames]
            found[mark].append((len(some), figures_of(verdicts, some)))
            pictures.append(torch.stack([avg_pool2d(each, 2) for each in frames[:, list(STILLS)]]))
        seen = torch.cat(pictures, 1)
        for row in range(min(len(some), SHEET_STREAMS - len(strips))):
            good = all(verdicts[row].right(some[row]).values())
            strips.append(world_clips.Strip(f"{texts[row]} | last: {describe(verdicts[row])}", seen[row], good))
    return {str(mark): _weighted(parts) for mark, parts in found.items()}


def change(subject: Subject, plan: Plan, context: str, steps: int, scenes: list[Scene]) -> dict[str, float]:
    """Figures of the second chunk under a prompt with another color and place."""
    chance = random.Random(plan.seed)
    parts = []
    chunks = range(CHANGE_AT - RUN_UP, CHANGE_AT + 2)
    for begin in range(0, len(scenes), plan.batch):
        old = scenes[begin : begin + plan.batch]
        new = [changed(scene, chance) for scene in old]
        latents = subject.rollout(
            [canonical(scene) for scene in old],
            chunks=CHANGE_AT + 2,
            steps=steps,
            kv_context=context,
            seed=plan.seed + begin,
            switch={CHANGE_AT: [canonical(scene) for scene in new]},
            keep=set(chunks),
        )
        frames = decode(subject, latents, chunks)
        verdicts = [judge(each) for each in frames[:, -1]]
        rights = [verdict.right(scene) for verdict, scene in zip(verdicts, new, strict=True)]
        seen = {SEEN: sum(right["color"] and right["place"] for right in rights) / len(rights)}
        parts.append((len(old), {**figures_of(verdicts, new), **seen}))
    return _weighted(parts)


def bars_met(marks: dict[str, dict[str, float]], after: dict[str, float]) -> dict[str, bool]:
    """Which bars are met."""
    met = {f"{name} >= {bar:.2f}": all(part[name] >= bar for part in marks.values()) for name, bar in BARS.items()}
    met[f"both things >= {BOTH_BAR}"] = all(part.get("both", 1.0) >= BOTH_BAR for part in marks.values())
    start, end = next(iter(marks.values())), list(marks.values())[-1]
    met[f"drift within {DRIFT_BAR}"] = all(end[name] - start[name] >= -DRIFT_BAR - 1e-9 for name in BARS)
    met[f"change within 2 chunks >= {CHANGE_BAR}"] = after[SEEN] >= CHANGE_BAR
    return met


def run(subject: Subject, plan: Plan, out: Path, head: report.Header) -> dict[str, Any]:
    """Carry out the plan; write `out` (JSON) and contact sheets beside it after every configuration."""
    chance = random.Random(plan.seed)
    scenes = [draw(chance) for _ in range(plan.prompts)]
    results: dict[str, Any] = {}
    lines: list[dict[str, report.Value]] = []
    for context in plan.contexts:
        for steps in plan.steps:
            strips: list[world_clips.Strip] = []
            marks = steady(subject, plan, context, steps, scenes, strips)
            after = change(subject, plan, context, steps, scenes)
            results[f"{context} {steps}"] = {"steady": marks, "change": after, "met": bars_met(marks, after)}
            columns = ("color", "shape", "motion", "size", "speed", "place", "hour", "weather", "camera", "both", "all")
            for name, part in (*((f"chunk {mark}", part) for mark, part in marks.items()), ("2nd after change", after)):
                lines.append({"context": context, "steps": steps, "at": name, **{c: part.get(c) for c in columns}})
            world_clips.contact_sheet(out.with_name(f"{out.stem}_{context}_{steps}.png"), strips)
            report.write_json(out, head, results, plan=vars(plan))
    print(report.table(lines))
    for name, figures in results.items():
        for bar, met in figures["met"].items():
            print(f"{'met   ' if met else 'MISSED'}  {name} steps: {bar}")
    return results


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.world256_quality", description=SUMMARY)
    plan = Plan()
    parser.add_argument("--weights", type=Path, required=True, help="model folder")
    parser.add_argument("--prompts", type=int, default=plan.prompts)
    parser.add_argument("--marks", type=int, nargs="+", default=plan.marks, help="chunks to judge, rising")
    parser.add_argument("--contexts", nargs="+", choices=plan.contexts, default=plan.contexts)
    parser.add_argument("--steps", type=int, nargs="+", choices=plan.steps, default=plan.steps)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--batch", type=int, default=plan.batch, help="streams at once")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "world256_quality.json", help="JSON file")
    parser.add_argument("--quick", action="store_true", help="24 prompts, chunks 5 and 50, contexts as given, 4 steps")
    options = parser.parse_args(argv)
    marks = tuple(options.marks)
    if marks != tuple(sorted(set(marks))) or marks[0] < 1:
        parser.error(f"--marks {' '.join(map(str, marks))}: rising chunk numbers from 1 on")
    if options.prompts < 1 or options.batch < 1:
        parser.error("--prompts and --batch: at least 1")
    configured = Plan(
        options.prompts, marks, tuple(options.contexts), tuple(options.steps), options.seed, options.batch
    )
    if options.quick:
        configured = replace(configured, prompts=24, marks=(5, 50), steps=(4,), batch=12)
    return options, configured


def main(argv: list[str] | None = None) -> int:
    options, plan = parse(argv)
    head = report.header(warm_up="none: nothing here is timed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        subject = load_subject(options.weights, device, as_floats)
    except StreamdiffError as error:
        print(f"error: {error}")
        return 2
    run(subject, plan, options.out, head)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
