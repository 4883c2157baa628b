"""Plans: decode goes where it costs least, sizes are those of the real model, wrong input is told before any work."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from streamdiff.cli import main
from streamdiff.commands import plan as plan_report
from streamdiff.commands.plan import PlanJob, as_text, as_tree, make
from streamdiff.config import KVContext, ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.tiny import model as tiny
from streamdiff.models.transformer.wan import attend
from streamdiff.pipeline.planner import trace
from streamdiff.pipeline.planner.costs import Ceilings, Costs, estimate, in_proportion, read_profile
from streamdiff.pipeline.planner.memory import Storage, memory
from streamdiff.pipeline.planner.model_sizes import ModelSizes, read_sizes
from streamdiff.pipeline.planner.simulator import Setup, Stream, simulate
from streamdiff.pipeline.planner.stage_layout import Workload, choose_layout, decode_stage
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.scheduler.step import KV_CONTEXTS
from streamdiff.session_state import walk

SAME_STEP = ModelConfig(kv_context="same_step")
QUARTERS = "0.25,0.25,0.25,0.25"


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return read_sizes("tiny")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.load_model(tiny.WEIGHTS, torch.device("cpu"))


# ---- the place of decode ----------------------------------------------------------------------------------------


def costs(blocks: int, *, embed: float = 0.0, head: float = 0.0, decode: float = 0.0) -> Costs:
    """Blocks of 1 s, for up to three rows in proportion."""
    return Costs(
        "", (in_proportion(1.0, 3),) * blocks, in_proportion(embed, 3), in_proportion(head, 3), decode, 0.0, 0.0
    )


def test_decode_goes_where_it_costs_least_and_blocks_make_room_for_it() -> None:
    """12 blocks, 4 ranks, a decode of 8 s once in 4 forwards: 2 s per forward, as much as two blocks."""
    load = Workload(4, 1, 4, "same_step", 1)
    busy_head = choose_layout(costs(12, embed=2.0, decode=8.0), load)
    assert (busy_head.decode, busy_head.slowest_s) == ("last", 4.0)
    busy_last = choose_layout(costs(12, head=2.0, decode=8.0), load)
    assert (busy_last.decode, decode_stage(busy_last.decode, 4), busy_last.slowest_s) == ("head", 0, 4.0)
    alone = choose_layout(costs(12, decode=8.0), load, "dedicated")
    assert (decode_stage(alone.decode, 4), alone.slowest_s) == (None, 3.0)
    assert alone.blocks == ((0, 3), (3, 6), (6, 9), (9, 12))
    on_last = choose_layout(costs(10, decode=8.0), load, "last")
    assert [last - first for first, last in on_last.blocks] == [3, 3, 3, 1]
    assert on_last.stage_s[3] == (1.0, 2.0, 3.0), "decode is no part of the stage's forward"


# ---- sizes against the real model ------------------------------------------------------------------------------


def test_sizes_are_those_of_the_loaded_model(sizes: ModelSizes, model: Model) -> None:
    spec, denoiser = model.spec, model.denoiser
    assert replace(sizes.spec, context_sigma=spec.context_sigma) == spec, "a plan asks for no noise of the clean pass"
    assert [sizes.spec.window_chunks(c) for c in KV_CONTEXTS] == [spec.window_chunks(c) for c in KV_CONTEXTS]
    assert sizes.blocks == len(denoiser.blocks)
    assert sizes.text_tokens == model.text.encode(model.text.examples[0]).shape[0]
    state = denoiser.embed(torch.zeros(1, *spec.chunk_shape), torch.zeros(1, spec.chunk_latents))
    assert sizes.hidden_values == sum(tensor.numel() for tensor in state)
    assert sizes.tokens == state.hidden.shape[1]
    assert sizes.flow_values == denoiser.output_layer(state, spec.chunk_shape[1:]).numel()


def test_weights_add_up_to_the_models(sizes: ModelSizes, model: Model) -> None:
    parts = {name: parameter.numel() for name, parameter in model.denoiser.model.named_parameters()}

    def count(*prefixes: str) -> int:
        return sum(number for name, number in parts.items() if name.startswith(prefixes))

    assert [count(f"blocks.{n}.") for n in range(sizes.blocks)] == [sizes.block_values] * sizes.blocks
    assert count("condition_embedder.time_proj", "condition_embedder.text_embedder") == sizes.shared_values
    assert count("patch_embedding", "condition_embedder.time_embedder") == sizes.embed_values
    assert count("proj_out", "scale_shift_table") == sizes.output_values
    ours = sizes.embed_values + sizes.shared_values + sizes.output_values + sizes.blocks * sizes.block_values
    assert ours == sum(parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
def test_planned_caches_are_as_large_as_those_of_open_stages(
    model: Model, kv_context: KVContext, steps: Literal[2, 4], stages: int
) -> None:
    plan = make(ModelConfig(kv_context=kv_context, steps=steps), PlanJob(stages=stages, sessions=2, decode="head"))
    for (first, last), row in zip(plan.layout.blocks, plan.memory, strict=True):
        stage = ModelRunner(model.part(first, last), torch.device("cpu"), row.rank, stages)
        for session in range(2):
            stage.open(session, steps=steps, kv_context=kv_context)
            stage.set_text(session, 0, model.text.encode(model.text.examples[0]), oldest=0)
        kept = [(walk.nbytes(each.state), *each.text[0]) for each in stage.sessions.values()]
        assert row.caches == sum(size + sum(kv.key.nbytes + kv.value.nbytes for kv in text) for size, *text in kept)


def test_the_estimate_counts_the_operations_of_the_real_model(sizes: ModelSizes, model: Model) -> None:
    """With a slow processor and infinitely fast memory, seconds are operations."""
    spec, denoiser = model.spec, model.denoiser
    slow = Ceilings(tflops=1e-9, gbps=1e30)
    found = estimate(sizes, slow, kv_context="same_step", max_rows=1, value_bytes=4)
    past = torch.zeros(1, sizes.tokens * sizes.spec.window_chunks("same_step"), denoiser.heads, denoiser.head_dim)
    text = denoiser.text(torch.zeros(1, sizes.text_tokens, sizes.text_dim))
    state = denoiser.embed(torch.zeros(1, *spec.chunk_shape), torch.zeros(1, spec.chunk_latents))
    modulation = denoiser.modulation(state.time)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            weights = denoiser.weights(0)
            query, _, _ = denoiser.before_attention(weights, state.hidden, modulation)
            mixed = attend(query, past, past)
            denoiser.after_attention(weights, state.hidden, modulation, text[0], mixed, attend)
        with FlopCounterMode(display=False) as decoding:
            model.decoder.decode(torch.zeros(1, *spec.chunk_shape), model.decoder.new_memory())
    assert found.block_s[0][0] * 1e3 == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert found.decode_s * 1e3 == pytest.approx(decoding.get_total_flops(), rel=1e-6)


def test_memory_holds_everything_once_and_where_it_lives(sizes: ModelSizes) -> None:
    model = sizes.embed_values + sizes.output_values + sizes.blocks * sizes.block_values
    for place, home in (("head", 0), ("own-stream", 0), ("last", 3), ("dedicated", 4)):
        load = Workload(4, 2, 4, "same_step", 3)
        rows = memory(sizes, choose_layout(costs(sizes.blocks), load, place), load, Storage(2))
        assert [row.rank for row in rows] == list(range(5 if place == "dedicated" else 4))
        assert [row.rank for row in rows if "decode" in row.role] == [home]
        stored = model + 4 * sizes.shared_values + sizes.text_values + sizes.decoder.weights
        assert sum(row.weights for row in rows) == 2 * stored
        caches = 2 * 2 * sizes.cache_values(sizes.blocks, steps=4, kv_context="same_step")
        assert sum(row.caches for row in rows) == caches
        assert [row.decoding for row in rows if row.decoding] == [2 * 2 * sizes.decoder.remembered]
        assert rows[home].decoding
    layout = choose_layout(costs(sizes.blocks), load, "head")
    one_row = memory(sizes, layout, Workload(4, 1, 4, "same_step", 1), Storage(2))
    assert [row.activations * 3 for row in one_row] == [row.activations for row in rows[:4]]


def test_a_plan_in_8_bits_has_smaller_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line; the rest of the memory stays."""
    found = []
    for mode in ("none", "int8"):
        assert main.main(["plan", "--stages", "2", "--dtype", "bfloat16", "--json", "--quantize", mode]) == 0
        found.append([rank["bytes"] for rank in json.loads(capsys.readouterr().out)["ranks"]])
    for whole, small in zip(*found, strict=True):
        assert small["weights"] < whole["weights"] * 0.8
        assert [small[part] for part in ("caches", "activations")] == [
            whole[part] for part in ("caches", "activations")
        ]


