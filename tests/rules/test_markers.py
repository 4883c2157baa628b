"""Where tests of a kind lie: `make alone` looks nowhere else for them."""

from __future__ import annotations

import re

import pytest

from tests.rules.source import ROOT

TESTS = ROOT / "tests"


@pytest.mark.parametrize("marker", ["browser", "interop"])
def test_tests_that_want_the_machine_to_themselves_lie_where_make_looks_for_them(marker: str) -> None:
    found = {path for path in TESTS.rglob("test_*.py") if re.search(rf"\bmark\.{marker}\b", path.read_text("utf-8"))}
    (named,) = re.findall(r"^ALONE_IN := (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    folders = [ROOT / folder for folder in named.split()]
    assert found and all(any(path.is_relative_to(folder) for folder in folders) for path in found)


def test_all_in_a_folder_that_is_left_out_beside_others_want_the_machine_to_themselves() -> None:
    (named,) = re.findall(r"^ASIDE := --ignore=(\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    files = list((ROOT / named).rglob("test_*.py"))
    assert files and all(
        re.search(r"^pytestmark = .*mark\.browser\b", file.read_text(), re.MULTILINE) for file in files
    )
