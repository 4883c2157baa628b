"""One rank of a case of `fps_ttff`, in a process of its own: `python -m benchmarks.stream_rank --address FOLDER ...`.

Rank 0 drives the engine as `streamdiff serve`'s engine process does, takes every frame at once, and writes down when it
came; the others are the ranks of `streamdiff serve --stages`. Reads FOLDER/case.json, writes FOLDER/raw.json. Rank 0
ends with its standard input, whose other end the benchmark's process holds, and removes FOLDER then.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import psutil
import torch
from tqdm import tqdm

from benchmarks import stream_parts
from benchmarks.stream_case import Case
from benchmarks.stream_figures import Arrival, Prompt, Raw, Run
from streamdiff import clock
from streamdiff.device import own_device
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Accepted, Close, Event, FrameBatch, Open, Refused, SetPrompt, Shown
from streamdiff.engine.process.ipc import EXIT_CONFIG
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.profiler import Profiler
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

CASE, RAW = "case.json", "raw.json"
LEAD_CHUNKS = 2
"""As `streamdiff generate` has it: one chunk is computed while the one before it is decoded."""
_WAIT_S = 0.01  # as the engine process waits with nothing to do
_LIMIT_S = 600.0  # for anything to come
Bar: TypeAlias = "tqdm[NoReturn]"


class Player:
    """A stream whose frames are taken as soon as they are there."""

    def __init__(self, engine: Engine, name: str, prompt: str, seed: int = 0) -> None:
        """Raises ConfigError for what the engine refuses, here and later."""
        self.engine, self.name = engine, name
        self.epochs: dict[str, int] = {}  # of prompts, by text
        self.run = Run(clock.monotonic_s())
        self._take(engine.handle(Open(name, prompt, seed)))

    def turn(self) -> list[Arrival]:
        """One turn of the engine's loop; returns what came. Mutates: self."""
        return self._take(self.engine.step(_WAIT_S))

    def _take(self, events: Sequence[Event]) -> list[Arrival]:
        came: list[Arrival] = []
        for event in events:
            match event:
                case Refused():
                    raise ConfigError(event.reason)
                case Accepted():
                    self.epochs[event.request] = event.epoch
                case FrameBatch():
                    count = len(event.pictures)
                    came.append(Arrival(clock.monotonic_s(), event.chunk, event.epoch, count, event.chunk_s))
                    self.engine.handle(Shown(self.name, event.first + count))
        self.run.arrivals += came
        return came

    def play(self, enough: Callable[[Arrival], bool]) -> Arrival:
        """Go on until a piece comes that is `enough`. Raises RuntimeError when none comes. Mutates: self."""
        end_s = clock.monotonic_s() + _LIMIT_S
        while clock.monotonic_s() < end_s:
            if found := next((piece for piece in self.turn() if enough(piece)), None):
                return found
        raise RuntimeError(f"{self.engine.describe()}: nothing more came within {_LIMIT_S:g} s")

    def prompt(self, text: str, at_s: float) -> Prompt:
        """Go on until `at_s`, when a prompt comes, and until a frame of its epoch is there. Mutates: self."""
        while clock.monotonic_s() < at_s:
            self.turn()
        self._take(self.engine.handle(SetPrompt(self.name, text, text)))
        first = self.play(lambda piece: text in self.epochs and piece.epoch >= self.epochs[text])
        return Prompt(at_s, first.at_s)

    def close(self) -> None:
        """End the stream and let what is in flight run out. Mutates: self."""
        self.engine.handle(Close(self.name))
        while self.engine.busy:
            self.engine.step(_WAIT_S)


