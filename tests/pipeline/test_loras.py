"""LoRAs that sessions load while they play: as if merged, beside others as alone, on any number of stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import HashStore

from streamdiff.core import exact_scale, lora_id
from streamdiff.engine import messages
from streamdiff.engine.change_log import read_log
from streamdiff.engine.engine import Engine
from streamdiff.models.model import Model
from streamdiff.models.spec import Lora
from streamdiff.models.transformer.lora import LAYERS
from streamdiff.models.transformer.quantization import is_quantized, quantize
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import open_lora
from streamdiff.pipeline.distributed.state_exchange import StoreExchange
from streamdiff.pipeline.loras import LoraFolder
from streamdiff.pipeline.planner.partition import rows_carried, split_evenly
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.playing import local_links, same
from tests.small import CPU, RED, small_model

MODEL = small_model(3, layers=3)
ANSWERS = messages.Accepted | messages.Closed | messages.Opened | messages.Refused | messages.Saved
CHUNK, CHUNKS = MODEL.spec.chunk_frames, 6
SHAPES = {name: tuple(each.shape) for name, each in MODEL.denoiser.model.state_dict().items()}


def write_lora(path: Path, seed: int, rank: int = 3, layers: Sequence[str] = LAYERS) -> None:
    """A LoRA of these layers of all blocks, strong enough to be seen, with an alpha."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for block in range(MODEL.blocks):
        for layer in layers:
            rows, columns = SHAPES[f"blocks.{block}.{layer}.weight"]
            name = f"transformer.blocks.{block}.{layer}"
            state[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / 4
            state[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 4
            state[f"{name}.alpha"] = torch.tensor(rank * 0.75)
    save_file(state, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate("xyz"):
        write_lora(folder / f"{name}.safetensors", seed)
    write_lora(folder / "some.safetensors", 9, 2, ("attn2.to_v", "ffn.net.2"))
    return folder


def merged(folder: Path, **scales: float) -> Model:
    """The model with LoRAs merged by the code that does so at the start."""
    model = copy.deepcopy(MODEL.denoiser.model)
    for name, scale in scales.items():
        adapter = open_lora(Lora(folder / f"{name}.safetensors", scale), SHAPES)
        for weight, each in model.named_parameters():
            if (change := adapter.change(weight, CPU)) is not None:
                each.data += change.reshape(each.shape)
    return replace(MODEL, denoiser=WanDenoiser(model))


OPEN: list[Engine] = []


@pytest.fixture(autouse=True)
def closes() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Played:
    """An engine whose sessions play; `latents` of finished chunks by session, and what was answered."""

    def __init__(self, folder: Path | None, model: Model = MODEL, stages: int = 1, rows: int = 1) -> None:
        parts = local_parts(model, CPU, stages, local_links(model, stages, rows_carried(model.spec, rows)))
        exchange = StoreExchange(HashStore())
        for stage in (parts.stage, *(worker.stage for worker in parts.local)):
            stage.exchange = exchange  # as between processes
        self.pipeline = StreamingPipeline(model, CPU, max_rows=rows, parts=parts)
        if folder is not None:
            self.pipeline.loras = LoraFolder(self.pipeline, str(folder), 2, split_evenly(model.blocks, stages))
        self.engine = Engine(self.pipeline, 3 * CHUNK)
        OPEN.append(self.engine)
        self.events: list[Any] = []
        self.latents: dict[int, dict[int, torch.Tensor]] = {}
        self.given: list[tuple[int, dict[int, float]]] = []  # chunk, and the LoRAs that hold from it on
        self.shown: dict[str, int] = {}
        sample = self.pipeline.sample

        def kept(wait_s: float = 0.0) -> list[Any]:
            finished = sample(wait_s)
            for row, latents in finished:
                self.latents.setdefault(row.session, {})[row.chunk] = latents.clone()
            return finished

        give = self.pipeline.set_conditioning

        def set_conditioning(session: int, conditioning: torch.Tensor, **how: Any) -> None:
            self.given.append((self.pipeline.next_chunk(session), how["loras"]))
            give(session, conditioning, **how)

        self.pipeline.sample, self.pipeline.set_conditioning = kept, set_conditioning  # type: ignore[method-assign]

    def tell(self, command: Any) -> Any:
        """Carry out a command; its answer."""
        self.events += (events := self.engine.handle(command))
        while not (answers := [each for each in events if isinstance(each, ANSWERS)]):
            futures.wait(self.engine.encodings())
            self.events += (events := self.engine.settle())
        return answers[-1]

    def refusal(self, command: Any) -> tuple[str, str]:
        """Field and reason of its refusal."""
        answer = self.tell(command)
        assert isinstance(answer, messages.Refused), answer
        return answer.field, answer.reason

    def step(self) -> None:
        """A step of the engine, whose frames are shown at once."""
        self.events += (events := self.engine.step(0.1))
        for each in events:
            if isinstance(each, messages.FrameBatch):
                self.shown[each.session] = self.shown.get(each.session, 0) + len(each.pictures)
                self.engine.handle(messages.Shown(each.session, each.first + len(each.pictures)))

    def play(self, chunks: int, *sessions: str) -> list[torch.Tensor]:
        """Latents of so many chunks of the first session, when all are so far."""
        while any(self.shown.get(each, 0) < chunks * CHUNK for each in sessions):
            self.step()
        return [self.latents[self.engine._sessions[sessions[0]].slot][chunk] for chunk in range(chunks)]


def alone(folder: Path, scales: dict[str, float], model: Model = MODEL) -> list[torch.Tensor]:
    played = Played(folder, model)
    assert isinstance(played.tell(messages.Open("s", RED, 3, loras=scales)), messages.Opened)
    return played.play(CHUNKS, "s")


def close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scales", [{"x": 0.7}, {"x": 1.0, "y": 0.3}, {"some": 2.0}])
def test_a_session_with_loras_equals_a_model_that_has_them_merged(
    folder: Path, scales: dict[str, float], fused: bool
) -> None:
    model = replace(MODEL, denoiser=WanDenoiser(copy.deepcopy(MODEL.denoiser.model)).fuse()) if fused else MODEL
    live = alone(folder, scales, model)
    assert close(live, alone(folder, {}, merged(folder, **scales))) and not close(live, alone(folder, {}))


def test_sessions_with_different_loras_in_one_forward_equal_each_alone_on_any_number_of_stages(folder: Path) -> None:
    of = {"a": {"x": 0.8}, "b": {"y": 1.5}, "c": {}}
    for stages, rows in ((1, 1), (1, 4), (3, 4)):
        played = Played(folder, stages=stages, rows=rows)
        for name, scales in of.items():
            played.tell(messages.Open(name, RED, 3, loras=scales))
        played.play(CHUNKS, *of)
        assert (played.pipeline.scheduler.counts.rows[3] > 0) is (rows > stages == 1), "whether they shared forwards"
        for name, scales in of.items():
            own = played.play(CHUNKS, name)
            assert (same if rows == 1 else close)(own, alone(folder, scales)), "rows of a forward round otherwise"


@pytest.mark.parametrize("stages", [1, 3])
def test_a_scale_comes_over_chunks_from_the_one_that_the_receipt_names_and_its_log_plays_again(
    folder: Path, stages: int, tmp_path: Path
) -> None:
    played = Played(folder, stages=stages)
    played.tell(messages.Open("s", RED, 3, loras={"y": 0.5}))
    played.play(1, "s")
    accepted = played.tell(messages.SetLora("s", "x", 1.0, 3, "r"))
    given = played.given
    played.play(CHUNKS, "s")
    applied = next(
        each for each in played.events if isinstance(each, messages.Applied) and each.epoch == accepted.epoch
    )
    x, y = (lora_id(played.pipeline.loras.read(name).label) for name in "xy")
    assert given == [(0, {y: 0.5}), *((applied.chunk + n, {y: 0.5, x: exact_scale((n + 1) / 3)}) for n in range(3))]
    assert played.tell(messages.SetLora("s", "y", None, 1, "out")).epoch > accepted.epoch
    made = played.play(CHUNKS + 3, "s")
    assert given[-1][1] == {x: 1.0}, "it is out"
    (tmp_path / "log").write_bytes(played.tell(messages.GetLog("s", "log")).data)
    log = read_log(tmp_path / "log")
    again = Played(folder, stages=4 - stages)
    again.tell(messages.Open("s", log.header.prompt, 3, changes=log.changes, facts=log.header.model))
    assert same(again.play(CHUNKS + 3, "s"), made) and again.given == given
    assert not close(made[:CHUNKS], alone(folder, {"y": 0.5}))
    for each in (played, again):
        each.tell(messages.Reset("s", 3, "reset"))
        each.latents.clear()
        each.shown.clear()
    assert close(played.play(2, "s"), alone(folder, {"x": 1.0})[:2]), "a reset keeps what it has"


def test_a_saved_session_continues_with_its_loras_elsewhere_and_needs_the_same_files(
    folder: Path, tmp_path: Path
) -> None:
    played = Played(folder, stages=3)
    played.tell(messages.Open("s", RED, 3, loras={"x": 1.0}))
    played.play(2, "s")
    played.engine.handle(messages.Save("s", "save"))
    while not (saved := [each for each in played.events if isinstance(each, messages.Saved)]):
        played.step()
    played.play(CHUNKS + 2, "s")
    after = Played(folder)
    opened = after.tell(messages.Open("t", "", snapshot=bytes(saved[0].data)))
    assert opened.loras == {"x": 1.0}
    while len(made := after.latents.get(0, {})) < 3:
        after.step()
    assert all(torch.equal(latents, played.latents[0][chunk]) for chunk, latents in made.items())
    write_lora(tmp_path / "x.safetensors", 77)
    for other in (Played(None), Played(tmp_path)):
        refused = other.refusal(messages.Open("t", "", snapshot=bytes(saved[0].data), request="open"))
        assert refused[0] == "lora" and "'x'" in refused[1]


def test_what_cannot_be_is_refused_by_name_and_the_session_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    for name in "xyz":
        (tmp_path / f"{name}.safetensors").write_bytes((folder / f"{name}.safetensors").read_bytes())
    save_file({"transformer.blocks.0.attn1.to_q.diff": torch.zeros(24, 24)}, tmp_path / "full.safetensors")
    save_file({"transformer.norm_out.lora_A.weight": torch.zeros(2, 3)}, tmp_path / "half.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((folder / "x.safetensors").read_bytes()[:3000])
    wide = {f"transformer.blocks.0.attn1.to_q.lora_{half}.weight": torch.ones(9, 9) for half in "AB"}
    save_file(wide, tmp_path / "wide.safetensors")
    played = Played(tmp_path)
    played.tell(messages.Open("s", RED, 3, loras={"x": 1.0}))
    for name, scale, over, field, words in (
        ("w", 1.0, 1, "lora", "has cut, full, half"), ("../x", 1.0, 1, "lora", "../x"), ("cut", 1.0, 1, "lora", "cut"),
        ("x.safetensors", 1.0, 1, "lora", ""), ("wide", 1.0, 1, "lora", "24 x 24"), ("half", 1.0, 1, "lora", ""),
        ("full", 1.0, 1, "lora", "merge it"), ("x", 2.1, 1, "scale", "2.1"), ("x", float("nan"), 1, "scale", "nan"),
        ("x", 1.0, 0, "over", "0"), ("y", None, 1, "lora", "the session has x"),
    ):  # fmt: skip
        refused = played.refusal(messages.SetLora("s", name, scale, over, "r"))
        assert refused[0] == field and words in refused[1]
    assert same(played.play(CHUNKS, "s"), alone(folder, {"x": 1.0}))
    played.tell(messages.Open("t", RED, 3, loras={"y": 1.0}))
    one_more = messages.SetLora("s", "z", 1.0, 1, "r")
    assert "x, y are loaded, and model.max_loras is 2" in played.refusal(one_more)[1]
    played.tell(messages.Close("t"))
    assert isinstance(played.tell(one_more), messages.Accepted), "one that nobody uses makes room"
    assert Played(None).refusal(messages.Open("s", RED, 3, loras={"x": 1.0}, request="r"))[0] == "lora"


def test_beside_weights_in_8_bits(folder: Path) -> None:
    own = copy.deepcopy(MODEL.denoiser.model)
    for name, weight in own.named_parameters():
        if is_quantized(name, tuple(weight.shape)):
            owner, _, leaf = name.rpartition(".")
            setattr(own.get_submodule(owner), leaf, nn.Parameter(quantize(weight.data, "int8", name), False))
    model = replace(MODEL, denoiser=WanDenoiser(own))
    plain, live = alone(folder, {}, model), alone(folder, {"x": 1.0}, model)
    expected = alone(folder, {}, merged(folder, x=1.0))
    far, off = (torch.stack(each).sub(torch.stack(expected)).abs().mean() for each in (live, plain))
    assert 5 * far < off
