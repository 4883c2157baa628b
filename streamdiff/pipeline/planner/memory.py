"""Memory of every rank, counted from shapes before anything is loaded: weights, text encoder, caches, what a forward
and a call of the decoder take, what the decoder remembers. Pure: sizes in, bytes out.

`streamdiff plan` and `models` ask here, and the check before loading (`fit`). The budget of running sessions
(`kv_budget`) counts caches by the same `ModelSizes.cache_values`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from streamdiff.models.catalogue import CatalogueEntry
from streamdiff.pipeline.planner.model_sizes import BFLOAT16, ModelSizes, entry_sizes
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.stage_layout import Blocks, Layout, Workload

OFFLOAD_BUFFERS = 2
"""Blocks that lie on the device where blocks are offloaded: one computes, one is copied."""
LIBRARIES_BYTES = 600_000_000
"""What cuBLAS and cuDNN take to work in, and what torch's allocator cannot hand out: an assumption, not measured."""
# Tensors that are alive at a block's widest moment, of width D, by the norms in float32, or D and the feed-forward's.
# Measured without compilation (tests/pipeline/planner/test_memory.py).
_NORM_WIDTHS, _FFN_WIDTHS, _FFN = 20, 6, 3
_EXCHANGED = 12
"""Tensors of a rank's tokens that `distributed.context_parallel` has as buffers, three for each that is exchanged."""


@dataclass(frozen=True)
class Storage:
    """How a model is kept: bytes of a number, of the decoder's (None: the same), `quantize` and `offload` as in the
    configuration, `text_bytes` of a text encoder on rank 0's device, and latent frames per call of the decoder (None:
    a chunk)."""

    value_bytes: int
    quantize: str = "none"
    offload: str = "none"
    text_bytes: int = 0
    decode_latents: int | None = None
    decoder_bytes: int | None = None

    @property
    def bytes_per_decoder_value(self) -> int:
        """Of the decoder's weights and memory."""
        return self.decoder_bytes or self.value_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: the transformer's part and the decoder as `weights`; caches of all sessions; `activations` are
    the link's slots and the widest moment of a block; `decoding` is what the decoder remembers of all sessions, and
    `decode_work` what a call of it takes beside that."""

    rank: int
    role: str
    weights: int
    text_encoder: int
    caches: int
    activations: int
    decoding: int
    decode_work: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rank", "role")}

    @property
    def work(self) -> int:
        """What computing takes beside weights and sessions."""
        return self.activations + self.decode_work


def block_weights(sizes: ModelSizes, storage: Storage) -> int:
    """Bytes of one block's weights."""
    saved = 0
    if storage.quantize != "none":  # a number of a matrix takes one byte, every row five for its scale and zero
        saved = (storage.value_bytes - 1) * sizes.linear_values - 5 * sizes.linear_rows
    return storage.value_bytes * sizes.block_values - saved


def offloaded_bytes(sizes: ModelSizes, blocks: int, storage: Storage) -> int:
    """What every forward of `blocks` blocks copies from host memory to the device; 0 where they all have a buffer, and
    without offload."""
    copies = storage.offload != "none" and blocks > OFFLOAD_BUFFERS
    return blocks * block_weights(sizes, storage) if copies else 0


