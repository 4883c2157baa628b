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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder
from streamdiff.models.model import Model
from streamdiff.models.tiny import model
from streamdiff.models.tiny.training import autoencoder as train_autoencoder
from streamdiff.models.tiny.training import denoiser, loop
from streamdiff.models.tiny.training.autoencoder import Recipe
from streamdiff.models.tiny.training.batches import CHUNK, CHUNKS, latent_statistics
from streamdiff.models.tiny.training.denoiser import Learner, Plan


@dataclass(frozen=True)
class World:
    """What the stages of a world's training are: updates of each by default, the autoencoder's recipe, what computes
    its latents' mean and deviation `[C]`, stage two, and the share of --minutes that each has where all are trained."""

    steps: Mapping[str, int]
    recipe: Recipe
    statistics: Callable[[TAEHV, torch.Generator, torch.device], tuple[Tensor, Tensor]]
    train: Callable[[Path, TAEHV, loop.Budget, int, torch.device, Plan], Learner[Any]]
    minutes: Mapping[str, float]


STEPS = {"autoencoder": 6000, "denoiser": 8000}
MINUTES = {"autoencoder": 0.15, "denoiser": 0.85}
WORLD = World(STEPS, Recipe(), latent_statistics, denoiser.train, MINUTES)


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


def carry_out(args: argparse.Namespace, refused: str | None, work: Callable[[], str]) -> int:
    """Do the `work`, unless there is an error in the options, and print what it returns; returns the exit code."""
    if refused:
        print(f"train: {refused}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        told = work()
    except ConfigError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    if loop.rank() == 0:
        print(f"train: {told}")
    return 0


def train_stages(
    args: argparse.Namespace,
    world: World,
    device: torch.device,
    autoencoder: TAEHV | None,
    begin: Model | None,
    blend: float = 0.0,
) -> str:
    """Train what `args` says, stage one unless an `autoencoder` is given, and write the model; returns that in words.
    Stage two goes on with `begin`, `blend` of which stays (`Plan`)."""

    def budget(stage: str) -> loop.Budget:
        if args.stage not in ("all", stage):
            return loop.Budget(1, 1e-9)
        share = world.minutes[stage] if args.stage == "all" else 1.0
        return loop.Budget(args.steps or world.steps[stage], args.minutes and args.minutes * share)

    if autoencoder is None:
        autoencoder = train_autoencoder.train(
            args.out, budget("autoencoder"), args.seed, device, args.batch, args.bf16, world.recipe
        )
    parts = None
    if args.stage == "autoencoder":
        mean, std = world.statistics(autoencoder, torch.Generator().manual_seed(args.seed), device)
    else:
        plan = Plan(args.batch, args.rate, begin, args.bf16, blend)
        learner = world.train(args.out, autoencoder, budget("denoiser"), args.seed, device, plan)
        parts = learner.network.text, learner.network.transformer
        mean, std = learner.statistics
    folder: Path = args.out / "model"
    if loop.rank() == 0:
        stream = stream_of(world.recipe.whole // world.recipe.config.spatial)
        model.save(folder, autoencoder, mean, std, parts, stream)
    return f"model written to {folder}"


def _refusal(args: argparse.Namespace) -> str | None:
    """The first error in the options, found before anything is written; None if there is none."""
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
    return carry_out(args, _refusal(args), lambda: _train(args))


def _train(args: argparse.Namespace) -> str:
    """Train what was asked for; returns what was written."""
    device = pick_device(args.device)
    loop.join_group()
    autoencoder = begin = None
    if args.begin:
        begin = model.load_model(model.WEIGHTS if args.begin == "tiny" else Path(args.begin), device)
        assert begin.decoder is not None and isinstance(begin.decoder.network, TaehvDecoder)
        autoencoder = begin.decoder.network.autoencoder
    told = train_stages(args, WORLD, device, autoencoder, begin, args.blend)
    if loop.rank() == 0 and args.install and args.stage != "autoencoder":
        shutil.copytree(args.out / "model", model.WEIGHTS, dirs_exist_ok=True)
    return told


if __name__ == "__main__":
    raise SystemExit(main())
