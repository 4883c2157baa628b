"""Train the embedded model of the 256 pixel world: `python -m streamdiff.models.tiny.world256.training`.

    python -m streamdiff.models.tiny.world256.training --stage autoencoder --bf16 --steps 8000
    python -m streamdiff.models.tiny.world256.training --stage denoiser --bf16 --minutes 120
    torchrun --nproc-per-node 2 -m streamdiff.models.tiny.world256.training --bf16 --batch 4   # gradients averaged

Checkpoints lie under --out; the same command goes on where it stopped. The learning rate falls to zero as --steps or
--minutes, of this and resumed runs together, are used up. At the end the model is written to OUT/model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from streamdiff.models.tiny import model
from streamdiff.models.tiny.training import autoencoder as train_autoencoder
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.batches import CHUNK, CHUNKS
from streamdiff.models.tiny.world256.tracks import SIZE
from streamdiff.models.tiny.world256.training import autoencoder as clips
from streamdiff.models.tiny.world256.training import denoiser
from streamdiff.models.tiny.world256.training.batches import latent_statistics

STEPS = {"autoencoder": 8000, "denoiser": 8000}
STREAM: dict[str, object] = {
    "latent_height": SIZE // clips.AUTOENCODER.spatial,
    "latent_width": SIZE // clips.AUTOENCODER.spatial,
    "chunk_latents": CHUNK,
    "window_latents": CHUNK * CHUNKS,
    "clean_window_latents": CHUNK * 3,
    "sink_latents": 0,
    "native_fps": 40.0,
    "shift": 5.0,
    "context_sigma": 0.25,
    "steps": [4, 2],
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m streamdiff.models.tiny.world256.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=Path("runs/world256"), help="folder of checkpoints")
    made.add_argument("--stage", choices=("all", "autoencoder", "denoiser"), default="all", help="what to train")
    made.add_argument("--minutes", type=float, help="stop each stage after this many minutes, cooled down")
    made.add_argument("--steps", type=int, help="updates of each trained stage (default 8000)")
    made.add_argument("--batch", type=int, default=4, help="samples per process and step (default 4)")
    made.add_argument("--rate", type=float, default=1.0, help="factor on the denoiser's learning rates (default 1)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=0, help="CPU threads per process (default: torch's choice)")
    made.add_argument("--bf16", action="store_true", help="multiply in bfloat16")
    return made


def _refusal(args: argparse.Namespace) -> str | None:
    """What cannot work, before anything is written."""
    for name in ("minutes", "steps", "batch", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            return f"--{name} is {value}; it must be more than 0"
    if args.threads < 0:
        return f"--threads is {args.threads}; it must be at least 1, or 0 for torch's choice"
    if args.stage == "denoiser" and not (args.out / "autoencoder.pt").is_file():
        return f"--stage denoiser needs {args.out}/autoencoder.pt; train the autoencoder first"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    if refusal := _refusal(args):
        print(f"train: {refusal}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop.join_group()

    def budget(stage: str, train: bool) -> loop.Budget:
        return loop.Budget(args.steps or STEPS[stage], args.minutes) if train else loop.Budget(1, 1e-9)

    try:
        first = budget("autoencoder", args.stage != "denoiser")
        autoencoder = train_autoencoder.train(args.out, first, args.seed, device, args.batch, args.bf16, clips.RECIPE)
        parts = None
        if args.stage != "autoencoder":
            plan = denoiser.Plan(args.batch, args.rate, args.bf16)
            trained = denoiser.train(args.out, autoencoder, budget("denoiser", True), args.seed, device, plan)
            parts = (trained.network.text, trained.network.transformer)
            mean, std = trained.mean, trained.std
        else:
            mean, std = latent_statistics(autoencoder, torch.Generator().manual_seed(args.seed), device)
    except KeyboardInterrupt:
        print("\ntrain: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    if loop.rank() == 0:
        model.save(args.out / "model", autoencoder, mean, std, parts, STREAM)
        print(f"train: model written to {args.out / 'model'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
