"""A published model's facts, from the catalogue and its transformer's sizes. Needs no torch and none of its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.schema import Entry, Stream
from streamdiff.models.spec import ModelSpec

USUAL = "self-forcing"
"""The model of the catalogue whose picture, rate and chunk a checkpoint has that the catalogue does not know."""


def architecture_of(entry: Entry) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel` for the model's own transformer."""
    shared = entries.parts()
    return shared.architectures[entry.architecture].arguments(shared.text_encoders[entry.text_encoder].width)


def spec_of(
    name: str, entry: Entry | None, architecture: Mapping[str, Any], size: tuple[int, int] | None = None
) -> ModelSpec:
    """The facts of the model `name` with a transformer of this architecture (as `architecture_of` has it), for pictures
    of `size` (width, height in pixels; the model's own when None). Of a checkpoint without an entry, what is usual.

    A model that makes whole clips has no steps, and a window of 0: who runs it has to say both.
    """
    stream = entry.stream if entry is not None else None
    usual = entries.find(USUAL)
    assert usual.stream is not None and usual.native_fps is not None
    known = entry or usual
    shared = entries.parts()
    pictures, tokens = shared.autoencoders[known.autoencoder], shared.text_encoders[known.text_encoder].tokens
    width, height = size or (known.width, known.height)
    schedules = entry.sampling.schedules() if entry is not None and entry.sampling is not None else ()
    noise = entry.context.noise if entry is not None and entry.context is not None else None
    return ModelSpec(
        name=name,
        latent_channels=architecture["out_channels"],
        latent_height=height // pictures.spatial,
        latent_width=width // pictures.spatial,
        chunk_latents=(stream or usual.stream).chunk_latents,
        window_latents=stream.window_latents if stream is not None else 0,
        clean_window_latents=stream.clean_window_latents if stream is not None else None,
        sink_latents=stream.sink_latents if stream is not None else 0,
        frames_per_latent=pictures.temporal,
        width=width,
        height=height,
        native_fps=known.native_fps or usual.native_fps,
        shift=1.0,
        steps=tuple(schedule.steps for schedule in schedules),
        schedules=schedules,
        text_shape=(tokens, architecture["text_dim"]),
        context_sigma=(noise or 0.0) / 1000,
        rope=entry.positions.published if entry is not None and entry.positions is not None else "relative",
        adaptive_sink=_sink_value(stream, "adaptive"),
        averaged_sink=_sink_value(stream, "average"),
        context_alone=entry is not None and entry.context is not None and entry.context.alone,
        context_pictures=entry is not None and entry.context is not None and entry.context.pictures,
        switch=entry.switches.own if entry is not None and entry.switches is not None else "keep",
        first_chunks=1 if stream is None else stream.first_chunks,
    )


def _sink_value(stream: Stream | None, policy: str) -> float | None:
    return stream.sink_value if stream is not None and stream.sink_policy == policy else None
