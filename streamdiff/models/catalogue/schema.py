"""Schema of the catalogue's YAML entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from streamdiff.config import KVContext, PromptPolicy
from streamdiff.models.sampling import Schedule, published

Rope = Literal["absolute", "relative"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Architecture(_Section):
    """Sizes of a transformer in diffusers' Wan layout."""

    width: int = Field(ge=1, description="model width D, heads * head_dim")
    ffn_dim: int = Field(ge=1)
    heads: int = Field(ge=1)
    blocks: int = Field(ge=1)
    in_channels: int = Field(ge=1)
    out_channels: int = Field(ge=1)
    freq_dim: int = Field(ge=1)
    patch: tuple[int, int, int] = (1, 2, 2)

    def arguments(self, text_dim: int) -> dict[str, Any]:
        """Arguments of diffusers' `WanTransformer3DModel`, for texts of this width."""
        return {
            "patch_size": self.patch,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.width // self.heads,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "text_dim": text_dim,
            "freq_dim": self.freq_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.blocks,
            "cross_attn_norm": True,
        }


class Files(_Section):
    """Files of one repository. `repo` is a hub id, or the address of a repository elsewhere (then it has a slash more);
    `licence` is that of the files, not of any code."""

    repo: str
    files: tuple[str, ...] = Field(min_length=1)
    licence: str | None
    licence_note: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether `repo` is a hub id."""
        return self.repo.count("/") == 1


class Weights(Files):
    """Transformer weights. `container` is the top-level key that holds the tensors, `flat` where they lie at the top
    themselves, None where nobody has said (the loader then looks). `others` are files of the same repository for other
    uses, by name."""

    container: str | None
    others: dict[str, str] = {}


class Lora(Files):
    """An adapter on top of the weights, in PEFT's layout; `alpha / rank` is its scale."""

    container: str | None
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)

    @property
    def scale(self) -> float:
        """Factor on B @ A."""
        return self.alpha / self.rank


class TinyDecoder(Files):
    """A small one for the same latents. `latents` says in which space it wants them: `model`, as the transformer
    makes them, or `vae`, after mean and deviation are put back. The wrong one gives washed-out colour and no error."""

    name: str
    latents: Literal["model", "vae"]
    note: str | None = None


class Autoencoder(_Section):
    """An autoencoder: its latent channels, and pixels per latent pixel in time and space."""

    title: str
    weights: Files | None
    channels: int = Field(ge=1)
    temporal: int = Field(ge=1)
    spatial: int = Field(ge=1)
    values: int | None = Field(ge=1, description="stored numbers")
    config: dict[str, Any] | None = Field(None, description="of diffusers' class, as far as memory depends on it")
    tiny: tuple[TinyDecoder, ...] = ()


class TextEncoder(_Section):
    """A text encoder: `tokens` is the fixed length that texts are padded to, `width` that of an embedding."""

    title: str
    weights: Files | None
    tokens: int = Field(ge=1)
    width: int = Field(ge=1)
    gigabytes: float | None = Field(gt=0, description="of its weights in bfloat16")


class SharedParts(_Section):
    """What models share, by name."""

    architectures: dict[str, Architecture]
    autoencoders: dict[str, Autoencoder]
    text_encoders: dict[str, TextEncoder]


class Sampling(_Section):
    """Denoise steps as they are published; see `sampling.published` for shift, warp and nearest. `timestep_dtype` is
    the type in which the authors' code tells timesteps, where that rounds them; `first_noise_scale` the factor on the
    noise that a chunk begins with. With `keep_end` the 0 at the end of `steps` is a step of its own, which may be left
    out."""

    steps: tuple[float, ...] = Field(min_length=1)
    first_chunk_steps: tuple[float, ...] | None = None
    shift: float = Field(gt=0)
    warp: bool
    nearest: bool = Field(description="the authors' code rounds noise levels to its grid of 1,000")
    keep_end: bool = False
    timestep_dtype: Literal["exact", "bfloat16"] = "exact"
    first_noise_scale: float = Field(1.0, gt=0, le=1)

    def schedule(self) -> Schedule:
        """Timesteps and noise levels of the denoise steps, with those of the first chunk where it has its own.

        Raises:
            ConfigError: a list is no schedule.
        """
        first = None if self.first_chunk_steps is None else self._published(self.first_chunk_steps, self.keep_end)
        return replace(self._published(self.steps, self.keep_end), first=first)

    def schedules(self) -> tuple[Schedule, ...]:
        """`schedule()`, and, where the model has `keep_end`, the same schedule without the step at its end."""
        made = self.schedule()
        if not self.keep_end:
            return (made,)
        return made, self._published(self.steps, keep_end=False)

    def _published(self, steps: tuple[float, ...], keep_end: bool) -> Schedule:
        return published(
            steps,
            shift=self.shift,
            warp=self.warp,
            nearest=self.nearest,
            keep_end=keep_end,
            bfloat16=self.timestep_dtype == "bfloat16",
            noise_scale=self.first_noise_scale,
        )


