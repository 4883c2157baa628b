"""What can be typed after `streamdiff`, and what is said where it is mistyped: options are made of the fields of the
configuration and of the commands' jobs (`commands.jobs`). Knows no command's work."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamdiff.commands import jobs
from streamdiff.config import GPUS, MODEL, RENAMED, SERVER, STREAM, Config, Flag, Steps
from streamdiff.config_file import kind_of, section_of
from streamdiff.errors import ConfigError
from streamdiff.version import __version__

GENERAL, REFERENCE = "options", "to the letter (see the end)"


class Option(NamedTuple):
    """One option. `name` is that of the parsed arguments' attribute: the dotted key of a setting, or the field of a
    job, so that `plan` may have --stages of its own. Not given, it is None: configuration and jobs have the defaults.
    `flag` may be several names with spaces between.

    `action` is one of argparse; with another than `_STORE` and "append" the option takes no value. `group` is its
    heading in the help; with `rare` it is in that of --help-all only.
    """

    name: str
    flag: str
    metavar: str
    help: str
    parse: Callable[[str], object]
    action: str | type[argparse.Action]
    group: str
    rare: bool


def _add(parser: argparse.ArgumentParser, options: Sequence[Option], *, everything: bool) -> None:
    """Let `options` be typed; the help lists them by group, rare ones only with `everything`. Mutates: parser."""
    groups: dict[str, argparse._ActionsContainer] = {GENERAL: parser}
    for each in options:
        shown = everything or not each.rare
        if shown and each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        about = each.help if shown else argparse.SUPPRESS
        given = {"dest": each.name, "help": about, "action": each.action}
        value = {"type": each.parse, "metavar": each.metavar} if each.action in (_STORE, "append") else {}
        place = groups[each.group] if shown else parser
        place.add_argument(*each.flag.split(), default=None, **given, **value)  # type: ignore[arg-type]


class Named(argparse.Action):
    """Switches of one setting: each sets the value of its own name, and excludes the others."""

    def __init__(self, option_strings: Sequence[str], dest: str, **given: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **given)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name, before = str(option_string).removeprefix("--"), getattr(namespace, self.dest)
        if before == name:
            parser.error(f"{option_string} is given twice; give it once")
        if before is not None:
            parser.error(f"--{before} and --{name} exclude each other; give one of them")
        setattr(namespace, self.dest, name)


def _once(kind: type[argparse.Action]) -> type[argparse.Action]:
    """The action `kind` of an option that can be given once: of two values one would be lost without a word."""

    def call(self: argparse.Action, parser: Parser, namespace: argparse.Namespace, values: Any, typed: str) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{typed} is given twice; give it once")
        kind.__call__(self, parser, namespace, values, typed)

    return type(kind.__name__, (kind,), {"__call__": call})


_STORE, _YES_OR_NO = _once(argparse._StoreAction), _once(argparse.BooleanOptionalAction)
_SWITCH_ON, _SWITCH_OFF = _once(argparse._StoreTrueAction), _once(argparse._StoreFalseAction)


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


def _steps(text: str) -> int | tuple[float, ...]:
    """A number of steps, or timesteps with commas between them. Raises argparse.ArgumentTypeError."""
    return int(text) if text.strip().isdigit() else _numbers(text)


_PARSERS: dict[Any, Callable[[str], object]] = {
    int: int,
    float: float,
    Path: Path,
    Steps: _steps,
    tuple[float, ...]: _numbers,
}
_METAVARS = {int: "N", float: "N", Path: "FILE"}


def _option(name: str, field: FieldInfo, flag: Flag, group: str, rare: bool) -> Option:
    """How a field is typed: by its type, and the marker on it."""
    kind, may_be_none = kind_of(field)
    typed = flag.name or "--" + name.rpartition(".")[2].replace("_", "-")
    choices = "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    action: str | type[argparse.Action] = _STORE
    if kind is bool and may_be_none:
        action = _YES_OR_NO
    elif kind is bool:
        action = _SWITCH_OFF if field.default else _SWITCH_ON
    elif get_origin(kind) is list or field.default == ():
        action = "append"
    elif " " in typed:
        action = Named
    return Option(
        name,
        typed,
        flag.metavar or choices or _METAVARS.get(kind, "NAME"),
        _help(field),
        _PARSERS.get(kind, str),
        action,
        flag.group or group,
        rare or flag.rare,
    )


def _help(field: FieldInfo) -> str:
    """The docstring, and the default where that does not say it. argparse wants percent signs doubled."""
    about, value = " ".join((field.description or "").split()).rstrip("."), field.default
    if value is True:
        return f"do not {about[0].lower()}{about[1:]}"
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return (f"{about} (default {value})" if is_plain and "default" not in about else about).replace("%", "%%")


def _flag(field: FieldInfo) -> Flag | None:
    return next((each for each in field.metadata if isinstance(each, Flag)), None)


def fields() -> Iterator[tuple[str, FieldInfo, Flag | None]]:
    """Dotted key, field, and how it can be typed, of every setting."""
    for section in Config.model_fields:
        for name, field in section_of(section).model_fields.items():
            yield f"{section}.{name}", field, _flag(field)


_REST = {"model": MODEL, "session": STREAM, "playback": STREAM, "batching": GPUS, "serve": SERVER}
"""Heading of a section's options that only --help-all lists."""
SETTINGS = {
    key: _option(key, field, flag, _REST[key.split(".")[0]], not flag.group)
    for key, field, flag in fields()
    if flag is not None
}
"""Every option that sets a value of the configuration, by its key."""


