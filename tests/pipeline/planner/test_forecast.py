"""Named GPUs: estimates lie near published figures, say which KV contexts reach a rate and what fits; every P stages x
C ranks of a number of GPUs is simulated, and the best follows from what is simulated."""

from __future__ import annotations

import re
from typing import Any

import pytest

from streamdiff.commands.jobs import PlanJob
from streamdiff.commands.plan import Plan, as_text, make
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner import forecast
from streamdiff.pipeline.planner.forecast import Case, Comparison, GpuRing, compare
from streamdiff.pipeline.planner.memory import Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_of
from streamdiff.pipeline.planner.partition import Workload
from tests.rules.source import ROOT

LARGE = "random:wan2.1-14b"

# Frames per second of Wan 1.3B at 832x480 in 4 steps that others have published for one GPU: who, on what, with which
# autoencoder, and the window that the estimate takes. A clip of 81 frames that sees all of itself has a window of 12
# latent frames on average; FlashDreams drops its first two chunks, which leaves 15.
PUBLISHED = [
    ("FlashDreams", "h100", "self-forcing", "taew2_1", 12, 34.9),
    ("FlashDreams", "b200", "self-forcing", "taew2_1", 12, 59.1),
    ("LongLive", "h100", "longlive-1.3b", None, 12, 20.7),
    ("Light Forcing, dense", "5090", "self-forcing", None, 12, 8.9),
]


def planned(gpu: str, model: str = "self-forcing", **changes: Any) -> Plan:
    job = {name: changes.pop(name) for name in list(changes) if name in PlanJob.model_fields}
    return make(ModelConfig.model_validate({"name": model, **changes}), PlanJob(gpu=gpu, chunks=8, **job))


def rates(outcome: Plan, sessions: int = 1) -> dict[str, float]:
    assert outcome.forecast is not None
    return {e.kv_context: e.frames_per_s for e in outcome.forecast.expected if e.sessions == sessions}


@pytest.mark.parametrize(("who", "gpu", "model", "vae", "window", "published"), PUBLISHED)
def test_published_figures_lie_within_the_stated_factor(
    who: str, gpu: str, model: str, vae: str | None, window: int, published: float
) -> None:
    estimated = rates(planned(gpu, model, vae=vae, window=window))["clean"]
    assert published / forecast.FACTOR < estimated < published * forecast.FACTOR
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert re.search(rf"\| {who}\b[^|]*\| {published:g} \| {estimated:.3g} \|", page), f"{estimated:.3g}"


def test_the_contexts_that_reach_the_target_are_named() -> None:
    outcome = planned("h100", vae="taew2_1", stages=4, fps=100.0)
    assert outcome.forecast is not None
    assert outcome.forecast.reaching(1) == ("staircase", "same_step")


def test_what_does_not_fit_reaches_nothing_and_the_options_are_told() -> None:
    outcome = planned("4090", "krea-realtime-14b", fps=1.0)
    assert outcome.forecast is not None and outcome.forecast.reaching(1) == ()
    assert set(outcome.forecast.most_sessions.values()) == {0}
    text = "\n".join(as_text(outcome))
    assert "krea-realtime-14b does not fit: rank 0 needs " in text and "NVIDIA GeForce RTX 4090 has 25.2 GB" in text
    assert re.search(r"makes it fit: --[a-z-]+ \w", text)


def test_offloaded_blocks_are_as_slow_as_their_copies() -> None:
    """14B over PCIe 5.0 to an H100: 28 GB per step at 51 GB/s is longer than computing."""
    plain, offloaded = (planned("h100", "krea-realtime-14b", offload=each) for each in ("none", "blocks"))
    whole_s = offloaded.layout.forward_s
    assert whole_s > 28.1e9 / 51.2e9 > plain.layout.forward_s
    text = "\n".join(as_text(offloaded))
    assert "offload: 28.1 GB per step and stage from host memory at 51.2 GB/s take 0.549 s, computing " in text
    assert offloaded.memory[0].weights < 0.2 * plain.memory[0].weights


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_a_gpu_is_recognised_by_what_its_driver_calls_it(title: str, name: str | None) -> None:
    assert getattr(forecast.recognise(title), "name", None) == name


