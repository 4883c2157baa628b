"""What can be typed after `streamdiff`, and what is said where it is mistyped. Knows no command's work."""

from __future__ import annotations

import argparse
import difflib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from streamdiff.cli import options
from streamdiff.commands.jobs import (
    DecodeJob,
    EncodeJob,
    GenerateJob,
    ModelsJob,
    PlanJob,
    ReferenceJob,
    ServeJob,
)
from streamdiff.config import RENAMED, Config
from streamdiff.errors import ConfigError
from streamdiff.version import __version__

_PLANNED = ("name", "steps", "kv_context", "quantize", "offload", "vae", "size", "window", "sink")
# The settings that a command takes, as keys or whole sections, and its jobs, whose fields are options.
_COMMANDS: dict[str, tuple[tuple[str, ...], tuple[type[BaseModel], ...]]] = {
    "serve": (tuple(Config.model_fields), (ServeJob,)),
    "generate": (
        ("model", "session.prompt", "session.seed", "session.image", "playback.fps"),
        (GenerateJob, ReferenceJob),
    ),
    "plan": (tuple(f"model.{name}" for name in _PLANNED), (PlanJob,)),
    "decode": ((), (DecodeJob,)),
    "encode": ((), (EncodeJob,)),
    "doctor": (("model", "session.seed", "playback.fps", "serve.host", "serve.port"), ()),
    "models": ((), (ModelsJob,)),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, whose message is one line, where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


@cache
def texts() -> dict[str, Any]:
    """What help says beside the options: `help.yaml`."""
    found: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("help.yaml").read_text(encoding="utf-8"))
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    """What was typed, as far as a parser can check it.

    Raises:
        ConfigError: a command or option that is not known, with the nearest one that is, or a value of another type.
    """
    known = parsers()
    command = next((word for word in argv if not word.startswith("-")), "")
    if command not in known:
        raise ConfigError(f"unknown command {command!r}{_suggestion(command, list(_COMMANDS))}")
    arguments, unknown = known[""].parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; a text with spaces needs quotes around it")
        if word in RENAMED:
            raise ConfigError(f"the option {word} is called {RENAMED[word]} now")
        name = word.removeprefix("--").replace("-", "_")
        for key, *_ in options.fields():
            if command == "serve" and key.endswith(f".{name}"):
                raise ConfigError(f"{key} has no option; it is set in a file of --config")
        raise ConfigError(f"unknown option {word}{_suggestion(word, list(known[command]._option_string_actions))}")
    return arguments


class _HelpAll(argparse.Action):
    """Print the help with every option, and end, as --help does with those that people use."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        parsers(everything=True)[parser.prog.split()[-1]].print_help()
        parser.exit()


def parsers(*, everything: bool = False) -> dict[str, Parser]:
    """The whole command line's parser under "", and that of each command under its name. Their help lists the options
    that people use, or `everything`."""
    plain: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    text = texts()
    parser = Parser(
        prog="streamdiff", description="A prompt becomes live, steerable video.", epilog=text["streamdiff"], **plain
    )
    parser.add_argument("--version", action="version", version=f"streamdiff {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    made: dict[str, Parser] = {}
    for name, (keys, jobs) in _COMMANDS.items():
        purpose, after = text[name]["purpose"], text[name]["text"]
        made[name] = own = commands.add_parser(
            name,
            help=purpose,
            usage=f"streamdiff {name}{' [NAME]' * (name == 'models')} [options]",
            description=f"{purpose[0].upper()}{purpose[1:]}.",
            epilog=after.replace("{tensor_files}\n", text["tensor_files"])
            + (text[name].get("more", "") if everything else ""),
            **plain,
        )
        taken = [option for job in jobs for option in options.of_job(job)]
        flags = {option.flag for option in taken}
        inherited = [option for option in options.settings(*keys) if option.flag not in flags]
        if any(option.rare for option in (*taken, *inherited)):
            own.add_argument("--help-all", action=_HelpAll, nargs=0, help="every option")
        if keys:
            own.add_argument(
                "--config",
                type=Path,
                metavar="FILE",
                help="a YAML file with settings, see configs/ and docs/settings.md",
            )
        options.add(own, [*inherited, *taken], everything=everything)
    made["models"].add_argument("name", nargs="?", metavar="NAME", help="show all of this one")
    return {"": parser, **made}


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
