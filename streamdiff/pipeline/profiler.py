"""A PyTorch profiler's trace of some chunks of a running stream, and what it says in a page of text.

`ProfiledRuntime` stands in a `StreamingPipeline`'s place, waits until the window is full, traces some chunks from their
first micro-step to their last picture, writes two files and goes on. What is traced is slower than usual, so no rate is
told here. In a ring the trace is of the head's rank.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from streamdiff.errors import ConfigError
from streamdiff.models.interfaces import TextEncoder
from streamdiff.pipeline.profile_report import _STEP, _UNFINISHED, CHUNKS, SUMMARY, TRACE, describe, summarise
from streamdiff.pipeline.streaming_pipeline import Frames, ModelInfo, StreamingPipeline


def check_folder(folder: Path) -> None:
    """Make the folder, if it is not there.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {folder}: cannot be made: {error.strerror or error}; name a folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--profile {folder}: cannot be written to; name another folder")


def check_traced(folder: object, chunks: int | None) -> None:
    """Raises ConfigError: a number of chunks, and no folder for what is said about them."""
    if chunks is not None and folder is None:
        raise ConfigError(
            f"--profile-chunks (model.trace_chunks) is {chunks}, but nothing is traced: "
            "say where to, with --profile DIR"
        )


class ProfiledRuntime:
    """A `StreamingPipeline` that is traced for a while; for callers the same (`engine.pipeline_api.Pipeline`)."""

    def __init__(self, runtime: StreamingPipeline, folder: Path, chunks: int = CHUNKS) -> None:
        """Raises ConfigError as `check_folder`. Mutates: removes from `folder` what an earlier run left unfinished."""
        check_folder(folder)
        for left in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        self.runtime, self.folder, self.chunks = runtime, folder, chunks
        self.info: ModelInfo = runtime.info
        self.text: TextEncoder = runtime.text
        self._writing: threading.Thread | None = None
        self._before = runtime.model.spec.window_chunks(runtime.info.kv_context) + 1  # chunks before the first one
        self._profile: profile | None = None
        self._seen = self._works = 0
        self._open: set[int] = set()
        self._first: dict[int, int] = {}  # by session: the first chunk that was not begun before the trace

    def step(self, wait_s: float = 0.0) -> list[Frames]:
        """As `StreamingPipeline.step`. Mutates: self; begins to write when the last chunk is there."""
        if self._profile is None:
            made = self.runtime.step(wait_s)
        else:
            with record_function(_STEP):
                made = self.runtime.step(wait_s)
        for frames in made:
            if self._writing is None and frames.last:
                self._count(frames)
        return made

    def _count(self, frames: Frames) -> None:
        if self._profile is None:
            if frames.chunk + 1 >= self._before:
                self._start()
        elif frames.chunk >= self._first.get(frames.session, 0):
            self._seen += 1
            if self._seen == self.chunks:
                self._stop()

    @property
    def traced(self) -> bool:
        """Whether all chunks are; the files may still be written, until `close` returns."""
        return self._writing is not None

    def _start(self) -> None:
        cuda = torch.cuda.is_available() and self.info.device.startswith("cuda")
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # decoding has a thread of its own
            acc_events=True,
        )
        # Several chunks may come out at once that were computed before, while decoding was behind: they do not count.
        self._first = {session: self.runtime.ring.scheduler.next_chunk(session) for session in self._open}
        self._works = self.runtime.ring.worker.done
        self._profile.start()
        print(f"streamdiff: {self.chunks} chunks are traced now, and slower", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """End the trace; the files are written on a thread, for that takes seconds and the stream goes on."""
        assert self._profile is not None
        works = self.runtime.ring.worker.done - self._works
        self._profile.stop()
        self._writing = threading.Thread(target=self._write, args=(self._profile, works), name="profile")
        self._writing.start()
        self._profile = None

    def _write(self, traced: profile, works: int) -> None:
        info = self.info
        title = f"{info.name} on {info.device}, {info.width}x{info.height}, {info.steps} steps, {info.kv_context}"
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.folder) as name:
            plain, trace, summary = Path(name) / "trace.json", Path(name) / TRACE, Path(name) / SUMMARY
            traced.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(trace, "wb") as packed:
                shutil.copyfileobj(source, packed)
            found = summarise(json.loads(plain.read_bytes())["traceEvents"])
            text = describe(found, title=title, chunks=self._seen, micro_steps=works)
            summary.write_text(text, encoding="utf-8")
            for whole in (trace, summary):
                whole.replace(self.folder / whole.name)
        print(f"streamdiff: profile of {self._seen} chunks in {self.folder}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """As `StreamingPipeline.close`; a trace that was begun is written."""
        if self._profile is not None and self._seen:
            self._stop()
        self.runtime.close()
        if self._writing is not None:
            self._writing.join()
        else:
            told = f"the stream ended before a chunk was made after the first {self._before}, which fill the window"
            print(f"streamdiff: no profile: {told}", file=sys.stderr)

    # ---- as the runtime's --------------------------------------------------------------------------------------

    def minimum_lead(self, *, steps: int, kv_context: str) -> int:
        return self.runtime.minimum_lead(steps=steps, kv_context=kv_context)

    def open(self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str) -> None:
        self.runtime.open(session, conditioning, seed=seed, epoch=epoch, steps=steps, kv_context=kv_context)
        self._open.add(session)
        self._first[session] = 0

    def check_switch(self, session: int, switch: str) -> None:
        self.runtime.check_switch(session, switch)

    def check_steps(self, session: int, steps: int) -> None:
        self.runtime.check_steps(session, steps)

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        self.runtime.set_steps(session, steps, epoch=epoch)

    def set_conditioning(self, session: int, conditioning: Tensor, *, epoch: int, switch: str = "keep") -> None:
        self.runtime.set_conditioning(session, conditioning, epoch=epoch, switch=switch)

    def reset(self, session: int, conditioning: Tensor, *, seed: int, epoch: int) -> None:
        self.runtime.reset(session, conditioning, seed=seed, epoch=epoch)
        self._first[session] = 0

    def set_paused(self, session: int, paused: bool) -> None:
        self.runtime.set_paused(session, paused)

    def set_room(self, session: int, frames: int) -> None:
        self.runtime.set_room(session, frames)

    def close_session(self, session: int) -> None:
        self.runtime.close_session(session)
        self._open.discard(session)

    @property
    def busy(self) -> bool:
        return self.runtime.busy

    def check(self, wait_s: float = 0.0) -> None:
        self.runtime.check(wait_s)

    def work_s(self) -> float | None:
        return self.runtime.work_s()

    def sessions_fit(self) -> int | None:
        return self.runtime.sessions_fit()

    def occupancy(self) -> list[float]:
        return self.runtime.occupancy()

    def busy_s(self) -> list[float]:
        return self.runtime.busy_s()
