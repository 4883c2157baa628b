"""Every setting is written once, in streamdiff/config.py; flags, files and the page of docs/ follow it."""

from __future__ import annotations

import argparse
import runpy

from streamdiff.cli.parser import SETTINGS, fields, parsers
from tests.rules.source import ROOT

MOST_SETTINGS, MOST_FLAGS, MOST_FLAGS_OF_ALL = 85, 25, 67


def flags_shown(*, everything: bool) -> list[str]:
    """What the help of `serve` lists."""
    shown = [each for each in parsers(everything=everything)["serve"]._actions if each.help != argparse.SUPPRESS]
    return [flag for action in shown for flag in action.option_strings if flag.startswith("--")]


def test_there_are_not_too_many() -> None:
    """More of them take a decision (docs/decisions/0062-files-settings-size.md)."""
    assert len(list(fields())) <= MOST_SETTINGS
    assert len(flags_shown(everything=False)) <= MOST_FLAGS
    assert len(flags_shown(everything=True)) <= MOST_FLAGS_OF_ALL


def test_the_reference_pages_are_of_today() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "reference.py"))
    for page, text in (("settings.md", made["table"]()), ("api.md", made["api"]())):
        assert (ROOT / "docs" / page).read_text(encoding="utf-8") == text, "run `make reference`"


def test_every_setting_says_what_it_is() -> None:
    assert not [key for key, field, _ in fields() if not field.description]


def test_a_flag_is_that_of_one_setting() -> None:
    flags = [flag for option in SETTINGS.values() for flag in option.flag.split()]
    assert len(flags) == len(set(flags))
