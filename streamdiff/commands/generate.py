"""A video file from prompts: what `streamdiff generate` does. Knows nothing about the command line or about codecs."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from streamdiff import api
from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.config import Config, SessionConfig
from streamdiff.engine.process.main import run_as_worker, work_for_rank_0
from streamdiff.engine.validation import check_prompt
from streamdiff.errors import ConfigError
from streamdiff.video import picture
from streamdiff.video.writer import check_target, write_video

LONGEST_S = 24 * 3600


@dataclass(frozen=True)
class GenerateJob:
    """What to make: `changes` are (seconds from the start, prompt), in order of time; a video that exists is replaced
    only with `overwrite`."""

    output: Path | None = None
    seconds: float = 10.0
    changes: tuple[tuple[float, str], ...] = ()
    overwrite: bool = False


def run_as_ranks(
    config: Config,
    check: Callable[[], object],
    run: Callable[[], int],
    argv: Sequence[str],
    follow: Callable[[], None] | None = None,
) -> int:
    """`run` on rank 0 of a ring whose ranks are processes of their own that carry out the same command line `argv`;
    the others `follow` (default: as those of a live engine). They are started here, after `check`, unless torchrun has
    started this process as one of them. Returns the exit status.

    Raises:
        ConfigError, RequestError: as `check` and `run`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        check()
        from streamdiff.engine.process.launcher import launch  # imports torch

        with TemporaryDirectory(prefix="streamdiff-") as folder:
            return launch("streamdiff", config.model.ranks, argv, folder)
    if os.environ["RANK"] == "0":
        return run()
    return run_as_worker(config.model) if follow is None else work_for_rank_0(follow)


def run(config: Config, job: GenerateJob) -> int:
    """Make the video, with a progress bar on standard error; returns the exit status.

    The frame rate is the model's own unless the configuration says another. A changed prompt shows at the second chunk
    after its time at the latest, as it would live.

    Raises:
        ConfigError, RequestError: what was asked for cannot be made; nothing is written then.
    """
    check_start(config.session)
    output, start = check(job), config.session
    image = None if start.image is None else picture.read_bytes(start.image)
    begin = partial(api.StreamSession, seed=start.seed, image=image)
    with exit_on_sigterm(), begin(api.load(config.model), start.prompt) as session:
        fps = fps_of(config, session)
        total = max(1, round(job.seconds * fps))
        with tqdm(total=total, unit="frame", desc=output.name, dynamic_ncols=True) as bar:
            if session.notice:
                bar.write(session.notice, file=sys.stderr)
            write_video(output, frames(session, total, bar, fps, job.changes), fps)
    print(f"{output}: {total} frames, {total / fps:g} s at {fps:g} per second, {session.width} x {session.height}")
    return 0


def check_start(start: SessionConfig) -> None:
    """Raises ConfigError for a beginning that only `serve` has; it would be ignored."""
    for name, value, instead in (
        ("snapshot", start.snapshot, "streamdiff.load goes on from it"),
        ("input", start.input, "StreamSession.video and feed follow it"),
    ):
        if value is not None:
            raise ConfigError(f"session.{name} is {value!r}, but is for `serve`; in a program, {instead}")


def check_seconds(seconds: float) -> None:
    """Raises ConfigError for a length that no video can have."""
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"--seconds is {seconds:g}, but must be above 0 and at most a day ({LONGEST_S:,})")


def fps_of(config: Config, session: api.StreamSession) -> float:
    """The frame rate of a video: what the configuration says, else the model's own."""
    return config.playback.fps if "fps" in config.playback.model_fields_set else session.fps


def check(job: GenerateJob) -> Path:
    """The output. Raises ConfigError, or RequestError of a prompt, for what cannot be made."""
    if job.output is None:
        raise ConfigError("--output is missing; for example: --output out.mp4")
    check_seconds(job.seconds)
    late = [time_s for time_s, _ in job.changes if time_s >= job.seconds]
    if late:
        raise ConfigError(f"--prompt-at {late[0]:g} lies after the end; the video is {job.seconds:g} s long")
    for _, prompt in job.changes:
        check_prompt(prompt)
    check_target(job.output, job.overwrite)
    return job.output


def frames(
    session: api.StreamSession,
    total: int,
    bar: tqdm[NoReturn],
    fps: float,
    changes: Iterable[tuple[float, str]] = (),
) -> Iterator[NDArray[np.uint8]]:
    """The first `total` frames of the session, its prompt changed on the way (`GenerateJob`). Mutates: session, bar."""
    due = deque(changes)
    for number, frame in enumerate(islice(session, total)):
        while due and due[0][0] * fps <= number:
            notice = session.prompt(due.popleft()[1])
            if notice:
                bar.write(notice, file=sys.stderr)
        yield frame
        bar.update()
