"""What the fast paths of the decoder are worth: each beside the plain path, in turns, so a busy machine hurts all.

    python -m benchmarks.decode_paths                                     # the embedded model's: a minute, compiling
    python -m benchmarks.decode_paths --vae random:wan2.1 --size 832x480 --device cuda --at-once 3

Paths: `plain`; `compiled` (`--compile on`); `yuv420` (a server on CUDA); `both`; `bfloat16`. The embedded model's
decoder, and any on a CPU, runs in float32 on all but the last; others in bfloat16. Each path with channels last, and,
with `--layouts`, with the width last too. Seconds are those of a chunk on the device, its copy to the host included;
`ratio` is how many times as fast as the first row a path is, by the medians. `off_by` compares pictures, in levels
of 255.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import paths, report
from streamdiff import clock
from streamdiff.device import pick_device
from streamdiff.models.autoencoder import autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, rgb24, yuv420p
from streamdiff.models.spec import parse_size
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS
from streamdiff.pipeline.decode.host_copy import TransferStream, decode_chunk
from streamdiff.pipeline.runner.torch_compile import one_graph

SUMMARY = "Seconds per chunk of each fast path of the decoder beside the plain one, taking turns."
PATHS = {
    "plain": (False, rgb24),
    "compiled": (True, rgb24),
    "yuv420": (False, yuv420p),
    "both": (True, yuv420p),
    "bfloat16": (False, rgb24),
}
LAYOUTS = {"channels last": True, "width last": False}
WARM_UP = 2  # chunks whose times do not count


class Run:
    """One stream on one path."""

    def __init__(self, decoder: Any, path: str, layout: str, like: Tensor, at_once: int) -> None:
        compiled, kind = PATHS[path]
        decoder.set_channels_last(LAYOUTS[layout])
        self.decoder, self.at_once = PictureDecoder(decoder, kind), at_once
        begun_s = clock.monotonic_s()
        if compiled:
            self.decoder.compile(like, at_once, one_graph)
        self.compile_s = clock.monotonic_s() - begun_s
        self.memory, self.lane = self.decoder.new_memory(), TransferStream(like.device)
        self.seconds: list[float] = []
        self.pictures = torch.empty(0)

    def make(self, latents: Tensor) -> None:
        """Decode a chunk `[C, F, h, w]`, note the seconds and keep the pictures. Mutates: self."""
        begun_s = clock.monotonic_s()
        self.lane.follow(self.lane.mark(), latents)
        pieces = decode_chunk(self.decoder, latents, self.memory, self.lane, self.at_once)
        self.pictures = torch.cat([piece.clone() for piece in pieces])
        self.seconds.append(clock.monotonic_s() - begun_s)


def load(vae: str, device: torch.device, path: str = "plain") -> Any:
    """The decoder half of an autoencoder, or of one with random weights, in the path's dtype."""
    plain = torch.float32 if device.type == "cpu" or vae == "tiny" else torch.bfloat16
    dtype = torch.bfloat16 if path == "bfloat16" else plain
    return autoencoder.load_decoder(vae, device, dtype)


@torch.inference_mode()
def measure(
    runs: dict[str, Run], shape: tuple[int, ...], device: torch.device, rounds: int
) -> list[dict[str, report.Value]]:
    """A row per path; see the module."""
    drawn = torch.Generator().manual_seed(0)
    off_by = dict.fromkeys(runs, 0)
    for _ in range(WARM_UP + rounds):
        latents = torch.randn(shape, generator=drawn).to(device)
        for run in runs.values():
            run.make(latents)
        plain = next(iter(runs.values())).pictures
        planes = yuv420p(plain.permute(0, 3, 1, 2).float())
        for path, run in runs.items():
            expected = plain if run.pictures.shape == plain.shape else planes
            off_by[path] = max(off_by[path], int((run.pictures.int() - expected.int()).abs().max()))
    first = next(iter(runs.values())).seconds[WARM_UP:]
    return [
        {**paths.row(path, run.seconds[WARM_UP:], first, run.compile_s), "off_by": off_by[path]}
        for path, run in runs.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--vae", default="tiny", help="tiny, a path, random:wan2.1 or random:taew2_1 (default: tiny)")
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT of the picture (default: 256x256)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    paths.add_option(parser, PATHS)
    parser.add_argument("--layouts", action="store_true", help="each path with the width last too")
    parser.add_argument("--chunk", type=int, default=3, help="latent frames in a chunk (default: 3)")
    parser.add_argument("--at-once", type=int, default=1, help="latent frames decoded by one call (default: 1)")
    parser.add_argument("--rounds", type=int, default=10, help="chunks of each path that count (default: 10)")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    names = paths.chosen(parser, options.paths, PATHS)
    device, head = pick_device(options.device), report.header(warm_up=f"{WARM_UP} chunks")
    torch.set_num_threads(DECODE_THREADS)
    width, height = parse_size(options.size)
    sample = load(options.vae, device)
    shape = (sample.latent_channels, options.chunk, height // sample.spatial, width // sample.spatial)
    like = torch.zeros(shape, device=device)
    with paths.no_compiled_code():
        runs = {
            f"{path}, {layout}": Run(load(options.vae, device, path), path, layout, like, options.at_once)
            for layout in (LAYOUTS if options.layouts else ("channels last",))
            for path in names
        }
        rows = measure(runs, shape, device, options.rounds)
    paths.tell(rows, head, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
