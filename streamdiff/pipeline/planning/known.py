"""Facts of a model in the catalogue, to plan with before anything is downloaded. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from streamdiff.models import catalogue
from streamdiff.models.catalogue import Entry
from streamdiff.models.decoder_memory import wan_values
from streamdiff.models.specs import architecture_of, spec_of
from streamdiff.pipeline.planning.facts import Facts, facts_from, read_facts
from streamdiff.pipeline.planning.plan import Layout, Memory, Workload, memory, split_evenly

BFLOAT16 = 2  # bytes of a number


def facts_of(name: str) -> Facts:
    """Of a model of the catalogue, or of a folder of the embedded kind.

    Raises:
        ConfigError: neither.
    """
    entry = catalogue.entries().get(name)
    return known_facts(entry) if entry is not None else read_facts(name)


def known_facts(entry: Entry, *, height: int | None = None, width: int | None = None) -> Facts:
    """Sizes of the model at `height` x `width` pixels, by default its own picture.

    As `facts_from` has them, and what the decoder remembers of a stream. A model that makes whole clips counts as a
    chunk of one latent frame that sees itself.
    """
    if entry.weights is None:
        return read_facts(entry.name)
    architecture = architecture_of(entry)
    spec = spec_of(entry.name, entry, architecture, (width or entry.width, height or entry.height))
    if entry.stream is None:
        spec = replace(spec, chunk_latents=1, window_latents=1)
    decoder = catalogue.parts().autoencoders[entry.autoencoder].config
    remembered = wan_values(decoder, spec.latent_height, spec.latent_width) if decoder else 0
    # Whose past is seen again from its pictures decodes every chunk a second time.
    return facts_from(architecture, spec, remembered * (2 if spec.context_pictures else 1))


def stage_memory(entry: Entry, stages: int, quantize: str = "none") -> tuple[Memory, ...]:
    """Bytes of every stage in bfloat16: the transformer's weights, its blocks in 8 bits where `quantize` says so
    (`models.quantize`), and the caches and decoder's memory of one session at the model's own
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
    steps = facts.steps[0] if facts.steps else 1
    return memory(facts, layout, Workload(stages, sessions, steps, kv_context, 1), BFLOAT16, quantize)
