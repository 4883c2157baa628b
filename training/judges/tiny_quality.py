"""Does the embedded model show what the prompt says, still after 200 chunks, and at once after a prompt change?

    python -m training.judges.tiny_quality            # 200 prompts, two contexts, 4 and 2 steps: hours on a CPU
    python -m training.judges.tiny_quality --weights runs/tiny/model --quick  # 24 prompts to chunk 50: minutes
    python -m training.judges.tiny_quality --prompts 4 --marks 5 3000 12000 --contexts clean    # an hour

What is done is kept beside the result until all is done: the same command goes on after an interruption.
Judged from decoded pixels alone; training/README.md defines every figure. Knows nothing about how latents are made:
a `Subject` makes them and decodes them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d
from tqdm import tqdm

from benchmarks import report
from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.device import embedded_autoencoder_dtype
from streamdiff.errors import StreamdiffError
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import with_window
from streamdiff.models.tiny.prompts import canonical
from streamdiff.models.tiny.scene import COLOR_NAMES, PLACES, Scene, plain
from training.judges.contact_sheet import Strip, write_sheet
from training.judges.tiny_figures import TOGETHER, Rights, bars_met, change_figures, figures_of, truth_figures
from training.judges.world_judge import describe, judge, mistake
from training.world.scenes import random_scene

SUMMARY = "Judge what the embedded model shows, at chosen chunks and after a prompt change."
RUN_UP = 2
"""Chunks decoded before what is judged: the decoder remembers frames, so it needs them to be in its stride."""
DECODE_STREAMS = 8
SHEET_STREAMS = 8
CONTEXTS = ("clean", "staircase", "same_step")
PLAIN = ModelConfig()
COLUMNS = ("color", "shape", "motion", "size", "speed", "place", "hour", "weather", "camera", "both", "all")
"""What the printed table shows."""


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
    """What is measured. `decode` turns latents `[N, F, C, h, w]`, a stream's first, into frames float32
    `[N, T, 3, H, W]` in [0, 1]."""

    rollout: Rollout
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What to run. `marks`: the chunks that are judged, each with the `TOGETHER` - 1 before it, rising, counted from 0;
    prompts change at `change_at`."""

    prompts: int = 200
    marks: tuple[int, ...] = (5, 50, 200)
    contexts: tuple[str, ...] = CONTEXTS[:2]
    steps: tuple[int, ...] = (4, 2)
    seed: int = 0
    batch: int = 20
    change_at: int = 6

    @property
    def configurations(self) -> list[tuple[str, int]]:
        return [(context, steps) for context in self.contexts for steps in self.steps]

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks per stream of the long run and of the run with a prompt change."""
        return self.marks[-1] + 1, self.change_at + 2


class Kept:
    """What was found of the batches that are done, in a file, so that hours of work survive an interruption.

    `stamp` says what it belongs to (plan, weights); what belongs to anything else is forgotten.
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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps({"stamp": self.stamp, "parts": self.parts}))
            fresh.replace(self.path)

    def done(self) -> None:
        """The result is written; the parts are not needed any more. Mutates: the file, which goes."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Outcome:
    """What was found: `rights` by the chunk that was judged, what was `wrong` in words, strips for a contact sheet."""

    rights: dict[str, Rights]
    wrong: list[str]
    strips: list[Strip]


@dataclass(frozen=True)
class Case:
    """One context and number of steps of a plan. `advance` is told the stream-chunks done."""

    subject: Subject
    plan: Plan
    context: str
    steps: int
    kept: Kept
    advance: Callable[[int], object]

    def run(self, old: Sequence[Scene], new: Sequence[Scene] | None = None) -> Outcome:
        """Streams of the scenes `old`, judged at the plan's marks; or, with `new`, which these scenes become at
        `change_at`, in each of the two chunks from there on. Batches that are kept are not made again, and have no
        strips."""
        found = Outcome({}, [], [])
        for begin in range(0, len(old), self.plan.batch):
            span = slice(begin, begin + self.plan.batch)
            name = f"{self.context} {self.steps} {'change' if new else 'steady'} {begin}"
            if name not in self.kept.parts:
                made = self._batch(old[span], new[span] if new else None, self.plan.seed + begin)
                found.strips.extend(made.strips[: SHEET_STREAMS - len(found.strips)])
                self.kept.put(name, {"rights": made.rights, "wrong": made.wrong})
            for at, rights in self.kept.parts[name]["rights"].items():
                found.rights.setdefault(at, []).extend(rights)
            found.wrong.extend(self.kept.parts[name]["wrong"])
            self.advance(len(old[span]) * self.plan.chunks[bool(new)])
        return found

    def _batch(self, old: Sequence[Scene], new: Sequence[Scene] | None, seed: int) -> Outcome:
        change, wanted = self.plan.change_at, new or old
        looks, length = ((change, change + 1), 1) if new else (self.plan.marks, TOGETHER)
        prompts, asked = ([canonical(scene) for scene in each] for each in (old, wanted))
        latents = self.subject.rollout(
            prompts,
            chunks=self.plan.chunks[bool(new)],
            steps=self.steps,
            kv_context=self.context,
            seed=seed,
            switch={change: asked} if new else None,
            keep={chunk for look in looks for chunk in _until(look, length)},
        )
        found, stills = Outcome({}, [], []), []
        for look in looks:
            frames = decode(self.subject, latents, _until(look, length))[:, -length:].flatten(1, 2)
            verdicts = [judge(each) for each in frames]
            rights = [verdict.right(scene) for verdict, scene in zip(verdicts, wanted, strict=True)]
            found.rights[str(look)] = rights
            for each in zip(verdicts, rights, asked, strict=True):
                if not all(each[1].values()):
                    found.wrong.append(f"chunk {look} {mistake(*each)}")
            shown = frames[:SHEET_STREAMS, [0, frames.shape[1] // 2, -1]]
            stills.append(avg_pool2d(shown.flatten(0, 1), 2).unflatten(0, shown.shape[:2]))
        for row, pictures in enumerate(torch.cat(stills, 1)):
            text = f"{prompts[row]} -> {asked[row]}" if new else prompts[row]
            good = all(rights[row].values())
            found.strips.append(Strip(f"{text} | last: {describe(verdicts[row])}", pictures, good))
        return found


def _until(chunk: int, length: int) -> range:
    """What is decoded to judge the `length` chunks that end with `chunk`."""
    return range(max(0, chunk + 1 - length - RUN_UP), chunk + 1)


def decode(subject: Subject, latents: dict[int, Tensor], chunks: Sequence[int]) -> Tensor:
    """Decode neighbouring chunks as one stream: float32 `[N, len(chunks), T, 3, H, W]` in [0, 1], on the CPU."""
    joined = torch.cat([latents[chunk] for chunk in chunks], 1)
    frames = torch.cat([subject.decode(part).float().cpu() for part in joined.split(DECODE_STREAMS)])
    whole: Tensor = frames.clamp(0, 1).unflatten(1, (len(chunks), -1))
    return whole


def changed(scene: Scene, chance: random.Random) -> Scene:
    """Another color of the first thing and another place; the rest stays."""

    def other(names: tuple[str, ...], name: str) -> str:
        return chance.choice([each for each in names if each != name])

    first = replace(scene.first, color=other(COLOR_NAMES, scene.first.color))
    return plain(replace(scene, first=first, place=other(PLACES, scene.place)))


def estimate_s(subject: Subject, plan: Plan) -> float:
    """Seconds the plan will take, from a trial of two lengths (so that start-up does not count)."""
    count, chance = min(plan.batch, plan.prompts, 4), random.Random(plan.seed)
    prompts = [canonical(random_scene(chance)) for _ in range(count)]
    spent = []
    for chunks in (2, 2, 4):  # the first warms up
        began = clock.monotonic_s()
        latents = subject.rollout(prompts, chunks=chunks, steps=4, kv_context="clean", seed=plan.seed, keep={0, 1})
        spent.append(clock.monotonic_s() - began)
    per_pass = max(1e-6, spent[2] - spent[1]) / 2 / count / 5
    began = clock.monotonic_s()
    frames = decode(subject, latents, (0, 1))
    per_decode = (clock.monotonic_s() - began) / 2 / count
    judge(frames[0, 1])  # makes the pictures that it compares with
    began = clock.monotonic_s()
    judge(frames[0, 1])
    per_chunk = per_decode + clock.monotonic_s() - began
    shown = len(plan.marks) * TOGETHER + 2
    runs_up = (len(plan.marks) + 2) * RUN_UP
    looks = (shown * per_chunk + runs_up * per_decode) * plan.prompts * len(plan.configurations)
    passes = sum(plan.prompts * sum(plan.chunks) * (steps + 1) for _, steps in plan.configurations)
    return per_pass * passes + looks


def run(subject: Subject, plan: Plan, out: Path, head: report.Header, kept: Kept | None = None) -> dict[str, Any]:
    """Carry out what `kept` does not hold of the plan; write `out` (JSON) anew and contact sheets beside it after every
    configuration."""
    kept = kept or Kept(None)
    chance = random.Random(plan.seed)
    scenes = [random_scene(chance) for _ in range(plan.prompts)]
    chance = random.Random(plan.seed)
    others = [changed(scene, chance) for scene in scenes]
    results: dict[str, Any] = {}
    truth = truth_figures(scenes, plan.marks)
    lines = [_line("world", None, f"chunk {mark}", part) for mark, part in truth.items()]
    total = len(plan.configurations) * plan.prompts * sum(plan.chunks)
    with tqdm(total=total, unit="chunk", smoothing=0.05) as bar:
        for context, steps in plan.configurations:
            bar.set_description(f"{context} {steps} steps")
            case = Case(subject, plan, context, steps, kept, bar.update)
            steady, change = case.run(scenes), case.run(scenes, others)
            marks = {mark: figures_of(rights, scenes) for mark, rights in steady.rights.items()}
            after = change_figures(change.rights, others)
            results[f"{context} {steps}"] = {
                "steady": marks,
                "change": after,
                "met": bars_met(context, marks, after),
                "wrong": steady.wrong,
                "wrong after change": change.wrong,
            }
            for name, part in (*((f"chunk {mark}", part) for mark, part in marks.items()), ("2nd after change", after)):
                lines.append(_line(context, steps, name, part))
            for kind, outcome in (("", steady), ("_change", change)):
                if outcome.strips:  # none when all batches were done before an interruption
                    write_sheet(out.with_name(f"{out.stem}_{context}_{steps}{kind}.png"), outcome.strips)
            report.write_json(out, head, results, plan=vars(plan), truth=truth)
    kept.done()
    print(report.table(lines))
    for name, figures in results.items():
        for bar_name, met in figures["met"].items():
            print(f"{'met   ' if met else 'MISSED'}  {name} steps: {bar_name}")
    return results


def _line(context: str, steps: int | None, at: str, part: dict[str, float]) -> dict[str, report.Value]:
    """A row of the printed table."""
    return {"context": context, "steps": steps, "at": at, **{name: part.get(name) for name in COLUMNS}}


def load_subject(folder: Path, device: torch.device, config: ModelConfig = PLAIN) -> Subject:
    """The model in a folder with the sink of `config`, ready to be measured.

    Raises:
        ConfigError: the folder is no model, or the sink does not fit into its window.
    """
    from training import embedded as tiny
    from training.judges.rollout import rollout

    loaded = tiny.load_model(folder, device, decoder_dtype=embedded_autoencoder_dtype(device))
    loaded = replace(loaded, spec=with_window(loaded.spec, None, config.sink, None))
    decoder = loaded.decoder
    assert decoder is not None, "the whole model was loaded"

    def decode_each(latents: Tensor) -> Tensor:
        """The very pictures a viewer gets: one stream at a time, rounded to bytes."""
        streams = latents.transpose(1, 2).to(device).split(1)
        pictures = torch.stack([decoder.decode(stream, decoder.new_memory()) for stream in streams])
        return pictures.movedim(-1, 2).float() / 255

    def frames_first(prompts: list[str], **wanted: Any) -> dict[int, Tensor]:
        made = rollout(loaded, prompts, **wanted)
        return {chunk: latents.transpose(1, 2) for chunk, latents in made.items()}

    return Subject(frames_first, decode_each)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Plan, ModelConfig]:
    """The command line, what to run, and with which sink. Ends the process where that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m training.judges.tiny_quality", description=SUMMARY)
    plan = Plan()
    parser.add_argument("--weights", type=Path, default=EMBEDDED_WEIGHTS, help="model folder (default: the packaged)")
    parser.add_argument("--prompts", type=int, default=plan.prompts)
    parser.add_argument("--marks", type=int, nargs="+", default=plan.marks, help="chunks to judge, rising")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=plan.contexts)
    parser.add_argument("--sink", type=int, metavar="LATENTS", help="latent frames of the sink (default: the model's)")
    parser.add_argument("--steps", type=int, nargs="+", choices=plan.steps, default=plan.steps)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--batch", type=int, default=plan.batch, help="streams at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON file (default: training/results/tiny_quality[_quick].json)")
    parser.add_argument("--quick", action="store_true", help="24 prompts, chunks 5 and 50, contexts as given, 4 steps")
    options = parser.parse_args(argv)
    marks = tuple(options.marks)
    if marks != tuple(sorted(set(marks))) or marks[0] < 1:
        parser.error(f"--marks {' '.join(map(str, marks))}: rising chunk numbers from 1 on")
    if options.prompts < 1 or options.batch < 1:
        parser.error("--prompts and --batch: at least 1")
    config = ModelConfig(sink=options.sink)
    plan = Plan(options.prompts, marks, tuple(options.contexts), tuple(options.steps), options.seed, options.batch)
    if options.quick:
        plan = replace(plan, prompts=24, marks=(5, 50), steps=(4,), batch=12)
    return options, plan, config


def stamp_of(folder: Path, plan: Plan, config: ModelConfig) -> str:
    """What results belong to: the plan, the sink, and all weights of the model."""
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*/*.safetensors")):
        weights.update(path.read_bytes())
    return f"{plan} {config.sink} {weights.hexdigest()}"


def main(argv: list[str] | None = None) -> int:
    options, plan, config = parse(argv)
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    head = report.header(warm_up="none: nothing here is timed")
    try:
        subject = load_subject(options.weights, torch.device(name), config)
    except StreamdiffError as error:
        print(f"error: {error}")
        return 2
    streams = f"{len(plan.configurations)} x {plan.prompts} streams to chunk {plan.marks[-1]}"
    print(f"{streams} on {name}; this takes about {report.duration(estimate_s(subject, plan))}", flush=True)
    out = options.out or report.ROOT / "training" / "results" / f"tiny_quality{'_quick' if options.quick else ''}.json"
    run(subject, plan, out, head, Kept(out.with_suffix(".parts"), stamp_of(options.weights, plan, config)))
    print(f"written: {report.public_path(str(out.resolve()))} and contact sheets beside it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
