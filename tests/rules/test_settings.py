"""Every setting is written once, in streamdiff/config.py; flags, files and the page of docs/ follow it."""

from __future__ import annotations

import runpy

from streamdiff.cli.options import SETTINGS, fields
from tests.rules.source import ROOT


def test_the_page_of_settings_is_of_today() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "settings.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["table"](), "run `make settings`"


def test_every_setting_says_what_it_is() -> None:
    assert not [key for key, field, _ in fields() if not field.description]


def test_a_flag_is_that_of_one_setting() -> None:
    flags = [flag for option in SETTINGS.values() for flag in option.flag.split()]
    assert len(flags) == len(set(flags))
