"""`serve --gpus N` takes what the planner finds best on the devices here, says why, and refuses with reasons."""

from __future__ import annotations

from typing import Any

import pytest

from streamdiff.cli import main
from streamdiff.commands.jobs import ServeJob
from streamdiff.commands.plan import devices_here, with_best
from streamdiff.config import Config
from streamdiff.errors import ConfigError

H100 = "NVIDIA H100 80GB HBM3"


def config(**model: Any) -> Config:
    return Config.model_validate({"model": {"name": "self-forcing", "vae": "taew2_1", **model}})


def chosen(count: int, goal: Any = None, titles: tuple[str, ...] = (H100,) * 4, **model: Any) -> Config:
    return with_best(config(**model), ServeJob(gpus=count, goal=goal), lambda: titles)


@pytest.mark.slow
def test_one_stream_gets_ranks_that_share_and_many_get_stages(capsys: pytest.CaptureFixture[str]) -> None:
    one = chosen(4).model
    assert (one.parallel, one.stages, one.shares, one.decode_rank) == ("1x4", 1, 4, "head")
    told = capsys.readouterr().err
    assert told.startswith("streamdiff: --parallel 1x4 --decode-rank head: 1x4, decoding on the first rank: ")
    assert "of 6 ways to use 4 x NVIDIA H100 SXM, linked by nvlink, estimated" in told
    assert chosen(4, "many").model.parallel == "4x1"
    assert chosen(2).model.parallel == "1x2"
    large = chosen(4, vae=None).model
    assert (large.parallel, large.decode_rank, large.ranks) == ("1x3", "dedicated", 4)  # three compute, one decodes
    assert "--decode-rank dedicated: 1x3, decoding on one more GPU" in capsys.readouterr().err
    assert (one.name, one.vae) == ("self-forcing", "taew2_1")


def test_what_is_said_by_the_user_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(4, decode_rank="head", vae=None).model.decode_rank == "head"
    assert "--decode-rank" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "goal", "titles", "model", "field"),
    [
        (None, "many", (), {}, "goal"),
        (4, None, (), {"stages": 2}, "model.stages"),
        (4, None, (), {"parallel": "2x2"}, "model.parallel"),
        (4, None, (), {"device": "cpu"}, "model.device"),
        (4, None, (), {}, "gpus"),
        (4, None, (H100,), {}, "gpus"),
        (2, None, (H100, "NVIDIA H200"), {}, "gpus"),
        (2, None, ("Tesla T4",) * 2, {}, "gpus"),
        (1, None, ("NVIDIA GeForce RTX 4090",), {"name": "random:wan2.1-14b"}, "gpus"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    count: int | None, goal: Any, titles: tuple[str, ...], model: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        with_best(config(**model), ServeJob(gpus=count, goal=goal), lambda: titles)
    assert error.value.field == field


@pytest.mark.slow
def test_a_machine_without_gpus_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_here() == []
    assert main.main(["serve", "--gpus", "4"]) == 2
    assert "sees 0 CUDA devices here (none). Give fewer, or --stages or --parallel" in capsys.readouterr().err
