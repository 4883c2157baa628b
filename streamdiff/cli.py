"""The `streamdiff` command: what was typed becomes a `Config` and a call. Knows nothing about how it is carried out.

Nothing heavy is imported before a command runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from streamdiff import cli_convert, cli_exact, cli_options
from streamdiff.cli_options import Option
from streamdiff.errors import ConfigError, RequestError, StreamdiffError
from streamdiff.version import __version__

if TYPE_CHECKING:
    from streamdiff.config import Config

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and remembers its long options so that a mistyped one finds its neighbour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.flags: list[str] = []
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        self.flags += [arg for arg in args if isinstance(arg, str) and arg.startswith("--")]
        return super().add_argument(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line; `None` means the process's own. Returns the exit status.

    0 done, 1 the engine or this machine failed, 2 what was asked for cannot be done, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parse(argv)
        match arguments.command:
            case "serve":
                return _serve(arguments)
            case "generate":
                return _generate(arguments)
            case "plan":
                return _plan(arguments)
            case "doctor":
                return _doctor(arguments)
            case "models":
                return _models(arguments)
            case "decode" | "encode":
                return _convert(arguments)
        _parsers()[""].print_help()
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
    from streamdiff.serve import server

    return server.run(_at_native_rate(config))


def _at_native_rate(config: Config) -> Config:
    """With the rate of a published model where none was asked for: faster is fast motion."""
    from streamdiff.models import catalogue

    entry = catalogue.entries().get(config.model.name)
    if "fps" in config.playback.model_fields_set or entry is None or entry.native_fps is None:
        return config
    playback = config.playback.model_copy(update={"fps": entry.native_fps})
    return config.model_copy(update={"playback": playback})


def _doctor(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from streamdiff import doctor

    return doctor.report(config)


def _generate(arguments: argparse.Namespace) -> int:
    if cli_exact.asked_for(arguments):
        return _exact(arguments)
    config = _config(arguments)
    from streamdiff import generate

    job = generate.Job(
        output=arguments.output,
        seconds=10.0 if arguments.seconds is None else arguments.seconds,
        changes=tuple(sorted(parse_change(text) for text in arguments.prompt_at)),
    )
    return generate.run(config, job)


def _exact(arguments: argparse.Namespace) -> int:
    for flag, is_given, instead in (
        ("--seconds", arguments.seconds is not None, "--chunks"),
        ("--prompt-at", bool(arguments.prompt_at), "--prompt-switch"),
        ("--profile", getattr(arguments, "model.trace") is not None, "--seconds instead of them"),
    ):
        if is_given:
            raise ConfigError(f"{flag} does not go with the options that say everything by chunks; use {instead}")
    steps, model = getattr(arguments, "model.steps"), getattr(arguments, "model.name")
    config = _config(arguments, without=("model.steps", "model.name"))
    for name, value, plain in (
        ("compile", config.model.compile, "off"),
        ("clean_pass", config.model.clean_pass, "alone"),
    ):
        if value != plain:
            raise ConfigError(
                f"model.{name} is {value}, but options that say everything by chunks run the plain path; use {plain}"
            )
    from streamdiff import exact

    given = {name: getattr(arguments, name) for name in cli_exact.NAMES}
    job = exact.Job(
        model=model or config.model.name,
        prompt=config.session.prompt,
        seed=config.session.seed,
        output=arguments.output,
        device=config.model.device,
        fps=config.playback.fps if "fps" in config.playback.model_fields_set else None,
        kv_context=config.model.kv_context,
        steps=steps,
        weights=_path(config.model.weights),
        lora=config.model.lora,
        vae=config.model.vae,
        text_encoder=_path(config.model.text_encoder),
        text_device=config.model.text_device,
        keep_text_encoder=config.model.keep_text_encoder,
        stages=config.model.stages,
        dtype=config.model.dtype,
        size=config.model.size,
        attention=config.model.attention,
        quantize=config.model.quantize,
    )
    given = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
    }
    return exact.run(replace(job, **given))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _plan(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    from streamdiff.pipeline import plan_report

    given = {name: getattr(arguments, name) for name in plan_report.Job.__dataclass_fields__}
    return plan_report.run(config.model, plan_report.Job(**given))


def _models(arguments: argparse.Namespace) -> int:
    from streamdiff import models_report

    return models_report.run(arguments.name, as_json=arguments.as_json)


def _convert(arguments: argparse.Namespace) -> int:
    from streamdiff import convert

    given = {name: getattr(arguments, name) for name in convert.Job.__dataclass_fields__}
    job = convert.Job(**given)
    return convert.decode(job) if arguments.command == "decode" else convert.encode(job)


def _config(
    arguments: argparse.Namespace, extra: Mapping[str, object] | None = None, without: Sequence[str] = ()
) -> Config:
    """The file given with --config, or the defaults, with the options laid over it, but for keys `without`."""
    from streamdiff.config import load

    given = {
        option: getattr(arguments, option.key, None)
        for option in (
            *cli_options.ADDRESS,
            cli_options.PROMPT,
            *cli_options.MODEL,
            *cli_options.PARTS,
            *cli_options.SERVE,
            cli_options.TRACE,
        )
    }
    overrides = {
        option.key: value for option, value in given.items() if value is not None and option.key not in without
    }
    names = {option.key: option.flag for option in given}
    return load(arguments.config, {**overrides, **(extra or {})}, names)


# ---- parsing ---------------------------------------------------------------------------------------------------


def _parsers() -> dict[str, _Parser]:
    """The whole command line's parser under "", and that of each command under its name."""
    parser = _Parser(
        prog="streamdiff",
        description="A prompt becomes live, steerable video.",
        epilog=cli_options.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"streamdiff {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    serve = _command(commands, "serve", "show a live stream in the browser", cli_options.SERVE_EXAMPLES)
    shown = (*cli_options.ADDRESS, cli_options.PROMPT, *cli_options.MODEL, *cli_options.PARTS, *cli_options.SERVE)
    _add(serve, (*shown, cli_options.TRACE))
    _add_flags(serve)

    generate = _command(commands, "generate", "make a video file", cli_options.GENERATE_EXAMPLES + cli_exact.EXAMPLES)
    _add_generate(generate)

    plan = _command(
        commands, "plan", "simulate the ring: throughput, latency, memory per rank", cli_options.PLAN_EXAMPLES
    )
    _add(plan, cli_options.PLAN_MODEL)
    _add_plan(plan)

    decode = _command(commands, "decode", "latents in a file to a video", cli_convert.DECODE_EXAMPLES, config=False)
    cli_convert.add_decode(decode)
    encode = _command(commands, "encode", "a video to latents in a file", cli_convert.ENCODE_EXAMPLES, config=False)
    cli_convert.add_encode(encode)

    doctor = _command(commands, "doctor", "say what was found here and what will be used", cli_options.DOCTOR_EXAMPLES)
    _add(doctor, (*cli_options.ADDRESS, *cli_options.MODEL, *cli_options.LOOKED_AT))

    models = _command(
        commands, "models", "list published models: files, licences, memory", cli_options.MODELS_EXAMPLES, config=False
    )
    models.add_argument("name", nargs="?", metavar="NAME", help="show all of this one")
    models.add_argument("--json", dest="as_json", action="store_true", help="print as JSON")
    made = {"serve": serve, "generate": generate, "plan": plan, "decode": decode, "encode": encode}
    return {"": parser, **made, "doctor": doctor, "models": models}


def _add_generate(generate: _Parser) -> None:
    """The options of `generate`."""
    generate.add_argument("--output", type=Path, metavar="FILE", help=".mp4, .webm, or a folder for PNG frames")
    generate.add_argument("--seconds", type=float, metavar="S", help="length (default 10)")
    _add(
        generate,
        (
            cli_options.PROMPT,
            *(option for option in cli_options.MODEL if option.flag != "--steps"),
            *cli_options.PARTS,
            cli_options.TRACE,
        ),
    )
    generate.add_argument(
        "--steps",
        dest="model.steps",
        type=cli_exact.parse_steps,
        metavar="N",
        help="denoise steps per chunk: 4, or 2 for twice the speed; or the timesteps themselves, 1000,937.5,833.33,625",
    )
    cli_exact.add(generate)
    generate.add_argument(
        "--prompt-at",
        action="append",
        default=[],
        metavar="SECONDS:TEXT",
        help="change the prompt at this time; may be given several times",
    )


def _add_flags(serve: _Parser) -> None:
    """What `serve` takes without a value."""
    serve.add_argument("--insecure", action="store_true", help="let other machines in without a token")
    serve.add_argument("--no-browser", action="store_true", help="do not open a browser")


def _add_plan(plan: _Parser) -> None:
    """The options of `plan` that are no part of a configuration; their names are the fields of its `Job`."""
    numbers: tuple[tuple[str, int, str], ...] = (
        ("--stages", 4, "stages of the ring, one device each (default 4)"),
        ("--sessions", 1, "sessions at the same time (default 1)"),
        ("--max-rows", 1, "micro-steps that may share a forward, at most (default 1)"),
        ("--chunks", 100, "chunks to simulate per session (default 100)"),
    )
    for flag, default, text in numbers:
        plan.add_argument(flag, type=int, default=default, metavar="N", help=text)
    plan.add_argument("--stage-times", metavar="S,S,...", help="seconds of each stage, for a forward of one row")
    plan.add_argument("--profile", type=Path, metavar="FILE", help="measured times as JSON, see below")
    ceilings: tuple[tuple[str, str, str], ...] = (
        ("--tflops", "N", "10^12 operations per second that a device reaches (default 400)"),
        ("--gbps", "N", "GB/s of memory that a device reaches (default 2,500)"),
        ("--link-gbps", "N", "GB/s of a link between devices (default 25)"),
        ("--link-time", "SECONDS", "of a message between stages, in place of what the times' source says"),
        ("--decode-time", "SECONDS", "of a chunk's decode, in place of what the times' source says"),
    )
    for flag, metavar, text in ceilings:
        plan.add_argument(flag, type=float, metavar=metavar, help=text)
    plan.add_argument(
        "--decode",
        default="auto",
        metavar="PLACE",
        help="where chunks are decoded: head, last, own-rank, own-stream (default auto: head or last)",
    )
    plan.add_argument("--dtype", default="float32", metavar="TYPE", help="float32 or bfloat16 (default float32)")
    plan.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome/Perfetto trace")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw the first chunks as .png, .svg or .pdf")
    plan.add_argument("--json", dest="as_json", action="store_true", help="print the plan as JSON")


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, purpose: str, examples: str, config: bool = True
) -> _Parser:
    parser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config:
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="a YAML file with the same settings, see configs/"
        )
    return parser


def _add(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    for option in options:
        # The key as the name keeps these apart from options that a command has for itself, as `plan` has its --stages.
        action = "append" if option.repeat else "store"
        parser.add_argument(
            option.flag, dest=option.key, type=option.type, metavar=option.metavar, help=option.help, action=action
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse, and name the nearest known word for what is unknown."""
    parsers = _parsers()
    commands = [name for name in parsers if name]
    command = next((word for word in argv if not word.startswith("-")), "")
    if command not in parsers:
        raise ConfigError(f"unknown command {command!r}{_near(command, commands)}")
    arguments, unknown = parsers[""].parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; a text with spaces needs quotes around it")
        raise ConfigError(f"unknown option {word}{_near(word, parsers[command].flags)}")
    return arguments


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"


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
