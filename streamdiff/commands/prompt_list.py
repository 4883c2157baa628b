"""Many video files from a file of prompts, by one engine: what `streamdiff generate --prompts` does."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NoReturn

from av.error import FFmpegError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from streamdiff import api
from streamdiff.atomic_write import check_parent, exit_on_sigterm
from streamdiff.commands.generate import LONGEST_S, check_seconds, check_start, fps_of, frames
from streamdiff.config import Config, SessionConfig
from streamdiff.errors import ConfigError, EngineFailure, RequestError, StreamdiffError
from streamdiff.video.writer import check_target, write_video

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
class PromptListJob:
    """Options of a prompt list: a video for every line of `prompts`, in the folder `output`; with `resume`, videos that
    exist already are skipped, with `overwrite` they are replaced, and with neither no video is made."""

    prompts: Path
    output: Path | None = None
    seconds: float = 10.0
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class PlannedVideo:
    """A line of the prompt list, with the path, links followed, and the length in seconds of its video."""

    number: int
    line: PromptLine
    output: Path
    seconds: float


def pending(job: PromptListJob) -> list[PlannedVideo]:
    """The videos that are still to be made, in the order of their lines. Writes nothing.

    Raises:
        ConfigError: the file cannot be read, a line says something that cannot be, or its output is not below the
            folder, is in the way of another line's, or exists, with neither `resume` nor `overwrite`.
    """
    if job.output is None:
        raise ConfigError(
            "--output is missing; with --prompts it is the folder of the videos, for example: --output out/"
        )
    if job.output.exists() and not job.output.is_dir():
        raise ConfigError(f"--output is {job.output}, a file; with --prompts it is the folder of the videos")
    if job.resume and job.overwrite:
        raise ConfigError("--resume skips videos that are there, and --overwrite replaces them; give one of the two")
    check_seconds(job.seconds)
    videos = []
    lines_of: dict[PurePath, int] = {}  # outputs, and the folders they are in
    outputs: set[PurePath] = set()
    for number, line in _read(job.prompts):
        where = f"{job.prompts}:{number}: output"
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
        videos.append(PlannedVideo(number, line, output, job.seconds if line.seconds is None else line.seconds))
    return videos


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


def _read(path: Path) -> Iterator[tuple[int, PromptLine]]:
    """Lines with their numbers, from 1; empty ones are left out."""
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
        check_target(video.output, job.overwrite)
    failed: list[str] = []
    with exit_on_sigterm(), api.StreamSession(api.load(config.model), None) as session:
        fps = fps_of(config, session)
        total = sum(_frames_of(video, fps) for video in videos)
        with tqdm(total=total, unit="frame", dynamic_ncols=True) as bar:
            for video in videos:
                bar.set_description(video.output.name)
                end = bar.n + _frames_of(video, fps)
                try:
                    if Path(os.path.realpath(video.output)) != video.output:
                        raise ConfigError(f"{video.output} has become a link to elsewhere")
                    check_target(video.output, job.overwrite)
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
    session.restart(video.line.prompt, seed=seed, image=start.image)
    if session.notice:
        bar.write(f"line {video.number}: {session.notice}", file=sys.stderr)
    write_video(video.output, frames(session, _frames_of(video, fps), bar, fps), fps)


def _report(job: PromptListJob, videos: Sequence[PlannedVideo], failed: Sequence[str]) -> None:
    print(f"{job.output}: {len(videos) - len(failed)} of {len(videos)} videos made")
    for line in failed:
        print(f"streamdiff: failed: {line}", file=sys.stderr)
