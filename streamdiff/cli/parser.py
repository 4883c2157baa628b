"""What can be typed after `streamdiff`, and what is said where it is mistyped. Knows no command's work."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from streamdiff.cli import convert_options, reference_options
from streamdiff.cli import options as cli_options
from streamdiff.cli.options import Option
from streamdiff.errors import ConfigError
from streamdiff.version import __version__

_BUT_STEPS = tuple(option for option in cli_options.MODEL if option.flag != "--steps")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and remembers its long options so that a mistyped one finds its neighbour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.flags: list[str] = []
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        self.flags += [arg for arg in args if isinstance(arg, str) and arg.startswith("--")]
        return super().add_argument(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """What was typed, as far as a parser can check it.

    Raises:
        ConfigError: a command or option that is not known, with the nearest one that is, or a value of another type.
    """
    known = parsers()
    commands = [name for name in known if name]
    command = next((word for word in argv if not word.startswith("-")), "")
    if command not in known:
        raise ConfigError(f"unknown command {command!r}{_near(command, commands)}")
    arguments, unknown = known[""].parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; a text with spaces needs quotes around it")
        raise ConfigError(f"unknown option {word}{_near(word, known[command].flags)}")
    return arguments


def parsers() -> dict[str, Parser]:
    """The whole command line's parser under "", and that of each command under its name."""
    parser = Parser(
        prog="streamdiff",
        description="A prompt becomes live, steerable video.",
        epilog=cli_options.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"streamdiff {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    serve = _command(commands, "serve", "show a live stream in the browser", cli_options.SERVE_EXAMPLES)
    shown = (*cli_options.ADDRESS, cli_options.PROMPT, *_BUT_STEPS, *cli_options.PARTS, *cli_options.SERVE)
    _add(serve, (*shown, *cli_options.TRACE))
    _add_steps(serve)
    _add_flags(serve)

    generate = _command(
        commands, "generate", "make a video file", cli_options.GENERATE_EXAMPLES + reference_options.EXAMPLES
    )
    _add_generate(generate)

    plan = _command(
        commands, "plan", "simulate the ring: throughput, latency, memory per rank", cli_options.PLAN_EXAMPLES
    )
    _add(plan, cli_options.PLAN_MODEL)
    _add_plan(plan)

    decode = _command(commands, "decode", "latents in a file to a video", convert_options.DECODE_EXAMPLES, config=False)
    convert_options.add_decode(decode)
    encode = _command(commands, "encode", "a video to latents in a file", convert_options.ENCODE_EXAMPLES, config=False)
    convert_options.add_encode(encode)

    doctor = _command(commands, "doctor", "say what was found here and what will be used", cli_options.DOCTOR_EXAMPLES)
    _add(doctor, (*cli_options.ADDRESS, *cli_options.MODEL, *cli_options.LOOKED_AT))

    models = _command(
        commands, "models", "list published models: files, licences, memory", cli_options.MODELS_EXAMPLES, config=False
    )
    models.add_argument("name", nargs="?", metavar="NAME", help="show all of this one")
    models.add_argument("--json", dest="as_json", action="store_true", help="print as JSON")
    made = {"serve": serve, "generate": generate, "plan": plan, "decode": decode, "encode": encode}
    return {"": parser, **made, "doctor": doctor, "models": models}


def _add_generate(generate: Parser) -> None:
    """The options of `generate`."""
    generate.add_argument("--output", type=Path, metavar="FILE", help=".mp4, .webm, or a folder for PNG frames")
    generate.add_argument("--seconds", type=float, metavar="S", help="length (default 10)")
    _add(
        generate,
        (
            cli_options.PROMPT,
            *_BUT_STEPS,
            *cli_options.PARTS,
            cli_options.STAGES,
            *cli_options.TRACE,
        ),
    )
    _add_steps(generate)
    reference_options.add(generate)
    generate.add_argument(
        "--prompt-at",
        action="append",
        default=[],
        metavar="SECONDS:TEXT",
        help="change the prompt at this time; may be given several times",
    )


def _add_steps(parser: Parser) -> None:
    """`--steps` where it may be a list."""
    parser.add_argument(
        "--steps",
        dest="model.steps",
        type=reference_options.parse_steps,
        metavar="N",
        help="denoise steps per chunk (default: what the model was made for; `tiny` has 4, and 2); or the timesteps "
        "themselves, 1000,937.5,833.33,625",
    )


def _add_flags(serve: Parser) -> None:
    """What `serve` takes without a value."""
    serve.add_argument("--insecure", action="store_true", help="let other machines in without a token")
    serve.add_argument("--no-browser", action="store_true", help="do not open a browser")


def _add_plan(plan: Parser) -> None:
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
    commands: argparse._SubParsersAction[Parser], name: str, purpose: str, examples: str, config: bool = True
) -> Parser:
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


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
