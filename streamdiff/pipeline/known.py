"""Facts of a model in the catalogue, to plan with before anything is downloaded. Needs no torch."""

from __future__ import annotations

from streamdiff.models import catalogue
from streamdiff.models.catalogue import Entry
from streamdiff.models.decoder_memory import wan_values
from streamdiff.pipeline.facts import Decoder, Facts, read_facts
from streamdiff.pipeline.plan import Layout, Memory, Workload, memory, split_evenly

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

    They are the transformer's, and what the decoder remembers of a stream: weights of text encoder and autoencoder
    count as 0, and nothing is said about how long decoding takes. A model that makes whole clips counts as a chunk of
    one latent frame that sees itself.
    """
    if entry.weights is None:
        return read_facts(entry.name)
    shared = catalogue.parts()
    sizes, pictures = shared.architectures[entry.architecture], shared.autoencoders[entry.autoencoder]
    text, stream = shared.text_encoders[entry.text_encoder], entry.stream
    latent_height = (height or entry.height) // pictures.spatial
    latent_width = (width or entry.width) // pictures.spatial
    return Facts(
        name=entry.name,
        blocks=sizes.blocks,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        ffn_dim=sizes.ffn_dim,
        text_dim=text.width,
        freq_dim=sizes.freq_dim,
        in_channels=sizes.in_channels,
        out_channels=sizes.out_channels,
        patch=sizes.patch,
        cross_attn_norm=True,
        latent_height=latent_height,
        latent_width=latent_width,
        chunk_latents=stream.chunk_latents if stream else 1,
        window_latents=stream.window_latents if stream else 1,
        clean_window_latents=stream.clean_window_latents if stream else None,
        sink_latents=stream.sink_latents if stream else 0,
        steps=(entry.sampling.schedule().steps,) if entry.sampling else (),
        native_fps=entry.native_fps or 0.0,
        text_tokens=text.tokens,
        decoder=Decoder(pictures.channels, 1, (0, 0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, pictures.temporal)),
        text_values=0,
        decoder_values=0,
        decoder_memory_values=wan_values(pictures.config, latent_height, latent_width) if pictures.config else 0,
        first_chunk_steps=entry.sampling.schedule().of(0).steps if entry.sampling else None,
    )


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