def memory(sizes: ModelSizes, layout: Layout, load: Workload, storage: Storage) -> tuple[Memory, ...]:
    """Memory of every rank.

    The text encoder is on rank 0; so is the decoder, unless it is on the last rank or one of its own.
    Caches, and what the decoder remembers, are of all sessions. A link has two slots at each of its ends, for the rows
    of a full forward. The ranks that share a stage follow one another; the first of them has what one rank has alone.
    """
    last, found = load.stages - 1, list[Memory]()
    home = {"last": last * load.shares, "dedicated": load.stages * load.shares}.get(layout.decode, 0)
    decoder = _decoder(sizes, load, storage)
    values = storage.value_bytes
    for rank in range(load.stages * load.shares):
        stage = rank // load.shares
        first, end = layout.blocks[stage]
        count = end - first
        other = sizes.shared_values
        other += sizes.embed_values + sizes.text_values if stage == 0 else 0
        other += sizes.output_values if stage == last else 0
        on_device = count if storage.offload == "none" else min(count, OFFLOAD_BUFFERS)
        weights = values * other + on_device * block_weights(sizes, storage)
        role = " ".join(
            word for word, here in (("head", rank == 0), ("output", stage == last), ("decode", rank == home)) if here
        )
        caches = sizes.cache_values(count, steps=load.steps, kv_context=load.kv_context, shares=load.shares)
        decoding = decoder if rank == home else (0, 0, 0)
        found.append(
            Memory(
                rank,
                role,
                weights + decoding[0],
                storage.text_bytes if rank == 0 else 0,
                values * load.sessions * caches,
                values * load.max_rows * _activations(sizes, stage, load),
                *decoding[1:],
            )
        )
    if home == load.stages * load.shares:
        found.append(Memory(home, "decode", decoder[0], 0, 0, 0, *decoder[1:]))
    return tuple(found)


def _activations(sizes: ModelSizes, stage: int, load: Workload) -> int:
    """Numbers of one row: the link's slots, and the widest moment of a block; where ranks share the stage, also the
    buffers of their exchanges, queries, keys and values before and after, and the result likewise."""
    hidden = sizes.hidden_values // load.shares
    received = sizes.flow_values if stage == 0 else hidden
    sent = sizes.flow_values if stage == load.stages - 1 else hidden
    slots = 2 * (received + sent) if load.stages > 1 else 0
    tokens = sizes.tokens // load.shares
    exchanged = tokens * sizes.width * _EXCHANGED if load.shares > 1 else 0
    widest = tokens * max(_NORM_WIDTHS * sizes.width, _FFN_WIDTHS * sizes.width + _FFN * sizes.ffn_dim)
    return slots + exchanged + widest


def _decoder(sizes: ModelSizes, load: Workload, storage: Storage) -> tuple[int, int, int]:
    """Bytes of the decoder's weights, of what it remembers of all sessions, and of a call."""
    values, chunk = storage.bytes_per_decoder_value, sizes.spec.chunk_latents
    latents = min(chunk, storage.decode_latents or chunk)
    work = sizes.decoder.work(latents) if sizes.decoder.work_per_latent else 0
    return values * sizes.decoder.weights, values * load.sessions * sizes.decoder.remembered, values * work


def stage_memory(entry: CatalogueEntry, stages: int, quantize: str = "none") -> tuple[Memory, ...]:
    """Bytes of every stage in bfloat16: the transformer's weights, its blocks in 8 bits where `quantize` says so
    (`models.transformer.quantization`), and the caches and decoder's memory of one session at the model's own
    picture, window and KV context.

    Blocks are spread evenly. It leaves out the text encoder, the decoder's weights and calls (`decoder_bytes`), and
    what the libraries take; a model that cannot stream has no caches.

    Raises:
        ConfigError: more stages than blocks.
    """
    sizes = entry_sizes(entry)
    blocks: Blocks = split_evenly(sizes.blocks, stages)
    sessions = 0 if entry.stream is None else 1
    kv_context = entry.context.default if entry.context else "clean"
    steps = sizes.spec.steps[0] if sizes.spec.steps else 1
    load = Workload(stages, sessions, steps, kv_context, 1)
    whole = memory(sizes, Layout(blocks, (), "head", 0.0), load, Storage(BFLOAT16, quantize))
    decoder = BFLOAT16 * sizes.decoder.weights if entry.weights is not None else 0
    return tuple(
        replace(each, weights=each.weights - (decoder if each.rank == 0 else 0), decode_work=0) for each in whole
    )


def decoder_bytes(entry: CatalogueEntry, vae: str | None = None) -> int:
    """Bytes of the decoder's weights and of a call for a chunk, in bfloat16: of the model's own, or the one called
    `vae`."""
    sizes = entry_sizes(entry, vae=vae)
    return BFLOAT16 * (sizes.decoder.weights + sizes.decoder.work(sizes.spec.chunk_latents))
