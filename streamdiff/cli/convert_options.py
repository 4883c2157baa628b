"""What can be typed after `streamdiff decode` and `streamdiff encode`, and what their help says about files.

Options have the names of the fields of `convert.Job`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

_FILES = """
A tensor file is a .safetensors file with this tensor alone, floating-point, all values finite:
  latents   [C, F, h, w] or [chunks, C, f, h, w]: chunks are laid end to end. Normalised, as the transformer has them:
            (raw - latents_mean) / latents_std per channel, unless the file's header says `normalised: no`, as that of
            `encode --raw` does; `decode` heeds it. F counts latent frames; h, w are the picture's sides over 8
            (Wan2.1; C is 16 there)
  video     [3, F, H, W]: red, green, blue from -1 to 1; F counts pictures
PATH is `tiny` (the embedded model); wan2.1, taew2_1 or lighttaew2_1, published ones, which are fetched; a folder with
config.json and diffusion_pytorch_model.safetensors, or one that has it in vae/; or a file: Wan2.1_VAE.pth, taew2_1.pth,
lighttaew2_1.pth, or the like as .safetensors.
"""
DECODE_EXAMPLES = f"""examples:
  streamdiff decode --vae Wan2.1_VAE.pth --latents latents.safetensors --out video.mp4
  streamdiff decode --vae ./vae --latents latents.safetensors --out video.safetensors --dtype float32
  streamdiff decode --vae tiny --latents latents.safetensors --out frames/     one PNG per frame
{_FILES}
Of Wan the first latent frame is 1 picture, each later one 4: F latent frames are 1 + 4 (F - 1) pictures.
"""
ENCODE_EXAMPLES = f"""examples:
  streamdiff encode --vae Wan2.1_VAE.pth --video video.mp4 --out latents.safetensors
  streamdiff encode --vae tiny --video frames/ --out latents.safetensors
{_FILES}
Wan takes 1 + 4 n pictures (1, 5, 9, ...), and refuses other numbers. The small autoencoders (tiny, taew2_1) take any;
the last picture is repeated until there are four. Written are the means, nothing is drawn: `latents` [C, F, h, w].

Every model here knows normalised latents. The authors' code of StreamDiffusionV2 all the same leaves that out when it
encodes (it was mended in December 2025, and left out again in February 2026): --raw gives `generate --video-latents`
what theirs gets, to compare, or for its look. Other models refuse such a file.
"""


def add_decode(parser: argparse.ArgumentParser) -> None:
    """The options of `decode`."""
    _add(
        parser,
        "--latents",
        "a tensor file with `latents`, see below",
        ".mp4, .webm, a folder for PNG frames, or .safetensors with `video`",
    )
    parser.add_argument(
        "--fps", type=float, metavar="N", help="of a video file (default: the model's own; Wan's is 16)"
    )
    parser.set_defaults(raw=False)


def add_encode(parser: argparse.ArgumentParser) -> None:
    """The options of `encode`."""
    _add(
        parser,
        "--video",
        "a video, a folder of .png pictures, or a tensor file with `video`, see below",
        ".safetensors with `latents`",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="write latents as the network gives them, not normalised, and say so in the file (default: normalised)",
    )
    parser.set_defaults(fps=None)


def _add(parser: argparse.ArgumentParser, source: str, source_help: str, out_help: str) -> None:
    parser.add_argument("--vae", required=True, metavar="PATH", help="the autoencoder: a path or name, see below")
    parser.add_argument(source, dest="source", type=Path, required=True, metavar="FILE", help=source_help)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"what to write: {out_help}")
    parser.add_argument(
        "--chunk-frames",
        type=int,
        metavar="N",
        help="latent frames per call of the network (default: the file's chunks, else 4); the result is the same",
    )
    parser.add_argument(
        "--latent-space",
        metavar="SPACE",
        help="what a TAEHV file takes: normalised or raw (default: by its published name: taew2_1, lighttaew2_1)",
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu or cuda (default auto)")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="float32 or bfloat16 of the network (default: float32 on a CPU, bfloat16 on CUDA)",
    )
