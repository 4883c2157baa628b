"""Options of the jobs that work by numbers and files (`commands.jobs`), and what the help says of the files.

One of those of `ReferenceJob` given is enough for `generate` to work that way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamdiff.cli.options import SWITCH, Option, parse_numbers
from streamdiff.commands.jobs import DecodeJob, EncodeJob, ReferenceJob

REFERENCE_EXAMPLES = """
by numbers and files, to compare with another implementation (the options under "to the letter"):
  streamdiff generate --model wan.safetensors --prompt-embeds text.safetensors --noise noise.safetensors \\
      --steps 1000,937.5,833.33,625 --window 21 --chunks 7 --latents-out latents.safetensors
  streamdiff generate --chunks 8 --latents-out latents.safetensors --no-decode

Tensor files are .safetensors, all values finite; C latent channels, f latent frames of a chunk, h and w the picture's
sides over 8 (Wan2.1), L text tokens, D text width:
  prompt_embeds   [L, D] or [1, L, D]: used as they are; Wan's are padded with zeros to 512 rows
  initial         [chunks, C, f, h, w]: what a chunk's first step receives, standard normal noise (with
                  --video-latents: what is mixed into them). It is not scaled; the authors of Causal-rCM scale theirs
  renoise         [chunks, steps-1, C, f, h, w]: the noise before each later step (steps of the chunk that has most);
                  both stand in the file of --noise
  latents         [chunks, C, f, h, w], float32, clean, normalised as the transformer has them; what comes out, and what
                  --video-latents takes (of `encode --raw` where the model's authors begin with such), and
                  --given-latents. These two may also be a clip, [C, F, h, w]
of --first-steps:
  timesteps       [chunks] or [chunks, f]: what the model is told at a chunk's first step, 0 to 1000, also by latent
                  frame; or [chunks, steps, f]: at every step (steps of the chunk that has most)
  sigmas          as timesteps: noise levels, 0 to 1, that x0 is made with, and x_t before a later step (default:
                  timestep / 1000, or as --nearest looks them up, by itself for models whose authors do)
  noise_level     [chunks] or [chunks, f], with --video-latents and only then: how much noise is mixed into them, 0 to 1
With these options --stages P cuts the model into P parts that take turns in this one process; with --processes each has
a process of its own, as without these options (--seconds). The bits are the same.
x_t = (1 - sigma) x0 + sigma noise; the model predicts noise - x0. Chunks count from 0.
"""

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


def _option(name: str, field: FieldInfo) -> Option:
    """The option that sets an annotated field of a job."""
    kinds = get_args(field.annotation) or (field.annotation,)
    action: str | type[argparse.Action] = "store"
    parse: Callable[[str], Any] = parse_numbers if tuple[float, ...] in kinds else kinds[0]
    if bool in kinds:
        action = SWITCH if field.default is False else argparse.BooleanOptionalAction
    elif field.default == ():
        action = "append"
    metavar, *other_flag = field.metadata
    flag = next(iter(other_flag), f"--{name.replace('_', '-')}")
    return Option(flag, metavar, field.description or "", parse, name, action, field.is_required())


def _options(job: type[BaseModel]) -> tuple[Option, ...]:
    return tuple(_option(name, field) for name, field in job.model_fields.items() if field.metadata)


DECODE, ENCODE = _options(DecodeJob), _options(EncodeJob)
REFERENCE = tuple(option._replace(group="to the letter (see the end)", rare=True) for option in _options(ReferenceJob))


def is_reference(arguments: argparse.Namespace) -> bool:
    """Whether one of the options of `ReferenceJob` was given, or steps as a list."""
    return isinstance(getattr(arguments, "model.steps"), tuple) or any(
        getattr(arguments, option.name) is not None for option in REFERENCE
    )
