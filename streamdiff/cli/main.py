"""The `streamdiff` command: what was typed becomes a `Config` and a call. Knows nothing about how it is carried out.

Nothing heavy is imported before a command runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from streamdiff.cli import parser
from streamdiff.commands import jobs
from streamdiff.config import Config
from streamdiff.config_file import explain, load
from streamdiff.errors import ConfigError, RequestError, StreamdiffError

_JobT = TypeVar("_JobT", bound=BaseModel)
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
    except BrokenPipeError:  # the reader of the output has closed it
        _drop_output()
        return OK
    except (StreamdiffError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and _is_output_full():
            _drop_output()
            error = OSError(f"what there is to print cannot be written to standard output: {error.strerror}")
        elif isinstance(error, OSError) and error.filename is not None:  # without its number
            error = OSError(f"{error.filename}: {error.strerror}")
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
                return _reference(arguments, argv) if parser.is_reference(arguments) else _generate(arguments, argv)
        case "plan":
            from streamdiff.commands import plan
            from streamdiff.models.resolve import check_parts

            model = _config(arguments).model
            if "name" not in model.model_fields_set:
                check_parts(model)  # the file says which model it is
            return plan.run(model, _job(jobs.PlanJob, arguments))
        case "doctor":
            from streamdiff.commands import doctor

            return doctor.report(_config(arguments))
        case "models":
            from streamdiff.commands import models

            return models.run(_job(jobs.ModelsJob, arguments))
        case "mcp":
            from streamdiff.commands import mcp

            return mcp.run(_job(jobs.McpJob, arguments))
        case "osc":
            from streamdiff.commands import osc

            return osc.run(_job(jobs.OscJob, arguments))
        case "decode" | "encode":
            from streamdiff.commands import convert

            if arguments.command == "decode":
                return convert.decode(_job(jobs.DecodeJob, arguments))
            return convert.encode(_job(jobs.EncodeJob, arguments))
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
    config, job = _config(arguments), _job(jobs.ServeJob, arguments)
    if job.gpus is not None or job.goal is not None:
        from streamdiff.commands import plan

        config = plan.with_best(config, job)
    _check_model(config)
    start = config.session  # what is wrong with it is said before anything is loaded
    if start.image is not None:
        from streamdiff.video.picture import fit_picture

        fit_picture(start.image, 16, 16)
    if start.input is not None:
        from streamdiff.server.sessions.video_input import check_video

        check_video(start.input)
    if start.snapshot is not None:
        from streamdiff.server.sessions.keeper import read_snapshot
        from streamdiff.snapshot_header import read_saved_session

        read_saved_session(read_snapshot(start.snapshot), start.snapshot)
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
    from streamdiff.commands import generate

    config = _config(arguments)
    job = _job(jobs.GenerateJob, arguments)
    if job.prompts is None and job.resume:
        raise ConfigError("--resume goes with --prompts FILE: it skips the lines whose videos are there")
    if job.prompts is not None:
        for flag, value in (("--prompt", getattr(arguments, "session.prompt")), ("--prompt-at", arguments.prompt_at)):
            if value is not None:
                raise ConfigError(f"{flag} does not go with --prompts, whose lines are the prompts")
    if job.replay is not None:
        told = ("session.prompt", "session.seed", "seconds", "prompt_at", "prompts", "timeline", "model.steps")
        for name in (*told, "model.kv_context"):
            if vars(arguments).get(name) is not None:
                flag = f"--{name.split('.')[-1].replace('_', '-')}"
                raise ConfigError(f"{flag} does not go with --replay: the log says it", field=name)
    if job.timeline is not None and (job.prompts is not None or job.prompt_at):
        raise ConfigError("--timeline is of one video, and says all its prompts; leave --prompts and --prompt-at out")
    _check_model(config)
    videos = generate.planned(config.session, job)  # here too, before ranks are started
    run = partial(generate.run, config, job)
    if config.model.ranks == 1 or not videos:  # with nothing left to make no rank is needed
        return run()
    return generate.run_as_ranks(config, lambda: None, run, argv)


def _check_by_chunks(arguments: argparse.Namespace, config: Config) -> None:
    """Raises ConfigError for what was typed, or stands in the configuration, that options by chunks would ignore."""
    for flag, instead in (
        ("--prompts", "one command for each prompt"),
        ("--seconds", "--chunks"),
        ("--prompt-at", "--prompt-switch"),
        ("--timeline", "--prompt-switch"),
        ("--replay", "it without them"),
        ("--resume", "it with --prompts instead of them"),
        ("session.image", "--given-latents"),
        ("model.decode_rank", "rank 0, which decodes there, or --seconds"),
        ("model.trace", "--seconds instead of them"),
    ):
        typed, differs = vars(arguments)[flag.removeprefix("--").replace("-", "_")], False
        if "." in flag:
            section, name = flag.split(".")
            settings: BaseModel = getattr(config, section)
            differs = getattr(settings, name) != type(settings).model_fields[name].default
            flag = flag if typed is None else parser.SETTINGS[flag].flag
        if typed or differs:
            raise ConfigError(f"{flag} does not go with the options that say everything by chunks; use {instead}")
    for name, refused, plain in (
        ("compile", "on", "off"),
        ("quantize", "auto", "none, fp8 or int8"),
        ("preset", "fast", "plain"),
    ):
        if getattr(config.model, name) == refused:
            raise ConfigError(
                f"model.{name} is {refused}, but options that say everything by chunks run the plain path; use {plain}"
            )


def _reference(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = _config(arguments)
    _check_by_chunks(arguments, config)
    from streamdiff.commands import generate, reference

    generate.check_start(config.session)
    model, session, playback = config.model, config.session, config.playback
    known = {name: getattr(model, name) for name in ("window", "sink", "rope")}
    known |= {"model": model, "prompt": session.prompt, "seed": session.seed}
    known["fps"] = playback.fps if "fps" in playback.model_fields_set else None
    job = _job(jobs.ReferenceJob, arguments, **known)
    if not job.processes:
        return reference.run(job)
    check, run = partial(reference.prepare, job), partial(reference.run, job)
    return generate.run_as_ranks(config, check, run, argv, partial(reference.follow, job))


def _job(kind: type[_JobT], arguments: argparse.Namespace, **known: object) -> _JobT:
    """The job of what was typed, else of what is `known`, else of its defaults. Raises ConfigError: it cannot be."""
    typed = {name: getattr(arguments, name, None) for name in kind.model_fields}
    flags = {option.name: option.flag for option in parser.of_job(kind)}
    try:
        return kind(**known | {name: value for name, value in typed.items() if value is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = str(problem["loc"][0])
        if problem["type"] == "missing":
            raise ConfigError(
                f"{flags[field]} is missing: {kind.model_fields[field].description}", field=field
            ) from None
        raise ConfigError(explain(problem, flags[field]), field=field) from None


def _config(arguments: argparse.Namespace) -> Config:
    """The file given with --config, or the defaults, with the options laid over it."""
    from streamdiff.models.resolve import completed

    given = {key: vars(arguments).get(key) for key in parser.SETTINGS}
    overrides = {key: value for key, value in given.items() if value is not None}
    config = load(arguments.config, overrides, {key: option.flag for key, option in parser.SETTINGS.items()})
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
