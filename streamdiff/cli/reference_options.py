"""What can be typed after `streamdiff generate` to say everything by numbers and files, and what its help says of them.

Options have the names of the fields of `reference_model.ReferenceJob`; one of them given is enough for `generate` to
work that way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from streamdiff.cli.options import SWITCH, Option, parse_numbers

EXAMPLES = """
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

# fmt: off
_OPTIONS = (
    Option("--chunks", "N", "chunks to make, instead of --seconds", int),
    Option("--latents-out", "FILE", "write the latents", Path),
    Option("--prompt-embeds", "FILE", "the prompt's embeddings, instead of --prompt", Path),
    Option("--noise", "FILE", "noise instead of --seed", Path),
    Option("--video-latents", "FILE", "encoded video that chunks start from instead of noise alone, as "
           "`streamdiff encode` writes it: [C, F, h, w], or in chunks, see below", Path),
    Option("--strength", "S", "noise level, 0 to 1, that --video-latents is mixed with for the first step, which is "
           "told 1000 S (default: those of the first of --steps)", float),
    Option("--first-steps", "FILE", "timestep and noise level of each chunk's first step, or of every step, also by "
           "latent frame, instead of those of --steps and --strength; see below", Path),
    Option("--given-latents", "FILE", "finished latents of the stream's first chunks, which it goes on from; they "
           "count in --chunks and come out again. Where finished chunks have a pass of their own (--kv-context clean, "
           "staircase) they get that alone, at timestep 0 without noise; in same_step every step sees them at its own "
           "noise level", Path),
    Option("--container", "NAME", "which tensors of --weights: generator, generator_ema, ... (default: the usual)"),
    Option("--model-config", "FILE", "config.json of diffusers, for what shapes cannot tell (the number of heads)",
           Path),
    Option("--shift", "N", "timestep shift of --warp and --nearest (default 1: none)", float),
    Option("--sigmas", "N,N,...", "noise levels of the steps, if they are not timestep / 1000; a 0 at "
           "the end of --steps is a step where it has a level above 0 here, and is dropped otherwise", parse_numbers),
    Option("--first-chunk-steps", "N,N,...", "the list of --steps for a stream's first chunk, where that has another, "
           "at least as long; its noise levels are timestep / 1000, or follow from --shift and --warp", parse_numbers),
    Option("--window", "N", "latent frames a chunk can see, the sink and the chunk itself included; 0: all", int),
    Option("--sink", "N", "latent frames at the stream's beginning that stay in sight (default: the model's own, or 0)",
           int),
    Option("--rope", "KIND", "absolute (positions count from the stream's beginning, without end) or relative (the "
           "sink stands next to the window); default: the model's own, or relative"),
    Option("--chunk-frames", "N", "latent frames of a chunk (default: those of --noise, or the model's own)", int,
           "chunk_latents"),
    Option("--first-chunk-frames", "N", "latent frames that are made together at the beginning, a multiple of "
           "the chunk's (default: the model's own); in files, and for --chunks, they are several chunks", int,
           "first_chunk_latents"),
    Option("--context-noise", "T", "timestep, 0 to 1000, at which a finished chunk is remembered (default: the "
           "model's own, or 0)", float),
    Option("--prompt-mix", "N", "chunks over which each --prompt-switch (keep, recache, recache-causal) comes: they "
           "see 1/N, 2/N, ... 1 of its embeddings and the rest of those before it (default 1: at once; Krea's server "
           "has 3)", int),
    Option("--adaptive-sink", "THRESHOLD", "a chunk takes the place of the sink chunk that it is least like, if their "
           "keys and values are less alike than this (cosine, -1 to 1; StreamDiffusionV2 has 0.2; -1: never): with "
           "--kv-context same_step and --rope absolute instead of a place in the window, as published, else beside it",
           float),
    Option("--averaged-sink", "KEEP", "a chunk that leaves the window is folded into the sink, of which this share "
           "stays (0 to 1; Reward-Forcing has 0.999; 1: the sink stays as it is); the sink is then one chunk", float),
    Option("--warp", "", "--steps are meant before the shift", action=SWITCH),
    Option("--nearest", "", "the noise level of a timestep, also of one that --strength or motion gives, is the "
           "nearest of 1,000 shifted ones, as Self-Forcing's and StreamDiffusionV2's code looks it up (with --shift)",
           action=SWITCH),
    Option("--motion-noise", "", "the more --video-latents move, the less noise is mixed in, down to 0.1 below "
           "--strength; the model is told 0.1 less than that (StreamDiffusionV2, with --strength 0.8); motion is that "
           "of the pixels where the file says it, as one of `streamdiff encode` does, else of the latents",
           action=SWITCH),
    Option("--context-alone", "", "a finished chunk is remembered as it is without what was before it, but the sink "
           "(default: the model's own; Krea computes its past anew for every chunk, which with a window of two chunks "
           "is the same)", action=argparse.BooleanOptionalAction),
    Option("--context-pictures", "", "from the second chunk on a finished chunk is remembered with its first latent "
           "frame encoded again, by itself, from the last of its pictures; takes both halves of the autoencoder "
           "(default: the model's own; Krea)", action=argparse.BooleanOptionalAction),
    Option("--no-decode", "", "make latents only", action=SWITCH),
    Option("--processes", "", "a process for each of --stages, started here, instead of turns in this one",
           action=SWITCH),
    Option("--prompt-switch", "CHUNK:FILE[:POLICY]", "other prompt embeddings from this chunk on; POLICY is keep "
           "(default: only the text changes), flush (the past is forgotten but for the sink), recache (the window's "
           "clean latents are run through the model again under the new text, all in one forward, as LongLive does), "
           "recache-causal (the same chunk by chunk, each of which sees those before it) or reset (a fresh stream); "
           "may be given several times", action="append"),
)
# fmt: on
OPTIONS = tuple(option._replace(group="to the letter (see the end)", rare=True) for option in _OPTIONS)


def is_requested(arguments: argparse.Namespace) -> bool:
    """Whether one of these options was given, or steps as a list."""
    return isinstance(getattr(arguments, "model.steps"), tuple) or any(
        getattr(arguments, option.name) is not None for option in OPTIONS
    )
