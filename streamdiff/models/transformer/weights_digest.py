"""Digest of a transformer block's weights, from samples of them, to tell whether two blocks have the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_SAMPLES = 256  # values of each tensor: other training changes nearly all of them


@torch.inference_mode()
def weights_digest(block: nn.Module) -> str:
    """A digest of names, shapes and evenly spaced values of a block's weights; the same in any memory layout. For
    weights in 8 bits it is that of what they stand for. The host waits for the device."""
    digest = hashlib.sha256()
    for name, weight in sorted(block.state_dict().items()):
        whole = weight if type(weight) in (Tensor, nn.Parameter) else weight.dequantize()
        flat = whole.reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].float().cpu().contiguous()
        digest.update(f"{name} {list(whole.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