def measure(runtime: StreamingPipeline, case: Case, load_s: float) -> Raw:
    """Everything of a case, from a warm runtime, which is used up."""
    amount, spec = case.amount, runtime.model.spec
    device = runtime.stage.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(runtime, LEAD_CHUNKS * runtime.info.chunk_frames)
    warm_up = spec.window_chunks(case.config.kv_context) + amount.margin
    total = amount.openings + warm_up + amount.chunks + amount.prompts
    with tqdm(total=total, desc=case.label, unit="", dynamic_ncols=True, leave=False) as bar:
        openings = [_opening(engine, case, number, bar) for number in range(amount.openings)]
        player = Player(engine, "steady", case.prompt)
        player.play(lambda piece: _end_of(piece, warm_up + amount.chunks - 1, bar))
        steady = Run(player.run.asked_s, list(player.run.arrivals))
        occupancy = engine.occupancy()
        prompts = list(_prompts(player, runtime, amount.prompts, bar))
        player.close()
        peak = peak_bytes(device)
        at_a_time = plan_load(case.config, device).decode_latents
        parts, remarks = stream_parts.measure(runtime, amount.rounds, at_a_time, bar.set_postfix_str)
        if case.profile is not None:
            bar.set_postfix_str("profile")
            engine = _profile(runtime, case, Path(case.profile))
    engine.close()
    return Raw(
        playback_fps=case.playback_fps or spec.native_fps,
        warm_up_chunks=warm_up,
        load_s=load_s,
        openings=openings,
        steady=steady,
        prompts=prompts,
        parts=parts,
        peak_bytes=[peak],
        threads=[torch.get_num_threads()],
        occupancy=occupancy,
        remarks=remarks,
    )


def _opening(engine: Engine, case: Case, number: int, bar: Bar) -> Run:
    """A stream, until its second chunk has begun to come."""
    player = Player(engine, f"opening {number}", case.prompt, seed=number)
    player.play(lambda piece: piece.chunk == 1)
    player.close()
    bar.update()
    return player.run


def _end_of(piece: Arrival, chunk: int, bar: Bar) -> bool:
    """Whether this is the last piece of `chunk`. Mutates: bar, at the end of every chunk."""
    bar.update(piece.chunk_s is not None)
    return piece.chunk_s is not None and piece.chunk >= chunk


def _prompts(player: Player, runtime: StreamingPipeline, count: int, bar: Bar) -> Iterator[Prompt]:
    """Prompts at times that are spread over a chunk, since one that comes just before a chunk begins waits least."""
    ends = [piece.at_s for piece in player.run.arrivals if piece.chunk_s is not None]
    chunk_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    for number in range(count):
        start = player.play(lambda piece: piece.chunk_s is not None)
        yield player.prompt(_text(runtime, number), start.at_s + chunk_s * (1 + number / count))
        bar.update()


def _text(runtime: StreamingPipeline, number: int) -> str:
    """A prompt unlike those before it, which no cache knows."""
    examples = runtime.text.examples
    return examples[number % len(examples)] if runtime.info.model == "tiny" else f"{examples[0]} (take {number})"


def _profile(runtime: StreamingPipeline, case: Case, folder: Path) -> Engine:
    """Trace some chunks of another stream, when everything else is measured; the engine that has to be closed."""
    profiler = Profiler(runtime, folder)
    engine = Engine(runtime, LEAD_CHUNKS * runtime.info.chunk_frames)
    player = Player(engine, "profile", case.prompt)
    player.play(lambda piece: profiler.traced)
    player.close()
    return engine


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: tensors on a CUDA device since its counter was reset, else all of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _lead(folder: Path, case: Case) -> None:
    """Rank 0."""
    runtime = build_pipeline(case.config)
    raw = measure(runtime, case, clock.wall_s() - psutil.Process().create_time())
    (folder / RAW).write_text(json.dumps(raw.to_json()))


def _follow(folder: Path, case: Case, rank: int) -> None:
    """Any other rank; its memory counts from its start."""
    rank_process.run_worker(case.config)
    facts = {"peak_bytes": peak_bytes(own_device(case.config.device)), "threads": torch.get_num_threads()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))


def _end_with_parent(folder: Path) -> None:
    """As `engine.process.main` does it: the launcher ends the other ranks when this one has ended."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream_rank", description="one rank of fps_ttff")
    parser.add_argument("--address", type=Path, required=True, help="folder with case.json")
    options = parser.parse_args(argv)
    case = Case.from_json(json.loads((options.address / CASE).read_text()))
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        threading.Thread(target=_end_with_parent, args=(options.address,), name="parent-watch", daemon=True).start()
    try:
        if rank == 0:
            _lead(options.address, case)
        else:
            _follow(options.address, case, rank)
    except (ConfigError, EngineFailure) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written; taking the interpreter down with torch in it takes seconds
