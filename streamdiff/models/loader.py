"""Loads the parts of a model that `models.resolve` has found, and reads its facts."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamdiff.config import EMBEDDED, ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.device import embedded_autoencoder_dtype, pick_dtype
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, hub, sampling
from streamdiff.models import spec as model_spec
from streamdiff.models.autoencoder import autoencoder
from streamdiff.models.autoencoder.autoencoder import ImageEncoder, check_autoencoder
from streamdiff.models.camera import CHANNELS
from streamdiff.models.catalogue import CatalogueEntry, Files
from streamdiff.models.clip_vision import ClipVision, check_tower
from streamdiff.models.resolve import ResolvedModel, resolve_model
from streamdiff.models.spec import ActionModules, ModelSpec, ParsedPrompt, TextEncoder
from streamdiff.models.text_encoder import EmbeddingFolder, WanText, check_text_files
from streamdiff.models.tiny.folder import FolderFacts, read_folder
from streamdiff.models.tiny.model import TinyText
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer import weights as wan_weights
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import WanCheckpoint

PARTS = ("weights", "vae", "text_encoder")
_FINGERPRINT_BYTES = 2**20  # of each file


class Kernels(NamedTuple):
    """Kernels of a transformer: attention (`models.transformer.attention_backend`), 8-bit layers (`quantization`)."""

    attention: str
    quantize: str


class ModelLoader:
    """Finds the model that `config` names, and loads its transformer on `device`.
    `dtype` is that of the transformer's weights."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        architecture: Mapping[str, Any] | None = None,
    ) -> None:
        """`architecture`: see `ResolvedModel`."""
        self.config, self.device, self._architecture = config, device, architecture
        self.dtype, self._usual_dtype = pick_dtype(config.dtype, device), pick_dtype("auto", device)

    @cached_property
    def model(self) -> ResolvedModel:
        """Where its parts lie. Fetches published files of the transformer that are not there. ConfigError as
        `resolve_model`."""
        return resolve_model(self.config, self._architecture)

    @property
    def decoder_dtype(self) -> torch.dtype:
        """Dtype of the autoencoder."""
        return embedded_autoencoder_dtype(self.device) if self.model.embedded else self._usual_dtype

    # ---- facts: headers and configurations are read, no weights ----------------------------------------------------

    @cached_property
    def checkpoint(self) -> WanCheckpoint:
        """The transformer's file, or drawn weights.

        Raises:
            ConfigError: no Wan transformer, files that cannot be read, or one of other sizes than the model has.
        """
        model = self.model
        if model.weights is not None:
            found = wan_weights.open_transformer(
                model.weights, model.container, model.architecture, model.usual_container
            )
            if model.entry is not None:
                _check_kind(found, model.entry, sizes=model.architecture is None)
            return found
        sizes = catalogue.transformer_arguments(catalogue.find(model.name))
        return wan_weights.open_transformer(wan_weights.drawn_transformer(model.name, sizes, self.device, self.dtype))

    @cached_property
    def folder_facts(self) -> FolderFacts | None:
        """Facts in the folder of an embedded kind of model; None for other models. ConfigError as `read_folder`."""
        if not self.model.embedded:
            return None
        assert self.model.folder is not None
        return read_folder(self.model.folder, self.model.name)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's spec, from its folder or the catalogue; usual values for an unknown checkpoint.

        Raises:
            ConfigError: as `checkpoint`; or a size, where the model has one of its own.
        """
        facts = self.folder_facts
        if facts is None:
            _, _, architecture, actions = self.checkpoint
            _check_camera(self.model.weights, architecture)
            spec = catalogue.make_spec(self.model.name, self.model.entry, architecture, actions)
            said = self.model.architecture or self.checkpoint.checkpoint.config or {}
            if self.model.entry is None and type(window := said.get("local_attn_size")) is int and window > 0:
                sink = said.get("sink_size")  # in worlds' own configurations
                spec = replace(spec, window_latents=window, sink_latents=sink if type(sink) is int else 0)
            spec = replace(spec, kv_contexts=KV_CONTEXTS) if self.config.untested else spec
            size = self.config.size
            return spec if size is None else model_spec.with_size(spec, *model_spec.parse_size(size))
        if self.config.size is not None:
            raise ConfigError(f"the size of {self.model.name} is fixed; leave --size out")
        return facts.spec

    def live_spec(self) -> ModelSpec:
        """The facts with which the model streams: what the configuration says goes before its own.

        Raises:
            ConfigError: a model that makes whole clips, or of which too little is said; one that does not have as many
                steps as are asked for, a window that cannot be, or a clean pass that its KV context does not have.
        """
        model, config = self.model, self.config
        unknown = model.entry is None and not model.embedded
        if model.entry is not None and model.entry.stream is None:
            raise ConfigError(
                f"{config.name} is bidirectional: each frame sees all of a clip, so it makes whole clips and cannot "
                "run live; name one of the causal models that `streamdiff models` lists"
            )
        if not unknown and (config.timesteps is not None or config.chunk_latents is not None):
            raise ConfigError(
                f"the timesteps and the chunk of {config.name} are known; leave lists of --steps, and --chunk-frames, "
                "out"
            )
        if fault := model_spec.context_fault(self.spec, config.kv_context):
            raise ConfigError(fault, field="kv_context")
        given = _given_stream(config) if unknown else {}
        spec, overrides = replace(self.spec, **given), (config.window, config.sink, config.rope)
        if overrides != (None, None, None):
            if model.embedded:
                raise ConfigError(
                    f"{config.name} knows no past but that of the window it was trained with; leave --window, --sink "
                    "and --rope out"
                )
            spec = model_spec.with_window(spec, *overrides)
        model_spec.choose_steps(config.step_count, spec.steps, spec.name)
        return spec

    def check_files(self, *parts: str) -> None:
        """Open those of `PARTS` that are on disk as loading would, without reading weights; the transformer with its
        LoRAs.

        Raises:
            ConfigError: what loading would refuse, but for values.
        """
        model = self.model
        if "weights" in parts and (model.weights is not None or model.loras):
            wan_weights.plan_transformer(self.checkpoint, loras=model.loras)
        if "vae" in parts and model.vae is not None and not model.embedded:
            check_autoencoder(model.vae, "decoder", self.config.latent_space, self.spec)
        if "text_encoder" in parts and isinstance(model.text_encoder, Path):
            if model.reads_pictures:
                check_tower(model.text_encoder, self.spec.text_shape)
            elif not wan_weights.takes_picture_only(self.checkpoint.architecture):
                check_text_files(model.text_encoder, self.spec.text_shape[1])

    def digest(self) -> str:
        """Of all configuration files, and of the weights' names, sizes and beginnings."""
        found = hashlib.sha256()
        for path in sorted(self._files()):
            found.update(path.name.encode() + str(path.stat().st_size).encode())
            with path.open("rb") as file:
                found.update(file.read(_FINGERPRINT_BYTES))
        return found.hexdigest()[:16]

    def _files(self) -> set[Path]:
        """Every file that a part of the model is read from."""
        model = self.model
        vae = self.config.vae
        vae_path = None if vae is None or vae.startswith(catalogue.RANDOM) else autoencoder.locate(vae)
        roots = [model.folder, model.weights, model.text_encoder, vae_path, *(lora.path for lora in model.loras)]
        found: set[Path] = set()
        for root in roots:
            if isinstance(root, Path):
                found |= {path for path in root.rglob("*") if path.is_file()} if root.is_dir() else {root}
        return found

    # ---- parts -----------------------------------------------------------------------------------------------------

    def transformer(
        self,
        blocks: tuple[int, int] | None = None,
        kernels: Kernels | None = None,
        weights_on: torch.device | None = None,
    ) -> WanDenoiser:
        """Blocks `blocks` (first, last exclusive; all when None) of the transformer, and what goes with them, with
        these `kernels`, None: as configured. Attention (`models.transformer.attention_backend`) is tried out first.
        Weights lie on `weights_on`, None: on the device.
        Mutates: torch's dispatch, where attention is one of `attention_backend.IMPLEMENTATIONS`.

        Raises:
            ConfigError: weights that do not fit, a model that takes more than latents and text, a kernel that cannot
                run here or is wrong, or weights that cannot be quantised so here.
        """
        model, device, dtype, sizes = self.model, self.device, self.dtype, self.checkpoint.architecture
        heads, head_dim = sizes["num_attention_heads"], sizes["attention_head_dim"]
        attention, quantize = kernels or Kernels(self.config.attention, self.config.quantize)
        attention_backend.probe(attention, device, dtype, heads, head_dim)
        attention_backend.activate(attention)
        weights = wan_weights.load_transformer(
            self.checkpoint,
            device=weights_on or device,
            dtype=dtype,
            blocks=blocks,
            loras=model.loras,
            quantize=quantize,
        )
        found: Any = weights.config
        if found.added_kv_proj_dim is not None:
            raise ConfigError(
                f"{model.weights}: this is an image-to-video model, which is not supported: it takes the picture "
                "through CLIP. Use a text-to-video model; a stream of one can begin with a picture too (--image)"
            )
        denoiser = WanDenoiser(weights, self.spec.control_planes, self.spec.condition_channels)
        if denoiser.extra_channels and not model.embedded:
            raise ConfigError(
                f"{model.weights} takes {denoiser.extra_channels} channels beside the latents', which nothing gives "
                f"it: a picture's condition has {self.spec.latent_channels + self.spec.frames_per_latent}"
            )
        denoiser.attention = attention
        return denoiser.fuse()

    def picture_encoder(self, spec: ModelSpec) -> ImageEncoder:
        """The encoder of start pictures for streams of `spec`. Reads no file before the first picture."""
        load, space = autoencoder.load_autoencoder, self.config.latent_space
        return ImageEncoder(lambda: load(self.model.found_vae, "encoder", self.device, self.decoder_dtype, space), spec)


