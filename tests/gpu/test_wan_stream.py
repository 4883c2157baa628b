"""What a GPU is bought for, through `build_pipeline`: bfloat16, heads 128 wide, flash and cuDNN attention, FP8, graphs,
two sessions at once, and rings over NCCL. On the CPU the same functions with what there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import off_by, two_streams
from streamdiff.config import ModelConfig, ServedModel
from streamdiff.models.transformer.quantization import FP8_CAPABILITY
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import LoadPlan
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.graphs import Graph, GraphCache, Inputs, Run, Tensors
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.gpu.nccl_ring import refused
from tests.gpu.wan_stream import config_of, ring_of, write_model
from tests.pipeline.runner.test_cuda_graphs import record

OFF = {"flash": 0.1, "cudnn": 0.1, "graphs": 0.1, "fp8": 0.3, "default": 0.1}
"""Length of the difference from float32 through that of the latents, after chunks that each see the ones before."""
GPU = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wan")
    write_model(path)
    return path


def off(folder: Path, variant: str, device: str) -> float:
    """How far two streams are from those in float32 by the plain formula."""
    got, _ = two_streams(config_of(folder, variant, device))
    exact, _ = two_streams(config_of(folder, "exact", device))
    return off_by(got, exact)


@pytest.mark.slow
def test_on_the_cpu_bfloat16_and_flash_are_near_the_formula(folder: Path) -> None:
    assert 1e-4 < off(folder, "flash", "cpu") <= OFF["flash"]


@pytest.mark.slow
def test_on_the_cpu_a_ring_makes_what_one_stage_makes(folder: Path) -> None:
    """Two processes, over a CPU stand-in for NCCL."""
    alone, _ = two_streams(config_of(folder, "flash", "cpu"))
    assert torch.equal(ring_of(folder, "flash", "cpu", 2), alone)


@pytest.mark.slow
def test_on_the_cpu_both_sessions_come_to_chunks_that_have_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for CUDA's graphs, nothing compiled, and a pool for two as a server has on CUDA."""
    replays: list[Inputs] = []

    def counted(run: Run, inputs: Inputs) -> tuple[Graph, Tensors]:
        graph, result = record(run, inputs)
        return SimpleNamespace(replay=lambda: (replays.append(inputs), graph.replay())), result

    def loaded(config: ModelConfig) -> StreamingPipeline:
        runtime = build_pipeline(config)
        replays.clear()
        return runtime

    monkeypatch.setattr(compiled_stage, "graph_cache_on", lambda device: GraphCache(counted))
    monkeypatch.setattr(gpu_check, "build_pipeline", loaded)
    pool = property(lambda plan: PreallocatedCaches(2, plan.steps, plan.config.kv_context))
    monkeypatch.setattr(LoadPlan, "preallocated", pool)
    with torch.compiler.set_stance("force_eager"):
        assert two_streams(config_of(folder, "graphs", "cpu"))[1] == 2
    assert len(replays) >= 2 * 3 * 5, "of each, three chunks of four steps and a clean pass"


@pytest.mark.parametrize("variant", [pytest.param(name, marks=GPU) for name in OFF])
def test_it_is_near_the_formula(variant: str, folder: Path) -> None:
    if variant == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a CUDA device of compute capability 8.9 or more")
    assert 1e-4 < off(folder, variant, "cuda") <= OFF[variant]


@pytest.mark.parametrize("variant", [pytest.param(name, marks=GPU) for name in ("flash", "graphs")])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_ring_over_nccl_makes_what_one_stage_makes(variant: str, stages: int, folder: Path) -> None:
    if reason := refused(stages):
        pytest.skip(reason)
    alone, _ = two_streams(config_of(folder, variant, "cuda"))
    assert off_by(ring_of(folder, variant, "cuda", stages), alone) <= (0.0 if variant == "flash" else OFF["graphs"])


@pytest.mark.parametrize("variant", [pytest.param("graphs", marks=GPU)])
def test_both_sessions_are_captured(variant: str, folder: Path) -> None:
    served = ServedModel(**dict(config_of(folder, variant, "cuda")), pictures="rgb")
    assert two_streams(served)[1] == 2
