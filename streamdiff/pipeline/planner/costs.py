"""How long the parts of a forward take: from a measured profile, or by an estimate from sizes and device ceilings.

Knows nothing about stages: which blocks go where is decided in `stage_layout`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.pipeline.planner.model_sizes import ModelSizes

PROFILE_KEYS = {
    "block_s": "seconds of each block, in order",
    "embed_s": "seconds of the embedding, on the first rank",
    "head_s": "seconds of the output layer, on the last rank",
    "decode_s": "seconds of decoding one chunk",
    "link_s": "seconds of a message from one stage to the next",
}
PROFILE_HELP = """A profile is a JSON object with these keys, all times in seconds:
  block_s   a list, one entry per block
  embed_s   embedding, on the first rank      head_s   output layer, on the last rank
  decode_s  one chunk's decode                link_s   one message between stages
An entry of block_s, embed_s or head_s is a number (one row; more rows in proportion) or a list: 1 row, 2 rows, ..."""

# About thirty kernels at a few microseconds each: less than this no block takes, however small it is.
_BLOCK_FLOOR_S = 1e-4
# Setting up a message and noticing that it has come.
_LINK_FLOOR_S = 2e-5


@dataclass(frozen=True)
class Costs:
    """Seconds. Entry r - 1 of a row list is a forward of r rows; `link_s` is the same between all stages, and
    `flow_s` that of the way back. `source` says where the numbers are from."""

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

    Raises:
        ConfigError: a value is not above 0.
    """

    tflops: float = 400.0
    gbps: float = 2500.0
    link_gbps: float = 25.0

    def __post_init__(self) -> None:
        for name, value in (("--tflops", self.tflops), ("--gbps", self.gbps), ("--link-gbps", self.link_gbps)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}, but must be a number above 0")

    def seconds(self, flops: float, size: float) -> float:
        """The roofline: whichever of computing `flops` and moving `size` bytes takes longer."""
        return max(flops / (self.tflops * 1e12), size / (self.gbps * 1e9))


def estimate(facts: ModelSizes, ceilings: Ceilings, *, kv_context: str, max_rows: int, value_bytes: int) -> Costs:
    """Costs from sizes alone: every part at the device's ceiling, window full. Real times are longer."""
    tokens, width, ffn = facts.tokens, facts.width, facts.ffn_dim
    seen = tokens * facts.spec.window(kv_context) // facts.spec.chunk_latents
    # Eight projections of width x width minus the text's own keys and values, the feed-forward's two, the attentions.
    flops = 2.0 * tokens * (6 * width**2 + 2 * width * ffn + 2 * width * (seen + facts.text_tokens))
    moved = 2 * width * (seen + facts.text_tokens) + 10 * tokens * width + 2 * tokens * ffn
    rows = range(1, max_rows + 1)

    def part(values: int, row_flops: float, row_values: float, floor_s: float) -> tuple[float, ...]:
        """A part with `values` weights, which are read once for all rows."""
        return tuple(
            max(floor_s, ceilings.seconds(r * row_flops, (values + r * row_values) * value_bytes)) for r in rows
        )

    block = part(facts.block_values, flops, moved, _BLOCK_FLOOR_S)
    message = max_rows * value_bytes / (ceilings.link_gbps * 1e9)
    return Costs(
        source=(
            f"an estimate from FLOPs and bytes at {ceilings.tflops:g} TFLOP/s, {ceilings.gbps:g} GB/s and links of "
            f"{ceilings.link_gbps:g} GB/s; not a measurement"
        ),
        block_s=(block,) * facts.blocks,
        embed_s=part(facts.embed_values, 2.0 * tokens * facts.embed_values, 2 * tokens * width, _BLOCK_FLOOR_S / 4),
        head_s=part(facts.output_values, 2.0 * tokens * facts.output_values, 2 * tokens * width, _BLOCK_FLOOR_S / 4),
        decode_s=facts.spec.chunk_latents * ceilings.seconds(facts.decode_flops, 0.0),
        link_s=_LINK_FLOOR_S + facts.hidden_values * message,
        flow_s=_LINK_FLOOR_S + facts.flow_values * message,
    )


def read_profile(path: Path, facts: ModelSizes, *, max_rows: int) -> Costs:
    """Costs as they were measured, see `PROFILE_HELP`. The flow's way back counts like any other link.

    Raises:
        ConfigError: unreadable file, a key that is missing or unknown, a time that cannot be, or another number of
            blocks than the model's.
    """
    tree = read_object(path)
    missing = [key for key in PROFILE_KEYS if key not in tree]
    if missing:
        told = ", ".join(f"{key!r} ({PROFILE_KEYS[key]})" for key in missing)
        raise ConfigError(f"--profile {path}: missing {told}")
    unknown = [key for key in tree if key not in PROFILE_KEYS]
    if unknown:
        raise ConfigError(f"--profile {path}: unknown key {unknown[0]!r}; known are {', '.join(PROFILE_KEYS)}")
    blocks = tree["block_s"]
    if not isinstance(blocks, list) or len(blocks) != facts.blocks:
        told = f"{len(blocks)} entries" if isinstance(blocks, list) else json.dumps(blocks)[:60]
        raise ConfigError(
            f"--profile {path}: block_s is {told}, but must be a list of {facts.blocks}, one per block of "
            f"{facts.spec.name}"
        )
    link_s = _seconds(path, tree, "link_s")
    return Costs(
        source=f"the profile {path}",
        block_s=tuple(_rows(path, f"block_s[{n}]", value, max_rows, above=True) for n, value in enumerate(blocks)),
        embed_s=_rows(path, "embed_s", tree["embed_s"], max_rows),
        head_s=_rows(path, "head_s", tree["head_s"], max_rows),
        decode_s=_seconds(path, tree, "decode_s"),
        link_s=link_s,
        flow_s=link_s,
    )


def in_proportion(time_s: float, max_rows: int) -> tuple[float, ...]:
    """A forward's seconds by rows when only that of one row is known: sharing a forward then gains nothing."""
    return tuple(time_s * rows for rows in range(1, max_rows + 1))


def total(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Seconds of several parts one after the other, by rows."""
    return tuple(math.fsum(times) for times in zip(*parts, strict=True))


def _rows(path: Path, key: str, value: object, max_rows: int, above: bool = False) -> tuple[float, ...]:
    """A number, or a list with a number for every count of rows."""
    if not isinstance(value, list):
        return in_proportion(_time(path, key, value, above), max_rows)
    if len(value) < max_rows:
        raise ConfigError(
            f"--profile {path}: {key} has {len(value)} entries, but --max-rows is {max_rows}; give one per number of "
            "rows, or a single number"
        )
    return tuple(_time(path, f"{key}[{n}]", item, above) for n, item in enumerate(value[:max_rows]))


def _seconds(path: Path, tree: Mapping[str, object], key: str) -> float:
    return _time(path, key, tree[key], above=False)


def _time(path: Path, key: str, value: object, above: bool) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if not isinstance(value, int | float) or not good or (above and value == 0):
        limit = "above 0" if above else "of 0 or more"
        raise ConfigError(f"--profile {path}: {key} is {json.dumps(value)[:60]}, but must be seconds {limit}")
    return float(value)
