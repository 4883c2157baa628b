"""Ranks that are not alike, or not as many as configured, are told so before anything is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.load_plan import check_world, plan_load
from tests.pipeline.processes import ROOT, run_ranks
from training.embedded import WEIGHTS

pytestmark = pytest.mark.slow
LIMIT_S = 240.0  # ends what hangs


def join(facts: list[dict[str, str]], store: dist.TCPStore | None = None) -> list[str]:
    """What each rank says; `store` is a launcher's, else rank 0 brings its own."""
    arguments = [json.dumps(facts), str(store is not None)]
    port = None if store is None else store.port
    said = run_ranks("tests.pipeline.distributed.group_process", arguments, len(facts), LIMIT_S, port)
    return [each.strip() for each in said]


def test_ranks_that_are_alike_meet() -> None:
    assert join([{"torch": "2.13"}] * 3) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_ranks_that_are_started_again_do_not_hear_those_before_them() -> None:
    """torchrun with --max-restarts gives them the same store, where facts and addresses of the dead stand."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for steps in ("4", "2"):
        assert join([{"model.steps": steps}] * 2, store) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_rank_that_differs_is_named_by_all() -> None:
    said = join([{"torch": "2.13", "model.steps": "4"}, {"torch": "2.13", "model.steps": "2"}])
    assert said == ["rank 1 has model.steps 2, but rank 0 has 4; all ranks of a ring need the same"] * 2


def rank_facts(**given: Any) -> dict[str, str]:
    return plan_load(ModelConfig(**given), torch.device("cpu")).rank_facts()


def test_weights_and_settings_are_among_the_facts(tmp_path: Path) -> None:
    facts = rank_facts()
    assert {"streamdiff", "torch", "weights", "model.steps", "model.kv_context"} <= set(facts)
    assert facts["model.steps"] == "4" and rank_facts(steps=4) == facts
    for path in WEIGHTS.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(WEIGHTS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    assert rank_facts(name=str(tmp_path))["weights"] == facts["weights"]
    config = tmp_path / "vae" / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert rank_facts(name=str(tmp_path))["weights"] != facts["weights"]


@pytest.mark.parametrize(
    ("world", "values", "words"),
    [
        (
            1,
            {"stages": 4},
            r"stages is 4, but this is one process.*`streamdiff generate` start.*torchrun --nproc-per-node 4",
        ),
        (2, {"stages": 4}, r"stages is 4, but torchrun started 2 ranks; start 4"),
        (
            4,
            {"stages": 4, "decode_rank": "dedicated"},
            r"stages is 4 and decoding has a rank of its own, but torchrun started 4 ranks; start 5",
        ),
        (2, {"parallel": "2x2"}, r"parallel is 2x2, but torchrun started 2 ranks; start 4"),
        (1, {"parallel": "1x2"}, r"parallel is 1x2, but this is one process.*torchrun --nproc-per-node 2"),
    ],
)
def test_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, values: dict[str, object], words: str
) -> None:
    config = ModelConfig.model_validate(values)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError, match=words):
        check_world(config)
    monkeypatch.setenv("WORLD_SIZE", str(config.ranks))
    check_world(config)


def test_stages_in_one_process_are_refused() -> None:
    command = [sys.executable, "-c", "import streamdiff; streamdiff.open('a red circle', stages=2)"]
    environment = {**os.environ, "WORLD_SIZE": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode != 0 and "stages is 2, but this is one process" in process.stderr
