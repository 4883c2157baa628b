"""Offloaded blocks compute what blocks on the device compute, to the bit, and no copy touches what is being read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.runner.block_offload import BUFFERS, CopyAhead, offload
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.pipeline.distributed.fake_device import RUBBISH, Device, World
from tests.pipeline.playing import Order, local_ring, play
from tests.small import CPU, RED, save_model, small_model, small_transformer, small_world

LAYERS = 5
SEEDS = range(30)


# ---- the order of copies, on a device that does everything as late, or as early, as it may --------------------------


def wrong_reads(orders: list[list[int]]) -> list[str]:
    """What blocks read that is not their own weights, by seed. A copy fills a buffer with rubbish first, and comes in
    two halves; a block reads each half at its beginning and at its end."""
    found: list[str] = []
    for seed in SEEDS:
        device = Device()
        world = World([device], seed)
        buffers = [[RUBBISH, RUBBISH] for _ in range(BUFFERS)]

        def copy(layer: int, slot: int, device: Device = device, buffers: list[list[int]] = buffers) -> None:
            stream = device.current()
            stream.run(lambda: buffers[slot].__setitem__(slice(2), [RUBBISH, RUBBISH]))
            for half in (0, 1):
                stream.run(lambda half=half: buffers[slot].__setitem__(half, layer))

        ahead = CopyAhead(LAYERS, device, copy)

        def read(layer: int, slot: int, half: int, buffers: list[list[int]] = buffers, seed: int = seed) -> None:
            if buffers[slot][half] != layer:
                found.append(f"seed {seed}: block {layer} reads {buffers[slot][half]}")

        for order in orders:
            for layer in order:
                slot = ahead.take(layer)
                for half in (0, 1, 0, 1):
                    device.computing.run(lambda slot=slot, layer=layer, half=half: read(layer, slot, half))
                world.a_while(8 * (seed % 2))  # even seeds: the host is done before anything runs
        world.to_the_end()
        assert world.left == 0, "something waits for ever"
    return found


FORWARDS = [list(range(LAYERS))] * 4


def test_every_block_reads_its_own_weights() -> None:
    assert wrong_reads(FORWARDS) == []


def test_a_block_is_copied_while_the_one_before_it_computes() -> None:
    """One ahead, also from the last block to the first of the next forward, and each block once per forward."""
    device, copies = Device(), []
    World([device], 0)
    ahead = CopyAhead(LAYERS, device, lambda layer, slot: copies.append((layer, slot)))
    under_way = []
    for layer in [*range(LAYERS), *range(LAYERS)]:
        ahead.take(layer)
        under_way.append(copies[-1][0])
    assert under_way == [1, 2, 3, 4, 0] * 2
    assert len(copies) == 1 + 2 * LAYERS
    assert [slot for _, slot in copies] == [n % BUFFERS for n in range(len(copies))]


# ---- real blocks ---------------------------------------------------------------------------------------------------


def flows(model: Model, stages: int = 1) -> list[Tensor]:
    """The flow of each step of five chunks, window rolling, under two prompts."""
    parts = [
        ModelRunner(model.part(stage * LAYERS // stages, (stage + 1) * LAYERS // stages), CPU, stage, stages)
        for stage in range(stages)
    ]
    text = model.text.encode(RED)
    for part in parts:
        part.open(0, steps=2, kv_context="clean")
        part.set_text(0, 0, text, 0)
        part.set_text(0, 1, text.flip(0), 0)
    generator, found = torch.Generator().manual_seed(1), []
    for chunk in range(5):
        for step in range(3):
            row = MicroStep(0, chunk, step, 2, chunk // 3)
            latents = torch.randn(1, *model.spec.chunk_shape, generator=generator)
            time = torch.full((1, model.spec.chunk_latents), 500.0 - 200 * step)
            given = latents, parts[0].denoiser.time_embedding(time)
            for part in parts:
                given = part.forward([row], given)
            found.append(given[0].clone())
    return found


def fresh(fused: bool = True) -> Model:
    denoiser = WanDenoiser(small_transformer(7, layers=LAYERS))
    return replace(small_model(), denoiser=denoiser.fuse() if fused else denoiser)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_offloaded_blocks_give_the_same_bits(fused: bool, stages: int) -> None:
    plain, offloaded = fresh(fused), fresh(fused)
    offload(offloaded.denoiser, CPU)
    for here, there in zip(flows(plain, stages), flows(offloaded, stages), strict=True):
        assert torch.equal(here, there)


def test_a_world_whose_blocks_differ_is_offloaded() -> None:
    plain, offloaded = small_world(2, layers=4), small_world(2, layers=4)
    source = offload(offloaded.denoiser, CPU).block_source
    assert len(set(source._sizes)) == 2
    orders = {0: Order(RED, 5, 4, "clean", keys={1: [{"walk": 1.0}]})}
    here, there = (play(local_ring(model, CPU, 2), model, orders, 5)[0] for model in (plain, offloaded))
    assert all(map(torch.equal, here, there))


def test_weights_lie_in_host_memory_once_and_two_blocks_on_the_device() -> None:
    model = fresh()
    block = sum(each.nbytes for each in model.denoiser.blocks[0].parameters())
    source = offload(model.denoiser, CPU).block_source
    assert len(source._buffers) == 2 and block <= source.block_bytes < 1.5 * block + 20 * 256
    slabs = {each.untyped_storage().data_ptr() for own in model.denoiser.blocks for each in own.parameters()}
    assert slabs == {each.untyped_storage().data_ptr() for each in source._host}, "nothing is held twice"
    resident = [kind.block for own in source._resident for kind in own.values()]
    on_device = {each.untyped_storage().data_ptr() for block in resident for each in block.parameters()}
    assert on_device == {each.data_ptr() for each in source._buffers}


# ---- from the configuration ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stream_of_an_offloaded_model_has_the_same_pictures(tmp_path: Path) -> None:
    save_model(tmp_path, layers=4)
    name = str(tmp_path)

    def pictures(config: ModelConfig) -> list[Tensor]:
        runtime = build_pipeline(config)
        runtime.open(0, runtime.text.encode(RED), seed=3, epoch=0, steps=2, kv_context="clean")
        found: list[Tensor] = []
        while len(found) < 3:
            runtime.set_frame_credit(0, 100)
            found += [torch.as_tensor(frames.pictures) for frames in runtime.step(wait_s=1.0)]
        assert (runtime.model.denoiser.block_source is not None) == (config.offload == "blocks")
        runtime.close()
        return found[:3]

    plain, offloaded = (pictures(ModelConfig(name=name, device="cpu", offload=how)) for how in ("none", "blocks"))
    for here, there in zip(plain, offloaded, strict=True):
        assert torch.equal(here, there)


def test_no_graphs_are_made_of_offloaded_blocks() -> None:
    assert plan_load(ModelConfig(compile="on"), CPU).preallocated is not None
    assert plan_load(ModelConfig(compile="on", offload="blocks"), CPU).preallocated is None
