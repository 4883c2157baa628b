"""A decoder's step as a CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from streamdiff.models.autoencoder.picture_decoder import Capture, DecoderState, Step
from streamdiff.pipeline.runner.cuda_graphs import CudaGraphCapture


class CapturedStep:
    """A compiled step as one CUDA graph, for all streams: inputs are copied to where the graph looks for them, and
    results from where it puts them, so that no stream's past lies in the graph's memory."""

    def __init__(self, step: Step, piece: Tensor, past: DecoderState, capture: CudaGraphCapture) -> None:
        """Of tensors like these, which are not kept; the step is executed first, to warm up."""
        self._piece, self._past = piece.clone(), _cloned(past)
        self._graph, (self._pictures, self._after) = capture(lambda given: step(*given), (self._piece, self._past))

    def __call__(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """See `Step`."""
        self._piece.copy_(piece)
        for layer, there in self._past.items():
            if isinstance(there, Tensor):
                there.copy_(cast(Tensor, past[layer]))
        self._graph.replay()
        return self._pictures.clone(), _cloned(self._after)


def capture_on(device: torch.device) -> Capture | None:
    """What captures a decoder's steps on `device`; None where there are no CUDA graphs. Their memory is a pool of their
    own, as the transformer's graphs are replayed at the same time."""
    return partial(CapturedStep, capture=CudaGraphCapture()) if device.type == "cuda" else None


def _cloned(past: DecoderState) -> DecoderState:
    return {layer: each.clone() if isinstance(each, Tensor) else each for layer, each in past.items()}
