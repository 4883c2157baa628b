"""Where compiled code is kept on disk: in a private folder, or not at all. That another process finds it is in
`test_compiled`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.distributed.heartbeat import RankWatch
from streamdiff.pipeline.load_plan import plan_load, plan_rank
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.runner.graphs import CACHE_VARIABLE, keep_compiled_code
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import CPU, small_model


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which is not there yet."""
    monkeypatch.setenv(CACHE_VARIABLE, "")  # so that it is put back afterwards
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_kept_in_the_users_cache_folder_for_nobody_else(user_cache: Path) -> None:
    folder = keep_compiled_code()
    assert folder == user_cache / "streamdiff" / "compiled"
    assert os.environ[CACHE_VARIABLE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keep_compiled_code() == folder


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_where_others_may_write_is_refused_with_the_way_out(user_cache: Path, mode: int) -> None:
    """torch unpickles and runs what lies in it."""
    folder = user_cache / "streamdiff" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(ConfigError) as refused:
        keep_compiled_code()
    assert refused.value.field == CACHE_VARIABLE and f"chmod 700 {folder}" in str(refused.value)
    assert os.environ[CACHE_VARIABLE] == ""


@pytest.mark.parametrize("part", ["stage", "decoder"])
def test_the_product_compiles_into_it(user_cache: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    for kind in (ModelRunner, PictureDecoder):
        monkeypatch.setattr(kind, "compile", lambda *given, **options: met.append(os.environ[CACHE_VARIABLE]))
    config, stage = ModelConfig(compile="on", device="cpu"), ModelRunner(small_model(1), CPU)
    plan = plan_load(config, CPU)
    if part == "stage":
        rank_process.compile_stage(plan, stage, RankMemory(0), RankWatch(None))
    else:
        loaded = rank_process.load_rank(plan_rank(plan))
        rank_process.compile_decoder(plan, loaded.decoder, torch.get_num_threads())
    assert met == [str(user_cache / "streamdiff" / "compiled")]
