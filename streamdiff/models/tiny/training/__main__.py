"""Train the embedded model: `python -m streamdiff.models.tiny.training`.

    python -m streamdiff.models.tiny.training --minutes 180          # both stages, on the CPU or the GPU that is there
    python -m streamdiff.models.tiny.training --stage denoiser       # go on with one stage
    python -m streamdiff.models.tiny.training --stage denoiser --begin tiny --rate 0.2 --minutes 30  # improve a model
    torchrun --nproc-per-node 2 -m streamdiff.models.tiny.training --bf16 --batch 4 --minutes 108  # gradients averaged

The last line has made, from nothing on two CPU cores, a model that meets every bar (docs/decisions/0017), before
training had rows of videos (0054).

In the last quarter, and with --begin, the model also learns from streams that it plays itself meanwhile. Checkpoints
lie under --out; the same command goes on where it stopped. At the end the model is written to OUT/model in diffusers
layout; `--install` puts it into the package instead of the present one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder
from streamdiff.models.tiny import model, world
from streamdiff.models.tiny.training import autoencoder as train_autoencoder
from streamdiff.models.tiny.training import denoiser, loop
from streamdiff.models.tiny.training.batches import CHUNK, CHUNKS, latent_statistics

STEPS = {"autoencoder": 6000, "denoiser": 8000}
SHARE = 0.15  # of the minutes goes to the autoencoder


def stream_of(latent_side: int) -> dict[str, object]:
    """Stream settings that are written into the model's folder."""
    return {
        "latent_height": latent_side,
        "latent_width": latent_side,
        "chunk_latents": CHUNK,
        "window_latents": CHUNK * CHUNKS,
        "clean_window_latents": CHUNK * 3,
        "sink_latents": 0,
        "native_fps": 40.0,
        "shift": 5.0,
        "context_sigma": 0.25,
        "steps": [4, 2],
    }


def shared_parser(
    module: str, summary: str | None, out: str, steps: str, batch: int, stages: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    """The command line of `python -m` that `module`: what every world's training has; `stages`, which one has alone."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path(out), help=f"folder of checkpoints (default {out})")
    known = ("all", "autoencoder", "denoiser", *stages)
    made.add_argument("--stage", choices=known, default="all", help="what to train")
    made.add_argument("--minutes", type=float, help="stop after this many minutes, learning rate cooled down to zero")
    made.add_argument("--steps", type=int, help=f"updates of each trained stage (default {steps})")
    made.add_argument("--batch", type=int, default=batch, help=f"samples per process and step (default {batch})")
    made.add_argument("--rate", type=float, default=1.0, help="factor on the denoiser's learning rates (default 1)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=0, help="CPU threads per process (default: torch's choice)")
    made.add_argument("--bf16", action="store_true", help="multiply in bfloat16 (a third faster on a CPU that can)")
    return made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = shared_parser("streamdiff.models.tiny.training", __doc__, "runs/tiny", "6000 and 8000", 8)
    made.add_argument(
        "--begin", metavar="MODEL", help="stage denoiser begins with this model instead of nothing: `tiny` or a folder"
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument(
        "--blend",
        type=float,
        default=0.0,
        help="what is written is so much of --begin's weights, from 0 to 1 (default 0)",
    )
    made.add_argument("--install", action="store_true", help="write the result into the installed package")
    return made


def shared_refusal(args: argparse.Namespace) -> str | None:
    """The first error in options that every world's training has; None if there is none."""
    for name in ("minutes", "steps", "batch", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            return f"--{name} is {value}; it must be more than 0"
    if args.threads < 0:
        return f"--threads is {args.threads}; it must be at least 1, or 0 for torch's choice"
    if args.stage == "denoiser" and not getattr(args, "begin", None) and not (args.out / "autoencoder.pt").is_file():
        return f"--stage denoiser needs {args.out}/autoencoder.pt; train the autoencoder first"
    return None


def _refusal(args: argparse.Namespace) -> str | None:
    """The first error in the options, found before anything is written; None if there is none."""
    if args.device == "cuda" and not torch.cuda.is_available():
        return "--device is cuda, but torch sees no CUDA device; use auto or cpu"
    if args.begin and args.stage != "denoiser":
        return "--begin goes with --stage denoiser: the autoencoder is that of the model"
    if not 0 <= args.blend < 1:
        return f"--blend is {args.blend}; it must be at least 0 and less than 1"
    if args.blend and not args.begin:
        return "--blend goes with --begin: it is the share of the weights that training began with"
    return shared_refusal(args)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    if refusal := _refusal(args):
        print(f"train: {refusal}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted if args.device == "auto" else args.device)
    loop.join_group()
    minutes = {"autoencoder": args.minutes, "denoiser": args.minutes}
    if args.minutes and args.stage == "all":
        minutes = {"autoencoder": args.minutes * SHARE, "denoiser": args.minutes * (1 - SHARE)}

    def budget(stage: str, train: bool) -> loop.Budget:
        return loop.Budget(args.steps or STEPS[stage], minutes[stage]) if train else loop.Budget(1, 1e-9)

    try:
        begin = None
        if args.begin:
            begin = model.load_model(model.WEIGHTS if args.begin == "tiny" else Path(args.begin), device)
    except ConfigError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    try:
        first = budget("autoencoder", args.stage in ("all", "autoencoder"))
        if begin is not None:
            assert begin.decoder is not None and isinstance(begin.decoder.network, TaehvDecoder)
            autoencoder = begin.decoder.network.autoencoder
        else:
            autoencoder = train_autoencoder.train(args.out, first, args.seed, device, args.batch, args.bf16)
        parts = None
        mean, std = latent_statistics(autoencoder, torch.Generator().manual_seed(args.seed), device)
        if args.stage in ("all", "denoiser"):
            plan = denoiser.Plan(args.batch, args.rate, begin, args.bf16)
            trained = denoiser.train(args.out, autoencoder, budget("denoiser", True), args.seed, device, plan)
            if begin is not None:
                loop.blend(trained.network.transformer, begin.denoiser.model, args.blend)
            parts = (trained.network.text, trained.network.transformer)
            mean, std = trained.mean, trained.std
    except KeyboardInterrupt:
        print("\ntrain: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    if loop.rank() == 0:
        folder = args.out / "model"
        model.save(
            folder, autoencoder, mean, std, parts, stream_of(world.SIZE // train_autoencoder.AUTOENCODER.spatial)
        )
        if args.install and parts is not None:
            shutil.copytree(folder, model.WEIGHTS, dirs_exist_ok=True)
        print(f"train: model written to {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
