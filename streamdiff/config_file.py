"""Reads a YAML file into `config.Config`, with messages that name the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import textwrap
import types
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from streamdiff.config import RENAMED, BatchingRule, Config, HostName, IceServer, Origin, Parallel, Proxy, Steps
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
    overrides = overrides or {}
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
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "value_error" and len(problem["loc"]) == 1:  # of keys that do not go together
                lines.append(f"{origin}: {key}: {problem['ctx']['error']}")
                continue
            where = (names or {}).get(key, key) if key in overrides else f"{origin}: {key}"
            lines.append(f"{where} {explain(problem['type'], problem['loc'], problem['input'])}")
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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: must hold sections with keys ({', '.join(Config.model_fields)}), but holds {_show(tree)}"
        )
    return {key: {} if value is None and key in Config.model_fields else value for key, value in tree.items()}


def explain(kind: str, location: tuple[int | str, ...], value: object) -> str:
    """What is wrong with the value at `location`, and what is allowed there."""
    known = list(Config.model_fields) if len(location) == 1 else list(section_of(str(location[0])).model_fields)
    key = str(location[min(1, len(location) - 1)])  # what follows is a place in a list
    if (new := RENAMED.get(".".join(map(str, location)))) is not None:
        return f"is called {new} now"
    if isinstance(value, str) and value in RENAMED:
        return f"is {value!r}, which is called {RENAMED[value]} now"
    entry = BatchingRule if location[0] == "batching" else IceServer
    if kind == "extra_forbidden" and len(location) > 2:
        return f"is no known key; known here: {', '.join(entry.model_fields)}"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"is no known key; {_suggest(key, location, known)}"
    if kind == "string_unicode":
        return f"is {_show(value)}, but must be UTF-8 text (its bytes that are not are shown as \\udc80 to \\udcff)"
    if len(location) == 1:
        inside = ", ".join(section_of(key).model_fields)
        return f"is {_show(value)}, but must be a section with keys among {inside}"
    if entry is BatchingRule and len(location) > 3:
        return f"is {_show(value)}, but must be {allowed(BatchingRule.model_fields[str(location[3])])}"
    return f"is {_show(value)}, but must be {allowed(section_of(str(location[0])).model_fields[key])}"


def _suggest(key: str, location: tuple[int | str, ...], known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    for name in Config.model_fields:  # the right key in the wrong place
        if key in section_of(name).model_fields:
            return f"did you mean {name}.{key}?"
    return f"known here: {textwrap.shorten(', '.join(known), KNOWN_CHARACTERS, placeholder=' ...')}"


def section_of(name: str) -> type[BaseModel]:
    """The model of a section of `Config`."""
    annotation = Config.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list[Origin]: "a list of origins such as https://example.org, or *",
    list[HostName]: "a list of names such as stream.example.org, without a port",
    list[Proxy]: "a list of addresses and networks such as 10.0.0.5 or 10.0.0.0/8",
    list[str]: "a list of files and addresses",
    tuple[BatchingRule, ...]: f"a list of rules, each with keys among {', '.join(BatchingRule.model_fields)}",
    Steps: "a whole number from 1 to 50, or a list of timesteps",
    Parallel: "PxC, a number of stages and of ranks that share each, such as 2x2",
    list[IceServer]: (
        "a list of servers, each with url (stun:HOST:PORT or turn:HOST:PORT), a turn server also with username and "
        "credential"
    ),
}


def kind_of(field: FieldInfo) -> tuple[Any, bool]:
    """The type of a field's values, without None; and whether None is one."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(field.annotation) if part is not type(None))
        return kind, True
    return field.annotation, False


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words, from its type and limits."""
    kind, optional = kind_of(field)
    if get_origin(kind) is Literal:
        words = "one of " + ", ".join(str(choice) for choice in get_args(kind))
    else:
        words = _TYPES.get(kind, "a value")
    words += _limits(field)
    return words + (", or null for the default" if optional else "")


def _limits(field: FieldInfo) -> str:
    words = []
    for limit in field.metadata:
        match limit:
            case annotated_types.Ge(ge=low):
                words.append(f"{low:,} or more")
            case annotated_types.Gt(gt=low):
                words.append(f"more than {low:,}")
            case annotated_types.Le(le=high) | annotated_types.Lt(lt=high):
                words.append(f"at most {high:,}")
            case annotated_types.MinLen(min_length=low):
                words.append(f"at least {low:,} character{'s' if low > 1 else ''}")
            case annotated_types.MaxLen(max_length=high):
                words.append(f"at most {high:,} characters")
    return ": " + " and ".join(words) if words else ""


def _show(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case list():
            return "a list"
        case dict():
            return "a section"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({len(str(value)):,} characters)"
