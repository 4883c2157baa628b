"""Video files from prompts: what `streamdiff generate` does, one video, or with `--prompts` one for each line of a file
by one engine. Knows nothing about the command line or about codecs."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from streamdiff import api
from streamdiff.atomic_write import check_parent, exit_on_sigterm
from streamdiff.commands.jobs import LONGEST_S, GenerateJob
from streamdiff.config import Config, SessionConfig
from streamdiff.engine.change_log import Log, read_log
from streamdiff.engine.process.main import run_as_worker, work_for_rank_0
from streamdiff.engine.timeline import TimedChange, read_timeline
from streamdiff.engine.validation import check_prompt
from streamdiff.errors import ConfigError, EngineFailure, RequestError, StreamdiffError
from streamdiff.video import picture
from streamdiff.video.files import check_target, write_video

_KINDS = {".mp4", ".webm", ""}
_LONGEST_NAME_BYTES = 255


class PromptLine(BaseModel):
    """A line of a JSONL file; what is left out is that of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str
    seed: int | None = None
    seconds: float | None = Field(None, gt=0, le=LONGEST_S)
    size: str | None = Field(None, pattern=r"^[0-9]{1,5}x[0-9]{1,5}$")
    output: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class PlannedVideo:
    """A video to be made, of `seconds`; `number` is that of its line, 0 without a list, whose outputs have links
    followed. `changes` are (seconds from the start, prompt), in order of time; `timeline` and `log` as in the job."""

    number: int
    line: PromptLine
    output: Path
    seconds: float
    changes: tuple[tuple[float, str], ...] = ()
    timeline: tuple[TimedChange, ...] = ()
    log: Log | None = None

    def frames(self, fps: float) -> int:
        """Frames that are to be made, `fps` per second."""
        return max(1, round(self.seconds * fps)) if self.log is None else self.log.header.frames


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


def check_start(start: SessionConfig) -> None:
    """Raises ConfigError for a beginning that only `serve` has; it would be ignored."""
    for name, instead in (
        ("snapshot", "streamdiff.load resumes it"),
        ("input", "StreamSession.video and feed follow it"),
    ):
        if (value := getattr(start, name)) is not None:
            raise ConfigError(f"session.{name} is {value!r}, but is for `serve`; in a program, {instead}")


def parse_change(text: str) -> tuple[float, str]:
    """`SECONDS:TEXT` of --prompt-at as (seconds, prompt).

    Raises:
        ConfigError: no colon, no time of 0 or more before it, or nothing after it.
        RequestError: a prompt that no stream takes.
    """
    time, colon, prompt = text.partition(":")
    try:
        time_s = float(time)
    except ValueError:
        time_s = -1.0
    if not colon or not 0 <= time_s < float("inf") or not prompt.strip():
        raise ConfigError(
            f'--prompt-at is {text!r}, but must be SECONDS:TEXT, for example "4:a blue star"', field="prompt_at"
        )
    check_prompt(prompt)
    return time_s, prompt.strip()


def planned(start: SessionConfig, job: GenerateJob) -> list[PlannedVideo]:
    """The videos that are to be made, in order. Writes nothing.

    Raises:
        ConfigError, RequestError: something cannot be made. Of a list: the file cannot be read, a line says something
            that cannot be, or its output is not below the folder, is in the way of another line's, or exists, with
            neither `resume` nor `overwrite`.
    """
    check_start(start)
    if job.prompts is not None:
        return list(_listed(job, job.prompts))
    changes = tuple(sorted(map(parse_change, job.prompt_at)))
    if changes and changes[-1][0] >= job.seconds:
        raise ConfigError(f"--prompt-at {changes[-1][0]:g} lies after the end; the video is {job.seconds:g} s long")
    check_target(job.output, job.overwrite)
    timeline = () if job.timeline is None else read_timeline(job.timeline)
    what = changes, timeline, None if job.replay is None else read_log(job.replay)
    return [PlannedVideo(0, PromptLine(prompt=start.prompt), job.output, job.seconds, *what)]


def _listed(job: GenerateJob, prompts: Path) -> Iterator[PlannedVideo]:
    """The videos of a list. Raises ConfigError as `planned`."""
    if job.output.exists() and not job.output.is_dir():
        raise ConfigError(f"--output is {job.output}, a file; with --prompts it is the folder of the videos")
    if job.resume and job.overwrite:
        raise ConfigError("--resume skips videos that are there, and --overwrite replaces them; give one of the two")
    lines_of: dict[PurePath, int] = {}  # outputs, and the folders they are in
    outputs: set[PurePath] = set()
    for number, line in read_lines(prompts):
        where = f"{prompts}:{number}: output"
        name = line.output or f"{number:05d}.mp4"
        output = _below(job.output, name, where)
        # One name for file systems that do not tell A from a, or an accent from a letter with one.
        key = PurePath(unicodedata.normalize("NFC", str(output)).casefold())
        if clash := lines_of.get(key) or next((lines_of[each] for each in key.parents if each in outputs), None):
            raise ConfigError(f"{where} {name!r} is that of line {clash} too, or one is a folder of the other")
        outputs.add(key)
        lines_of |= dict.fromkeys((key, *key.parents), number)
        if _exists(output):
            if job.resume:
                continue
            if not job.overwrite:
                raise ConfigError(f"{where} {name!r} exists; --overwrite replaces it, --resume skips it")
        yield PlannedVideo(number, line, output, job.seconds if line.seconds is None else line.seconds)


