"""Digests of latents, for every way in which a session can be played: `python -m tests.golden.play [--write]`.

Prints JSON, `{way: {case: digest}}`; or writes to `digests.json` what does not follow from the rest. A case is
`KV context/change`, where the change comes before chunk `CHANGE_AT`. torch's and MKL's code paths are those that every
x86-64 CPU has, so that the digests do not depend on the CPU.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # torch reads them when it is imported
    os.environ |= {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}

import hashlib
import json
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring, local_parts
from streamdiff.pipeline.runner.sampler import Finished
from streamdiff.pipeline.snapshot.file import Snapshot, mapped
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.topology import StageTopology, connect_stage
from streamdiff.session_state.swap_store import SwapStore
from tests.free_ports import free_port
from tests.pipeline import forked_ranks
from tests.pipeline.distributed.rendezvous_backend import join_ring
from tests.pipeline.playing import local_ring
from tests.saving import save as save_session
from tests.small import BLUE, CPU, RED, WHITE, small_model

CASES = [
    f"{context}/{change}"
    for context in ("clean", "staircase", "same_step")
    for change in ("keep", "recache", "flush", "steps")
    if (context, change) != ("same_step", "recache")
]
CHUNKS, INTERRUPTED_AT, CHANGE_AT = 7, 2, 4  # the window has three chunks, so that the last ones evict
MODEL = small_model(1, layers=3, heads=2, sink=2)
TABLE = Path(__file__).with_name("digests.json")
TOGETHER, SHARED = "two sessions in one forward", "1x2, two sessions"
Latents = dict[int, dict[int, torch.Tensor]]
"""By session and chunk."""


def record(ring: Ring, latents: Latents) -> None:
    """Have the latents of finished chunks added to `latents`. Mutates: ring."""
    take_back = ring._take_back

    def recording(wait_s: float | None) -> list[Finished]:
        finished = take_back(wait_s)
        for row, made in finished:
            latents[row.session][row.chunk] = made.clone()
        return finished

    ring._take_back = recording  # type: ignore[method-assign]


def digest(chunks: dict[int, torch.Tensor]) -> str:
    data = b"".join(chunks[chunk].numpy().tobytes() for chunk in range(CHUNKS))
    return hashlib.sha256(data).hexdigest()[:16]


def started(stages: int, latents: Latents, rows: int = 1) -> StreamingPipeline:
    parts = local_parts(MODEL, CPU, stages)
    for stage in (parts.stage, *(worker.stage for worker in parts.local)):
        stage.swaps = SwapStore(CPU, None, None)
    pipeline = StreamingPipeline(MODEL, CPU, max_rows=rows, parts=parts)
    record(pipeline, latents)
    return pipeline


def ended(pipeline: StreamingPipeline) -> None:
    pipeline.close()
    for stage in (pipeline.stage, *(worker.stage for worker in pipeline.local)):
        stage.swaps.close()


def change(ring: Ring, session: int, what: str) -> None:
    if what == "steps":
        ring.set_steps(session, 2, epoch=1)
    else:
        ring.set_conditioning(session, MODEL.text.encode(BLUE), epoch=1, switch=what)


def play(
    ring: Ring, step: Callable[[], object], latents: Latents, changes: dict[int, str], until: int = CHUNKS
) -> None:
    """Step until chunk `until - 1` of every session is finished; a session's change holds from chunk `CHANGE_AT` on.
    Mutates: changes, which keeps those that are to come."""
    sessions = list(ring.sampler.sessions)
    while any(len(latents[session]) < until for session in sessions):
        for session in sessions:
            admitted = ring.scheduler.next_chunk(session)
            if admitted == CHANGE_AT and session in changes:
                change(ring, session, changes.pop(session))
            limit = CHANGE_AT if session in changes else CHUNKS + 6  # a staircase finishes behind newer chunks
            ring.scheduler.set_frame_credit(session, (limit - admitted) * MODEL.spec.chunk_frames)
        step()


def opened(case: str, stages: int, latents: Latents) -> tuple[StreamingPipeline, dict[int, str]]:
    context, what = case.split("/")
    pipeline = started(stages, latents)
    pipeline.open(0, MODEL.text.encode(RED), seed=5, epoch=0, steps=4, kv_context=context)
    return pipeline, {0: what}


def played(case: str, stages: int) -> str:
    latents: Latents = defaultdict(dict)
    pipeline, changes = opened(case, stages, latents)
    play(pipeline, partial(pipeline.step, 0.1), latents, changes)
    ended(pipeline)
    return digest(latents[0])


def saved(case: str, stages: int, then: int, killed: bool) -> str:
    """Saved in mid-stream and resumed on another number of stages; where `killed`, by a process that does not survive
    it, and its latents are lost but for the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "session.safetensors"

        def save(latents: Latents) -> None:
            pipeline, changes = opened(case, stages, latents)
            play(pipeline, partial(pipeline.step, 0.1), latents, changes, INTERRUPTED_AT)
            save_session(pipeline, 0)[0].write(file)
            if killed:
                torch.save(latents[0], Path(folder) / "latents.pt")
                os.kill(os.getpid(), signal.SIGKILL)
            ended(pipeline)

        latents: Latents = defaultdict(dict)
        if killed:
            if (child := os.fork()) == 0:
                save(latents)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            latents[0].update(torch.load(Path(folder) / "latents.pt", weights_only=True))
        else:
            save(latents)
        pipeline = started(then, latents)
        pipeline.resting.load(0, Snapshot.from_bytes(mapped(file)))
        to_come = {0: case.split("/")[1]} if pipeline.scheduler.next_chunk(0) <= CHANGE_AT else {}
        play(pipeline, partial(pipeline.step, 0.1), latents, to_come)
        ended(pipeline)
    return digest(latents[0])


