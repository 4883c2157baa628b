#!/usr/bin/env python3
"""Writes docs/settings.md from the fields of `streamdiff.config`: every setting, its flag, default and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamdiff.cli.parser import SETTINGS, fields
from streamdiff.config import Config
from streamdiff.config_file import section_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Made by `make settings` from `streamdiff/config.py`; a test fails when it is out of date.

A setting stands in a YAML file (`--config FILE`, see `configs/`) as `section: {key: value}`. Those with an option can
be typed, and win over the file. Those of the section `model` are also the keyword arguments of `streamdiff.open`,
`load`, `stream` and `run_worker`, where `name` is called `model`. An unknown key is refused, and the nearest known one
is named.
"""


_TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_LIMITS = {"minimum": "{:,} or more", "exclusiveMinimum": "more than {:,}", "maximum": "at most {:,}"}


def allowed(schema: dict[str, Any]) -> str:
    """What a setting takes, in words, from pydantic's JSON schema of it."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if parts := [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]:
        return " or ".join(map(allowed, parts))
    limits = " and ".join(words.format(schema[name]) for name, words in _LIMITS.items() if name in schema)
    return _TYPES.get(schema.get("type", ""), "a list") + (f": {limits}" if limits else "")


def table() -> str:
    """The page's text."""
    lines = [HEAD]
    for section in Config.model_fields:
        about = (section_of(section).__doc__ or "").strip().splitlines()[0]
        schemas = section_of(section).model_json_schema()["properties"]
        lines += [f"## {section}", "", about, "", "| key | option | default | value |  |", "|---|---|---|---|---|"]
        for key, field, _ in fields():
            if key.startswith(section + "."):
                option = f"`{', '.join(SETTINGS[key].flag.split())}`" if key in SETTINGS else ""
                default = "" if field.default is None or field.default in ([], ()) else f"{field.default}"
                about = " ".join((field.description or "").split()).replace("|", "\\|")
                cells = (f"`{key}`", option, default, allowed(schemas[key.split(".")[1]]), about)
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
