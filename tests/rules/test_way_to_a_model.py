"""Whoever follows a configuration through the code to a loaded model jumps little: the modules on the way are bounded.

A stay is a run of calls into one module, in the order in which they first come; properties are read as attributes are.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cached_property
from itertools import groupby
from types import CodeType, FrameType
from typing import Any

import pytest

from streamdiff import api
from streamdiff.config import ModelConfig
from streamdiff.pipeline import build  # here, so that no import is on the way
from tests.rules.source import ROOT

STAYS, ENTRIES = 45, 3
"""Of the way at most, and into one module."""


class _Loaded(Exception):
    """The last part is there."""


def _stays(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules, by file, from where a command asks for a model to its text encoder, which comes last."""
    load_text, seen, places = build.rank_loader.load_text_encoder, set[tuple[CodeType, CodeType | None]](), list[str]()

    def last(*given: Any) -> None:
        load_text(*given)
        raise _Loaded

    def watch(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not _counts(frame):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(str(ROOT / "streamdiff")):
            caller = caller.f_back
        if (pair := (code, caller and caller.f_code)) not in seen:
            seen.add(pair)
            places.append(code.co_filename.removeprefix(f"{ROOT}/streamdiff/"))

    monkeypatch.setattr(build.rank_loader, "load_text_encoder", last)
    sys.setprofile(watch)
    try:
        with pytest.raises(_Loaded):
            api.load(config)
    finally:
        sys.setprofile(None)
    return ["commands/generate.py", *(place for place, _ in groupby(places))]


def _counts(frame: FrameType) -> bool:
    """Whether it is a function of the package, and neither a part of one nor a property."""
    code = frame.f_code
    owner, _, name = code.co_qualname.rpartition(".")
    if not code.co_filename.startswith(str(ROOT / "streamdiff")) or name.startswith("<"):
        return False
    found = vars(frame.f_globals.get(owner, object)).get(name)
    return not isinstance(found, property | cached_property)


@pytest.mark.slow
def test_the_way_to_a_model_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    stays = _stays(ModelConfig(device="cpu"), monkeypatch)
    often = {place: count for place, count in Counter(stays).items() if count > ENTRIES}
    assert len(stays) <= STAYS, " > ".join(stays)
    assert not often, f"entered more than {ENTRIES} times: {often}; the way is {' > '.join(stays)}"
    assert {"models/resolve.py", "models/transformer/weights.py", "models/tiny/text_encoder.py"} < set(stays)
