"""Train the embedded model of the 256 pixel world: `python -m streamdiff.models.tiny.world256.training`.

    python -m streamdiff.models.tiny.world256.training --stage autoencoder --bf16 --steps 8000
    python -m streamdiff.models.tiny.world256.training --stage denoiser --bf16 --minutes 120
    python -m streamdiff.models.tiny.world256.training --stage denoiser --begin benchmarks/results/world256 --bf16
    python -m streamdiff.models.tiny.world256.training --stage decoder --begin runs/world256/model --out runs/decoder
    torchrun --nproc-per-node 2 -m streamdiff.models.tiny.world256.training --bf16 --batch 4   # gradients averaged

Checkpoints lie under --out; the same command goes on where it stopped. The learning rate falls to zero as --steps or
--minutes, of this and resumed runs together, are used up. At the end the model is written to OUT/model.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.tiny import model
from streamdiff.models.tiny.training import autoencoder as train_autoencoder
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.__main__ import World, carry_out, shared_parser, shared_refusal, train_stages
from streamdiff.models.tiny.world256.training import autoencoder as clips
from streamdiff.models.tiny.world256.training import denoiser
from streamdiff.models.tiny.world256.training.batches import latent_statistics

STEPS = {"autoencoder": 8000, "denoiser": 8000, "decoder": 1000}
WORLD = World(STEPS, clips.RECIPE, latent_statistics, denoiser.train, dict.fromkeys(STEPS, 1.0))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = shared_parser("streamdiff.models.tiny.world256.training", __doc__, "runs/world256", "8000", 4, ("decoder",))
    made.add_argument(
        "--begin",
        type=Path,
        metavar="MODEL",
        help="stage denoiser takes the autoencoder of this model folder, and goes on with its transformer where it has "
        "one; stage decoder goes on with its decoder alone, and all else of the model stays",
    )
    return made


def _refusal(args: argparse.Namespace) -> str | None:
    """The first error in the options, found before anything is written; None if there is none."""
    if args.begin and args.stage not in ("denoiser", "decoder"):
        return "--begin goes with --stage denoiser or decoder: the autoencoder is that of the model"
    if args.stage == "decoder" and not args.begin:
        return "--stage decoder needs --begin: the model whose decoder is trained"
    if args.begin and args.begin.resolve() == (args.out / "model").resolve():
        return f"--begin is {args.begin}, which is where --out {args.out} writes its model; give another --out"
    if args.begin and not (args.begin / "vae" / "config.json").is_file():
        return f"--begin is {args.begin}, which has no vae/config.json; give the folder of a model"
    return shared_refusal(args)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    return carry_out(args, _refusal(args), lambda: _train(args))


def _train(args: argparse.Namespace) -> str:
    """Train what was asked for; returns what was written."""
    device = pick_device("auto")
    if args.bf16:  # what stays in float32, the optimizer's products, may be rounded too
        torch.set_float32_matmul_precision("high")
    autoencoder = _autoencoder(args.begin, device) if args.begin else None
    whole = args.stage == "denoiser" and args.begin and (args.begin / "transformer").is_dir()
    begin = model.load_model(args.begin, device) if whole else None
    loop.join_group()
    if args.stage == "decoder":
        assert autoencoder is not None
        return _decoder(args, autoencoder, device)
    return train_stages(args, WORLD, device, autoencoder, begin)


def _autoencoder(folder: Path, device: torch.device) -> TAEHV:
    """That of the model under `folder`. Raises ConfigError where it is of another kind than the one trained here."""
    half = load_decoder(folder, device)
    if not isinstance(half, TaehvDecoder) or half.config != clips.AUTOENCODER:
        raise ConfigError(f"the autoencoder of {folder} is of another kind; give a model of the 256 pixel world")
    return half.autoencoder


def _decoder(args: argparse.Namespace, autoencoder: TAEHV, device: torch.device) -> str:
    """Train the decoder of `args.begin`, whose `autoencoder` it is, and write the model with it."""
    budget, begin = loop.Budget(args.steps or STEPS["decoder"], args.minutes), autoencoder.float()
    train_autoencoder.train(args.out, budget, args.seed, device, args.batch, args.bf16, clips.RECIPE, begin)
    folder: Path = args.out / "model"
    if loop.rank() == 0:
        shutil.copytree(args.begin, folder, dirs_exist_ok=True)
        vae_config = read_object(args.begin / "vae" / "config.json")
        mean, std = (torch.tensor(vae_config[name]) for name in ("latents_mean", "latents_std"))
        model.save(folder, autoencoder, mean, std, None, {})
    return f"model with this decoder written to {folder}"


if __name__ == "__main__":
    raise SystemExit(main())
