"""Reads a YAML file into `config.Config`, with messages that name the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import re
import textwrap
import types
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from streamdiff.config import RENAMED, Config
from streamdiff.errors import ConfigError

KNOWN_CHARACTERS = 300
"""Of a list of known keys in a message."""


def load(
    path: Path | None, overrides: Mapping[str, object] | None = None, names: Mapping[str, str] | None = None
) -> Config:
    """Read a YAML file, or the defaults when `path` is None, and lay `overrides` over it.

    Args:
        path: a YAML file whose sections and keys are those of `Config`; an empty one means the defaults.
        overrides: values by dotted key (`{"playback.fps": 30}`); they win over the file.
        names: what the user typed for an overridden key (`{"playback.fps": "--fps"}`), for messages.

    Raises:
        ConfigError: unreadable file, unknown key (the nearest known one is named), or a value out of range. Every
            problem is listed, one per line, with where it stands, the value, and what is allowed.
    """
    overrides, names = overrides or {}, names or {}
    tree = {} if path is None else _read(path)
    for key, value in overrides.items():
        section, _, leaf = key.rpartition(".")
        inner = tree.setdefault(section, {}) if section else tree
        if isinstance(inner, dict):
            inner[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        origin = "the built-in configuration" if path is None else str(path)
        lines = []
        for problem in error.errors(include_url=False):
            key = ".".join(map(str, problem["loc"]))
            lines.append(explain(problem, names.get(key, key) if key in overrides else f"{origin}: {key}"))
        raise ConfigError("\n".join(lines)) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice: the first value would be lost without a word."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read(path: Path) -> dict[str, Any]:
    """The file's tree; a section left empty ("model:" with every line below it commented out) is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file in UTF-8 (byte {error.start})") from None
    try:
        # _Loader is a SafeLoader: it builds plain values only.
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {problem or str(error).splitlines()[0]}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold sections with keys ({', '.join(Config.model_fields)})")
    return {key: {} if value is None and key in Config.model_fields else value for key, value in (tree or {}).items()}


def explain(problem: ErrorDetails, where: str) -> str:
    """What pydantic has found wrong, and what is allowed; `where` names the value."""
    location, value, kind = problem["loc"], problem["input"], problem["type"]
    if (new := RENAMED.get(".".join(map(str, location)))) is not None:
        return f"{where} is called {new} now"
    if isinstance(value, str) and value in RENAMED:
        return f"{where} is {value!r}, which is called {RENAMED[value]} now"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{where} is no known key; {_suggestion(location)}"
    if kind == "model_type":
        return f"{where} is {_show(value)}, but must be a section with keys"
    if kind == "string_unicode":
        return f"{where} is {_show(value)}, but must be UTF-8 text (other bytes are shown as \\udc80 to \\udcff)"
    if kind == "value_error" and isinstance(value, dict):  # keys that do not go together
        return f"{where}: {problem['ctx']['error']}"
    reason = re.sub(r"^Value error, |^\w+ should (?=be|have)", "must ", problem["msg"]).replace("must must", "must")
    return f"{where} is {_show(value)}, but {reason}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """The nearest key that is known beside this one, or the right key in another place."""
    key = str(location[-1])
    tree: Any = Config
    for part in location[:-1]:
        if isinstance(part, str):
            kind, _ = kind_of(tree.model_fields[part])
            tree = next((each for each in (kind, *get_args(kind)) if hasattr(each, "model_fields")), tree)
    known = list(tree.model_fields)
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    for name in Config.model_fields:
        if key in section_of(name).model_fields:
            return f"did you mean {name}.{key}?"
    return f"known here: {textwrap.shorten(', '.join(known), KNOWN_CHARACTERS, placeholder=' ...')}"


def section_of(name: str) -> type[BaseModel]:
    """The model of a section of `Config`."""
    annotation = Config.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


def kind_of(field: FieldInfo) -> tuple[Any, bool]:
    """The type of a field's values, without None; and whether None is one."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(field.annotation) if part is not type(None))
        return kind, True
    return field.annotation, False


def _show(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return "a list"
        case dict():
            return "a section"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({len(str(value)):,} characters)"