def _check_camera(file: Path | None, architecture: Mapping[str, Any]) -> None:
    """Raises ConfigError for a camera of another kind."""
    wanted = CHANNELS * prod(architecture["patch_size"])
    if (channels := architecture.get("camera_channels")) not in (None, wanted):
        raise ConfigError(
            f"{file} takes {channels} camera channels, and poses are {wanted}; LingBot-World's models for actions "
            "are not supported",
            field="model",
        )


def _check_kind(file: WanCheckpoint, entry: CatalogueEntry, sizes: bool) -> None:
    """Compare a transformer with what the catalogue says of the model: what steers it, and its `sizes`. One that is
    narrower than any published one is a trial's: it may have fewer blocks, too.

    Raises:
        ConfigError: it is another model's.
    """
    wanted, given = catalogue.transformer_arguments(entry), file.architecture
    widths = [each.width for name, each in catalogue.parts().architectures.items() if name != EMBEDDED]
    trial = _width(given) < min(widths) and given["num_layers"] <= wanted["num_layers"]
    names = ("in_channels", "out_channels", "patch_size") + (() if trial else ("num_layers", "ffn_dim", "text_dim"))
    other = any(given[name] != wanted[name] for name in names) or not (trial or _width(given) == _width(wanted))
    steered = _steered_by(given, file.actions), _steered_by(wanted, catalogue.parts_of(entry)[0].actions)
    if steered[0] != steered[1] or (sizes and other):
        raise ConfigError(
            f"{file.checkpoint} is {_sizes(given)}, {steered[0]}; {entry.name} is {_sizes(wanted)}, {steered[1]} "
            f"({entry.architecture}). Give a file of its kind as --weights, or the name of the file's own model as "
            "--model"
        )


