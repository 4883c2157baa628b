"""One rank of those that share pictures: `python -m tests.pipeline.decode.split_process RANK RANKS PORT CASES...`.

A case is `NETWORK/RANKS/ROWS`, as `wan/2/5`, where the ranks beyond sit it out; `stream`, over links; or `lose`, where
rank 1 leaves in the midst of a stream. Rank 0 also decodes by itself, and prints a JSON object for each case.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, VideoDecoder, yuv420p
from streamdiff.models.autoencoder.row_decoder import RowDecoder, one_pixel
from streamdiff.models.autoencoder.wan import WanDecoder
from streamdiff.pipeline.decode.decode_worker import LocalDecoding
from streamdiff.pipeline.decode.decoding import Piece
from streamdiff.pipeline.decode.row_group import make_row_group
from streamdiff.pipeline.decode.split_decoding import SplitDecodeWorker, SplitDecoding
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import GroupBroken, LinkClosed
from streamdiff.pipeline.distributed.state_exchange import LocalExchange
from streamdiff.pipeline.topology import row_receiver, row_senders
from tests.small import CPU, small_autoencoder, small_decoder, small_model
from tests.small_vae import small_wan_autoencoder

SPEC = small_model().spec
CONFIG = ModelConfig(parallel="1x2", decode="split")
PIECES = (1, 3, 2, 3, 1, 3, 3, 1)
WIDTH = 5
LIMIT_S = 600.0


def network_of(kind: str) -> VideoDecoder:
    """A decoder with the same weights every time: `wan`, `wan64` in float64, `wan2.2`, also that, or `taehv`."""
    if kind == "taehv":
        return small_decoder(small_autoencoder(0), torch.linspace(-0.5, 0.5, 4), torch.linspace(0.5, 1.5, 4))
    later: dict[str, Any] = {"is_residual": True, "patch_size": 2, "out_channels": 12, "in_channels": 12}
    made = small_wan_autoencoder(z_dim=4, **NORMALISED, **(later if kind == "wan2.2" else {}))
    return WanDecoder(made if kind == "wan" else made.double())


NORMALISED: dict[str, Any] = {"latents_mean": [0.1, 0.0, -0.2, 0.3], "latents_std": [1.0, 1.5, 0.8, 1.2]}


def latents(height: int, width: int, count: int, seed: int) -> Tensor:
    """Normalised `[1, C, n, h, w]`."""
    return torch.randn(1, 4, count, height, width, generator=torch.Generator().manual_seed(seed))


def compare(kind: str, ranks: int, height: int, rank: int) -> None:
    """Two streams in turn, in pieces."""
    rows = make_row_group(ranks, height, CPU)
    if rows is None:
        return
    whole, split = network_of(kind), RowDecoder(network_of(kind), rows)
    memories = [(whole.new_memory(), split.new_memory()) for _ in range(2)]
    worst = spread = 0.0
    for number, count in enumerate(PIECES):
        for stream, (own, shared) in enumerate(memories):
            piece = latents(height, WIDTH, count, 2 * number + stream)
            made = split.decode_video(piece, shared)
            if rank == 0:
                expected = whole.decode_video(piece, own)
                assert made.shape == expected.shape
                worst = max(worst, float((made - expected).abs().max()))
                spread = max(spread, float(expected.std()))
    if kind.startswith("wan"):
        kept = sum(each.nbytes for each in memories[0][1].features if isinstance(each, Tensor))
        assert kept == split.stream_bytes(height, WIDTH), "a rank keeps its own rows, and that is counted"
    if rank == 0:
        print(json.dumps({"worst": worst, "spread": spread}), flush=True)


def chunk_of(stream: int, chunk: int) -> Tensor:
    return latents(SPEC.latent_height, SPEC.latent_width, SPEC.chunk_latents, chunk + 7 * stream)[0]


def head(network: VideoDecoder) -> tuple[SplitDecoding, SimpleQueue[Piece], SimpleQueue[None]]:
    """The head's decoding, what it delivers, and whether it says that something went wrong."""
    pieces, woken = SimpleQueue[Piece](), SimpleQueue[None]()
    decoder, wake = PictureDecoder(network, yuv420p), lambda: woken.put(None)
    return SplitDecoding(row_senders(SPEC, CONFIG), LocalExchange(), decoder, pieces.put, wake, CPU, 2), pieces, woken


def stream(network: VideoDecoder, rank: int) -> None:
    """Chunks of two streams, one of which ends and begins anew, over links, as YUV420."""
    if rank:
        timer = DeviceTimer.on(CPU)
        worker = SplitDecodeWorker(PictureDecoder(network, one_pixel), row_receiver(SPEC, CPU), CPU, 2, timer)
        worker.run()
        print(json.dumps({"chunks": worker.done}), flush=True)
        return
    split, shared, _ = head(network)
    own = SimpleQueue[Piece]()
    whole = LocalDecoding(PictureDecoder(network_of("wan"), yuv420p), own.put, lambda: None, CPU, 2)
    worst = 0
    for chunk in range(6):
        for number in (0, 1):
            for decoding in (split, whole):
                if (chunk, number) == (3, 1):
                    decoding.forget(number)
                decoding.submit(number, chunk, chunk_of(number, chunk))
            for _ in range(SPEC.chunk_latents):
                one, other = shared.get(timeout=LIMIT_S), own.get(timeout=LIMIT_S)
                assert (one.stream, one.chunk, one.last) == (other.stream, other.chunk, other.last)
                worst = max(worst, int(np.abs(one.pictures.astype(int) - other.pictures.astype(int)).max()))
    for decoding in (split, whole):
        decoding.check()
        decoding.close()
    print(json.dumps({"worst": worst}), flush=True)


def lose(network: VideoDecoder, rank: int) -> None:
    """Rank 1 decodes a chunk, and is gone without a word."""
    if rank:
        work = row_receiver(SPEC, CPU).receive(None)
        assert work is not None
        PictureDecoder(network, one_pixel).decode(work.tensors[0], network.new_memory())
        os._exit(0)
    split, _, woken = head(network)
    for chunk in range(3):
        split.submit(0, chunk, chunk_of(0, chunk))
    woken.get(timeout=LIMIT_S)
    try:
        split.check()
    except LinkClosed as error:  # the exchange ended, or the link
        print(json.dumps({"peers": error.peers if isinstance(error, GroupBroken) else [error.peer]}), flush=True)
    split.close()


def main(rank: int, ranks: int, port: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(days=3650))
    for case in cases:
        kind, *rest = case.split("/")
        if rest:
            compare(kind, int(rest[0]), int(rest[1]), rank)
        elif (rows := make_row_group(2, SPEC.latent_height, CPU)) is not None:
            {"stream": stream, "lose": lose}[kind](RowDecoder(network_of("wan"), rows), rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
