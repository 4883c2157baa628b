"""Compute time of a forward's parts: from a measured profile, or estimated from sizes and device ceilings.

Knows nothing about stages: which blocks go where is decided in `partition`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamdiff.errors import ConfigError
from streamdiff.models.weight_files import read_object
from streamdiff.pipeline.planner.model_sizes import ModelSizes

# About thirty kernels at a few microseconds each: less than this no block takes, however small it is.
_BLOCK_FLOOR_S = 1e-4
# Setting up a message and noticing that it has come.
_LINK_FLOOR_S = 2e-5
# Of each of the four tensors that a block exchanges: read and written as it is packed, and as it is unpacked.
_EXCHANGED, _COPIES = 4, 4
# What an action module's element-wise kernels move, in hidden states of a chunk (benchmarks/results/kernel_count.json).
_ACTING = 40.0


@dataclass(frozen=True)
class Costs:
    """Seconds of each part of a forward. Entry r - 1 of a row list is a forward of r rows; `link_s` is the same between
    all stages, and `flow_s` that of the way back. `source` says where the numbers are from."""

    source: str
    block_s: tuple[tuple[float, ...], ...]
    embed_s: tuple[float, ...]
    head_s: tuple[float, ...]
    decode_s: float
    link_s: float
    flow_s: float


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches at best in real work (not on its data sheet): 10^12 operations, 10^9 bytes of memory
    traffic, 10^9 bytes over a link, per second. The defaults fit one H100-class GPU in bfloat16 and PCIe links.

    `attention_tflops` and `decode_tflops` are those of attention and of the decoder, where they are not `tflops`;
    `elementwise` is what a block's element-wise kernels move beside, in hidden states of a chunk; `device` its name.
    An all-to-all among the ranks that share a stage takes `exchange_floor_s` whatever its size, and goes over
    `exchange_gbps`."""

    tflops: float = 400.0
    gbps: float = 2500.0
    link_gbps: float = 25.0
    attention_tflops: float | None = None
    decode_tflops: float | None = None
    elementwise: float = 0.0
    device: str | None = None
    exchange_floor_s: float = _LINK_FLOOR_S
    exchange_gbps: float = 25.0

    def seconds(self, flops: float, size: float, attention_flops: float = 0.0) -> float:
        """The roofline: whichever of computing `flops` and those of attention, and moving `size` bytes takes longer."""
        computing = flops / self.tflops + attention_flops / (self.attention_tflops or self.tflops)
        return max(computing / 1e12, size / (self.gbps * 1e9))

    def exchange_s(self, nbytes: float, ranks: int) -> float:
        """An all-to-all where each of `ranks` has `nbytes`, of which it keeps one part. The ranks do the same at the
        same time, so a stage stays one server of the simulation, which takes that longer."""
        if ranks == 1:
            return 0.0
        return self.exchange_floor_s + nbytes * (ranks - 1) / ranks / (self.exchange_gbps * 1e9)

    @property
    def source(self) -> str:
        """What an estimate at these ceilings is, for people."""
        rates = f"{self.tflops:g} TFLOP/s, {self.gbps:g} GB/s and links of {self.link_gbps:g} GB/s"
        if self.device is None:
            return f"an estimate from FLOPs and bytes at {rates}; not a measurement"
        return (
            f"an estimate for {self.device} from FLOPs and bytes: matrix products at {self.tflops:.4g}, attention at "
            f"{self.attention_tflops:.4g}, decoding at {self.decode_tflops:.4g} TFLOP/s, memory at {self.gbps:.4g} and "
            f"links at {self.link_gbps:.4g} GB/s; not a measurement"
        )


BY_DEVICE = {"cpu": Ceilings(tflops=0.05, gbps=10.0, decode_tflops=0.2), "cuda": Ceilings(decode_tflops=100.0)}
"""Of devices of a type, to share out a ring's blocks, where only ratios count. On a CPU the embedded model's decoder
reaches four times the rate of its blocks, measured with a thread each; on a GPU decoders reach a quarter of that of
matrix products."""