# ---- where times come from -------------------------------------------------------------------------------------

PROFILE = {
    "block_s": [0.1, 0.1, 0.1, 0.2, 0.3, 0.4],
    "embed_s": 0.05,
    "head_s": [0.01, 0.015],
    "decode_s": 0.2,
    "link_s": 0,
}


def write(path: Path, tree: object) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_a_profile_is_read_row_by_row(sizes: ModelSizes, tmp_path: Path) -> None:
    found = read_profile(write(tmp_path / "p.json", PROFILE), sizes, max_rows=2)
    assert found.block_s == (*[(0.1, 0.2)] * 3, (0.2, 0.4), (0.3, 0.6), (0.4, 0.8)), "more rows in proportion"
    assert (found.embed_s, found.head_s) == ((0.05, 0.1), (0.01, 0.015))
    assert (found.decode_s, found.link_s, found.flow_s) == (0.2, 0, 0)
    plan = make(SAME_STEP, PlanJob(stages=2, profile=tmp_path / "p.json", decode="own-stream"))
    assert plan.layout.blocks == ((0, 4), (4, 6))
    assert [times[0] for times in plan.layout.stage_s] == pytest.approx([0.55, 0.71])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"link_s": None, "embed_s": None}, r"missing 'embed_s' \(.*\), 'link_s' \(seconds of a message"),
        ({"blocks": [1]}, "unknown key 'blocks'; known are block_s"),
        ({"block_s": [0.1, 0.2]}, "block_s is 2 entries, but must be a list of 6"),
        ({"block_s": 0.1}, "block_s is 0.1, but must be a list of 6"),
        ({"block_s": [0.1, 0, 0.1, 0.1, 0.1, 0.1]}, r"block_s\[1\] is 0, but must be seconds above 0"),
        ({"block_s": [0.1, "x", 0.1, 0.1, 0.1, 0.1]}, r'block_s\[1\] is "x"'),
        ({"decode_s": -1}, "decode_s is -1, but must be seconds of 0 or more"),
        ({"decode_s": True}, "decode_s is true"),
        ({"link_s": 10**400}, "link_s is 10{59}, but must be seconds of 0 or more"),
        ({"block_s": [0.1, [10**400, 1], *[0.1] * 4]}, r"block_s\[1\]\[0\] is 10{59}, but must be seconds above 0"),
        ({"embed_s": [0.1]}, "embed_s has 1 entries, but --max-rows is 2"),
    ],
)
def test_a_profile_that_cannot_be_is_told_by_its_key(
    sizes: ModelSizes, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    tree = {key: value for key, value in {**PROFILE, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        read_profile(write(tmp_path / "p.json", tree), sizes, max_rows=2)


def test_a_profile_that_is_no_profile_is_told(sizes: ModelSizes, tmp_path: Path) -> None:
    for text, words in (("[1]", "must hold a JSON object"), ("{", "not valid JSON"), ("\xff", "not valid JSON")):
        (tmp_path / "p.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=words):
            read_profile(tmp_path / "p.json", sizes, max_rows=1)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        read_profile(tmp_path / "none.json", sizes, max_rows=1)


def test_more_device_never_takes_longer_and_rows_share_the_weights(sizes: ModelSizes) -> None:
    def block(tflops: float, gbps: float) -> tuple[float, ...]:
        found = estimate(sizes, Ceilings(tflops, gbps), kv_context="clean", max_rows=4, value_bytes=2)
        return found.block_s[0]

    assert block(1e-3, 1)[0] > block(1e-2, 1)[0] > block(1, 1)[0] > block(1, 1e9)[0]
    bound_by_memory = block(1e9, 1e-3)
    assert bound_by_memory[0] < bound_by_memory[3] < 4 * bound_by_memory[0]


# ---- the model's folder ----------------------------------------------------------------------------------------


def test_another_folder_is_read_and_its_faults_are_told(tmp_path: Path, sizes: ModelSizes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.WEIGHTS, folder)
    assert read_sizes(str(folder)).block_values == sizes.block_values
    config = folder / "transformer" / "config.json"
    good = json.loads(config.read_text())

    def broken(**change: Any) -> str:
        write(config, {key: value for key, value in {**good, **change}.items() if value is not None})
        with pytest.raises(ConfigError) as caught:
            read_sizes(str(folder))
        return str(caught.value)

    assert "config.json: the key 'ffn_dim' is missing" in broken(ffn_dim=None)
    assert "num_layers is 0, but must be a whole number, at least 1" in broken(num_layers=0)
    assert "patch_size is [1, 2], but must be a list of 3" in broken(patch_size=[1, 2])
    write(config, good)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a safetensors file, or cut off"):
        read_sizes(str(folder))
    config.unlink()
    with pytest.raises(ConfigError, match=r"has no transformer/config\.json"):
        read_sizes(str(folder))


# ---- what comes out --------------------------------------------------------------------------------------------


def test_the_plan_says_what_was_asked_for() -> None:
    outcome = make(SAME_STEP, PlanJob(stage_times=QUARTERS, decode_time=0.0, sessions=1))
    text = "\n".join(as_text(outcome))
    assert "tiny: 4 stages, 1 session, KV context same_step, 4 steps" in text
    assert "times: stage times given by hand" in text
    assert "latency      4 s" in text and "first chunk  after 4 s" in text
    assert "an estimate from FLOPs and bytes at 400 TFLOP/s" in "\n".join(as_text(make(SAME_STEP, PlanJob())))


def test_a_shorter_window_is_planned_with() -> None:
    def caches(**asked: int) -> int:
        return make(ModelConfig(name="self-forcing", **asked), PlanJob(stages=1)).memory[0].caches  # type: ignore[arg-type]

    chunk = caches(window=9) - caches(window=6)
    assert chunk > 0 and caches() - caches(window=6) == 5 * chunk
    kept = chunk // 2  # the sink's keys, un-rotated
    assert caches(window=7, sink=1) == caches(window=9) + kept, "the sink's chunk is kept whole"
    with pytest.raises(ConfigError, match="--window is 6 latent frames; it holds the sink and a chunk, so at least 7"):
        caches(window=6, sink=4)


def test_a_step_that_may_be_left_out_is_planned_with_and_without() -> None:
    """Krea's fifth, of the first chunk too."""

    def first_chunk_s(steps: int | None) -> float:
        model = ModelConfig(name="krea-realtime-14b", steps=steps)
        return make(model, PlanJob(stages=1, stage_times="1", decode_time=0.0)).run.figures.first_chunk_s

    assert (first_chunk_s(None), first_chunk_s(4)) == (5, 4)


def test_json_holds_the_whole_plan_and_is_json() -> None:
    outcome = make(SAME_STEP, PlanJob(stage_times=QUARTERS, decode="dedicated", decode_time=0.5))
    tree = json.loads(json.dumps(as_tree(outcome), allow_nan=False))
    assert [rank["blocks"] for rank in tree["ranks"]] == [[0, 2], [2, 4], [4, 5], [5, 6], []]
    assert tree["ranks"][4]["role"] == ["decode"]
    assert tree["ranks"][4]["occupancy"] == pytest.approx(0.5, abs=0.03)
    for rank in tree["ranks"]:
        parts = rank["bytes"]
        assert parts.pop("total") == sum(parts.values())
    assert tree["figures"]["chunks_per_s"] == pytest.approx(1, rel=0.03)
    assert tree["figures"]["frames_per_s"] == pytest.approx(12, rel=0.03)
    assert tree["figures"]["latency_s"] == pytest.approx(4.5, rel=0.1)


@pytest.mark.parametrize(("decode", "keeps_busy"), [("head", 0), ("last", 3), ("own-stream", None)])
def test_a_trace_has_a_track_per_stage_and_one_for_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decode: str, keeps_busy: int | None
) -> None:
    path = tmp_path / "trace.json"
    job = PlanJob(stage_times=QUARTERS, decode=decode, decode_time=0.1, trace=path, chunks=8)
    assert plan_report.run(SAME_STEP, job) == 0
    assert "throughput" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "stage 3", 4: "decode"}
    work = [e for e in events if e["ph"] == "X"]
    first = {"name": "session 0 chunk 0 step 0", "tid": 0, "ts": 0.0, "dur": 250_000.0}
    assert first.items() <= work[0].items()
    assert work[0]["args"] == {"rows": [{"session": 0, "chunk": 0, "step": 0}]}
    for track in names:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == track)
        assert spans and all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
    decoding = {e["tid"] for e in work if e["name"].endswith("decode")}
    assert decoding == {4} | ({keeps_busy} if keeps_busy is not None else set())


def test_rows_that_share_a_forward_are_one_event() -> None:
    """Where further rows cost little: what pays is `pipeline.scheduler.row_limit`'s."""
    run = simulate(Setup(stage_s=((1.0, 1.1, 1.2),), streams=(Stream(4, "clean"),) * 6, max_rows=3, chunks=8))
    full = [bar for bar in trace.bars(run.spans, 1) if len(bar.rows) == 3]
    assert full[0].label == "session 0 chunk 0 step 0 + session 1 chunk 0 step 0 + session 2 chunk 0 step 0"


@pytest.mark.slow
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    plan_report.run(SAME_STEP, PlanJob(stage_times=QUARTERS, decode_time=0.1, plot=path, chunks=8))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'streamdiff\[plot\]'"):
        make(SAME_STEP, PlanJob(plot=tmp_path / "plan.png"))


# ---- what cannot be planned ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (PlanJob(stages=7), "stages is 7, but must be 1 to 6: every stage needs a block"),
        (PlanJob(stages=0), "--stages is 0"),
        (PlanJob(sessions=0), "--sessions is 0"),
        (PlanJob(max_rows=-1), "--max-rows is -1"),
        (PlanJob(chunks=1), "--chunks is 1, but must be 8 to 10,000"),
        (PlanJob(stage_times="0.1,0.1"), "--stage-times is '0.1,0.1', but must be 4 times"),
        (PlanJob(stage_times="0.1,0.1,0.1,0"), "each above 0"),
        (PlanJob(stage_times="0.1,0.1,0.1,-1"), "each above 0"),
        (PlanJob(stage_times="0.1,0.1,0.1,x"), "each above 0"),
        (PlanJob(stage_times=QUARTERS, profile=Path("p.json")), "both given"),
        (PlanJob(stage_times=QUARTERS, tflops=3), "--tflops is for the estimate"),
        (PlanJob(tflops=0), "--tflops is 0, but must be a number above 0"),
        (PlanJob(gbps=float("nan")), "--gbps is nan"),
        (PlanJob(link_time=-1), "--link-time is -1"),
        (PlanJob(decode_time=float("inf")), "--decode-time is inf"),
        (PlanJob(decode="roof"), "--decode-rank is 'roof', but must be one of auto, head, last, dedicated, own-stream"),
        (PlanJob(dtype="int8"), "--dtype is 'int8'"),
        (PlanJob(trace=Path("nowhere/t.json")), "lies in nowhere, which is no folder"),
        (PlanJob(trace=Path(".")), "is a folder"),
        (PlanJob(trace=Path("plan.svg"), plot=Path("./plan.svg")), "--trace and --plot are both 'plan.svg'; give each"),
        (PlanJob(plot=Path("plan.bmp")), "must end in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_planned_is_told_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, job: PlanJob, words: str
) -> None:
    def never(setup: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(plan_report, "simulate", never)
    with pytest.raises(ConfigError) as caught:
        make(SAME_STEP, job)
    assert words in str(caught.value)


def test_steps_that_the_model_lacks_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.WEIGHTS, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["stream"]["steps"] = [2]
    write(folder / "model_index.json", index)
    assert make(ModelConfig(name=str(folder)), PlanJob()).load.steps == 2
    with pytest.raises(ConfigError, match=r"--steps is 4; model .* has 2 \(without --steps: 2\)"):
        make(ModelConfig(name=str(folder), steps=4), PlanJob())
    with pytest.raises(ConfigError, match=r"model wan2.1-t2v-1.3b has no denoise steps of its own"):
        make(ModelConfig(name="wan2.1-t2v-1.3b"), PlanJob())
    with pytest.raises(ConfigError, match="--model is 'tinny'; it can be `tiny`"):
        make(ModelConfig(name="tinny"), PlanJob())