def _width(architecture: Mapping[str, Any]) -> int:
    return int(architecture["num_attention_heads"] * architecture["attention_head_dim"])


def _sizes(architecture: Mapping[str, Any]) -> str:
    """What tells one transformer from another, for people."""
    return (
        f"a transformer of {architecture['num_layers']} blocks, {_width(architecture)} wide, feed-forward "
        f"{architecture['ffn_dim']}, {architecture['in_channels']} channels in, {architecture['out_channels']} out, "
        f"texts {architecture['text_dim']} wide"
    )


def _steered_by(architecture: Mapping[str, Any], actions: ActionModules | None) -> str:
    """What steers a transformer beside texts, for people."""
    if actions is not None:
        return f"steered by {actions.keyboard} columns of a keyboard and {actions.mouse} of a mouse"
    return "steered by a camera" if architecture.get("camera_channels") is not None else "not steered by keys"


def _given_stream(config: ModelConfig) -> dict[str, Any]:
    """Facts of how a model streams that the catalogue does not know.

    Raises:
        ConfigError: something is not said.
    """
    settings = (
        ("--steps 1000,937.5,833.33,625 (the timesteps it gets)", config.timesteps),
        ("--chunk-frames N (latent frames of a chunk)", config.chunk_latents),
        ("--window N", config.window),
        ("--sink N (0: none)", config.sink),
        ("--rope absolute, or relative", config.rope),
    )
    missing = [option for option, value in settings if value is None]
    if missing or config.timesteps is None:
        raise ConfigError(
            f"how {config.name} streams is not in the catalogue, and not guessed: say {'; '.join(missing)}. Where it "
            "is of the kind of a model that `streamdiff models` lists, give its files as parts of that one instead: "
            "--model NAME --weights FILE"
        )
    schedule = sampling.published(config.timesteps)
    return {"steps": (schedule.steps,), "schedules": (schedule,), "chunk_latents": config.chunk_latents}


