"""What a chunk sees, changed from what a model has: window, sink, positions; what a user says of a model of which
nothing is known; and whether that can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from streamdiff.models.base import ModelSpec


def changed(spec: ModelSpec, window: int | None, sink: int | None, rope: str | None) -> ModelSpec:
    """`spec` with this window and sink, in latent frames, and these positions; None leaves what it has. Without a sink
    nothing is done with one.

    Raises:
        ConfigError: they do not go together.
    """
    if sink == 0:
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    spec = replace(
        spec,
        window_latents=spec.window_latents if window is None else window,
        clean_window_latents=spec.clean_window_latents if window is None else None,
        sink_latents=spec.sink_latents if sink is None else sink,
        rope=rope or spec.rope,
    )
    check(spec)
    return spec


def told(spec: ModelSpec, timesteps: Sequence[float], chunk_latents: int) -> ModelSpec:
    """`spec` of a model of which nothing is known, with the one schedule and the chunk that a user says.

    Raises:
        ConfigError: a list that is no schedule.
    """
    schedule = sampling.published(timesteps, shift=1.0, warp=False)
    return replace(spec, steps=(schedule.steps,), schedules=(schedule,), chunk_latents=chunk_latents)


def check(spec: ModelSpec) -> None:
    """Raises ConfigError unless window, sink, what is done with the sink, positions and the noise of the clean pass go
    together."""
    chunk = spec.chunk_latents
    if spec.first_chunks * chunk > min(map(spec.window, ("clean", "matched"))):
        raise ConfigError(
            f"--window is {spec.window_latents} latent frames; it must hold the first chunk, which has "
            f"{spec.first_chunks * chunk}"
        )
    if not 0 <= spec.sink_latents <= min(map(spec.window, ("clean", "matched"))) - chunk:
        raise ConfigError(
            f"--sink is {spec.sink_latents} and --window {spec.window_latents} latent frames; the window counts the "
            f"sink, which is at least 0, and must leave room for the chunk itself, {chunk} latent frames"
        )
    if spec.rope not in ("absolute", "relative"):
        raise ConfigError(f"--rope is {spec.rope}, but must be absolute or relative")
    _check_sink(spec)
    if not 0 <= spec.context_sigma <= 1:
        raise ConfigError(f"--context-noise is {spec.context_sigma * sampling.TIMESTEPS:g}, but must be from 0 to 1000")


def _check_sink(spec: ModelSpec) -> None:
    sink, chunk, adaptive, averaged = spec.sink_latents, spec.chunk_latents, spec.adaptive_sink, spec.averaged_sink
    if adaptive is not None and averaged is not None:
        raise ConfigError("--adaptive-sink and --averaged-sink are two ways to change the sink; give one of them")
    if adaptive is not None and not (-1 <= adaptive <= 1 and sink):
        raise ConfigError(
            f"--adaptive-sink is {adaptive:g} with a sink of {sink} latent frames; it must be from -1 to 1, and goes "
            "with a --sink"
        )
    if adaptive is not None and sink % chunk:
        raise ConfigError(
            f"--adaptive-sink puts chunks in the place of others, so --sink, which is {sink}, must be a multiple of "
            f"the chunk's {chunk} latent frames"
        )
    if averaged is not None and not (0 <= averaged <= 1 and sink == chunk):
        raise ConfigError(
            f"--averaged-sink is {averaged:g} with a sink of {sink} latent frames; it must be from 0 to 1, and the "
            f"sink one chunk, {chunk} latent frames, as chunks are folded into it"
        )
