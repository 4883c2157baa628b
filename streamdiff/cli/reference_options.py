"""What can be typed after `streamdiff generate` to say everything by numbers and files, and what its help says of them.

One of these options given is enough for `generate` to work that way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from pydantic.fields import FieldInfo

from streamdiff.cli.options import SWITCH, Option, parse_numbers
from streamdiff.commands.reference_job import ReferenceJob

EXAMPLES = """
by numbers and files, to compare with another implementation (--help lists the options under "to the letter"):
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


def _option(name: str, field: FieldInfo) -> Option:
    """The option that sets an annotated field of `ReferenceJob`."""
    kinds = get_args(field.annotation) or (field.annotation,)
    action: str | type[argparse.Action] = "store"
    parse: Callable[[str], Any] = parse_numbers if tuple[float, ...] in kinds else kinds[0]
    if bool in kinds:
        action = SWITCH if field.default is False else argparse.BooleanOptionalAction
    elif field.default == ():
        action = "append"
    metavar, *other_flag = field.metadata
    flag = next(iter(other_flag), f"--{name.replace('_', '-')}")
    return Option(flag, metavar, field.description or "", parse, name, action)


OPTIONS = tuple(_option(name, field) for name, field in ReferenceJob.model_fields.items() if field.metadata)


def is_requested(arguments: argparse.Namespace) -> bool:
    """Whether one of these options was given, or steps as a list."""
    return isinstance(getattr(arguments, "model.steps"), tuple) or any(
        getattr(arguments, option.name) is not None for option in OPTIONS
    )
