"""Reads the small JSON files that come with weights, such as `config.json`. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from streamdiff.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are the first
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a JSON object with keys, but holds {type(tree).__name__}")
    return tree


class Table:
    """A JSON object, that of the file at `path` or in it, whose entries are asked for by name and kind. ConfigError for
    one that is missing or of another kind; and as `read_object`."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None) -> None:
        self.path, self.values = path, read_object(path) if values is None else values

    def table(self, key: str) -> Table:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object with keys")
        return Table(self.path, value)

    def integer(self, key: str, low: int = 1) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(key, value, f"a whole number, at least {low}")
        return value

    def integers(self, key: str, count: int | None = None, low: int = 1) -> tuple[int, ...]:
        value = self._get(key)
        good = isinstance(value, list) and all(type(item) is int and item >= low for item in value) and value
        if not good or count not in (None, len(value)):
            raise self._wrong(key, value, f"a list of {count or 'some'} whole numbers, each at least {low}")
        return tuple(value)

    def names(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        good = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        if not good or len(set(value)) < len(value):
            raise self._wrong(key, value, "a list of names, each another")
        return tuple(value)

    def number(self, key: str) -> float:
        value = self._get(key)
        # An int may be larger than any float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.path}: the key {key!r} is missing")
        return self.values[key]

    def _wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} is {json.dumps(value)[:60]}, but must be {allowed}")


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of many names, for a message."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
