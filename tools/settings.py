#!/usr/bin/env python3
"""Writes docs/settings.md from the fields of `streamdiff.config`: every setting, its flag, default and limits."""

from __future__ import annotations

from pathlib import Path

from streamdiff.cli.options import SETTINGS, fields
from streamdiff.config import Config
from streamdiff.config_file import allowed, section_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Made by `make settings` from `streamdiff/config.py`; a test fails when it is out of date.

A setting stands in a YAML file (`--config FILE`, see `configs/`) as `section: {key: value}`. Those with an option can
be typed, and win over the file. Those of the section `model` are also the keyword arguments of `streamdiff.open`,
`load`, `stream` and `run_worker`, where `name` is called `model`. An unknown key is refused, and the nearest known one
is named.
"""


def table() -> str:
    """The page's text."""
    lines = [HEAD]
    for section in Config.model_fields:
        about = (section_of(section).__doc__ or "").strip().splitlines()[0]
        lines += [f"## {section}", "", about, "", "| key | option | default | value |  |", "|---|---|---|---|---|"]
        for key, field, _ in fields():
            if key.startswith(section + "."):
                option = f"`{', '.join(SETTINGS[key].flag.split())}`" if key in SETTINGS else ""
                default = "" if field.default is None or field.default in ([], ()) else f"{field.default}"
                about = " ".join((field.description or "").split()).replace("|", "\\|")
                value = allowed(field).removesuffix(", or null for the default").removeprefix("one of ")
                cells = (f"`{key}`", option, default, value, about)
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
