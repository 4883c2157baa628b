"""What can be typed after `streamdiff generate` to say everything by numbers and files, and what its help says of them.

Options have the names of the fields of `exact.Job`; one of them given is enough for `generate` to work that way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

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
                  --video-latents takes (of `encode --raw` where the model's authors begin with such)
With these options --stages P cuts the model into P parts that take turns in this one process: the very bits of P ranks,
and no faster. Without them (--seconds) the P are processes.
x_t = (1 - sigma) x0 + sigma noise; the model predicts noise - x0. Chunks count from 0.
"""


def parse_steps(text: str) -> int | tuple[float, ...]:
    """A number of steps, or timesteps with commas between them. Raises argparse.ArgumentTypeError."""
    if "," not in text and text.strip().isdigit():
        return int(text)
    return parse_numbers(text)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


def add(parser: argparse.ArgumentParser) -> None:
    """The options."""
    group = parser.add_argument_group("to the letter (see the end)")
    for flag, kind, metavar, text in _OPTIONS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--warp", action="store_true", default=None, help="--steps are meant before the shift")
    group.add_argument(
        "--motion-noise",
        action="store_true",
        default=None,
        help="the more --video-latents move, the less noise is mixed in, down to 0.1 below --strength; the model is "
        "told 0.1 less than that (StreamDiffusionV2, with --strength 0.8; its code looks at pixels)",
    )
    group.add_argument(
        "--context-alone",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a finished chunk is remembered as it is without what was before it, but the sink (default: the model's "
        "own; Krea computes its past anew for every chunk, which with a window of two chunks is the same)",
    )
    group.add_argument(
        "--context-pictures",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="from the second chunk on a finished chunk is remembered with its first latent frame encoded again, by "
        "itself, from the last of its pictures; takes both halves of the autoencoder (default: the model's own; Krea)",
    )
    group.add_argument("--no-decode", action="store_true", default=None, help="make latents only")
    group.add_argument(
        "--prompt-switch",
        action="append",
        metavar="CHUNK:FILE[:POLICY]",
        help="other prompt embeddings from this chunk on; POLICY is keep (default: only the text changes), flush (the "
        "past is forgotten but for the sink), recache (the window's clean latents are run through the model again "
        "under the new text) or reset (a fresh stream); may be given several times",
    )


_OPTIONS: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    ("--chunks", int, "N", "chunks to make, instead of --seconds"),
    ("--latents-out", Path, "FILE", "write the latents"),
    ("--prompt-embeds", Path, "FILE", "the prompt's embeddings, instead of --prompt"),
    ("--noise", Path, "FILE", "noise instead of --seed"),
    ("--video-latents", Path, "FILE", "encoded video that chunks start from instead of noise alone, as "
     "`streamdiff encode` writes it: [C, F, h, w], or in chunks, see below"),
    ("--strength", float, "S", "noise level, 0 to 1, that --video-latents is mixed with for the first step, which is "
     "told 1000 S (default: those of the first of --steps)"),
    ("--container", str, "NAME", "which tensors of --weights: generator, generator_ema, ... (default: the usual)"),
    ("--model-config", Path, "FILE", "config.json of diffusers, for what shapes cannot tell (the number of heads)"),
    ("--shift", float, "N", "timestep shift of --warp (default 1: none)"),
    ("--sigmas", parse_numbers, "N,N,...", "noise levels of the steps, if they are not timestep / 1000; a 0 at "
     "the end of --steps is a step where it has a level above 0 here, and is dropped otherwise"),
    ("--first-chunk-steps", parse_numbers, "N,N,...", "the list of --steps for a stream's first chunk, where that has "
     "another, at least as long; its noise levels are timestep / 1000, or follow from --shift and --warp"),
    ("--window", int, "N", "latent frames a chunk can see, the sink and the chunk itself included; 0: all"),
    ("--sink", int, "N", "latent frames at the stream's beginning that stay in sight (default: the model's own, or 0)"),
    ("--rope", str, "KIND", "absolute (positions count from the stream's beginning, without end) or relative (the sink "
     "stands next to the window); default: the model's own, or relative"),
    ("--chunk-frames", int, "N", "latent frames of a chunk (default: those of --noise, or the model's own)"),
    ("--first-chunk-frames", int, "N", "latent frames that are made together at the beginning, a multiple of "
     "the chunk's (default: the model's own); in files, and for --chunks, they are several chunks"),
    ("--context-noise", float, "T", "timestep, 0 to 1000, at which a finished chunk is remembered (default: the "
     "model's own, or 0)"),
    ("--prompt-mix", int, "N", "chunks over which each --prompt-switch (keep or recache) comes: they see 1/N, 2/N, ... "
     "1 of its embeddings and the rest of those before it (default 1: at once; Krea's server has 3)"),
    ("--adaptive-sink", float, "THRESHOLD", "a chunk takes the place of the sink chunk that it is least like, if their "
     "keys and values are less alike than this (cosine, -1 to 1; StreamDiffusionV2 has 0.2; -1: never)"),
    ("--averaged-sink", float, "KEEP", "a chunk that leaves the window is folded into the sink, of which this share "
     "stays (0 to 1; Reward-Forcing has 0.999; 1: the sink stays as it is); the sink is then one chunk"),
)  # fmt: skip
NAMES = (
    *(flag[2:].replace("-", "_") for flag, *_ in _OPTIONS),
    "warp",
    "motion_noise",
    "context_alone",
    "context_pictures",
    "no_decode",
    "prompt_switch",
)


def asked_for(arguments: argparse.Namespace) -> bool:
    """Whether one of these options was given, or steps as a list."""
    return isinstance(getattr(arguments, "model.steps"), tuple) or any(
        getattr(arguments, name) is not None for name in NAMES
    )
