"""The `streamdiff` command: what was typed becomes a `Config` and a call. Knows nothing about how it is carried out.

Nothing heavy is imported before a command runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from streamdiff.cli import job_options, options, parser
from streamdiff.errors import ConfigError, RequestError, StreamdiffError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from streamdiff.config import Config

_JobT = TypeVar("_JobT")
OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line; `None` means the process's own. Returns the exit status.

    0 done, 1 the engine or this machine failed, 2 what was asked for cannot be done, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _carry_out(argv)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
        return status
    except (ConfigError, RequestError) as error:
        return _print_error(error, USER_ERROR)
    except BrokenPipeError:  # whoever read what is printed has had enough
        _drop_output()
        return OK
    except (StreamdiffError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and _is_output_full():
            _drop_output()
            error = OSError(f"what there is to print cannot be written to standard output: {error.strerror}")
        return _print_error(error, FAILED)
    except KeyboardInterrupt:
        print("\nstreamdiff: stopped", file=sys.stderr)
        return INTERRUPTED


def _is_output_full() -> bool:
    """Whether standard output takes nothing more, as a file on a full disk."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Print nothing more, or the interpreter complains when it flushes at its end. Mutates: sys.stdout."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _carry_out(argv: list[str]) -> int:
    arguments = parser.parse(argv)
    match arguments.command:
        case "serve":
            return _serve(arguments)
        case "generate":
            from streamdiff.engine.process.main import log_on_stderr

            with log_on_stderr():
                return _generate(arguments, argv)
        case "plan":
            from streamdiff.commands import plan

            return plan.run(_config(arguments).model, _job(plan.PlanJob, arguments))
        case "doctor":
            from streamdiff.commands import doctor

            return doctor.report(_config(arguments))
        case "models":
            from streamdiff.commands import models

            return models.run(arguments.name, as_json=bool(arguments.as_json))
        case "decode" | "encode":
            from streamdiff.commands import convert
            from streamdiff.commands.jobs import DecodeJob, EncodeJob

            if arguments.command == "decode":
                return convert.decode(_job(DecodeJob, arguments))
            return convert.encode(_job(EncodeJob, arguments))
    parser.parsers()[""].print_help()
    return OK


def run() -> NoReturn:
    """The console script."""
    try:
        sys.exit(main())
    finally:
        gc.freeze()  # else the interpreter looks for garbage in all of torch as it ends, for longer than a second


def _print_error(error: Exception, status: int) -> int:
    print(f"streamdiff: error: {error}", file=sys.stderr)
    return status


# ---- commands --------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    if (arguments.gpus, arguments.goal) != (None, None):
        from streamdiff.cli.serve_gpus import with_best

        config = with_best(config, arguments.gpus, arguments.goal)
    _check_model(config)
    if config.session.image is not None:
        from streamdiff.video.picture import fit_picture

        fit_picture(config.session.image, 16, 16)  # what is wrong with it is said before anything is loaded
    if config.session.input is not None:
        from streamdiff.server.media.video_input import check_video

        check_video(config.session.input)
    if config.session.snapshot is not None:
        from streamdiff.server.sessions.keeper import read_snapshot
        from streamdiff.snapshot_header import read_saved_session

        read_saved_session(read_snapshot(config.session.snapshot), config.session.snapshot)
    from streamdiff.server import main as server

    return server.run(_at_native_rate(config))


def _at_native_rate(config: Config) -> Config:
    """With the rate of a published model where none was asked for: faster is fast motion."""
    from streamdiff.models import catalogue, resolve

    name = config.model.name
    if "fps" in config.playback.model_fields_set or resolve.is_embedded(name) or catalogue.is_random(name):
        return config
    known = catalogue.entries()
    entry = known.get(name, known[catalogue.USUAL])
    playback = config.playback.model_copy(update={"fps": entry.native_fps})
    return config.model_copy(update={"playback": playback})


