"""Memory of every rank: weights, caches, activations, decoder. Pure: sizes in, bytes out."""

from __future__ import annotations

from dataclasses import dataclass

from streamdiff.models.catalogue.schema import Entry
from streamdiff.pipeline.planner.model_sizes import BFLOAT16, ModelSizes, known_facts
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.stage_layout import Layout, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Activations are the link's slots and the widest moment of a block, an estimate; `decoding` is
    what the decoder remembers of streams."""

    rank: int
    role: str
    weights: int
    caches: int
    activations: int
    decoding: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.activations + self.decoding


def memory(
    facts: ModelSizes, layout: Layout, load: Workload, value_bytes: int, quantize: str = "none"
) -> tuple[Memory, ...]:
    """Memory of every rank, with numbers of `value_bytes` bytes, but for the blocks' matrices where `quantize` (see
    `models.transformer.quantization`) has them in 8 bits.

    The text encoder lives on the head; the decoder on the head too, unless it has the last rank or one of its own.
    Caches, and what the decoder remembers, are of all sessions. A link has two slots at each of its ends, for the rows
    of a full forward.
    """
    last, found = load.stages - 1, []
    decoding = value_bytes * load.sessions * facts.decoder_memory_values
    home = {"last": last, "own-rank": load.stages}.get(layout.decode, 0)
    block_peak = facts.tokens * (2 * facts.width + max(4 * facts.width, facts.ffn_dim))
    for rank, (first, end) in enumerate(layout.blocks):
        count = end - first
        weights = facts.shared_values + count * facts.block_values
        saved = 0 if quantize == "none" else count * _saved(facts, value_bytes)
        weights += facts.embed_values + facts.text_values if rank == 0 else 0
        weights += facts.output_values if rank == last else 0
        weights += facts.decoder_values if rank == home else 0
        caches = load.sessions * facts.cache_values(count, steps=load.steps, kv_context=load.kv_context)
        received = facts.flow_values if rank == 0 else facts.hidden_values
        sent = facts.flow_values if rank == last else facts.hidden_values
        slots = 2 * (received + sent) if load.stages > 1 else 0
        activations = load.max_rows * (slots + block_peak)
        role = " ".join(
            word for word, here in (("head", rank == 0), ("output", rank == last), ("decode", rank == home)) if here
        )
        remembered = decoding if rank == home else 0
        sizes = value_bytes * weights - saved, value_bytes * caches, value_bytes * activations, remembered
        found.append(Memory(rank, role, *sizes))
    if home == load.stages:
        found.append(Memory(home, "decode", value_bytes * facts.decoder_values, 0, 0, decoding))
    return tuple(found)


def _saved(facts: ModelSizes, value_bytes: int) -> int:
    """Bytes that 8 bits save in a block: a number of a matrix takes one, and every row five for its scale and zero."""
    return (value_bytes - 1) * facts.linear_values - 5 * facts.linear_rows


def stage_memory(entry: Entry, stages: int, quantize: str = "none") -> tuple[Memory, ...]:
    """Bytes of every stage in bfloat16: the transformer's weights, its blocks in 8 bits where `quantize` says so
    (`models.transformer.quantization`), and the caches and decoder's memory of one session at the model's own
    picture, window and KV context.

    Blocks are spread evenly. An estimate: it leaves out the text encoder, the autoencoder, and what the libraries take;
    a model that cannot stream has no caches.

    Raises:
        ConfigError: more stages than blocks.
    """
    facts = known_facts(entry)
    layout = Layout(split_evenly(facts.blocks, stages), (), "head", 0.0)
    sessions = 0 if entry.stream is None else 1
    kv_context = entry.context.default if entry.context else "clean"
    steps = facts.spec.steps[0] if facts.spec.steps else 1
    return memory(facts, layout, Workload(stages, sessions, steps, kv_context, 1), BFLOAT16, quantize)
