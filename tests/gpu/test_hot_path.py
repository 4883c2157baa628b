"""On a GPU: compiled blocks and CUDA graphs make the stream that the plain path makes, the host waits for nothing, and
pictures are those that a decoder on the same stream makes.

By hand: `python -m pytest tests/gpu/test_hot_path.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from streamdiff.models.autoencoder.picture_decoder import (
    Layout,
    Normalisation,
    PictureDecoder,
    VideoAutoencoder,
    rgb24,
    yuv420p,
)
from streamdiff.models.autoencoder.taehv import TaehvAutoencoder
from streamdiff.models.autoencoder.wan import WanAutoencoder
from streamdiff.models.model import Model
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, Decoding, Piece
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.graphs import capture_on, one_graph
from tests.gpu.nccl_rank import no_host_sync
from tests.pipeline.decode.draining import drain
from tests.pipeline.playing import CHUNKS_LONG, Order, play
from tests.small import RED, WHITE, small_autoencoder, small_model
from tests.small_vae import small_wan_autoencoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
TOLERANCE = 1e-3
"""Of latents in float32: kernels of a GPU add in another order, and chunks see each other."""
ORDERS = {"clean": Order(RED, 5, 4, "clean"), "same_step": Order(WHITE, 6, 4, "same_step")}


@pytest.fixture(scope="module")
def model() -> Model:
    model = small_model(3, layers=3, sink=2, heads=2, head_dim=16)
    model.denoiser.model.to("cuda")
    return model


@pytest.mark.parametrize("kv_context", ORDERS)
def test_graphs_make_the_plain_stream_and_are_never_made_again(model: Model, kv_context: str) -> None:
    device, order = torch.device("cuda"), {0: ORDERS[kv_context]}
    plain, graphs = Ring(model, device), Ring(model, device)
    graphs.stage.compile(PreallocatedCaches(1, 4, kv_context))
    assert graphs.stage.compiled is not None and graphs.stage.compiled._graph_cache is not None
    captured = set(graphs.stage.compiled._graph_cache.graphs)
    assert len(captured) == (4 if kv_context == "same_step" else 1), "of a full window, by cache"
    with torch.compiler.set_stance("fail_on_recompile"):
        got = play(graphs, model, order, CHUNKS_LONG)[0]
    expected = play(plain, model, order, CHUNKS_LONG)[0]
    assert max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) <= TOLERANCE
    assert set(graphs.stage.compiled._graph_cache.graphs) == captured


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("kv_context", ORDERS)
def test_a_micro_step_makes_no_host_sync(model: Model, kv_context: str, compiled: bool) -> None:
    """After one chunk, on which first calls and first uploads fall."""
    ring = Ring(model, torch.device("cuda"))
    if compiled:
        ring.stage.compile(PreallocatedCaches(1, 4, kv_context))
    ring.open(0, model.text.encode(RED), seed=1, epoch=0, steps=4, kv_context=kv_context)
    frames, done = ring.scheduler.chunk_frames, 0
    while done < 6:
        ring.scheduler.set_frame_credit(0, frames)
        done += len(ring.step_latents()[1])
    with no_host_sync():
        while done < 12:
            ring.scheduler.set_frame_credit(0, frames)
            done += len(ring.step_latents()[1])


@pytest.mark.parametrize("at_once", [1, 2])
def test_pictures_decoded_on_a_stream_of_their_own_are_the_same_while_the_device_is_busy(at_once: int) -> None:
    """Nothing of a chunk is read before it is there, and no pinned buffer is written before it was read."""
    model, device = small_model(2), torch.device("cuda")
    assert model.decoder is not None
    network = model.decoder.network
    assert isinstance(network, TaehvAutoencoder)
    network.autoencoder.to(device)
    statistics = network.normalisation
    assert statistics is not None
    decoder = PictureDecoder(TaehvAutoencoder(network.autoencoder, on(statistics, device)))
    chunks = [torch.randn(model.spec.chunk_shape, device=device) for _ in range(20)]
    memory = decoder.new_memory()
    expected = torch.cat([decoder.decode(chunk[None], memory) for chunk in chunks]).cpu().numpy()
    pieces: list[Piece] = []
    decoding = Decoding.here(decoder, pieces.append, lambda: None, device, at_once)
    for number, chunk in enumerate(chunks):
        late = torch.zeros_like(chunk)
        torch.cuda._sleep(20_000_000)  # the latents come late, as behind a transformer
        late.copy_(chunk)
        decoding.submit(0, number, late)
        del late
    drain(decoding)
    decoding.check()
    assert np.array_equal(np.concatenate([piece.pictures for piece in pieces]), expected)


def tiny_kind() -> tuple[VideoAutoencoder, tuple[int, ...]]:
    autoencoder = small_autoencoder(3).to("cuda")
    return TaehvAutoencoder(autoencoder, None), (4, 3, 4, 4)


def wan_kind() -> tuple[VideoAutoencoder, tuple[int, ...]]:
    autoencoder = small_wan_autoencoder(2, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    return WanAutoencoder(autoencoder.to("cuda")), (16, 3, 4, 4)


@pytest.mark.parametrize("layout", [rgb24, yuv420p])
@pytest.mark.parametrize("kind", [tiny_kind, wan_kind])
def test_a_captured_decoder_with_channels_last_makes_the_plain_pictures(
    kind: Callable[[], tuple[VideoAutoencoder, tuple[int, ...]]], layout: Layout
) -> None:
    """On the decoding thread and its stream; nothing is compiled there any more."""
    device, (plain, shape), (fast, _) = torch.device("cuda"), kind(), kind()
    plain.set_channels_last(channels_last=False)
    fast.set_channels_last(channels_last=True)
    decoder = PictureDecoder(fast, layout)
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(DECODE_THREADS)) as alike:
        alike.submit(
            decoder.compile, torch.zeros(shape, device=device), shape[1], one_graph, capture_on(device)
        ).result()
    chunks = [torch.randn(shape, device=device) for _ in range(4)]
    pieces: list[Piece] = []
    decoding = Decoding.here(decoder, pieces.append, lambda: None, device, shape[1])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for number, chunk in enumerate(chunks):
            decoding.submit(0, number, chunk)
        drain(decoding)
    finally:
        torch.compiler.set_stance("default")
    decoding.check()
    reference, memory = PictureDecoder(plain, layout), plain.new_memory()
    expected = torch.cat([reference.decode(chunk[None], memory) for chunk in chunks]).cpu().numpy().astype(int)
    got = np.concatenate([piece.pictures for piece in pieces]).astype(int)
    assert got.shape == expected.shape and np.abs(got - expected).max() <= 2


def test_yuv420_of_the_device_is_that_of_the_cpu() -> None:
    frames = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 255
    assert (yuv420p(frames.cuda()).cpu().int() - yuv420p(frames).int()).abs().max() <= 1


def on(statistics: Normalisation, device: torch.device) -> Normalisation:
    return Normalisation(statistics.mean.flatten().tolist(), statistics.std.flatten().tolist(), device)
