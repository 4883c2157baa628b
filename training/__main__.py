"""Train the embedded model: `python -m training`.

    python -m training --stage autoencoder --bf16 --steps 8000
    python -m training --stage denoiser --bf16 --minutes 120
    python -m training --stage denoiser --begin tiny --rate 0.15 --minutes 60  # improve a model
    python -m training --stage decoder --begin runs/tiny/model --out runs/decoder
    torchrun --nproc-per-node 2 -m training --bf16 --batch 4   # gradients averaged

Checkpoints lie under --out; the same command goes on where it stopped, also after SIGTERM, which ends a run after its
step. The learning rate falls to zero as --steps or
--minutes, of this and resumed runs together, are used up. At the end the model is written to OUT/model in diffusers
layout; `--install` puts it into the package instead of the present one.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvAutoencoder
from streamdiff.models.weight_files import read_object
from training import autoencoder as train_autoencoder
from training import denoiser, loop
from training import embedded as model
from training.autoencoder import AUTOENCODER
from training.batches import latent_statistics
from training.learner import Plan
from training.model_folder import save_model
from training.windows import CHUNK, CHUNKS
from training.world.tracks import KEYBOARD, SIZE

STEPS = {"autoencoder": 8000, "denoiser": 8000, "decoder": 1000}


def stream_settings() -> dict[str, object]:
    """Stream settings that are written into the model's folder."""
    latent_side = SIZE // AUTOENCODER.spatial
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
        "controls": [asdict(control) for control in KEYBOARD],
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder of checkpoints (default runs/tiny)")
    made.add_argument(
        "--stage", choices=("all", "autoencoder", "denoiser", "decoder"), default="all", help="what to train"
    )
    made.add_argument(
        "--minutes", type=float, help="end each trained stage after this many minutes, learning rate at zero"
    )
    made.add_argument("--steps", type=int, help="updates of each trained stage (default 8000, of a decoder 1000)")
    made.add_argument("--batch", type=int, default=4, help="samples per process and step (default 4)")
    made.add_argument("--rate", type=float, default=1.0, help="factor on the denoiser's learning rates (default 1)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=0, help="CPU threads per process (default: torch's choice)")
    made.add_argument("--bf16", action="store_true", help="multiply in bfloat16 (a third faster on a CPU that can)")
    made.add_argument(
        "--begin",
        type=lambda text: model.WEIGHTS if text == "tiny" else Path(text),
        metavar="MODEL",
        help="stage denoiser takes the autoencoder of this model, `tiny` or a folder, and goes on with its transformer "
        "where it has one; stage decoder goes on with its decoder alone, and all else of the model stays",
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--install", action="store_true", help="write the result into the installed package")
    return made


def _refusal(args: argparse.Namespace) -> str | None:
    """The first error in the options, found before anything is written; None if there is none."""
    for name in ("minutes", "steps", "batch", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            return f"--{name} is {value}; it must be more than 0"
    if args.threads < 0:
        return f"--threads is {args.threads}; it must be at least 1, or 0 for torch's choice"
    if args.begin and args.stage not in ("denoiser", "decoder"):
        return "--begin goes with --stage denoiser or decoder: the autoencoder is that of the model"
    if args.stage == "decoder" and not args.begin:
        return "--stage decoder needs --begin: the model whose decoder is trained"
    if args.begin and args.begin.resolve() == (args.out / "model").resolve():
        return f"--begin is {args.begin}, which is where --out {args.out} writes its model; give another --out"
    if args.begin and not (args.begin / "vae" / "config.json").is_file():
        return f"--begin is {args.begin}, which has no vae/config.json; give the folder of a model"
    if args.stage == "denoiser" and not args.begin and not (args.out / "autoencoder.pt").is_file():
        return f"--stage denoiser needs {args.out}/autoencoder.pt; train the autoencoder first"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    if refused := _refusal(args):
        print(f"train: {refused}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, lambda *_: loop.stopping.set())
    try:
        _train(args)
    except ConfigError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _train(args: argparse.Namespace) -> None:
    """Train what was asked for, write the model and say so."""
    device = pick_device(args.device)
    if args.bf16:  # what stays in float32, the optimizer's products, may be rounded too
        torch.set_float32_matmul_precision("high")
    autoencoder = _autoencoder(args.begin, device) if args.begin else None
    loop.join_group()
    if args.stage == "decoder":
        assert autoencoder is not None
        _decoder(args, autoencoder, device)
    else:
        _stages(args, device, autoencoder)
    if loop.rank() == 0:
        if args.install and args.stage != "autoencoder":
            shutil.copytree(args.out / "model", model.WEIGHTS, dirs_exist_ok=True)
        print(f"train: model written to {args.out / 'model'}")


def _stages(args: argparse.Namespace, device: torch.device, autoencoder: TAEHV | None) -> None:
    """Train stage one, unless an `autoencoder` is given, and stage two, and write the model."""

    def budget(stage: str) -> loop.Budget:
        if args.stage not in ("all", stage):
            return loop.Budget(1, 1e-9)
        return loop.Budget(args.steps or STEPS[stage], args.minutes)

    whole = args.begin and (args.begin / "transformer").is_dir()
    begin = model.load_model(args.begin, device) if whole else None
    if autoencoder is None:
        autoencoder = train_autoencoder.train(args.out, budget("autoencoder"), args.seed, device, args.batch, args.bf16)
    parts = None
    if args.stage == "autoencoder":
        mean, std = latent_statistics(autoencoder, torch.Generator().manual_seed(args.seed), device)
    else:
        plan = Plan(args.batch, args.rate, begin, args.bf16)
        learner = denoiser.train(args.out, autoencoder, budget("denoiser"), args.seed, device, plan)
        parts = learner.network.text, learner.network.finished()
        mean, std = learner.statistics
    if loop.rank() == 0:
        save_model(args.out / "model", autoencoder, mean, std, parts, stream_settings())


def _autoencoder(folder: Path, device: torch.device) -> TAEHV:
    """That of the model under `folder`. Raises ConfigError where it is of another kind than the one trained here."""
    half = load_autoencoder(folder, "decoder", device)
    if not isinstance(half, TaehvAutoencoder) or half.config != AUTOENCODER:
        raise ConfigError(f"the autoencoder of {folder} is of another kind; give one that this command has made")
    return half.autoencoder


def _decoder(args: argparse.Namespace, autoencoder: TAEHV, device: torch.device) -> None:
    """Train the decoder of `args.begin`, whose `autoencoder` it is, and write the model with it."""
    budget, begin = loop.Budget(args.steps or STEPS["decoder"], args.minutes), autoencoder.float()
    train_autoencoder.train(args.out, budget, args.seed, device, args.batch, args.bf16, begin)
    folder: Path = args.out / "model"
    if loop.rank() == 0:
        shutil.copytree(args.begin, folder, dirs_exist_ok=True)
        vae_config = read_object(args.begin / "vae" / "config.json")
        mean, std = (torch.tensor(vae_config[name]) for name in ("latents_mean", "latents_std"))
        save_model(folder, autoencoder, mean, std, None, {})


if __name__ == "__main__":
    raise SystemExit(main())
