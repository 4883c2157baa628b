"""Every P stages x C ranks of a number of GPUs is simulated, and the best follows from what is simulated."""

from __future__ import annotations

import json
import math

import pytest

from streamdiff.cli import main
from streamdiff.commands import plan
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner import gpus
from streamdiff.pipeline.planner.costs import Exchange
from streamdiff.pipeline.planner.forecast import costs_on
from streamdiff.pipeline.planner.memory import Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_of
from streamdiff.pipeline.planner.parallel import Case, Comparison, Machine, compare
from streamdiff.pipeline.planner.stage_layout import Workload, choose_layout
from tests.rules.source import ROOT

LARGE = "random:wan2.1-14b"


def sizes(name: str = "self-forcing", vae: str | None = "taew2_1") -> ModelSizes:
    return sizes_of(ModelConfig(name=name, vae=vae))


def compared(
    count: int, model: ModelSizes, sessions: int = 1, gpu: str = "h100", link: str | None = None, decode: str = "auto"
) -> Comparison:
    kind = gpus.find(gpu)
    load = Workload(1, sessions, 4, "clean", 1)
    return compare(Machine(kind, count, kind.pick_link(link)), model, load, Storage(2), decode)


def cases(found: Comparison) -> dict[tuple[str, str], Case]:
    return {(case.parallel, case.decode): case for case in found.cases}


def forward_s(model: ModelSizes, shares: int, gpu: str, link: str) -> float:
    load = Workload(1, 1, 4, "clean", 1, shares=shares)
    layout = choose_layout(costs_on(gpus.find(gpu), model, load, Storage(2), link), load, "head")
    return math.fsum(times[0] for times in layout.stage_s)


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


def test_an_exchange_costs_its_floor_and_what_goes_to_others() -> None:
    exchange = Exchange(1e-4, 10.0)
    assert exchange.seconds(0, 4) == 1e-4
    assert exchange.seconds(40e6, 4) == pytest.approx(1e-4 + 30e6 / 10e9)


def test_the_slower_link_costs_more() -> None:
    one = forward_s(sizes(), 1, "h100", "nvlink")
    assert forward_s(sizes(), 1, "h100", "pcie") == one
    nvlink, pcie = (one / forward_s(sizes(), 4, "h100", link) for link in ("nvlink", "pcie"))
    assert 1 < pcie < nvlink < 4
    with pytest.raises(ConfigError, match="--link is 'nvlink', but NVIDIA GeForce RTX 4090 can be linked by pcie"):
        compared(2, sizes(), gpu="4090", link="nvlink")


@pytest.mark.slow
def test_every_split_that_the_model_allows_is_there() -> None:
    found = compared(4, sizes())
    assert {place for place in cases(found)} == {
        ("1x4", "head"), ("2x2", "head"), ("4x1", "head"), ("1x3", "dedicated"), ("3x1", "dedicated"),
        ("1x2", "dedicated"),  # one GPU idle
    }  # fmt: skip
    assert {case.parallel for case in compared(8, sizes(), decode="last").cases} == {"8x1", "4x2", "2x4"}  # 12 heads
    assert {case.parallel for case in compared(5, sizes(LARGE), decode="last").cases} == {"5x1", "1x5"}  # 40
    with pytest.raises(ConfigError, match=r"--gpus is 16: tiny has 6 blocks.*of ranks 1, 2 can share"):
        compared(16, sizes("tiny", None))


def test_sharing_is_best_for_one_stream_and_stages_for_several() -> None:
    found = compared(4, sizes(), sessions=4)
    shared, staged = cases(found)["1x4", "head"], cases(found)["4x1", "head"]
    assert found.for_one is shared and found.for_asked is staged and found.for_many is staged
    assert shared.alone.frames_per_s > 2.5 * found.one_gpu.alone.frames_per_s
    assert staged.alone.frames_per_s == pytest.approx(found.one_gpu.alone.frames_per_s, rel=0.1)
    assert 4 * staged.asked.frames_per_s > 3.5 * found.one_gpu.alone.frames_per_s
    assert shared.alone.first_chunk_s < staged.alone.first_chunk_s / 2


