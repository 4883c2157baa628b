"""Very small real models: every part is the product's own class with random weights, so a test takes milliseconds.

Weights are drawn so that nothing is near zero or near one: attention, text, noise level and position all matter to
the result, and a mistake in any of them is far above the tolerance of a comparison.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from streamdiff.core import Control
from streamdiff.models.autoencoder.picture_decoder import Normalisation, PictureDecoder
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvAutoencoder, TaehvConfig
from streamdiff.models.model import Model
from streamdiff.models.spec import ActionModules, ActionRows, ModelSpec
from streamdiff.models.tiny.model import TinyText
from streamdiff.models.tiny.scene import Scene
from streamdiff.models.transformer.actions import attach
from streamdiff.models.transformer.wan import WanDenoiser, make_transformer
from training import autoencoder, model_folder
from training.embedded import TEXT_TOKENS, WIDTH
from training.scene_rows import row_of
from training.world.render import render
from training.world.tracks import Streams

CPU = torch.device("cpu")
LATENT_CHANNELS = 4
LATENT_SIDE = 4
AUTOENCODER = TaehvConfig(
    latent_channels=LATENT_CHANNELS,
    patch_size=2,
    decoder_widths=(8, 6, 6, 4),
    decoder_blocks=(1, 1, 1),
    decoder_space=(2, 1, 1),
    decoder_time=(2, 2, 1),
    encoder_widths=(4, 4, 6, 8),
    encoder_blocks=(1, 0, 1),
    frames_to_trim=0,
)
RED = "a red circle moving right over a meadow"
BLUE = "a blue star moving up over a meadow at night"
WHITE = "a white heart moving left over a meadow at dusk"
CONTROLS = (Control("x"), Control("pan", whole_chunk=True), Control("jump", "button"))
"""What steers a small model that has controls."""
KEYS = (Control("stand", "button", idle=True), Control("walk", "button"), Control("yaw", scale=0.1))
ACTIONS = ActionModules((0, 1), 2, 12, 2, 1, 8, 4, 256.0, ActionRows(12, 4, 3))
"""What steers a small world with action modules, in its first two blocks, and these."""


class Parts(NamedTuple):
    """What a small model is made of."""

    text: TinyText
    transformer: WanTransformer3DModel
    autoencoder: TAEHV
    mean: torch.Tensor
    std: torch.Tensor


def small_transformer(
    seed: int, *, layers: int = 2, heads: int = 2, head_dim: int = 12, planes: int = 2, features: int | None = None,
    actions: ActionModules | None = None,
) -> WanTransformer3DModel:  # fmt: skip
    """A random `WanTransformer3DModel` with 2 x 2 patches and `planes` input channels beyond the latents'; with
    `features` channels of a picture's features in the text's place, and action modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=LATENT_CHANNELS + planes,
            out_channels=LATENT_CHANNELS,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=64,
            image_dim=features,
        )
        if actions is not None:
            attach(transformer.blocks, actions, heads * head_dim)
        with torch.no_grad():
            for name, weight in transformer.named_parameters():
                if name.endswith("scale_shift_table"):
                    weight.normal_(std=0.6)
                elif weight.ndim == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.3)
                elif name.startswith("condition_embedder.text_embedder"):
                    weight.mul_(2.0)  # texts fill a third of their tokens
    return transformer.eval().requires_grad_(False)


def with_camera(small: WanTransformer3DModel) -> WanTransformer3DModel:
    """The same with the layers of a camera in every block, random ones."""
    model, draw = make_transformer({**small.config, "camera_channels": 1536}), torch.Generator().manual_seed(3)
    model.load_state_dict(small.state_dict(), strict=False)
    for name, weight in model.named_parameters():
        if "cam" in name or "c2ws" in name:
            weight.data = torch.randn(weight.shape, generator=draw) * weight.shape[-1] ** -0.5
    return model.eval().requires_grad_(False)


