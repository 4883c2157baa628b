"""Options of the command line, made of the fields of the configuration and of the commands' jobs (`commands.jobs`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamdiff.commands.jobs import ReferenceJob
from streamdiff.config import GPUS, MODEL, SERVER, STREAM, Config, Flag, Steps
from streamdiff.config_file import kind_of, section_of

GENERAL, REFERENCE = "options", "to the letter (see the end)"


class Option(NamedTuple):
    """One option. `name` is that of the parsed arguments' attribute: the dotted key of a setting, or the field of a
    job, so that `plan` may have --stages of its own. Not given, it is None: configuration and jobs have the defaults.
    `flag` may be several names with spaces between.

    `action` is one of argparse; with another than "store" and "append" the option takes no value. `group` is its
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


def add(parser: argparse.ArgumentParser, options: Sequence[Option], *, everything: bool) -> None:
    """Let `options` be typed; the help lists them by group, rare ones only with `everything`. Mutates: parser."""
    groups: dict[str, argparse._ActionsContainer] = {GENERAL: parser}
    for each in options:
        shown = everything or not each.rare
        if shown and each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        about = each.help if shown else argparse.SUPPRESS
        given = {"dest": each.name, "help": about, "action": each.action}
        value = {"type": each.parse, "metavar": each.metavar} if each.action in ("store", "append") else {}
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
        if before not in (None, name):
            parser.error(f"--{before} and --{name} exclude each other; give one of them")
        setattr(namespace, self.dest, name)


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
    action: str | type[argparse.Action] = "store"
    if kind is bool and may_be_none:
        action = argparse.BooleanOptionalAction
    elif kind is bool:
        action = "store_false" if field.default else "store_true"
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
    group, rare = (REFERENCE, True) if job is ReferenceJob else (GENERAL, False)
    marked = [(name, field, _flag(field)) for name, field in job.model_fields.items()]
    return [_option(name, field, flag, group, rare) for name, field, flag in marked if flag is not None]


def is_reference(arguments: argparse.Namespace) -> bool:
    """Whether one of the options of `ReferenceJob` was given, or steps as a list."""
    steps = getattr(arguments, "model.steps")
    return isinstance(steps, tuple) or any(vars(arguments)[each.name] is not None for each in of_job(ReferenceJob))
