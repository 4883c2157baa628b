"""`streamdiff generate --processes`: real ranks give what stages that take turns in one process give, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.engine.process import launcher
from streamdiff.models.model import StageModel
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.distributed import rendezvous
from streamdiff.pipeline.runner.block_offload import OffloadedBlocks
from tests.commands.conftest import CHUNK, CHUNKS, Given, checkpoint
from tests.commands.test_reference import files_for
from tests.pipeline.processes import run_ranks

LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes
WINDOW = ("--window", "9", "--sink", "3")


def cases(given: Given) -> dict[str, list[str]]:
    """Options of a stream each, in every KV context and with everything that files can say."""
    said = files_for(given, (CHUNKS, 3, CHUNK)).options
    other = given.folder / "other.safetensors"
    return {
        "recache": [*WINDOW, "--prompt-switch", f"3:{other}:recache"],
        "staircase, reset": [*WINDOW, "--kv-context", "staircase", "--prompt-switch", f"4:{other}:reset", *said],
        "same_step": [*WINDOW, "--kv-context", "same_step", "--adaptive-sink", "0.5", *said],
    }


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """With a block for each of four stages."""
    return checkpoint(tmp_path_factory.mktemp("ranks"), layers=4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def made(request: pytest.FixtureRequest, given: Given) -> dict[str, Tensor]:
    """Latents of all cases, from one ring of processes."""
    return over_ranks(given, request.param, "--stages", str(request.param))


def over_ranks(given: Given, ranks: int, *layout: str) -> dict[str, Tensor]:
    """Latents of all cases, by so many processes with these options."""
    commands, outputs = [], {}
    for number, (name, options) in enumerate(cases(given).items()):
        outputs[name] = given.folder / f"ranks-{layout[-1]}-{number}.safetensors"
        commands.append(given.command(*options, *layout, "--processes", out=outputs[name]))
    listed = given.folder / "commands.json"
    listed.write_text(json.dumps(commands))
    run_ranks("tests.commands.reference_rank", [str(listed)], ranks, LIMIT_S)
    return {name: load_file(path)["latents"] for name, path in outputs.items()}


@pytest.mark.slow
def test_ranks_give_the_bits_of_one_process(given: Given, made: dict[str, Tensor]) -> None:
    for name, options in cases(given).items():
        assert torch.equal(made[name], given.latents(*options)), name


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["1x4", "2x2"])
def test_ranks_that_share_stages_give_the_latents_of_one_process(parallel: str, tmp_path: Path) -> None:
    given = checkpoint(tmp_path, layers=4, heads=4)
    made = over_ranks(given, 4, "--parallel", parallel)
    for name, options in cases(given).items():
        torch.testing.assert_close(made[name], given.latents(*options), rtol=0, atol=1e-6)


def test_ranks_are_started_once_everything_has_been_checked(
    given: Given, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[tuple[str, int, list[str]]] = []
    monkeypatch.setattr(
        launcher, "launch", lambda module, ranks, argv, folder: started.append((module, ranks, list(argv))) or 0
    )
    command = given.command("--stages", "2", "--processes")
    assert main.main(command) == 0
    assert started == [("streamdiff", 2, command)]
    for wrong, words in (
        (given.command("--processes"), "--processes gives each of several stages a process; --stages is 1"),
        (given.command("--stages", "5", "--processes"), "4"),
        (given.command("--parallel", "1x2"), "--parallel is 1x2: ranks that share a stage need --processes"),
        (given.command("--stages", "2", "--processes", "--noise", str(tmp_path / "none")), "does not exist"),
    ):
        assert main.main(wrong) == 2
        assert words in capsys.readouterr().err
    assert len(started) == 1


def test_a_rank_that_follows_has_its_blocks_offloaded_too(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def connect_stage(model: StageModel, *_: object) -> None:
        assert len(model.denoiser.blocks) == 2 and isinstance(model.denoiser.block_source, OffloadedBlocks)
        raise Seen

    rank = SimpleNamespace(rank=1, send_memory=lambda memory: None, store=None, of_head=lambda name, value: value)
    monkeypatch.setattr(rendezvous, "join", lambda facts: rank)
    monkeypatch.setattr(rank_process, "RankWatch", lambda *_: SimpleNamespace(enter=None))
    monkeypatch.setattr(rank_process, "connect_stage", connect_stage)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    out = given.folder / "never.safetensors"
    with pytest.raises(Seen):
        main.main(given.command("--stages", "2", "--processes", "--offload", "blocks", out=out))