def settings(*keys: str) -> list[Option]:
    """Options by key, or of a whole section by its name."""
    return [option for key, option in SETTINGS.items() if key in keys or key.split(".")[0] in keys]


def of_job(job: type[BaseModel]) -> list[Option]:
    """Options of a command's job."""
    group, rare = (REFERENCE, True) if job is jobs.ReferenceJob else (GENERAL, False)
    marked = [(name, field, _flag(field)) for name, field in job.model_fields.items()]
    return [_option(name, field, flag, group, rare) for name, field, flag in marked if flag is not None]


def is_reference(arguments: argparse.Namespace) -> bool:
    """Whether one of the options of `ReferenceJob` was given, or steps as a list."""
    steps = getattr(arguments, "model.steps")
    return isinstance(steps, tuple) or any(vars(arguments)[each.name] is not None for each in of_job(jobs.ReferenceJob))


# ---- commands --------------------------------------------------------------------------------------------------

_PLANNED = ("name", "weights", "steps", "kv_context", "quantize", "offload", "vae", "size", "window", "sink", "rope")
# The settings that a command takes, as keys or whole sections, and its jobs, whose fields are options.
_COMMANDS: dict[str, tuple[tuple[str, ...], tuple[type[BaseModel], ...]]] = {
    "serve": (tuple(Config.model_fields), (jobs.ServeJob,)),
    "generate": (
        ("model", "session.prompt", "session.seed", "session.image", "playback.fps"),
        (jobs.GenerateJob, jobs.ReferenceJob),
    ),
    "plan": (tuple(f"model.{name}" for name in _PLANNED), (jobs.PlanJob,)),
    "decode": ((), (jobs.DecodeJob,)),
    "encode": ((), (jobs.EncodeJob,)),
    "doctor": (("model", "session.seed", "playback.fps", "serve.host", "serve.port"), ()),
    "models": ((), (jobs.ModelsJob,)),
    "mcp": ((), (jobs.McpJob,)),
    "osc": ((), (jobs.OscJob,)),
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
            means = "a prompt is given with --prompt" if " " in word else "a text with spaces needs quotes around it"
            raise ConfigError(f"unexpected argument {word!r}; {means}")
        if word in RENAMED:
            raise ConfigError(f"the option {word} is called {RENAMED[word]} now")
        name = word.removeprefix("--").replace("-", "_")
        options = list(known[command]._option_string_actions)
        for key, *_ in fields():
            if command == "serve" and key.endswith(f".{name}") and f"--{name.replace('_', '-')}" not in options:
                raise ConfigError(f"{key} has no option; it is set in a file of --config")
        raise ConfigError(f"unknown option {word}{_suggestion(word, options)}")
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
    for name, (keys, kinds) in _COMMANDS.items():
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
        taken = [option for job in kinds for option in of_job(job)]
        flags = {option.flag for option in taken}
        inherited = [option for option in settings(*keys) if option.flag not in flags]
        if any(option.rare for option in (*taken, *inherited)):
            own.add_argument("--help-all", action=_HelpAll, nargs=0, help="every option")
        if keys:
            own.add_argument(
                "--config",
                action=_STORE,
                type=Path,
                metavar="FILE",
                help="a YAML file with settings, see configs/ and docs/settings.md",
            )
        _add(own, [*inherited, *taken], everything=everything)
    made["models"].add_argument("name", nargs="?", metavar="NAME", help="show all of this one")
    return {"": parser, **made}


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
