"""The `streamdiff` command: what was typed becomes a `Config` and a call. Knows nothing about how it is carried out.

Nothing heavy is imported before a command runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from streamdiff.cli import options, parser, reference_options
from streamdiff.errors import ConfigError, RequestError, StreamdiffError

if TYPE_CHECKING:
    from streamdiff.config import Config

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line; `None` means the process's own. Returns the exit status.

    0 done, 1 the engine or this machine failed, 2 what was asked for cannot be done, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = parser.parse(argv)
        match arguments.command:
            case "serve":
                return _serve(arguments)
            case "generate":
                return _generate(arguments, argv)
            case "plan":
                return _plan(arguments)
            case "doctor":
                return _doctor(arguments)
            case "models":
                return _models(arguments)
            case "decode" | "encode":
                return _convert(arguments)
        parser.parsers()[""].print_help()
        return OK
    except (ConfigError, RequestError) as error:
        return _complain(error, USER_ERROR)
    except BrokenPipeError:  # whoever read what is printed has had enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter complains when it flushes at its end
        return OK
    except (StreamdiffError, OSError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        print("\nstreamdiff: stopped", file=sys.stderr)
        return INTERRUPTED


def run() -> NoReturn:
    """The console script."""
    sys.exit(main())


def _complain(error: Exception, status: int) -> int:
    print(f"streamdiff: error: {error}", file=sys.stderr)
    return status


# ---- commands --------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    flags = {"serve.open_browser": False} if arguments.no_browser else {}
    flags |= {"serve.insecure": True} if arguments.insecure else {}
    config = _config(arguments, flags)
    from streamdiff.server import main as server

    return server.run(_at_native_rate(config))


def _at_native_rate(config: Config) -> Config:
    """With the rate of a published model where none was asked for: faster is fast motion. And a folder's small pictures
    enlarged as the embedded model's, if it is of that kind."""
    from streamdiff.models import resolve
    from streamdiff.models.catalogue import entries, specs

    if resolve.is_embedded(config.model.name):
        return config.model_copy(update={"serve": config.serve.model_copy(update={"scale": config.serve.scale or 2})})
    known = entries.entries()
    entry = known.get(config.model.name, known[specs.USUAL])
    if "fps" in config.playback.model_fields_set or config.model.name.startswith(resolve.RANDOM):
        return config
    playback = config.playback.model_copy(update={"fps": entry.native_fps})
    return config.model_copy(update={"playback": playback})


def _doctor(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from streamdiff.commands import doctor

    return doctor.report(config)


def _generate(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if reference_options.asked_for(arguments):
        return _exact(arguments)
    config = _config(arguments)
    from streamdiff.commands import generate

    job = generate.GenerateJob(
        output=arguments.output,
        seconds=10.0 if arguments.seconds is None else arguments.seconds,
        changes=tuple(sorted(parse_change(text) for text in arguments.prompt_at)),
    )
    return generate.run(config, job) if config.model.ranks == 1 else generate.run_as_ranks(config, job, argv)


def _exact(arguments: argparse.Namespace) -> int:
    for flag, is_given, instead in (
        ("--seconds", arguments.seconds is not None, "--chunks"),
        ("--prompt-at", bool(arguments.prompt_at), "--prompt-switch"),
        ("--profile", getattr(arguments, "model.trace") is not None, "--seconds instead of them"),
        ("--profile-chunks", getattr(arguments, "model.trace_chunks") is not None, "--seconds instead of them"),
    ):
        if is_given:
            raise ConfigError(f"{flag} does not go with the options that say everything by chunks; use {instead}")
    steps = getattr(arguments, "model.steps")
    config = _config(arguments, without=("model.steps",))
    for name, value, plain in (
        ("compile", config.model.compile, "off"),
        ("clean_pass", config.model.clean_pass, "alone"),
    ):
        if value != plain:
            raise ConfigError(
                f"model.{name} is {value}, but options that say everything by chunks run the plain path; use {plain}"
            )
    from streamdiff.commands import reference

    given = {name: getattr(arguments, name) for name in reference_options.NAMES}
    job = reference.ReferenceJob(
        model=config.model.name,
        prompt=config.session.prompt,
        seed=config.session.seed,
        output=arguments.output,
        device=config.model.device,
        fps=config.playback.fps if "fps" in config.playback.model_fields_set else None,
        kv_context=config.model.kv_context,
        steps=config.model.steps if steps is None else steps,
        weights=_path(config.model.weights),
        lora=config.model.lora,
        vae=config.model.vae,
        text_encoder=_path(config.model.text_encoder),
        text_device=config.model.text_device,
        keep_text_encoder=config.model.keep_text_encoder,
        window=config.model.window,
        sink=config.model.sink,
        rope=config.model.rope,
        stages=config.model.stages,
        dtype=config.model.dtype,
        size=config.model.size,
        attention=config.model.attention,
        quantize=config.model.quantize,
    )
    given = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
    }
    return reference.run(replace(job, **given))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _plan(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from streamdiff.commands import plan as plan_report

    given = {name: getattr(arguments, name) for name in plan_report.PlanJob.__dataclass_fields__}
    return plan_report.run(config.model, plan_report.PlanJob(**given))


def _models(arguments: argparse.Namespace) -> int:
    from streamdiff.commands import models

    return models.run(arguments.name, as_json=arguments.as_json)


def _convert(arguments: argparse.Namespace) -> int:
    from streamdiff.commands import convert

    given = {name: getattr(arguments, name) for name in convert.ConvertJob.__dataclass_fields__}
    job = convert.ConvertJob(**given)
    return convert.decode(job) if arguments.command == "decode" else convert.encode(job)


def _config(
    arguments: argparse.Namespace, extra: Mapping[str, object] | None = None, without: Sequence[str] = ()
) -> Config:
    """The file given with --config, or the defaults, with the options laid over it, but for keys `without`."""
    from streamdiff.config_file import load

    given = {
        option: getattr(arguments, option.key, None)
        for option in (
            *options.ADDRESS,
            options.PROMPT,
            *options.MODEL,
            *options.PARTS,
            *options.SERVE,
            *options.TRACE,
        )
    }
    overrides = {
        option.key: value for option, value in given.items() if value is not None and option.key not in without
    }
    if isinstance(steps := overrides.get("model.steps"), tuple):
        del overrides["model.steps"]
        overrides["model.timesteps"] = steps
    names = {option.key: option.flag for option in given} | {"model.timesteps": "--steps"}
    from streamdiff.models.resolve import completed

    config = load(arguments.config, {**overrides, **(extra or {})}, names)
    return config.model_copy(update={"model": completed(config.model)})


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
