"""What can be typed after `streamdiff decode` and `streamdiff encode`, and what their help says about files.

An option sets the field of `convert.ConvertJob` with its flag's name, or the one that it states.
"""

from __future__ import annotations

from pathlib import Path

from streamdiff.cli.options import OVERWRITE, SWITCH, Option

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

# fmt: off
_VAE = Option("--vae", "PATH", "the autoencoder: a path or name, see below", required=True)
_BOTH = (
    OVERWRITE,
    Option("--chunk-frames", "N", "latent frames per call of the network (default: the file's chunks, else 4); the "
           "result is the same", int, "chunk_latents"),
    Option("--latent-space", "SPACE", "what a TAEHV file takes: normalised or raw (default: by its published name: "
           "taew2_1, lighttaew2_1)"),
    Option("--device", "DEVICE", "auto, cpu or cuda (default auto)"),
    Option("--dtype", "TYPE", "float32 or bfloat16 of the network (default: float32 on a CPU, bfloat16 on CUDA)"),
)
DECODE = (
    _VAE,
    Option("--latents", "FILE", "a tensor file with `latents`, see below", Path, "source", required=True),
    Option("--out", "FILE", "what to write: .mp4, .webm, a folder for PNG frames, or .safetensors with `video`",
           Path, required=True),
    *_BOTH,
    Option("--fps", "N", "of a video file (default: the model's own; Wan's is 16)", float),
)
ENCODE = (
    _VAE,
    Option("--video", "FILE", "a video, a folder of .png pictures, or a tensor file with `video`, see below", Path,
           "source", required=True),
    Option("--out", "FILE", "what to write: .safetensors with `latents`", Path, required=True),
    *_BOTH,
    Option("--raw", "", "write latents as the network gives them, not normalised, and say so in the file (default: "
           "normalised)", action=SWITCH),
)
# fmt: on
