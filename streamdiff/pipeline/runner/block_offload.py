"""Block offload: the transformer's blocks lie in pinned host memory, and are copied to the device one block ahead.

The device holds two buffers of one block each. While a block computes from one of them, the next block is copied into
the other on a stream of its own; after the last block comes the first one again, for the next forward. The numbers are
those of the path without offload, to the bit: weights are copied, never changed.

Streams and copies are given (`CopyAhead`), so that the same order runs on a CPU, where nothing is to be waited for, and
under tests that play an adversary. CUDA graphs are not made of such a stage: a replay has no host that starts copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import copy, deepcopy
from itertools import chain
from math import prod
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from streamdiff.device import host_memory
from streamdiff.errors import ConfigError
from streamdiff.models.transformer.wan import BlockWeights, Fused, WanDenoiser
from streamdiff.pipeline.distributed.cuda_streams import CudaStreams, Event, Streams

BUFFERS = 2
_ALIGNMENT = 256
"""Bytes at whose multiples tensors begin, as in torch's own device memory."""
_FUSED = ("to_q", "to_k", "to_v")
Copy = Callable[[int, int], None]
"""Copies block `layer` into buffer `slot`; called with the copy stream as the current one."""


class CopyAhead:
    """The order of copies: which block goes into which buffer, and what waits for what. Pure but for `streams`."""

    def __init__(self, blocks: int, streams: Streams, copy: Copy) -> None:
        self.blocks = blocks
        self._streams, self._copy = streams, copy
        self._stream = streams.new()
        self._read = [streams.event() for _ in range(BUFFERS)]
        self._copied = [streams.event() for _ in range(BUFFERS)]
        self._holds: list[int | None] = [None] * BUFFERS
        self._slot = BUFFERS - 1

    def take(self, layer: int) -> int:
        """The buffer that holds block `layer` for what the current stream is given until the next call; the block after
        it is on its way into the other one then. Blocks taken in order, again and again, are always on their way
        already; another order costs a wait, never a wrong block. Mutates: self."""
        slot = self._holds.index(layer) if layer in self._holds else (self._slot + 1) % BUFFERS
        self._fetch(layer, slot)
        self._copied[slot].wait(self._streams.current())
        self._fetch((layer + 1) % self.blocks, (slot + 1) % BUFFERS)
        self._slot = slot
        return slot

    def _fetch(self, layer: int, slot: int) -> None:
        """Start to copy block `layer` into buffer `slot`, once what has been given to the current stream, which may
        read the block there before, is done. Mutates: self."""
        if layer in self._holds:
            return
        self._read[slot].record(self._streams.current())
        self._read[slot].wait(self._stream)
        with self._streams.use(self._stream):
            self._copy(layer, slot)
        self._copied[slot].record(self._stream)
        self._holds[slot] = layer


