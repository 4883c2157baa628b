"""Traces some chunks of a running stream with PyTorch's profiler, as a Chrome trace for ui.perfetto.dev.

What is traced is slower than usual, so no rate is to be taken from it. In a ring the trace is of rank 0.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from streamdiff.atomic_write import temporary_sibling
from streamdiff.core import Frames
from streamdiff.errors import ConfigError
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

logger = logging.getLogger(__name__)

CHUNKS = 4
"""How many chunks are traced, unless it is said."""
TRACE = "trace.json.gz"


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


class Profiler:
    """Traces `chunks` chunks of a pipeline, whose `profiler` it is, once a stream's window is full."""

    def __init__(self, pipeline: StreamingPipeline, folder: Path, chunks: int = CHUNKS) -> None:
        """`folder` is one that `check_folder` takes. Mutates: the pipeline's `profiler`."""
        self.folder, self.chunks = folder, chunks
        self._writing: threading.Thread | None = None
        self._before = pipeline.model.spec.window_chunks(pipeline.info.kv_context)
        cuda = torch.cuda.is_available() and pipeline.info.device.startswith("cuda")
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=self._before, warmup=1, active=chunks, repeat=1),
            on_trace_ready=self._write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # decoding has a thread of its own
            acc_events=True,
        )
        pipeline.profiler = self

    def after_step(self, frames: Sequence[Frames]) -> None:
        """Take a step of the profiler's schedule where a chunk is finished. Mutates: self."""
        if any(each.last for each in frames):
            self._profile.step()
            if self._profile.step_num == self._before + 1:
                logger.info("%d chunks are traced now, and slower", self.chunks)

    @property
    def traced(self) -> bool:
        """Whether all chunks are; the file may still be written, until `close` returns."""
        return self._writing is not None

    def _write(self, traced: profile) -> None:
        """Write the file on a thread, for that takes seconds and the stream continues. Mutates: self."""
        chunks, target = min(self.chunks, traced.step_num - self._before - 1), self.folder / TRACE

        def write() -> None:
            with temporary_sibling(target) as plain, temporary_sibling(target) as packed:
                traced.export_chrome_trace(str(plain))  # torch packs in the system's temporary folder
                with plain.open("rb") as source, gzip.open(packed, "wb") as file:
                    shutil.copyfileobj(source, file)
                packed.replace(target)
            logger.info("trace of %d chunks in %s", chunks, target)

        self._writing = threading.Thread(target=write, name="profile")
        self._writing.start()

    def close(self) -> None:
        """Write a trace that was begun; waits until the file is there."""
        self._profile.stop()
        if self._writing is not None:
            self._writing.join()
        else:
            logger.warning(
                "no trace: the stream ended within its first %d chunks, before any is traced", self._before + 1
            )
