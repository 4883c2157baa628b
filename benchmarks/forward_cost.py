"""Operations and bytes of one forward of a Wan transformer, by arithmetic. Pure: no torch, no device.

For one chunk of L tokens in f latent frames, with N blocks of width D and feed-forward width F, that sees S tokens of
keys (the window, itself included) and T text tokens, C latent channels, patches of p values:

    embedding                 2 L D C p              position planes are folded into its bias
    modulation                2 f 6 D^2              time embeddings are made once per session
    self-attention matrices   N 2 L 4 D^2            query, key, value, output
    self-attention            N 4 L S D              Q K^T and P V
    cross-attention matrices  N 2 L 2 D^2            query, output; keys and values are made once per prompt
    cross-attention           N 4 L T D
    feed-forward              N 4 L D F
    output layer              2 L D C p

A multiplication and an addition are two operations. Norms, rotations, softmax and gates are left out: they are not
matrix work, and fused they move nothing of their own. Bytes are the least there can be: weights once, the cache's keys
and values once, the new ones written once, and every matrix product's input and output once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from streamdiff.pipeline.planner.model_sizes import ModelSizes


@dataclass(frozen=True)
class Part:
    """A part of a forward: floating-point operations, and numbers (not bytes) that it reads or writes at least."""

    name: str
    flops: float
    values: float

    def floor_s(self, ceilings: Ceilings, value_bytes: int) -> float:
        """The time when it runs at the device's ceilings: whichever of computing and moving takes longer."""
        return max(self.flops / ceilings.flops_per_s, self.values * value_bytes / ceilings.bytes_per_s)


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to reach: operations per second in matrix products, bytes per second in copies."""

    flops_per_s: float
    bytes_per_s: float


def forward(sizes: ModelSizes, kv_context: str) -> list[Part]:
    """The parts of a forward of one chunk, window full, with all blocks."""
    tokens, width, ffn, blocks = sizes.tokens, sizes.width, sizes.ffn_dim, sizes.blocks
    seen, text = tokens * sizes.spec.window_chunks(kv_context), sizes.text_tokens
    frames, patch = sizes.spec.chunk_latents // sizes.patch[0], sizes.out_channels * prod(sizes.patch)
    square = width**2 + width  # a square matrix with its bias
    return [
        Part("embedding", 2.0 * tokens * width * patch, (patch + 1) * width + tokens * (patch + width)),
        Part("modulation", 12.0 * frames * width**2, 6 * width**2 + 6 * width + 7 * frames * width),
        Part(
            "self-attention matrices",
            blocks * 8.0 * tokens * width**2,
            blocks * (4 * square + 2 * width + 6 * tokens * width),
        ),
        Part(
            "self-attention",
            blocks * 4.0 * tokens * seen * width,
            blocks * (2 * seen * width + 4 * tokens * width),
        ),
        Part(
            "cross-attention matrices",
            blocks * 4.0 * tokens * width**2,
            blocks * (2 * square + 2 * width + 4 * tokens * width),
        ),
        Part(
            "cross-attention",
            blocks * 4.0 * tokens * text * width,
            blocks * (2 * text * width + 2 * tokens * width),
        ),
        Part(
            "feed-forward",
            blocks * 4.0 * tokens * width * ffn,
            blocks * (2 * width * ffn + ffn + width + 2 * tokens * (width + ffn)),
        ),
        Part("output layer", 2.0 * tokens * width * patch, sizes.output_values + tokens * (width + patch)),
    ]
