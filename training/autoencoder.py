"""Stage one of training the embedded model: the autoencoder, on crops of the procedural world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamdiff.models.autoencoder.taehv import TAEHV, MemBlock, TaehvConfig, TaehvMemory, TGrow, TPool
from training import loop
from training.scene_rows import COLUMN
from training.world import weather
from training.world.render import Window, render
from training.world.scenes import draw_scenes, redraw
from training.world.tracks import FRAMES_PER_LATENT, SIZE, Streams, Track, join

AUTOENCODER = TaehvConfig(
    latent_channels=16,
    patch_size=4,
    decoder_widths=(64, 48, 32, 32),
    decoder_blocks=(2, 2, 1),
    decoder_space=(2, 2, 1),
    decoder_time=(2, 2, 1),
    encoder_widths=(24, 24, 48, 64),
    encoder_blocks=(0, 1, 2),
    frames_to_trim=0,
)
MATRIX_LR = 4e-3
OTHER_LR = 1e-3
ENDS = ("encoder.0.", "decoder.18.")
"""AdamW trains them: a matrix that is moved by Muon there shifts the colors of the whole picture at every step."""
DECODER_RATE = 0.3
CLIP_LATENTS = 3
CROP = 128
CONTRAST = 3.0
CUT = 0.25
"""Share of the boundaries between latent frames at which the scene changes."""
CELL = AUTOENCODER.spatial
SEEN = 0.15
"""Cover from which on rain, snow or wind is seen."""
FALLING = 8.0
"""Weight of its pixels: at 4 the autoencoder left out rain, which is thin."""


@dataclass(frozen=True)
class Clips:
    """A training batch: frames `[B, T, 3, H, W]` and the weight of each pixel `[B, T, 1, H, W]`."""

    frames: Tensor
    weight: Tensor


def draw_clips(batch: int, crop: int, generator: torch.Generator, device: torch.device) -> Clips:
    """Clips of `CLIP_LATENTS` latent frames, `crop` pixels square and on the latent grid, three of four of them near a
    thing. Pixels of things weigh four times, those of what falls or blows in front of them `FALLING`."""
    track = draw_track(batch, generator)
    windows = [window for window in draw_windows(track, crop, generator) for _ in range(track.place.shape[1])]
    pictures = render(track.flat(), windows, str(device))
    view = (batch, CLIP_LATENTS * FRAMES_PER_LATENT, -1, crop, crop)
    weight = 1.0 + 3.0 * (pictures.things > 0.02).float()
    weight[_falling(track.flat(), windows).to(device)] = FALLING
    return Clips(pictures.frames.view(view), weight.view(view))


def _falling(track: Track, windows: list[Window]) -> Tensor:
    """Where rain, snow or wind is seen, bool `[N, 1, side, side]`: too little of a picture for its error to count."""
    _, covers = weather.falling(track.scenes[:, COLUMN["weather"]], track.fall, track.light)
    return torch.stack([cover[window.slices] for cover, window in zip(covers, windows, strict=True)])[:, None] > SEEN


def draw_track(count: int, generator: torch.Generator) -> Track:
    """`count` streams in the middle of their lives, over `CLIP_LATENTS` latent frames, with cuts."""
    scenes = draw_scenes(count, generator)
    streams, tracks = Streams(scenes, generator), []
    for latent in range(CLIP_LATENTS):
        if latent:
            cut = torch.rand(count, 1, generator=generator) < CUT
            scenes = torch.where(cut, redraw(scenes, 0.6, generator), scenes)
        tracks.append(streams.play(scenes, FRAMES_PER_LATENT))
    return join(tracks)


def draw_windows(track: Track, crop: int, generator: torch.Generator) -> list[Window]:
    """For every stream the part of the picture that is shown."""
    count = len(track.scenes)
    room = (SIZE - crop) // CELL
    anywhere = torch.randint(room + 1, (count, 2), generator=generator) * CELL
    middle = track.place.shape[1] // 2
    second = track.scenes[:, middle, COLUMN["second"]] * torch.randint(2, (count,), generator=generator)
    shift = (torch.randint(5, (count, 2), generator=generator) - 2) * CELL
    near = track.place[torch.arange(count), middle, second] + shift - crop // 2
    near = (near // CELL * CELL).clamp(0, SIZE - crop)
    chosen: Tensor = torch.where(torch.rand(count, 1, generator=generator) < 0.75, near, anywhere)
    return [Window(top, left, crop) for top, left in chosen.tolist()]


def encode_groups(model: TAEHV, frames: Tensor) -> Tensor:
    """Encode every latent frame by itself: `[B, T, 3, H, W]` to `[B, T / 4, C, h, w]`.

    The embedded model's latents have no memory of earlier frames, so equal pictures have equal latents.
    """
    batch = frames.shape[0]
    groups = frames.reshape(-1, model.config.temporal, *frames.shape[2:])
    latents = model.encode(groups, TaehvMemory())
    return latents.view(batch, -1, *latents.shape[2:])


@torch.no_grad()
def initialise(model: TAEHV) -> None:
    """Initialise so that signals keep their size and the untrained model already shows each block's mean colour.

    He initialisation (torch's default shrinks signals sixfold per layer, which starves a deep plain network), residual
    branches small, and channels 0 to 2 of every layer wired to carry red, green and blue through. Mutates: model.
    """
    sub = model.config.patch_size**2
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu" if module.bias is not None else "linear")
            if module.bias is not None:
                module.bias.zero_()
    for module in model.modules():
        if isinstance(module, MemBlock):
            branch_end = module.conv[4].get_parameter("weight")
            branch_end.mul_(0.1)
            branch_end[:3] = 0.0
        elif isinstance(module, TPool):
            module.conv.weight[:3] = (
                torch.eye(module.conv.out_channels).repeat(1, module.stride)[:3, :, None, None] / module.stride
            )
        elif isinstance(module, TGrow):
            eye = torch.eye(module.conv.in_channels)[:3, :, None, None]
            for index in range(module.stride):
                module.conv.weight[index * module.conv.in_channels :][:3] = eye
    for layers in (model.encoder, model.decoder):
        for layer in layers:
            if isinstance(layer, torch.nn.Conv2d):
                layer.weight[:3] = 0.0
                layer.weight[range(3), range(3), 1, 1] = 1.0
    ends = [model.encoder[0], model.encoder[-1], model.decoder[1], model.decoder[-1]]
    first, bottom, top, last = (end for end in ends if isinstance(end, torch.nn.Conv2d))
    first.weight[:3], last.weight[:] = 0.0, last.weight * 0.1
    for color in range(3):
        inside = list(range(color * sub, (color + 1) * sub))
        first.weight[color, inside, 1, 1] = 1 / sub
        last.weight[inside] *= 0.0
        last.weight[inside, color, 1, 1] = 1.0
    bottom.weight[:3] *= CONTRAST
    bottom.bias[:3] = -0.5 * CONTRAST  # type: ignore[index]
    top.weight[:3] /= CONTRAST
    top.bias[:3] = 0.5  # type: ignore[index]


def loss_of(model: TAEHV, clips: Clips, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Training loss and plain mean squared error of one batch.

    Absolute and squared error, the error of frame differences (motion must be smooth within a latent frame), and a
    pull of the latents towards zero mean and unit variance. The decoder sees latents with a little noise, since the
    transformer's will not be perfect.
    """
    latents = encode_groups(model, clips.frames).float()
    mean, std = latents.mean((0, 1, 3, 4)), latents.std((0, 1, 3, 4))
    level = 0.15 * torch.rand(latents.shape[0], 1, 1, 1, 1, generator=generator)
    noise = torch.randn(latents.shape, generator=generator) * level
    decoded = model.decode(latents + noise.to(latents.device), TaehvMemory())
    error = decoded - clips.frames
    motion = (error[:, 1:] - error[:, :-1]).abs() * clips.weight[:, 1:]
    loss = (clips.weight * (error.abs() + 4 * error.square())).mean() + 2.0 * motion.mean()
    return loss + 0.02 * (mean.square() + (std - 1).square()).mean(), error.square().mean()


def _prepared(begin: TAEHV | None, device: torch.device) -> tuple[TAEHV, loop.Optimizer]:
    """The autoencoder to train, and its optimizer; see `train`."""
    model = TAEHV(AUTOENCODER) if begin is None else begin
    if begin is None:
        initialise(model)
    model.to(device).set_memory_format(torch.channels_last)
    model.encoder.requires_grad_(begin is None)
    model.decoder.requires_grad_(True)
    rate = 1.0 if begin is None else DECODER_RATE
    return model, loop.Optimizer(model, rate * MATRIX_LR, rate * OTHER_LR, adam=ENDS)


def train(
    out: Path,
    budget: loop.Budget,
    seed: int,
    device: torch.device,
    batch: int = 8,
    bf16: bool = False,
    begin: TAEHV | None = None,
) -> TAEHV:
    """Train, or go on with, the autoencoder under `out`; returns it. Writes `out/autoencoder.pt` every 100 steps.

    With `bf16` convolutions are computed in bfloat16; weights, latents and the loss stay float32. With `begin` only its
    decoder is trained, at `DECODER_RATE` of the learning rates, and `out/decoder.pt` is written: latents stay what they
    were, so a transformer that was trained on them goes with it. Mutates: begin.
    """
    torch.manual_seed(seed)
    model, optimizer = _prepared(begin, device)
    checkpoint = loop.Checkpoint(out / ("autoencoder.pt" if begin is None else "decoder.pt"))
    state = checkpoint.load(device)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    progress, smooth = checkpoint.progress, 0.0

    def save(step: int) -> None:
        checkpoint.save(step, model=model.state_dict(), optimizer=optimizer.state_dict())

    for done in loop.steps(budget, progress, "autoencoder"):
        generator = loop.step_generator(seed, progress.step)
        count, side = (max(1, batch // 4), SIZE) if progress.step % 8 == 7 else (batch, CROP)
        clips = draw_clips(count, side, generator, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss, mse = loss_of(model, clips, generator)
        optimizer.step(loss, done, progress.step)
        smooth = 0.95 * smooth + 0.05 * float(mse.detach()) if smooth else float(mse.detach())
        if progress.step % 100 == 99 and loop.rank() == 0:
            print(
                f"autoencoder step {progress.step + 1}: psnr {-10 * torch.log10(torch.tensor(smooth)):.2f} dB",
                flush=True,
            )
            save(progress.step + 1)
    save(progress.step)
    model.eval()
    return model