def load_text_encoder(
    model: ResolvedModel, config: ModelConfig, text_shape: tuple[int, int], device: torch.device
) -> TextEncoder:
    """The text encoder, which puts embeddings of `text_shape` on `device`. Where that of a large model runs: see
    `WanText`. Its weights come with the first text. Embeddings of a large one are kept in the user's cache folder too
    (`EmbeddingFolder`).

    Raises:
        ConfigError: there is none.
    """
    if model.index is not None:
        assert model.folder is not None
        return TinyText.load(model.folder, device)
    if (path := model.text_encoder) is None:
        if model.name.startswith(catalogue.RANDOM):
            return RandomText(text_shape, device)
        raise ConfigError(
            f"{model.name} comes without a text encoder; give a folder with encoder and tokenizer, in diffusers' or "
            "original Wan's layout, as --text-encoder, or embeddings as --prompt-embeds"
        )
    if model.reads_pictures:
        return ClipVision(path, text_shape, device)
    if isinstance(path, Files):
        path = hub.fetch_folder(path)
    length, width = text_shape
    return WanText(path, length=length, width=width, output=device, kept=EmbeddingFolder())


def awaited_bytes(text: TextEncoder, device: torch.device) -> int:
    """Bytes that a text encoder's weights will take on `device` once the first text loads them."""
    return text.awaited_bytes(device) if isinstance(text, WanText) else 0


class RandomText(TextEncoder):
    """Without an encoder: every text has embeddings of its own, drawn."""

    examples = ("anything: weights are random, and the picture is noise",)
    vocabulary = "Any words. The weights are random, so the picture is noise; only speed and memory are real."

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        return ParsedPrompt(prompt, "The weights are random: the picture is noise, only speed and memory are real.")

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]`, float32, on the device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(text.encode()))
        return torch.randn(self._shape, generator=generator, device=self._device)