@pytest.mark.slow
def test_a_large_decoder_gets_a_gpu_of_its_own_where_that_is_faster() -> None:
    found = compared(4, sizes(vae=None), sessions=4)
    whole, apart = cases(found)["1x4", "head"], cases(found)["1x3", "dedicated"]
    assert whole.alone.frames_per_s < apart.alone.frames_per_s
    assert found.for_one is apart and max(apart.rank_bytes[:3]) < apart.rank_bytes[0] + 1


def test_memory_of_every_rank_is_that_of_its_share() -> None:
    found = cases(compared(4, sizes(), decode="head"))
    shared, both, staged = (found[each, "head"].rank_bytes for each in ("1x4", "2x2", "4x1"))
    assert all(len(ranks) == 4 for ranks in (shared, both, staged))
    assert min(staged) < min(both) < min(shared)  # all weights on each rank, half, a quarter
    assert shared[0] > shared[1] == shared[2] == shared[3]  # the first one decodes


def test_what_does_not_fit_is_not_taken() -> None:
    found = compared(2, sizes(LARGE), gpu="4090")
    assert not any(case.alone.fits for case in found.cases)
    assert found.for_one is None and found.for_many is None


@pytest.mark.slow
def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "4", "--gpu", "h100", "--model", "self-forcing", "--vae", "taew2_1", "--sessions", "4"]
    assert main.main(words) == 0
    printed = capsys.readouterr().out
    for said in (
        "4 x NVIDIA H100 SXM, linked by nvlink", "an estimate", "memory of a rank", "1x4 ", "2x2 ", "4x1 ", "one GPU",
        "best for 1 session: 1x4, decoding on the first rank", "best for 4 sessions: 4x1",
    ):  # fmt: skip
        assert said in printed
    assert main.main([*words, "--link", "pcie", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["link"] == "pcie" and tree["best"]["one"] == ["1x4", "head"]
    assert {len(case["rank_bytes"]) for case in tree["cases"] if case["decode"] == "head"} == {4}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "4"], "of which kind is said by --gpu, one of h100"),
        (["--gpus", "0", "--gpu", "h100"], "--gpus is 0, but must be 1 to 16"),
        (["--gpus", "4", "--gpu", "h100", "--stages", "4"], "--stages does not go with --gpus"),
        (["--gpus", "4", "--gpu", "h100", "--trace", "x.json"], "--trace does not go with --gpus"),
        (["--gpus", "4", "--gpu", "h100", "--link", "ib"], "--link is 'ib', but NVIDIA H100 SXM can be linked by"),
        (["--link", "pcie"], "it is what GPUs named with --gpu are linked by"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


PAGE: tuple[tuple[str, str, str | None], ...] = (
    ("Wan 1.3B, `taew2_1`", "self-forcing", "taew2_1"),
    ("Wan 1.3B, Wan's", "self-forcing", None),
    ("Wan 14B, `taew2_1`", LARGE, "taew2_1"),
    ("Wan 14B, Wan's", LARGE, None),
)


def row(title: str, name: str, vae: str | None, count: int) -> str:
    """A line of the table in docs/parallel.md."""
    found = compare_on(count, ModelConfig(name=name, vae=vae))
    one, many = found.for_one, found.for_many
    if one is None or many is None:
        return f"| {title} | {count} | does not fit | | | | |"
    memory = " to ".join(dict.fromkeys(f"{each(one.rank_bytes) / 1e9:.2g}" for each in (min, max)))
    rate = many.crowd.frames_per_s * many.crowd.sessions
    return (
        f"| {title} | {count} | {split(one)} | {one.alone.frames_per_s:.3g} | {one.alone.latency_s:.2g}, "
        f"{one.alone.first_chunk_s:.2g} s | {memory} GB | {split(many)}: {rate:.3g} |"
    )


def split(case: Case) -> str:
    words = {"dedicated": " and one that decodes"}
    return f"`{case.parallel}`" + words.get(case.decode, "")


def compare_on(count: int, model: ModelConfig) -> Comparison:
    return plan.compare(model, plan.PlanJob(gpu="h100", gpus=count))[0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_pages_table_is_what_the_planner_says(count: int) -> None:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    for each in PAGE:
        assert row(*each, count) in page


def test_the_pages_example_is_what_the_planner_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "4", "--gpu", "h100", "--model", "self-forcing", "--vae", "taew2_1", "--sessions", "4"]
    assert main.main(words) == 0
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out.splitlines()
    assert all(line in page for line in printed if line[:4] in ("PxC ", "4x1 ", "2x2 ", "1x4 ", "one ", "best"))