class Stream(_Section):
    """How chunks follow one another. `first_chunk_latents` where the first chunk differs, `clean_window_latents` where
    the window of KV context `clean` does; `sink_value` is what an `average` sink keeps of itself when a chunk is folded
    into it, or the likeness below which a chunk of an `adaptive` one gives way; `trained_latents` is the longest stream
    it was trained on, None where that is not known."""

    chunk_latents: int = Field(ge=1)
    first_chunk_latents: int | None = Field(None, ge=1)
    window_latents: int = Field(ge=1)
    clean_window_latents: int | None = Field(None, ge=1)
    sink_latents: int = Field(ge=0)
    sink_policy: Literal["fixed", "average", "adaptive"] | None = None
    sink_value: float | None = Field(None, ge=-1, le=1)
    trained_latents: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Stream:
        if self.sink_latents + self.chunk_latents > min(self.window("clean"), self.window_latents):
            raise ValueError("a window holds at least the sink and one chunk")
        if (self.first_chunk_latents or self.chunk_latents) % self.chunk_latents:
            raise ValueError("first_chunk_latents must be a multiple of chunk_latents, as it is made of chunks")
        if self.first_chunk_latents is not None and self.first_chunk_latents > self.window_latents:
            raise ValueError("a window holds at least the first chunk")
        if (self.sink_policy in ("average", "adaptive")) != (self.sink_value is not None):
            raise ValueError("sink_value goes with sink_policy average or adaptive")
        return self

    def window(self, kv_context: KVContext) -> int:
        """Latent frames that a chunk sees, sink and itself included."""
        return (self.clean_window_latents if kv_context == "clean" else None) or self.window_latents


class Context(_Section):
    """KV contexts: the one the weights were trained for (None: not known), and others that are known to work.
    `noise` is the timestep told in the clean pass, None where there is none. `alone`: that pass sees nothing before the
    chunk but the sink. With a window of two chunks this is what comes of computing the past anew for every chunk.
    `pictures`: from the second chunk on it is shown a first latent frame that was encoded again, by itself, from the
    last of its pictures. `source`: where the contexts can be read, the authors' code."""

    trained: KVContext | None
    works: tuple[KVContext, ...] = ()
    noise: float | None = Field(ge=0, le=1000)
    alone: bool = False
    pictures: bool = False
    source: str | None = None

    @property
    def default(self) -> KVContext:
        """The context to run with when nothing else is asked for."""
        return self.trained or (self.works[0] if self.works else "clean")


class Switches(_Section):
    """Policies of a prompt change: what the model was trained with, and what is known to work. `reset` always does."""

    trained: PromptPolicy | None = None
    works: tuple[PromptPolicy, ...] = ()

    @property
    def own(self) -> PromptPolicy:
        """Policy of a prompt change that names none."""
        return self.trained or (self.works[0] if self.works else "keep")


class Positions(_Section):
    """Rotary positions as published, and others that the authors offer."""

    published: Rope
    works: tuple[Rope, ...] = ()


class CatalogueEntry(_Section):
    """One model. `sampling`, `stream`, `context`, `switches` and `positions` are None where it makes whole clips and
    cannot stream; `weights` is None for the embedded model. `encode_normalised` says whether the authors' code
    normalises what the autoencoder encodes; where it does not, such latents are taken, if the user makes them."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    title: str
    family: str
    kind: Literal["causal", "bidirectional"]
    use: str = Field(description="what it is good for")
    architecture: str
    weights: Weights | None
    lora: Lora | None = None
    height: int = Field(ge=16, description="of the picture it was trained for, or shown with")
    width: int = Field(ge=16)
    native_fps: float | None = Field(gt=0)
    autoencoder: str
    encode_normalised: bool | None
    text_encoder: str
    begins_with: Literal["noise", "video"] = Field("noise", description="what its chunks are made from")
    sampling: Sampling | None
    stream: Stream | None
    context: Context | None
    switches: Switches | None
    positions: Positions | None
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_complete(self) -> CatalogueEntry:
        streaming = (self.sampling, self.stream, self.context, self.switches, self.positions)
        if any((part is None) == (self.kind == "causal") for part in streaming):
            raise ValueError("a causal model has sampling, stream, context, switches and positions, another has none")
        if self.sampling is not None:
            self.sampling.schedule()
        return self