# ---- every ring of so many GPUs --------------------------------------------------------------------------------


def sizes(name: str = "self-forcing", vae: str | None = "taew2_1") -> ModelSizes:
    return sizes_of(ModelConfig(name=name, vae=vae))


def compared(
    count: int, model: ModelSizes, sessions: int = 1, gpu: str = "h100", link: str | None = None, decode: str = "auto"
) -> Comparison:
    kind = forecast.find(gpu)
    load = Workload(1, sessions, 4, "clean", 1)
    return compare(GpuRing(kind, kind.pick_link(link), model, Storage(2), load, decode), count)


def cases(found: Comparison) -> dict[tuple[str, str], Case]:
    return {(case.parallel, case.decode): case for case in found.cases}


def forward_s(model: ModelSizes, shares: int, gpu: str, link: str) -> float:
    load = Workload(1, 1, 4, "clean", 1, shares=shares)
    return GpuRing(forecast.find(gpu), link, model, Storage(2), load, "head").layout.forward_s


@pytest.mark.parametrize(
    ("who", "name", "gpu", "shares", "published"),
    [
        # Expected of Wan 1.3B where FLUX, with as many tokens, gained 1.60 and 2.64 (xDiT, compiled).
        ("FLUX by xDiT", "self-forcing", "h100", (1, 2), 1.60),
        ("FLUX by xDiT", "self-forcing", "h100", (1, 4), 2.64),
        # LingBot's 14B at 832x480: vllm-omni 6672, compiled; TeleFuser, two GPUs to four.
        ("vllm-omni", LARGE, "h200", (1, 2), 1.79),
        ("TeleFuser", LARGE, "h100", (2, 4), 1.74),
    ],
)
def test_gains_of_sharing_are_near_published_ones(
    who: str, name: str, gpu: str, shares: tuple[int, int], published: float
) -> None:
    few, many = (forward_s(sizes(name), count, gpu, "nvlink") for count in shares)
    assert few / many == pytest.approx(published, rel=0.22), who


def test_the_slower_link_costs_more() -> None:
    one = forward_s(sizes(), 1, "h100", "nvlink")
    assert forward_s(sizes(), 1, "h100", "pcie") == one
    nvlink, pcie = (one / forward_s(sizes(), 4, "h100", link) for link in ("nvlink", "pcie"))
    assert 1 < pcie < nvlink < 4
    with pytest.raises(ConfigError) as error:
        compared(2, sizes(), gpu="4090", link="nvlink")
    assert error.value.field == "link"


@pytest.mark.slow
def test_every_split_that_the_model_allows_is_there() -> None:
    found = compared(4, sizes())
    assert {place for place in cases(found)} == {
        ("1x4", "head"), ("2x2", "head"), ("4x1", "head"), ("1x3", "dedicated"), ("3x1", "dedicated"),
        ("1x2", "dedicated"),  # one GPU idle
    }  # fmt: skip
    assert {case.parallel for case in compared(8, sizes(), decode="last").cases} == {"8x1", "4x2", "2x4"}  # 12 heads
    assert {case.parallel for case in compared(5, sizes(LARGE), decode="last").cases} == {"5x1", "1x5"}  # 40
    with pytest.raises(ConfigError) as error:
        compared(16, sizes("tiny", None))
    assert error.value.field == "gpus"


def test_sharing_is_best_for_one_stream_and_stages_for_several() -> None:
    found = compared(4, sizes(), sessions=4)
    shared, staged = cases(found)["1x4", "head"], cases(found)["4x1", "head"]
    assert [found.best(kind) for kind in ("one", "sessions", "many")] == [shared, staged, staged]
    assert shared.expected["one"].frames_per_s > 2.5 * found.one_gpu.expected["one"].frames_per_s
    assert staged.expected["one"].frames_per_s == pytest.approx(found.one_gpu.expected["one"].frames_per_s, rel=0.1)
    assert 4 * staged.expected["sessions"].frames_per_s > 3.5 * found.one_gpu.expected["one"].frames_per_s
    assert shared.expected["one"].first_chunk_s < staged.expected["one"].first_chunk_s / 2