class OffloadedBlocks:
    """Weights of transformer blocks in host memory, and buffers of the device that they are copied to: a
    `BlockSource`."""

    def __init__(self, blocks: list[BlockWeights], device: torch.device, streams: Streams | None = None) -> None:
        """Moves the weights of `blocks`, which lie in host memory, into slabs of pinned memory, one block after the
        other; `device` is where they are used. Mutates: `blocks` and their modules, whose weights become views of the
        slabs.

        Raises:
            ConfigError: less host memory than they take.
        """
        self._sizes = [sum(_aligned(each.nbytes) for each in tensors_of(own).values()) for own in blocks]
        self.block_bytes = max(self._sizes)
        self._blocks, self._device = blocks, device
        self._streams = streams or (CudaStreams(device) if device.type == "cuda" else HostStreams())
        self._host = self._to_slabs(pinned=device.type == "cuda")
        self._make_buffers()

    def weights(self, layer: int) -> BlockWeights:
        """Those of block `layer` on the device, for what the current stream is given until the next call. Mutates:
        self."""
        return self._resident[self._ahead.take(layer)][self._sizes[layer]]

    def part(self, first: int, last: int) -> OffloadedBlocks:
        """Blocks `first` to `last` (exclusive) with buffers of their own; host memory is shared."""
        part = copy(self)
        part._blocks, part._host = self._blocks[first:last], self._host[first:last]
        part._sizes = self._sizes[first:last]
        part._make_buffers()
        return part

    def _make_buffers(self) -> None:
        """Buffers on the device for these blocks, and the order of copies into them; blocks of one size are alike.
        Mutates: self."""
        kinds = dict(zip(self._sizes, self._blocks, strict=True))
        self._buffers = [torch.empty(self.block_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        self._resident = [
            {size: _with_tensors(own, _views(buffer, tensors_of(own))) for size, own in kinds.items()}
            for buffer in self._buffers
        ]
        self._ahead = CopyAhead(len(self._blocks), self._streams, self._copy)

    def _copy(self, layer: int, slot: int) -> None:
        size = self._sizes[layer]
        self._buffers[slot][:size].copy_(self._host[layer][:size], non_blocking=True)

    def _to_slabs(self, pinned: bool) -> list[Tensor]:
        """Host memory of each block, uint8. Mutates: the blocks' modules."""
        host: list[Tensor] = []
        for size in slab_blocks(len(self._blocks), self.block_bytes):
            _check_host_memory(size * self.block_bytes, pinned)
            slab = torch.empty(size, self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
            for memory in slab:
                own = self._blocks[len(host)]
                given = tensors_of(own)
                views = _views(memory, given)
                for name, view in views.items():
                    view.copy_(given[name])
                self._blocks[len(host)] = _assign(own.block, views)
                host.append(memory)
        return host


def offload(denoiser: WanDenoiser, device: torch.device, streams: Streams | None = None) -> WanDenoiser:
    """`denoiser`, whose weights lie in host memory, with its blocks kept there and everything else on `device`.

    Raises:
        ConfigError: as `OffloadedBlocks`.
    """
    model = denoiser.model
    blocks = {id(each) for each in chain(model.blocks.parameters(), model.blocks.buffers())}
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in blocks and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
    weights = [denoiser.weights(layer) for layer in range(len(denoiser.blocks))]
    denoiser.fused = []  # `block_source` has them
    denoiser.block_source = OffloadedBlocks(weights, device, streams)
    if denoiser.tables is not None:
        denoiser.tables = denoiser.tables.to(device)
    return denoiser


class HostStreams:
    """`Streams` of a device that does what it is given at once: nothing waits."""

    def current(self) -> None:
        return None

    def new(self) -> None:
        return None

    def event(self) -> Event:
        return _Past()

    def use(self, stream: None) -> nullcontext[None]:
        return nullcontext()

    def when(self, event: Event, call: Callable[[], None]) -> None:
        call()


class _Past:
    """An event that has happened."""

    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


# ---- memory --------------------------------------------------------------------------------------------------------


def slab_blocks(blocks: int, block_bytes: int) -> Iterator[int]:
    """Numbers of blocks in each slab of host memory. torch rounds pinned memory up to a power of two, so a slab is the
    largest such that is filled, and only the last one is rounded up."""
    while blocks > 0:
        power = 1 << ((blocks * block_bytes).bit_length() - 1)
        size = max(1, power // block_bytes)
        yield size
        blocks -= size


def tensors_of(weights: BlockWeights) -> dict[str, Tensor]:
    """A block's weights by name; query, key and value as one where they are."""
    named = {
        name: each.detach() for name, each in chain(weights.block.named_parameters(), weights.block.named_buffers())
    }
    if weights.fused is not None:
        for name in _FUSED:
            del named[f"attn1.{name}.weight"], named[f"attn1.{name}.bias"]
        named |= {f"fused.{name}": each for name, each in weights.fused._asdict().items()}
    return named


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of these shapes and dtypes in `memory` uint8, one after the other."""
    views, begin = {}, 0
    for name, each in like.items():
        nbytes = prod(each.shape) * each.element_size()
        views[name] = memory[begin : begin + nbytes].view(each.dtype).view(each.shape)
        begin += _aligned(nbytes)
    return views


def _with_tensors(weights: BlockWeights, views: dict[str, Tensor]) -> BlockWeights:
    """A block like that of `weights`, whose weights are `views`."""
    empty = {id(each): nn.Parameter(each.detach().to("meta"), False) for each in weights.block.parameters()}
    return _assign(deepcopy(weights.block, empty), views)


def _assign(block: WanTransformerBlock, views: dict[str, Tensor]) -> BlockWeights:
    """`block` with `views` as its weights. Mutates: block."""
    named = {name: each for name, each in views.items() if not name.startswith("fused.")}
    fused = Fused(views["fused.weight"], views["fused.bias"]) if "fused.weight" in views else None
    if fused is not None:
        for name, weight, bias in zip(_FUSED, fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
            named |= {f"attn1.{name}.weight": weight, f"attn1.{name}.bias": bias}
    block.load_state_dict(named, assign=True)
    return BlockWeights(block, fused)


def _check_host_memory(nbytes: int, pinned: bool) -> None:
    """Raises ConfigError where less host memory than that is left; a machine that swaps its pinned pages is
    lost."""
    free, _ = host_memory()
    if pinned and nbytes > free:
        raise ConfigError(
            f"--offload blocks keeps {nbytes / 1e9:.3g} GB of weights in pinned host memory, and {free / 1e9:.3g} GB "
            "are left; use --quantize int8 without --offload, more --stages on other machines, or a smaller model",
            field="offload",
        )