def swapped(case: str, stages: int) -> str:
    latents: Latents = defaultdict(dict)
    pipeline, changes = opened(case, stages, latents)
    play(pipeline, partial(pipeline.step, 0.1), latents, changes, INTERRUPTED_AT)
    pipeline.resting.swap_out(0)
    while pipeline.resting.place(0) != "host":
        pipeline.step(0.01)
    pipeline.resting.swap_in(0)
    while pipeline.resting.is_away(0):
        pipeline.step(0.01)
    play(pipeline, partial(pipeline.step, 0.1), latents, changes)
    ended(pipeline)
    return digest(latents[0])


def open_two(ring: Ring, case: str) -> dict[int, str]:
    """Two sessions of other prompts and seeds."""
    context, what = case.split("/")
    for session, prompt in enumerate((RED, WHITE)):
        text = MODEL.text.encode(prompt)
        ring.open(session, text, seed=5 + session, epoch=0, steps=4, kv_context=context)
    return {0: what, 1: what}


def both(case: str) -> str:
    """Two sessions whose rows share forwards, on one stage."""
    latents: Latents = defaultdict(dict)
    ring = local_ring(MODEL, CPU, 1, max_rows=2)
    record(ring, latents)
    play(ring, ring.step_latents, latents, open_two(ring, case))
    assert ring.scheduler.counts.rows[2], "no forward was shared"
    return f"{digest(latents[0])} {digest(latents[1])}"


def rank(number: int, ranks: int, port: int, out: str) -> None:
    """A rank of a stage that two share: plays every case, and rank 0 writes the digests to `out`."""
    join_ring(number, ranks, port)
    table = {}
    for count, case in enumerate(CASES):
        topology = StageTopology(number, 1, count, shares=ranks)
        part = MODEL.part(*split_evenly(MODEL.blocks, 1)[0])
        if number:
            connect_stage(part, topology, CPU).worker().run()
            continue
        latents: Latents = defaultdict(dict)
        ring = Ring(part, CPU, topology.rows, connect_stage(part, topology, CPU))
        record(ring, latents)
        play(ring, partial(ring.step_latents, 1.0), latents, open_two(ring, case))
        ring.stop(60.0)
        table[case] = f"{digest(latents[0])} {digest(latents[1])}"
    if number == 0:
        Path(out).write_text(json.dumps(table))


def shared() -> dict[str, str]:
    """`1x2`: two ranks, forked from this process, share every forward."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "table.json"
        ranks = forked_ranks.fork(folder, "tests.golden.play", ["2", str(free_port()), str(out)])
        codes = forked_ranks.exit_codes(ranks, 900.0)
        assert codes == [0, 0], "\n".join(file.read_text() for file in sorted(folder.glob("*.err")))
        table: dict[str, str] = json.loads(out.read_text())
        return table


WAYS: dict[str, Callable[[str], str]] = {
    "1 stage": partial(played, stages=1),
    "2 stages": partial(played, stages=2),
    "3 stages": partial(played, stages=3),
    "saved on 1, resumed on 3": partial(saved, stages=1, then=3, killed=False),
    "killed on 3, resumed on 2": partial(saved, stages=3, then=2, killed=True),
    "swapped, 1 stage": partial(swapped, stages=1),
    "swapped, 2 stages": partial(swapped, stages=2),
    TOGETHER: both,
}


def main(write: bool) -> None:
    torch.set_num_threads(1)
    table = {name: {case: way(case) for case in CASES} for name, way in WAYS.items()}
    table[SHARED] = shared()
    if write:
        TABLE.write_text(json.dumps({way: table[way] for way in (TOGETHER, SHARED)}, indent=1) + "\n")
    else:
        print(json.dumps(table))


if __name__ == "__main__":
    if len(sys.argv) == 5:
        torch.set_num_threads(1)
        rank(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1:] == ["--write"])