def estimate(
    sizes: ModelSizes,
    ceilings: Ceilings,
    *,
    kv_context: str,
    max_rows: int,
    value_bytes: int,
    block_copy_s: float = 0.0,
    shares: int = 1,
) -> Costs:
    """Costs from sizes alone: every part at the device's ceiling, window full. Real times are longer. Where blocks are
    offloaded, `block_copy_s` is what a block's copy takes: one is copied while another computes. Where `shares` ranks
    share each stage (`distributed.context_parallel`), each has 1/C of a forward's tokens and heads, all weights, and
    two exchanges per block; what a message carries is split over as many links."""
    tokens, width = sizes.tokens, sizes.width
    flops, attention_flops = _block_flops(sizes, kv_context)
    acting, acts = _acting_flops(sizes, kv_context), () if sizes.spec.actions is None else sizes.spec.actions.blocks
    seen = sizes.window_tokens(kv_context) + sizes.text_tokens
    moved = 2 * width * seen + 10 * tokens * width + 2 * tokens * sizes.ffn_dim
    rows = range(1, max_rows + 1)

    def part(values: int, row_flops: float, row_values: float, floor_s: float) -> tuple[float, ...]:
        """A part with `values` weights, which are read once for all rows."""
        return tuple(
            max(floor_s, ceilings.seconds(r * row_flops, (values + r * row_values) * value_bytes)) for r in rows
        )

    def block(r: int, steered: bool) -> float:
        own = r / shares
        nbytes = (sizes.block_values + own * moved) * value_bytes
        computing = ceilings.seconds(own * flops, nbytes, own * attention_flops)
        between = ceilings.seconds(0.0, own * ceilings.elementwise * tokens * width * value_bytes)
        if steered:
            computing += ceilings.seconds(own * acting[0], sizes.acting_values * value_bytes, own * acting[1])
            between += ceilings.seconds(0.0, own * _ACTING * tokens * width * value_bytes)
        alone = max(_BLOCK_FLOOR_S, block_copy_s, computing + between)
        if shares == 1:
            return alone
        # Queries, keys and values go there, the result back, and all are copied.
        tensor = own * tokens * width * value_bytes
        there, back = (ceilings.exchange_s(count * tensor, shares) for count in (_EXCHANGED - 1, 1))
        return alone + (there + back + ceilings.seconds(0.0, _COPIES * _EXCHANGED * tensor))

    plain, act = (tuple(block(r, steered) for r in rows) for steered in (False, True))
    message = max_rows * value_bytes / (ceilings.link_gbps * 1e9)
    flow_s = _LINK_FLOOR_S + sizes.flow_values * message
    # The head hands the others what it begins with; of the last stage each gathers the flow.
    gather = ceilings.exchange_s(max_rows * value_bytes * sizes.flow_values, shares)
    embed = part(sizes.embed_values, 2.0 * tokens * sizes.embed_values, 2 * tokens * width, _BLOCK_FLOOR_S / 4)
    own = tokens / shares
    head = part(sizes.output_values, 2.0 * own * sizes.output_values, 2 * own * width, _BLOCK_FLOOR_S / 4)
    return Costs(
        source=ceilings.source,
        block_s=tuple(act if number in acts else plain for number in range(sizes.blocks)),
        embed_s=tuple(time_s + (flow_s if shares > 1 else 0.0) for time_s in embed),
        head_s=tuple(time_s + gather for time_s in head),
        decode_s=sizes.spec.chunk_latents * sizes.decoder.flops / ((ceilings.decode_tflops or ceilings.tflops) * 1e12),
        link_s=_LINK_FLOOR_S + sizes.hidden_values / shares * message,
        flow_s=flow_s,
    )


def _block_flops(sizes: ModelSizes, kv_context: str) -> tuple[float, float]:
    """Operations of a block on one row, window full: of matrix products, and of attention."""
    tokens, width = sizes.tokens, sizes.width
    # Eight projections of width x width minus the text's own keys and values, the feed-forward's two, the attentions.
    products = 2.0 * tokens * (6 * width**2 + 2 * width * sizes.ffn_dim)
    if sizes.camera_channels is not None:  # four more, once for all steps of a chunk and its clean pass
        products += 2.0 * tokens * 4 * width**2 / (sizes.spec.steps[0] + 1)
    return products, 2.0 * tokens * 2 * width * (sizes.window_tokens(kv_context) + sizes.text_tokens)


def _acting_flops(sizes: ModelSizes, kv_context: str) -> tuple[float, float]:
    """Operations of an action module on one row, window full: of matrix products, and of attention over time."""
    if (own := sizes.spec.actions) is None:
        return 0.0, 0.0
    kinds, window = 1 + (own.mouse > 0), sizes.spec.window(kv_context)
    return 2.0 * sizes.tokens * sizes.acting_values, 4.0 * kinds * sizes.tokens * window * own.heads * own.head_dim


def row_gflop(sizes: ModelSizes, kv_context: str) -> float:
    """10^9 operations of all blocks on one row, window full."""
    actions = sizes.spec.actions
    acting = 0.0 if actions is None else len(actions.blocks) * sum(_acting_flops(sizes, kv_context))
    return (sizes.blocks * sum(_block_flops(sizes, kv_context)) + acting) / 1e9


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_BlockSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Profile(BaseModel):
    """Measured seconds: an entry per block, of the embedding, the output layer, a chunk's decode, a message between
    stages. A list has those of a forward with 1 row, 2 rows, and so on; a number is that of one, more are in
    proportion."""

    model_config = ConfigDict(extra="forbid", strict=True)

    block_s: list[_BlockSeconds | list[_BlockSeconds]]
    embed_s: _Seconds | list[_Seconds]
    head_s: _Seconds | list[_Seconds]
    decode_s: _Seconds
    link_s: _Seconds


def read_profile(path: Path, sizes: ModelSizes, *, max_rows: int) -> Costs:
    """Costs as they were measured, from the JSON of a `Profile`. The flow's way back counts like any other link.

    Raises:
        ConfigError: unreadable file, a key that is missing or unknown, a time that cannot be, or another number of
            blocks than the model's.
    """
    try:
        found = Profile.model_validate(read_object(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))} is {str(first['input'])[:60]}: {first['msg']}"
        raise ConfigError(f"--profile {path}: {what}", field="profile") from None
    short = [each for each in (*found.block_s, found.embed_s, found.head_s) if isinstance(each, list)]
    if len(found.block_s) != sizes.blocks or any(len(each) < max_rows for each in short):
        raise ConfigError(
            f"--profile {path}: block_s must be a list of {sizes.blocks}, one per block of {sizes.spec.name}, and a "
            f"list by rows have {max_rows} entries (--max-rows)",
            field="profile",
        )

    def by_rows(value: float | list[float]) -> tuple[float, ...]:
        return tuple(value[:max_rows]) if isinstance(value, list) else in_proportion(value, max_rows)

    return Costs(
        source=f"the profile {path}",
        block_s=tuple(map(by_rows, found.block_s)),
        embed_s=by_rows(found.embed_s),
        head_s=by_rows(found.head_s),
        decode_s=found.decode_s,
        link_s=found.link_s,
        flow_s=found.link_s,
    )


def in_proportion(time_s: float, max_rows: int) -> tuple[float, ...]:
    """A forward's seconds by rows when only that of one row is known: sharing a forward then gains nothing."""
    return tuple(time_s * rows for rows in range(1, max_rows + 1))