def small_text(seed: int) -> TinyText:
    """The embedded model's text part, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = model_folder.build_text()
    text.encoder.eval().requires_grad_(False)
    return text


def bare_sky() -> torch.Tensor:
    """A picture of the embedded model's world with nothing in it, `[3, 256, 256]` in [0, 1]."""
    rows = torch.tensor([row_of(Scene(place="sky"))])
    frame: torch.Tensor = render(Streams(rows).play(rows, 1).flat(), things=False).frames[0]
    return frame


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def untrained_autoencoder() -> TAEHV:
    """The embedded model's, as its training begins."""
    torch.manual_seed(0)
    made = TAEHV(autoencoder.AUTOENCODER)
    autoencoder.initialise(made)
    return made


def small_autoencoder(seed: int, config: TaehvConfig = AUTOENCODER) -> TAEHV:
    """A narrow autoencoder with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TAEHV(config).eval().requires_grad_(False)


def small_parts(seed: int, *, layers: int = 2, heads: int = 2, head_dim: int = 12, planes: int = 2) -> Parts:
    """All parts of one model."""
    mean = torch.linspace(-0.5, 0.5, LATENT_CHANNELS)
    std = torch.linspace(0.5, 1.5, LATENT_CHANNELS)
    transformer = small_transformer(seed, layers=layers, heads=heads, head_dim=head_dim, planes=planes)
    return Parts(small_text(seed), transformer, small_autoencoder(seed), mean, std)


def small_decoder(autoencoder: TAEHV, mean: torch.Tensor, std: torch.Tensor) -> TaehvAutoencoder:
    """The decoder half, with these statistics of its latents `[C]`."""
    return TaehvAutoencoder(autoencoder, Normalisation(mean.tolist(), std.tolist(), CPU))


def small_encoder(seed: int = 0) -> TaehvAutoencoder:
    """The encoder that goes with `small_model`."""
    parts = small_parts(seed)
    return small_decoder(parts.autoencoder, parts.mean, parts.std)


def small_model(
    seed: int = 0,
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 12,
    planes: int = 2,
    chunk: int = 2,
    window: int = 6,
    sink: int = 0,
    controls: tuple[Control, ...] = (),
) -> Model:
    """A whole model; `chunk`, `window` and `sink` are in latent frames, `planes` are position planes."""
    parts = small_parts(seed, layers=layers, heads=heads, head_dim=head_dim, planes=planes + len(controls))
    spec = ModelSpec(
        name=f"small-{seed}",
        latent_channels=LATENT_CHANNELS,
        latent_height=LATENT_SIDE,
        latent_width=LATENT_SIDE,
        chunk_latents=chunk,
        window_latents=window,
        sink_latents=sink,
        frames_per_latent=AUTOENCODER.temporal,
        width=LATENT_SIDE * AUTOENCODER.spatial,
        height=LATENT_SIDE * AUTOENCODER.spatial,
        native_fps=40.0,
        shift=5.0,
        steps=(4, 2),
        text_shape=(TEXT_TOKENS, WIDTH),
        controls=controls,
    )
    decoder = PictureDecoder(small_decoder(parts.autoencoder, parts.mean, parts.std))
    return Model(spec, WanDenoiser(parts.transformer, len(controls)), parts.text, decoder)


def small_world(seed: int, *, layers: int = 3, heads: int = 2, window: int = 6) -> Model:
    """A model with action modules, which otherwise is as `small_model`."""
    plain = small_model(seed, layers=layers, heads=heads, window=window)
    spec = replace(plain.spec, controls=KEYS, actions=ACTIONS, action_rows=ACTIONS.rows)
    network = small_transformer(seed, layers=layers, heads=heads, actions=ACTIONS)
    return replace(plain, spec=spec, denoiser=WanDenoiser(network))


def save_model(folder: Path, layers: int = 2, controls: tuple[Control, ...] = ()) -> None:
    """Write a small model as one that says everything about itself, so that the product loads it by its folder."""
    parts = small_parts(7, layers=layers, planes=2 + len(controls))
    stream: dict[str, object] = {
        "latent_height": LATENT_SIDE,
        "latent_width": LATENT_SIDE,
        "chunk_latents": 2,
        "window_latents": 6,
        "sink_latents": 0,
        "native_fps": 40.0,
        "shift": 5.0,
        "steps": [4, 2],
        "controls": [asdict(control) for control in controls],
    }
    model_folder.save_model(folder, parts.autoencoder, parts.mean, parts.std, (parts.text, parts.transformer), stream)
