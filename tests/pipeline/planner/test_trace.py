"""Traces and plots of a plan take the place of earlier ones only when they are whole."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from streamdiff.commands import plan
from streamdiff.commands.plan import PlanJob
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner import trace

JOB = PlanJob(stage_times="0.25,0.25,0.25,0.25", decode_time=0.1, chunks=8)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device"), SystemExit])
@pytest.mark.parametrize("name", ["plan.json", "plan.svg"])
def test_an_end_on_the_way_leaves_an_earlier_trace_or_plot_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException | type[BaseException]
) -> None:
    path = tmp_path / name
    path.write_text("earlier")

    def cut_off(target: Path, *_: object, **__: object) -> None:
        with target.open("w") as file:
            file.write("half")
        raise error

    monkeypatch.setattr(Path, "write_text", cut_off)
    monkeypatch.setattr(Figure, "savefig", lambda self, target, **_: cut_off(target))
    with pytest.raises(BaseException) as raised:
        plan.run(ModelConfig(), replace(JOB, **{"plot" if name.endswith("svg") else "trace": path}))
    assert raised.type is error or getattr(raised.value, "errno", None) == errno.ENOSPC
    assert path.read_text() == "earlier" and [each.name for each in tmp_path.iterdir()] == [name]


def test_a_trace_is_written_through_links_and_into_pipes(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    trace.write_trace(link, (), 1)
    trace.write_trace(pipe, (), 1)
    assert link.is_symlink() and pipe.is_fifo()
    assert os.read(reading, 1 << 16) == target.read_bytes() and json.loads(target.read_text())["traceEvents"]
    os.close(reading)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.json", "pipe", "target.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.pdf"])
def test_a_plot_is_of_the_kind_that_its_name_says(tmp_path: Path, name: str) -> None:
    plan.run(ModelConfig(), replace(JOB, plot=tmp_path / name))
    begin = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[Path(name).suffix]
    assert (tmp_path / name).read_bytes().startswith(begin) and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"of t\.json cannot be written to; choose another"):
        plan.make(ModelConfig(), replace(JOB, trace=tmp_path / "t.json"))
