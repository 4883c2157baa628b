"""A video file from prompts: what `streamdiff generate` does. Knows nothing about the command line or about codecs."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from streamdiff import api
from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.config import Config
from streamdiff.engine.process.main import be_follower
from streamdiff.errors import ConfigError
from streamdiff.video.writer import check_target, write_video


@dataclass(frozen=True)
class GenerateJob:
    """What to make: `changes` are (seconds from the start, prompt), in order of time."""

    output: Path | None
    seconds: float
    changes: tuple[tuple[float, str], ...] = ()


def run_as_ranks(config: Config, job: GenerateJob, argv: Sequence[str]) -> int:
    """`run` over the ranks of a ring, each a process of its own that carries out the same command line `argv`. They are
    started here, unless torchrun has started this process as one of them. Returns the exit status.

    Raises:
        ConfigError, RequestError: as `run`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _checked(job)
        from streamdiff.engine.process.launcher import launch  # imports torch

        with TemporaryDirectory(prefix="streamdiff-") as folder:
            return launch("streamdiff", config.model.ranks, argv, folder)
    return run(config, job) if os.environ["RANK"] == "0" else be_follower(config.model)


def run(config: Config, job: GenerateJob) -> int:
    """Make the video, with a progress bar on standard error; returns the exit status.

    The frame rate is the model's own unless the configuration says another. A changed prompt shows at the second chunk
    after its time at the latest, as it would live.

    Raises:
        ConfigError, RequestError: what was asked for cannot be made; nothing is written then.
    """
    output = _checked(job)
    with exit_on_sigterm(), _open(config) as session:
        fps = config.playback.fps if "fps" in config.playback.model_fields_set else session.fps
        total = max(1, round(job.seconds * fps))
        with tqdm(total=total, unit="frame", desc=output.name, dynamic_ncols=True) as bar:
            if session.notice:
                bar.write(session.notice, file=sys.stderr)
            write_video(output, _frames(session, job, fps, total, bar), fps)
    print(f"{output}: {total} frames, {total / fps:g} s at {fps:g} per second, {session.width} x {session.height}")
    return 0


def _open(config: Config) -> api.StreamSession:
    return api.StreamSession(api.load(config.model), config.session.prompt, seed=config.session.seed)


def _checked(job: GenerateJob) -> Path:
    if job.output is None:
        raise ConfigError("--output is missing; for example: --output out.mp4")
    if not (math.isfinite(job.seconds) and 0 < job.seconds <= 24 * 3600):
        raise ConfigError(f"--seconds is {job.seconds:g}, but must be above 0 and at most a day (86,400)")
    late = [time_s for time_s, _ in job.changes if time_s >= job.seconds]
    if late:
        raise ConfigError(f"--prompt-at {late[0]:g} lies after the end; the video is {job.seconds:g} s long")
    check_target(job.output)
    return job.output


def _frames(
    session: api.StreamSession, job: GenerateJob, fps: float, total: int, bar: tqdm[NoReturn]
) -> Iterator[NDArray[np.uint8]]:
    """The first `total` frames of the session, its prompt changed on the way. Mutates: session, bar."""
    changes = deque(job.changes)
    for number, frame in enumerate(session):
        while changes and changes[0][0] * fps <= number:
            notice = session.prompt(changes.popleft()[1])
            if notice:
                bar.write(notice, file=sys.stderr)
        yield frame
        bar.update()
        if number + 1 == total:
            return