def _generate(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if job_options.is_reference(arguments):
        return _reference(arguments, argv)
    if arguments.prompts is not None:
        return _generate_list(arguments, argv)
    if arguments.resume:
        raise ConfigError("--resume goes with --prompts FILE: it skips the lines whose videos are there")
    config = _config(arguments)
    _check_model(config)
    from streamdiff.commands import generate

    generate.check_start(config.session)  # here too, before ranks are started
    changes = tuple(sorted(parse_change(text) for text in arguments.prompt_at or ()))
    job = _job(generate.GenerateJob, arguments, changes=changes)
    if config.model.ranks == 1:
        return generate.run(config, job)
    return generate.run_as_ranks(config, partial(generate.check, job), partial(generate.run, config, job), argv)


def _generate_list(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    for flag, is_given in (
        ("--prompt", getattr(arguments, "session.prompt") is not None),
        ("--prompt-at", bool(arguments.prompt_at)),
    ):
        if is_given:
            raise ConfigError(f"{flag} does not go with --prompts, whose lines are the prompts")
    from streamdiff.commands import generate

    job = _job(generate.PromptListJob, arguments)
    config = _config(arguments)
    _check_model(config)
    generate.check_start(config.session)
    run = partial(generate.run_list, config, job)
    # With nothing left to make no rank is needed.
    if config.model.ranks == 1 or not generate.pending(job):
        return run()
    return generate.run_as_ranks(config, partial(generate.pending, job), run, argv)


def _check_by_chunks(arguments: argparse.Namespace, config: Config) -> None:
    """Raises ConfigError for what was typed, or stands in the configuration, that options by chunks would ignore."""
    given = [
        ("--prompts", arguments.prompts is not None, "one command for each prompt"),
        ("--seconds", arguments.seconds is not None, "--chunks"),
        ("--prompt-at", bool(arguments.prompt_at), "--prompt-switch"),
        ("--resume", bool(arguments.resume), "it with --prompts instead of them"),
    ]
    for key, instead in (
        ("session.image", "--given-latents"),
        ("model.decode_rank", "rank 0, which decodes there, or --seconds"),
        ("model.trace", "--seconds instead of them"),
    ):
        section, name = key.split(".")
        settings: BaseModel = getattr(config, section)
        differs = getattr(settings, name) != type(settings).model_fields[name].default
        is_typed = getattr(arguments, key, None) is not None
        given.append((options.SETTINGS[key].flag if is_typed else key, is_typed or differs, instead))
    for what, is_given, instead in given:
        if is_given:
            raise ConfigError(f"{what} does not go with the options that say everything by chunks; use {instead}")


def _reference(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = _config(arguments)
    _check_by_chunks(arguments, config)
    for name, refused, plain in (
        ("compile", "on", "off"),
        ("quantize", "auto", "none, fp8 or int8"),
        ("preset", "fast", "plain"),
    ):
        if getattr(config.model, name) == refused:
            raise ConfigError(
                f"model.{name} is {refused}, but options that say everything by chunks run the plain path; use {plain}"
            )
    from streamdiff.commands import generate, reference
    from streamdiff.commands.jobs import ReferenceJob

    generate.check_start(config.session)
    job = _job(
        ReferenceJob,
        arguments,
        model=config.model,
        prompt=config.session.prompt,
        seed=config.session.seed,
        fps=config.playback.fps if "fps" in config.playback.model_fields_set else None,
        window=config.model.window,
        sink=config.model.sink,
        rope=config.model.rope,
    )
    if not job.processes:
        return reference.run(job)
    check, run = partial(reference.prepare, job), partial(reference.run, job)
    return generate.run_as_ranks(config, check, run, argv, partial(reference.follow, job))


def _job(kind: type[_JobT], arguments: argparse.Namespace, **known: object) -> _JobT:
    """The dataclass `kind` of what was typed, else of what is `known`, else of its defaults."""
    typed = {name: getattr(arguments, name, None) for name in inspect.signature(kind).parameters}
    typed = {name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()}
    return kind(**known | {name: value for name, value in typed.items() if value is not None})


def _config(arguments: argparse.Namespace) -> Config:
    """The file given with --config, or the defaults, with the options laid over it."""
    from streamdiff.config_file import load

    given = {key: getattr(arguments, key, None) for key in options.SETTINGS}
    overrides = {key: value for key, value in given.items() if value is not None}
    names = {key: option.flag for key, option in options.SETTINGS.items()}
    from streamdiff.models.resolve import completed

    config = load(arguments.config, overrides, names)
    return config.model_copy(update={"model": completed(config.model)})


def _check_model(config: Config) -> None:
    """Refuse parts of the model that are not there, more stages than a known model has blocks, and more ranks for each
    than can share it, before processes are started that take seconds to find out.

    Raises:
        ConfigError: something is missing, or there are more.
    """
    from streamdiff.models import catalogue
    from streamdiff.models.resolve import check_parts, is_embedded

    model = config.model
    check_parts(model)
    if model.stage_ranks == 1 or model.weights is not None:
        return
    if is_embedded(model.name) or model.name in catalogue.entries():
        from streamdiff.pipeline.planner.model_sizes import sizes_of
        from streamdiff.pipeline.planner.partition import check_ranks

        check_ranks(model, sizes_of(model))


def parse_change(text: str) -> tuple[float, str]:
    """`SECONDS:TEXT` of --prompt-at as (seconds, prompt).

    Raises:
        ConfigError: no colon, no time of 0 or more before it, or nothing after it.
    """
    time, colon, prompt = text.partition(":")
    try:
        time_s = float(time)
    except ValueError:
        time_s = -1.0
    if not colon or not 0 <= time_s < float("inf") or not prompt.strip():
        raise ConfigError(f'--prompt-at is {text!r}, but must be SECONDS:TEXT, for example "4:a blue star"')
    return time_s, prompt.strip()
