"""Many video files from a file of prompts, by one engine: what `streamdiff generate --prompts` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from av.error import FFmpegError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from streamdiff import api
from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands.generate import LONGEST_S, check_seconds, check_start, fps_of, frames
from streamdiff.config import Config, SessionConfig
from streamdiff.errors import ConfigError, EngineFailure, RequestError, StreamdiffError
from streamdiff.video.writer import check_target, write_video

_KINDS = (".mp4", ".webm", "")


class PromptLine(BaseModel):
    """A line of a JSONL file; what is left out is that of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str
    seed: int | None = None
    seconds: float | None = Field(None, gt=0, le=LONGEST_S)
    size: str | None = Field(None, pattern=r"^[0-9]{1,5}x[0-9]{1,5}$")
    output: str | None = Field(None, min_length=1)


@dataclass(frozen=True)
class PromptListJob:
    """Options of a prompt list: a video for every line of `prompts`, in the folder `output`; with `resume`, videos that
    exist already are skipped."""

    prompts: Path
    output: Path | None = None
    seconds: float = 10.0
    resume: bool = False


@dataclass(frozen=True)
class PlannedVideo:
    """A line of the prompt list, with the path and the length in seconds of its video."""

    number: int
    line: PromptLine
    output: Path
    seconds: float


def pending(job: PromptListJob) -> list[PlannedVideo]:
    """The videos that are still to be made, in the order of their lines. Writes nothing.

    Raises:
        ConfigError: the file cannot be read, a line says something that cannot be, two lines have one output, or an
            output cannot be written.
    """
    if job.output is None:
        raise ConfigError(
            "--output is missing; with --prompts it is the folder of the videos, for example: --output out/"
        )
    if job.output.exists() and not job.output.is_dir():
        raise ConfigError(f"--output is {job.output}, a file; with --prompts it is the folder of the videos")
    check_seconds(job.seconds)
    videos = [
        PlannedVideo(
            number,
            line,
            job.output / (line.output or f"{number:05d}.mp4"),
            job.seconds if line.seconds is None else line.seconds,
        )
        for number, line in _read(job.prompts)
    ]
    by_output: dict[Path, int] = {}
    for video in videos:
        where = f"{job.prompts}:{video.number}"
        if video.output.suffix.lower() not in _KINDS:
            raise ConfigError(f"{where}: output is {video.output.name!r}; it ends in .mp4 or .webm, or is a folder")
        if "\0" in str(video.output):
            raise ConfigError(f"{where}: output is {video.output.name!r}, but no file's name has a NUL; leave it out")
        first = by_output.setdefault(video.output.resolve(), video.number)
        if first != video.number:
            raise ConfigError(f"{where}: output {video.output.name!r} is that of line {first} too; name another")
    return [video for video in videos if not (job.resume and _is_whole(video.output))]


def _is_whole(output: Path) -> bool:
    """Whether a complete video exists at `output`: files are moved to their name when complete."""
    return output.is_file() or (output.is_dir() and any(output.iterdir()))


def _read(path: Path) -> Iterator[tuple[int, PromptLine]]:
    """Lines with their numbers, from 1; empty ones are left out."""
    try:
        text = path.read_text(encoding="utf-8")
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
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        too_much = "a number has too many digits, or brackets are nested too deep"
        why = error.msg if isinstance(error, json.JSONDecodeError) else too_much
        raise ConfigError(f"{where}: it is not JSON: {why}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'{where}: a line is a JSON object, for example {{"prompt": "a blue star", "seed": 1}}')
    try:
        return PromptLine.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(PromptLine.model_fields)
        why = (
            f"is not known; fields are {known}" if first["type"] == "extra_forbidden" else f"cannot be: {first['msg']}"
        )
        raise ConfigError(f"{where}: {name!r} {why}") from error


def run(config: Config, job: PromptListJob) -> int:
    """Make the videos one after the other, with one progress bar; returns the exit status: 1 if a line failed, which
    is named at the end. Each is what `generate` makes of its prompt and seed alone.

    Raises:
        ConfigError: see `pending` and `generate.check_start`; nothing is made then.
        EngineFailure: the engine ended; what is made stays.
    """
    check_start(config.session)
    videos = pending(job)
    if job.resume:
        print(f"{job.prompts}: {len(videos)} videos to make, the others are there")
    if not videos:
        return 0
    for video in videos:
        video.output.parent.mkdir(parents=True, exist_ok=True)
        check_target(video.output)
    failed: list[str] = []
    with exit_on_sigterm(), api.StreamSession(api.load(config.model), None) as session:
        fps = fps_of(config, session)
        total = sum(_frames_of(video, fps) for video in videos)
        with tqdm(total=total, unit="frame", dynamic_ncols=True) as bar:
            for video in videos:
                bar.set_description(video.output.name)
                end = bar.n + _frames_of(video, fps)
                try:
                    _make(session, video, config.session, fps, bar)
                except EngineFailure:
                    raise
                except (StreamdiffError, OSError, FFmpegError) as error:
                    failed.append(f"{job.prompts}:{video.number}: {error}")
                bar.update(end - bar.n)
    _report(job, videos, failed)
    return 1 if failed else 0


def _frames_of(video: PlannedVideo, fps: float) -> int:
    return max(1, round(video.seconds * fps))


def _make(
    session: api.StreamSession, video: PlannedVideo, start: SessionConfig, fps: float, bar: tqdm[NoReturn]
) -> None:
    """One video. Mutates: session, bar.

    Raises:
        RequestError: a prompt, seed or size that cannot be. ConfigError, OSError: a file that cannot be written.
    """
    size = f"{session.width}x{session.height}"
    if video.line.size not in (None, size):
        raise RequestError("size", f"the size is {video.line.size}; this engine makes {size}")
    seed = start.seed if video.line.seed is None else video.line.seed
    session.restart(video.line.prompt, seed=seed, image=start.image, fit=start.fit)
    if session.notice:
        bar.write(f"line {video.number}: {session.notice}", file=sys.stderr)
    write_video(video.output, frames(session, _frames_of(video, fps), bar, fps), fps)


def _report(job: PromptListJob, videos: Sequence[PlannedVideo], failed: Sequence[str]) -> None:
    print(f"{job.output}: {len(videos) - len(failed)} of {len(videos)} videos made")
    for line in failed:
        print(f"streamdiff: failed: {line}", file=sys.stderr)
