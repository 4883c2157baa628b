"""Stage one of training the embedded model: the autoencoder, on crops of the procedural world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamdiff.models.autoencoder.taehv import TAEHV, MemBlock, Memory, TaehvConfig, TGrow, TPool
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import loop

AUTOENCODER = TaehvConfig(
    latent_channels=8,
    patch_size=2,
    decoder_widths=(64, 48, 24, 16),
    decoder_blocks=(2, 2, 1),
    decoder_space=(2, 2, 1),
    decoder_time=(2, 2, 1),
    encoder_widths=(16, 16, 32, 64),
    encoder_blocks=(0, 1, 2),
    frames_to_trim=0,
)
MATRIX_LR = 1e-2
OTHER_LR = 1e-3
DECODER_RATE = 0.3
CLIP_LATENTS = 3
CROP = 64
CONTRAST = 3.0


@dataclass(frozen=True)
class Clips:
    """A training batch: frames `[B, T, 3, H, W]` and the weight of each pixel `[B, T, 1, H, W]`."""

    frames: Tensor
    weight: Tensor


def draw_clips(batch: int, crop: int, generator: torch.Generator, device: torch.device) -> Clips:
    """Clips of `CLIP_LATENTS` latent frames, a quarter of the boundaries between them a cut to another scene.

    Crops lie on the latent grid, three of four near the shape. Pixels of the shape and its rim weigh four times.
    """

    def pick(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(device)

    shape = (batch, CLIP_LATENTS)
    fields = [pick(len(names), *shape) for names in world.ATTRIBUTES]
    keep = torch.rand(shape, generator=generator).to(device) >= 0.25
    for i in range(1, CLIP_LATENTS):
        for values in fields:
            redraw = ~keep[:, i] & (pick(100, batch) < 60)
            values[:, i] = torch.where(redraw, values[:, i], values[:, i - 1])
    color, kind, motion, background = (f.repeat_interleave(world.FRAMES_PER_LATENT, 1) for f in fields)
    step = world.velocities(str(device))[motion]
    start = pick(world.CELLS, batch, 1, 2) * world.LATTICE
    place = (start + torch.cumsum(step, 1) - step).remainder(world.SIZE)
    window = None
    size = world.SIZE
    frames = batch * CLIP_LATENTS * world.FRAMES_PER_LATENT
    if crop < world.SIZE:
        size = crop
        near = place[:, place.shape[1] // 2] + (pick(5, batch, 2) - 2) * world.LATTICE - crop // 2
        anywhere = pick((world.SIZE - crop) // world.LATTICE + 1, batch, 2) * world.LATTICE
        corner = torch.where(pick(4, batch, 1) > 0, near.clamp(0, world.SIZE - crop) // 8 * 8, anywhere)
        corner = corner.repeat_interleave(CLIP_LATENTS * world.FRAMES_PER_LATENT, 0)
        window = (corner[:, 0], corner[:, 1], crop)
    args = (kind.flatten(), background.flatten(), place[..., 0].flatten(), place[..., 1].flatten())
    video = world.render(color.flatten(), *args, crop=window)
    plain = world.empty(background.flatten(), crop=window)
    weight = 1.0 + 3.0 * ((video - plain).abs().amax(1, keepdim=True) > 0.02).float()
    view = (batch, frames // batch, -1, size, size)
    return Clips(video.view(view), weight.view(view))


def encode_groups(model: TAEHV, frames: Tensor) -> Tensor:
    """Encode every latent frame by itself: `[B, T, 3, H, W]` to `[B, T / 4, C, h, w]`.

    The embedded model's latents have no memory of earlier frames, so equal pictures have equal latents.
    """
    batch = frames.shape[0]
    groups = frames.reshape(-1, model.config.temporal, *frames.shape[2:])
    latents = model.encode(groups, Memory())
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
    decoded = model.decode(latents + noise.to(latents.device), Memory())
    error = decoded - clips.frames
    motion = (error[:, 1:] - error[:, :-1]).abs() * clips.weight[:, 1:]
    loss = (clips.weight * (error.abs() + 4 * error.square())).mean() + 2.0 * motion.mean()
    return loss + 0.02 * (mean.square() + (std - 1).square()).mean(), error.square().mean()


@dataclass(frozen=True)
class Recipe:
    """Which autoencoder is trained, and on what: `draw` makes a batch of clips (see `draw_clips`) of `crop` pixels
    square, at every eighth step of `whole`; `matrix_lr` is Muon's learning rate, `adam` names the parts that AdamW
    trains besides what is no matrix."""

    config: TaehvConfig = AUTOENCODER
    draw: Callable[[int, int, torch.Generator, torch.device], Clips] = draw_clips
    crop: int = CROP
    whole: int = world.SIZE
    matrix_lr: float = MATRIX_LR
    adam: tuple[str, ...] = ()


def _prepared(recipe: Recipe, begin: TAEHV | None, device: torch.device) -> tuple[TAEHV, loop.Optimizer]:
    """The autoencoder to train, and its optimizer; see `train`."""
    model = TAEHV(recipe.config) if begin is None else begin
    if begin is None:
        initialise(model)
    model.to(device).set_memory_format(torch.channels_last)
    model.encoder.requires_grad_(begin is None)
    model.decoder.requires_grad_(True)
    rate = 1.0 if begin is None else DECODER_RATE
    return model, loop.Optimizer(model, rate * recipe.matrix_lr, rate * OTHER_LR, adam=recipe.adam)


def train(
    out: Path,
    budget: loop.Budget,
    seed: int,
    device: torch.device,
    batch: int = 8,
    bf16: bool = False,
    recipe: Recipe = Recipe(),
    begin: TAEHV | None = None,
) -> TAEHV:
    """Train, or go on with, the autoencoder under `out`; returns it. Writes `out/autoencoder.pt` every 100 steps.

    With `bf16` convolutions are computed in bfloat16; weights, latents and the loss stay float32. With `begin` only its
    decoder is trained, at `DECODER_RATE` of the learning rates, and `out/decoder.pt` is written: latents stay what they
    were, so a transformer that was trained on them goes with it. Mutates: begin.
    """
    torch.manual_seed(seed)
    model, optimizer = _prepared(recipe, begin, device)
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
        count, side = (max(1, batch // 4), recipe.whole) if progress.step % 8 == 7 else (batch, recipe.crop)
        clips = recipe.draw(count, side, generator, device)
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
