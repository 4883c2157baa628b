"""What survives the embedded model's autoencoder: PSNR, and the judge's verdicts on truth and on what is left.

    python -m training.judges.autoencoder_quality                            # the packaged weights
    python -m training.judges.autoencoder_quality --weights runs/tiny --quick
    python -m training.judges.autoencoder_quality --truth                    # the judge alone, on rendered pictures

Every clip is one chunk of a stream in the middle of its life. Knows nothing about the transformer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvAutoencoder, TaehvMemory
from streamdiff.models.tiny.prompts import canonical
from streamdiff.models.tiny.scene import SIZES, Scene
from training.autoencoder import AUTOENCODER, encode_groups
from training.embedded import WEIGHTS
from training.judges.contact_sheet import Strip, write_sheet
from training.judges.world_judge import ATTRIBUTES, Verdict, describe, judge, mistake, shares
from training.scene_rows import COLUMN, from_row
from training.world.render import render
from training.world.scenes import draw_scenes
from training.world.shapes import RADIUS
from training.world.tracks import SIZE, Streams, Track

SUMMARY = "Judge random clips of the world, as they are and after encoding and decoding."
APART = 0.8
"""Things nearer than so many times the sum of their radii hide each other, and their chunks count apart."""
BARS = {"psnr_db": 30.0, "verdicts": 0.97}
TRUTH_BAR = 0.99
SHEET_CLIPS = 10
STILLS = [0, 3, 6, 11]


def load_weights(path: Path) -> TAEHV:
    """The autoencoder of a training folder, a model folder or a checkpoint.

    Raises:
        ConfigError: none of the three is at `path`.
    """
    if (path / "vae").is_dir():
        decoder = load_autoencoder(path, "decoder", torch.device("cpu"))
        assert isinstance(decoder, TaehvAutoencoder)
        return decoder.autoencoder
    file = path / "autoencoder.pt" if path.is_dir() else path
    if file.suffix == ".pt" and file.is_file():
        model = TAEHV(AUTOENCODER)
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["model"])
        return model.eval()
    raise ConfigError(f"no autoencoder at {path}: give a model folder (with vae/ inside) or one with autoencoder.pt")


def hidden(scene: Scene, track: Track) -> bool:
    """Whether two things of one stream's `track` (N = 1) hide each other somewhere in it."""
    if scene.second is None:
        return False
    away = (track.place[0, :, 0] - track.place[0, :, 1] + SIZE // 2).remainder(SIZE) - SIZE // 2
    sizes = track.scenes[0, 0, [COLUMN["size"], COLUMN["second_size"]]].tolist()
    return bool(away.float().norm(dim=1).min() < APART * sum(RADIUS[SIZES[size]] for size in sizes))


@torch.inference_mode()
def reconstruct(model: TAEHV, frames: Tensor) -> Tensor:
    """Encode and decode one chunk `[T, 3, SIZE, SIZE]` as a stream that begins with it."""
    return model.decode(encode_groups(model, frames[None]), TaehvMemory())[0].clamp(0, 1)


def _strips(scene: Scene, frames: Tensor, shown: Tensor, verdict: Verdict) -> list[Strip]:
    """Truth, and what is left of it below."""
    truth = Strip(f"truth: {canonical(scene)}", frames[STILLS])
    return [truth, Strip(f"judged: {describe(verdict)}", shown[STILLS], all(verdict.right(scene).values()))]


def measure(model: TAEHV | None, count: int, seed: int) -> tuple[dict[str, Any], list[Strip]]:
    """Draw, reconstruct and judge `count` clips; without a model the truth alone."""
    generator = torch.Generator().manual_seed(seed)
    rights: dict[str, list[dict[str, bool]]] = {"apart": [], "hidden": []}
    squared: list[float] = []
    strips: list[Strip] = []
    wrong: list[str] = []
    for index in tqdm(range(count), unit="clip"):
        rows = draw_scenes(1, generator)
        scene, track = from_row(rows[0].tolist()), Streams(rows, generator).play(rows)
        frames = render(track.flat()).frames
        shown = frames if model is None else reconstruct(model, frames)
        squared.append(float((shown - frames).square().mean()))
        verdict = judge(shown)
        right = verdict.right(scene)
        rights["hidden" if hidden(scene, track) else "apart"].append(right)
        if not all(right.values()):
            wrong.append(f"{index} {mistake(verdict, right, canonical(scene))}")
        if len(strips) < 2 * SHEET_CLIPS:
            strips += _strips(scene, frames, shown, verdict)
    results: dict[str, Any] = {"chunks": count, "hidden_chunks": len(rights["hidden"])}
    if model is not None:
        results["psnr_db"] = -10 * torch.tensor(squared).mean().log10().item()
        results["psnr_worst_chunk_db"] = -10 * torch.tensor(squared).max().log10().item()
    results |= {name: shares(values) for name, values in rights.items() if values}
    return {**results, "wrong": wrong}, strips


def bars_met(results: dict[str, Any]) -> dict[str, bool]:
    """Which of the bars are met; chunks whose things hide each other do not count."""
    lowest = min(results["apart"][name] for name in ATTRIBUTES) if "apart" in results else 0.0
    if "psnr_db" not in results:
        return {f"every verdict on truth >= {TRUTH_BAR}": lowest >= TRUTH_BAR}
    return {
        f"psnr >= {BARS['psnr_db']:.0f} dB": results["psnr_db"] >= BARS["psnr_db"],
        f"every verdict >= {BARS['verdicts']:.2f}": lowest >= BARS["verdicts"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.judges.autoencoder_quality", description=SUMMARY)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="model or training folder, or checkpoint (.pt)")
    parser.add_argument("--truth", action="store_true", help="judge rendered pictures, without an autoencoder")
    parser.add_argument("--clips", type=int, default=64, help="random clips of a chunk (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        default=report.ROOT / "training" / "results",
        help="folder for the JSON and the contact sheet",
    )
    parser.add_argument("--quick", action="store_true", help="12 clips")
    options = parser.parse_args(argv)
    if options.clips < 1:
        parser.error(f"--clips {options.clips}: at least 1")
    head = report.header(warm_up="none: nothing here is timed")
    try:
        model = None if options.truth else load_weights(options.weights)
    except StreamdiffError as error:
        parser.error(str(error))
    count = 12 if options.quick else options.clips
    results, strips = measure(model, count, options.seed)
    results["met"] = bars_met(results)
    path = options.out / f"autoencoder_quality{'_truth' if options.truth else ''}.json"
    report.write_json(path, head, results, clips=count, seed=options.seed)
    write_sheet(path.with_suffix(".png"), strips)
    rows = [{"things": name, **results[name]} for name in ("apart", "hidden") if name in results]
    print(report.table(rows))
    print(f"psnr {results['psnr_db']:.2f} dB" if model is not None else "truth")
    print("\n".join(results["wrong"][:12]))
    for bar, met in results["met"].items():
        print(f"{'met   ' if met else 'MISSED'}  {bar}")
    print(f"written: {report.public_path(str(path.resolve()))} and the contact sheet beside it (.png)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