def _below(folder: Path, name: str, where: str) -> Path:
    """The path of the output `name`, links followed; ConfigError where it is not below `folder`, or cannot be made."""
    is_control = any(unicodedata.category(character) == "Cc" for character in name)
    is_long = any(len(os.fsencode(part)) > _LONGEST_NAME_BYTES for part in name.split("/"))
    if is_control or is_long or name.startswith("~"):
        raise ConfigError(
            f"{where} is {name!r}; it has no control characters, at most {_LONGEST_NAME_BYTES} bytes a name, and does "
            "not begin with ~"
        )
    root, output = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    if {Path(name).suffix.lower(), output.suffix.lower()} - _KINDS:
        raise ConfigError(f"{where} is {name!r}; it ends in .mp4 or .webm, or is a folder")
    if root not in output.parents:
        raise ConfigError(f"{where} is {name!r}, which is not below {folder} (--output); give a path in that folder")
    there = next(each for each in output.parents if os.path.lexists(each))
    try:
        check_parent(there / output.name)
        if output.parent == there and not _exists(output):
            check_target(output)
    except ConfigError as error:
        raise ConfigError(f"{where} is {name!r}: {error}") from error
    return output


def _exists(output: Path) -> bool:
    """Whether a video is there, or anything else that is no empty folder: files have their name when complete."""
    return any(output.iterdir()) if output.is_dir() else os.path.lexists(output)


def read_lines(path: Path) -> Iterator[tuple[int, PromptLine]]:
    """Lines of a prompt list with their numbers, from 1; empty ones are left out. Raises ConfigError as `planned`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--prompts is {path}, which cannot be read: {why}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts is {path}, which has no prompt: give one a line")
    is_json = path.suffix.lower() in (".jsonl", ".ndjson")
    for number, line in lines:
        yield number, _parsed(line, f"{path}:{number}") if is_json else PromptLine(prompt=line)


def _parsed(line: str, where: str) -> PromptLine:
    try:
        return PromptLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        fields = ", ".join(PromptLine.model_fields)
        why = f"{name or 'the line'}: {first['msg']}; a line is a JSON object with {fields}"
        raise ConfigError(f"{where}: {why}", field=name) from error


# ---- making them --------------------------------------------------------------------------------------------------


def run(config: Config, job: GenerateJob) -> int:
    """Make the videos one after the other, with one progress bar on standard error; returns the exit status: 1 if a
    line of a list failed, which is named at the end.

    Each is what its prompt and seed give alone, at the model's own rate unless the configuration says another. A
    changed prompt shows at the second chunk after its time at the latest, as it would live.

    Raises:
        ConfigError, RequestError: see `planned`; nothing is made then.
        EngineFailure: the engine ended; what is made stays.
    """
    start, videos = config.session, planned(config.session, job)
    if job.resume:
        print(f"{job.prompts}: {len(videos)} videos to make, the others are there")
    if not videos:
        return 0
    image = None if start.image is None else picture.read_bytes(start.image)
    for video in videos:
        video.output.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with exit_on_sigterm(), api.StreamSession(api.load_model(config.model), None) as session:
        fps = config.playback.fps if "fps" in config.playback.model_fields_set else session.fps
        total = sum(video.frames(fps) for video in videos)
        with tqdm(total=total, unit="frame", dynamic_ncols=True) as bar:
            for video in videos:
                bar.set_description(video.output.name)
                end = bar.n + video.frames(fps)
                try:
                    _make(session, video, start, image, fps, job.overwrite, bar)
                except EngineFailure:
                    raise
                except (StreamdiffError, OSError, FFmpegError) as error:
                    if job.prompts is None:
                        raise
                    failed.append(f"{job.prompts}:{video.number}: {error}")
                bar.update(end - bar.n)
    if job.prompts is None:
        size = f"{session.width} x {session.height}"
        print(f"{job.output}: {total} frames, {total / fps:g} s at {fps:g} per second, {size}")
    else:
        print(f"{job.output}: {len(videos) - len(failed)} of {len(videos)} videos made")
    for line in failed:
        print(f"streamdiff: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _make(
    session: api.StreamSession,
    video: PlannedVideo,
    start: SessionConfig,
    image: bytes | None,
    fps: float,
    overwrite: bool,
    bar: tqdm[NoReturn],
) -> None:
    """One video. Mutates: session, bar.

    Raises:
        RequestError: a prompt, seed or size that cannot be. ConfigError, OSError: a file that cannot be written.
    """
    line = ""
    if video.number:
        line = f"line {video.number}: "
        if Path(os.path.realpath(video.output)) != video.output:
            raise ConfigError(f"{video.output} has become a link to elsewhere")
        check_target(video.output, overwrite)
    size = f"{session.width}x{session.height}"
    if video.line.size not in (None, size):
        raise RequestError("size", f"the size is {video.line.size}; this engine makes {size}")
    if video.log is not None:
        session.replay(video.log, image)
        if cut := video.log.header.cut:
            bar.write(f"the log ends before its stream did: {cut[:200]}", file=sys.stderr)
    else:
        session.restart(video.line.prompt, seed=start.seed if video.line.seed is None else video.line.seed, image=image)
    if video.timeline:
        session.timeline(video.timeline, fps=fps)
    if session.notice:
        bar.write(f"{line}{session.notice}", file=sys.stderr)
    write_video(video.output, _frames(session, video, fps, bar), fps)


def _frames(
    session: api.StreamSession, video: PlannedVideo, fps: float, bar: tqdm[NoReturn]
) -> Iterator[NDArray[np.uint8]]:
    """The video's frames; the prompt changes on the way. Mutates: session, bar."""
    due = deque(video.changes)
    for number, frame in enumerate(islice(session, video.frames(fps))):
        while due and due[0][0] * fps <= number:
            notice = session.set_prompt(due.popleft()[1])
            if notice:
                bar.write(notice, file=sys.stderr)
        yield frame
        bar.update()
