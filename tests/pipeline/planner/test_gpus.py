"""Named GPUs: estimates lie near published figures, and say which KV contexts reach a rate, and what fits."""

from __future__ import annotations

import json
import re

import pytest

from streamdiff.cli import main
from streamdiff.commands.plan import Outcome, PlanJob, as_text, as_tree, make
from streamdiff.config import ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner import gpus
from tests.rules.source import ROOT

# Frames per second of Wan 1.3B at 832x480 in 4 steps that others have published for one GPU: who, on what, with which
# autoencoder, and the window that the estimate takes. A clip of 81 frames that sees all of itself has a window of 12
# latent frames on average; FlashDreams drops its first two chunks, which leaves 15.
PUBLISHED = [
    ("FlashDreams", "h100", "self-forcing", "taew2_1", 12, 34.9),
    ("FlashDreams", "b200", "self-forcing", "taew2_1", 12, 59.1),
    ("LongLive", "h100", "longlive-1.3b", None, 12, 20.7),
    ("Light Forcing, dense", "5090", "self-forcing", None, 12, 8.9),
]


def planned(gpu: str, model: str = "self-forcing", **changes: object) -> Outcome:
    job = {name: changes.pop(name) for name in list(changes) if name in PlanJob.__dataclass_fields__}
    return make(ModelConfig.model_validate({"name": model, **changes}), PlanJob(gpu=gpu, chunks=8, **job))  # type: ignore[arg-type]


def rates(outcome: Outcome, sessions: int = 1) -> dict[str, float]:
    assert outcome.gpu is not None
    return {e.kv_context: e.frames_per_s for e in outcome.gpu.forecast.expected if e.sessions == sessions}


@pytest.mark.parametrize(("who", "gpu", "model", "vae", "window", "published"), PUBLISHED)
def test_published_figures_lie_within_the_stated_factor(
    who: str, gpu: str, model: str, vae: str | None, window: int, published: float
) -> None:
    estimated = rates(planned(gpu, model, vae=vae, window=window))["clean"]
    assert published / gpus.FACTOR < estimated < published * gpus.FACTOR
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert re.search(rf"\| {who}\b[^|]*\| {published:g} \| {estimated:.3g} \|", page), f"{estimated:.3g}"


def test_the_decoder_in_use_counts() -> None:
    large, small = planned("h100"), planned("h100", vae="taew2_1")
    assert large.setup.decode_s > 20 * small.setup.decode_s > 0
    assert rates(large)["clean"] < 0.75 * rates(small)["clean"]


def test_sessions_share_a_gpu() -> None:
    outcome = planned("h100", sessions=3)
    for kv_context, rate in rates(outcome, 3).items():
        assert 3 * rate == pytest.approx(rates(outcome)[kv_context], rel=0.1)


def test_a_ring_gains_in_contexts_that_fill_it() -> None:
    """One session of clean waits for itself; staircase and same_step keep four stages busy."""
    one, four = rates(planned("h100", vae="taew2_1")), rates(planned("h100", vae="taew2_1", stages=4))
    assert four["clean"] < 1.3 * one["clean"]
    assert four["staircase"] > 3 * one["staircase"] and four["same_step"] > 3 * one["same_step"]


def test_the_contexts_that_reach_the_target_are_named() -> None:
    outcome = planned("h100", vae="taew2_1", stages=4, fps=100.0)
    assert outcome.gpu is not None
    assert outcome.gpu.forecast.reaching(1) == ("staircase", "same_step")
    text = "\n".join(as_text(outcome))
    assert "the target is 100 frames/s of each session" in text
    assert "1 session reaches it in: staircase, same_step" in text
    assert "to expect of 4 x NVIDIA H100 SXM: an estimate, not a measurement" in text
    assert "trained for it" in text


def test_what_does_not_fit_reaches_nothing_and_the_options_are_told() -> None:
    outcome = planned("4090", "krea-realtime-14b", fps=1.0)
    assert outcome.gpu is not None and outcome.gpu.forecast.reaching(1) == ()
    assert set(outcome.gpu.forecast.most_sessions.values()) == {0}
    text = "\n".join(as_text(outcome))
    assert "krea-realtime-14b does not fit: rank 0 needs " in text and "NVIDIA GeForce RTX 4090 has 25.2 GB" in text
    assert re.search(r"makes it fit: --[a-z-]+ \w", text)


def test_offloaded_blocks_are_as_slow_as_their_copies() -> None:
    """14B over PCIe 5.0 to an H100: 28 GB per step at 51 GB/s is longer than computing."""
    plain, offloaded = (planned("h100", "krea-realtime-14b", offload=each) for each in ("none", "blocks"))
    whole_s = sum(times[0] for times in offloaded.layout.stage_s)
    assert whole_s > 28.1e9 / 51.2e9 > sum(times[0] for times in plain.layout.stage_s)
    text = "\n".join(as_text(offloaded))
    assert "offload: 28.1 GB per step and stage from host memory at 51.2 GB/s take 0.549 s, computing " in text
    assert offloaded.memory[0].weights < 0.2 * plain.memory[0].weights


def test_all_of_it_is_in_the_json() -> None:
    tree = json.loads(json.dumps(as_tree(planned("h200", sessions=2)), allow_nan=False))
    found = tree["forecast"]
    assert found["estimate"] is True and found["gpu"]["source"] and found["published_figures_within_factor"] == 1.5
    assert {(each["kv_context"], each["sessions"]) for each in found["expected"]} == {
        (kv_context, count) for kv_context in KV_CONTEXTS for count in (1, 2)
    }
    assert set(found["reaching"]) == {"1", "2"}


@pytest.mark.parametrize("gpu", gpus.GPUS)
def test_every_gpu_says_where_its_figures_are_from(gpu: str) -> None:
    found = gpus.find(gpu)
    assert "NVIDIA" in found.source and found.shares_from
    assert set(found.tflops) == {"float32", "bfloat16", "fp8"}
    assert 0 < found.attention_share <= 1 and 0 < found.matrix_share <= 1
    assert found.ceilings("bfloat16").tflops < found.tflops["bfloat16"]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_a_gpu_is_recognised_by_what_its_driver_calls_it(title: str, name: str | None) -> None:
    assert getattr(gpus.recognise(title), "name", None) == name


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (PlanJob(gpu="a100"), "--gpu is 'a100', but must be one of h100, h200, b200, 4090, 5090"),
        (PlanJob(gpu="h100", tflops=300), "--gpu h100 says what --tflops would say"),
        (PlanJob(gpu="h100", stage_times="1"), "--gpu is for the estimate; leave it out where times are given"),
        (PlanJob(fps=25), "--fps is 25; it is the rate, above 0, that a --gpu is held against"),
        (PlanJob(gpu="h100", fps=-1), "--fps is -1"),
    ],
)
def test_what_cannot_be_asked_is_told(job: PlanJob, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(ModelConfig(name="self-forcing"), job)
    assert words in str(caught.value)


def test_it_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --gpu 5090 --model self-forcing --vae taew2_1 --size 640x384 --sessions 2 --fps 12 --chunks 8"
    assert main.main(words.split()) == 0
    assert "2 sessions reach it in: " in capsys.readouterr().out
