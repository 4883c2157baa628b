"""How much of the world survives the embedded model's autoencoder: PSNR, the judge's verdicts, displacement error.

    python -m benchmarks.autoencoder_quality
    python -m benchmarks.autoencoder_quality --weights runs/autoencoder.pt --quick

Every clip is two chunks long; in every second clip the scene changes between them. Knows nothing about the transformer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report, world_clips
from benchmarks.world_judge import Verdict, judge
from streamdiff import clock
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.autoencoder.taehv import TAEHV, Memory
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder
from streamdiff.models.tiny import world
from streamdiff.models.tiny.model import WEIGHTS
from streamdiff.models.tiny.training.autoencoder import AUTOENCODER, encode_groups

SUMMARY = "Judge what is left of random clips of the world after encoding and decoding."
CHUNK_FRAMES = 12
BATCH_CLIPS = 8
SHEET_CLIPS = 12
BARS = {"psnr_db": 32.0, "verdicts": 0.97, "displacement_px": 0.3}


def load_weights(path: Path) -> TAEHV:
    """The autoencoder of a model folder, or of a training checkpoint (`.pt`, key "model").

    Raises:
        ConfigError: neither of the two is at `path`.
    """
    if path.is_dir():
        decoder = load_decoder(path, torch.device("cpu"))
        assert isinstance(decoder, TaehvDecoder)
        return decoder.autoencoder
    if path.suffix == ".pt" and path.is_file():
        model = TAEHV(AUTOENCODER)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
        return model.eval()
    raise ConfigError(f"no autoencoder at {path}: give a model folder (with vae/ inside) or a checkpoint ending in .pt")


@dataclass(frozen=True)
class Clips:
    """N clips of two chunks: scenes int64 `[N, 2, 4]`, the true film of 2 x CHUNK_FRAMES frames."""

    scenes: Tensor
    film: world_clips.Film


def draw_clips(count: int, generator: torch.Generator) -> Clips:
    """Random scenes from random places of the lattice; shapes go on from where they are when the scene changes."""
    first = world_clips.rows_of(world_clips.draw_scenes(count, generator))
    other = world_clips.rows_of(world_clips.draw_scenes(count, generator))
    second = torch.where((torch.arange(count) % 2 == 1)[:, None], other, first)
    start = torch.randint(world.CELLS, (count, 2), generator=generator) * world.LATTICE
    before = world_clips.film(first, start, CHUNK_FRAMES)
    after = world_clips.film(second, start + CHUNK_FRAMES * world.velocities()[first[:, 2]], CHUNK_FRAMES)
    joined = (torch.cat([getattr(before, f.name), getattr(after, f.name)], 1) for f in fields(before))
    return Clips(torch.stack([first, second], 1), world_clips.Film(*joined))


@torch.inference_mode()
def reconstruct(model: TAEHV, frames: Tensor) -> Tensor:
    """Encode and decode `[N, T, 3, H, W]` as streams that begin with these frames."""
    return model.decode(encode_groups(model, frames), Memory()).clamp(0, 1)


@dataclass(frozen=True)
class Measured:
    """One row per chunk (N): errors squared `[N]`, right `[N, 4]`, scenes `[N, 4]`, steps `[N, T - 1, 2]` in pixels."""

    squared: Tensor
    right: Tensor
    scenes: Tensor
    step: Tensor
    true_step: Tensor
    wrong: tuple[str, ...]


def measure(clips: Clips, decoded: Tensor) -> tuple[Measured, Verdict]:
    """Compare reconstructions with their truth, chunk by chunk."""
    chunks = (-1, CHUNK_FRAMES)
    seen = decoded.unflatten(1, chunks).flatten(0, 1)
    true = clips.film.frames.unflatten(1, chunks).flatten(0, 1)
    position = clips.film.position.unflatten(1, chunks).flatten(0, 1)
    verdict, scenes = judge(seen), clips.scenes.flatten(0, 1)
    squared = (seen - true).square().mean((1, 2, 3, 4))
    true_step = (position[:, 1:] - position[:, :-1]).float()
    right = verdict.right(scenes)
    wrong = tuple(
        f"chunk {row}: asked {' '.join(_words(scenes[row]))}, seen {world_clips.describe(verdict, row)}"
        for row in (~right.all(1)).nonzero().flatten().tolist()
    )
    return Measured(squared, right, scenes, verdict.step, true_step, wrong), verdict


def _words(scene: Tensor) -> list[str]:
    return [world_clips.NAMES[name][row] for name, row in zip(world_clips.ATTRIBUTES, scene.tolist(), strict=True)]


def summary(parts: list[Measured]) -> dict[str, Any]:
    """The figures of all chunks together (benchmarks/README.md defines each)."""
    squared, right = torch.cat([p.squared for p in parts]), torch.cat([p.right for p in parts])
    step, true = torch.cat([p.step for p in parts]), torch.cat([p.true_step for p in parts])
    error = torch.linalg.vector_norm(step - true, dim=2)
    scenes = torch.cat([p.scenes for p in parts])
    moving = scenes[:, 2] != world.MOTION_NAMES.index("still")
    # How far along its way a shape gets in each of the four steps from one frame of a latent frame to the next.
    along = ((step * true).sum(2) / world.SPEED)[moving]
    phases = [along[:, phase :: world.FRAMES_PER_LATENT].mean().item() for phase in range(world.FRAMES_PER_LATENT)]
    return {
        "chunks": len(squared),
        "psnr_db": -10 * squared.mean().log10().item(),
        "psnr_worst_chunk_db": -10 * squared.max().log10().item(),
        **world_clips.shares(right),
        "displacement_px": error.mean().item(),
        "displacement_p95_px": error.flatten().quantile(0.95).item(),
        "step_px_by_phase": phases,
        "all_by_background": {
            name: right[scenes[:, 3] == row].all(1).float().mean().item()
            for row, name in enumerate(world.BACKGROUNDS)
            if bool((scenes[:, 3] == row).any())
        },
        "wrong": [text for part in parts for text in part.wrong],
    }


def strips_of(clips: Clips, decoded: Tensor, verdict: Verdict, most: int) -> list[world_clips.Strip]:
    """Truth above reconstruction, for the second chunk of the first `most` clips."""
    strips = []
    span = slice(CHUNK_FRAMES - 1, None, 2)
    for row in range(min(most, len(decoded))):
        scene = clips.scenes[row, 1]
        good = bool(verdict.right(clips.scenes.flatten(0, 1))[row * 2 + 1].all())
        strips.append(world_clips.Strip("truth: " + " ".join(_words(scene)), clips.film.frames[row, span]))
        seen = f"autoencoder, judged: {world_clips.describe(verdict, row * 2 + 1)}"
        strips.append(world_clips.Strip(seen, decoded[row, span], good))
    return strips


def bars_met(results: dict[str, Any]) -> dict[str, bool]:
    """Which of the bars are met."""
    lowest = min(results[name] for name in world_clips.ATTRIBUTES)
    return {
        f"psnr >= {BARS['psnr_db']:.0f} dB": results["psnr_db"] >= BARS["psnr_db"],
        f"every verdict >= {BARS['verdicts']:.2f}": lowest >= BARS["verdicts"],
        f"displacement error < {BARS['displacement_px']} px": results["displacement_px"] < BARS["displacement_px"],
    }


def measure_all(model: TAEHV, clips: Clips) -> tuple[list[Measured], list[world_clips.Strip]]:
    """Reconstruct and measure all clips, a few at a time, under a progress bar."""
    parts: list[Measured] = []
    strips: list[world_clips.Strip] = []
    with tqdm(total=len(clips.scenes), unit="clip") as bar:
        for rows in torch.arange(len(clips.scenes)).split(BATCH_CLIPS):
            some = Clips(clips.scenes[rows], world_clips.Film(clips.film.frames[rows], clips.film.position[rows]))
            decoded = reconstruct(model, some.film.frames)
            part, verdict = measure(some, decoded)
            parts.append(part)
            strips += strips_of(some, decoded, verdict, SHEET_CLIPS - len(strips) // 2)
            bar.update(len(rows))
    return parts, strips


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoencoder_quality", description=SUMMARY)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="model folder or training checkpoint (.pt)")
    parser.add_argument("--clips", type=int, default=64, help="random clips of two chunks (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the JSON and the contact sheet")
    parser.add_argument("--quick", action="store_true", help="12 clips")
    options = parser.parse_args(argv)
    if options.clips < 1:
        parser.error(f"--clips {options.clips}: at least 1")
    try:
        model = load_weights(options.weights)
    except StreamdiffError as error:
        parser.error(str(error))
    head = report.header(warm_up="none: nothing here is timed")
    count = 12 if options.quick else options.clips
    clips = draw_clips(count, torch.Generator().manual_seed(options.seed))
    began = clock.monotonic_s()
    parts, strips = measure_all(model, clips)
    results = summary(parts)
    results["met"] = bars_met(results)
    results["seconds"] = round(clock.monotonic_s() - began, 1)
    path = options.out / "autoencoder_quality.json"
    report.write_json(path, head, results, clips=count, seed=options.seed)
    world_clips.contact_sheet(path.with_suffix(".png"), strips)
    print(report.table([{k: v for k, v in results.items() if isinstance(v, int | float)}]))
    print("steps by phase", [round(v, 2) for v in results["step_px_by_phase"]])
    print("\n".join(results["wrong"][:12]))
    for bar, met in results["met"].items():
        print(f"{'met   ' if met else 'MISSED'}  {bar}")
    print(f"written: {report.public_path(str(path.resolve()))} and the contact sheet beside it (.png)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
