"""What can be typed after `streamdiff`, and what is said where it is mistyped. Knows no command's work."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

from streamdiff.cli import job_options, options
from streamdiff.cli.options import Option
from streamdiff.config import RENAMED
from streamdiff.errors import ConfigError
from streamdiff.version import __version__

# What each command is for, its examples, and its options.
_COMMANDS: dict[str, tuple[str, str, tuple[Option, ...]]] = {
    "serve": (
        "show a live stream in the browser",
        options.SERVE_EXAMPLES,
        options.SERVE,
    ),
    "generate": ("make a video file", options.GENERATE_EXAMPLES, (*options.GENERATE, *job_options.REFERENCE)),
    "plan": ("simulate the ring: throughput, latency, memory per rank", options.PLAN_EXAMPLES, options.PLAN),
    "decode": ("latents in a file to a video", job_options.DECODE_EXAMPLES, job_options.DECODE),
    "encode": ("a video to latents in a file", job_options.ENCODE_EXAMPLES, job_options.ENCODE),
    "doctor": ("say what was found here and what will be used", options.DOCTOR_EXAMPLES, options.DOCTOR),
    "models": ("list published models: files, licences, memory", options.MODELS_EXAMPLES, (options.JSON,)),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, whose message is one line, where argparse would end the process."""

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
        raise ConfigError(f"unknown command {command!r}{_suggestion(command, commands)}")
    arguments, unknown = known[""].parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; a text with spaces needs quotes around it")
        if word in RENAMED:
            raise ConfigError(f"the option {word} is called {RENAMED[word]} now")
        if command == "serve" and (key := _setting(word)) is not None:
            raise ConfigError(f"{key} has no option; it is set in a file of --config")
        raise ConfigError(f"unknown option {word}{_suggestion(word, list(known[command]._option_string_actions))}")
    return arguments


def _setting(flag: str) -> str | None:
    """The key of the setting that a flag would be of."""
    name = flag.removeprefix("--").replace("-", "_")
    return next((key for key, *_ in options.fields() if key.endswith(f".{name}")), None)


class _HelpAll(argparse.Action):
    """Print the help with every option, and end, as --help does with those that people use."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        parsers(everything=True)[parser.prog.split()[-1]].print_help()
        parser.exit()


def parsers(*, everything: bool = False) -> dict[str, Parser]:
    """The whole command line's parser under "", and that of each command under its name. Their help lists the options
    that people use, or `everything`."""
    parser = Parser(
        prog="streamdiff",
        description="A prompt becomes live, steerable video.",
        epilog=options.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"streamdiff {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    made: dict[str, Parser] = {}
    for name, (purpose, examples, taken) in _COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=purpose,
            usage=f"streamdiff {name}{' [NAME]' * (name == 'models')} [options]",
            description=f"{purpose[0].upper()}{purpose[1:]}.",
            epilog=examples + (job_options.REFERENCE_EXAMPLES if everything and name == "generate" else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if any(option.rare for option in taken):
            made[name].add_argument("--help-all", action=_HelpAll, nargs=0, help="every option")
        own = {option.flag for option in taken if not option.key.count(".")}
        options.add(made[name], [o for o in taken if "." not in o.key or o.flag not in own], everything=everything)
    made["models"].add_argument("name", nargs="?", metavar="NAME", help="show all of this one")
    return {"": parser, **made}


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
