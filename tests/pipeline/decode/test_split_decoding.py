"""Ranks that share pictures by rows decode what one rank decodes, over real processes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import wan_decoder
from streamdiff.models.autoencoder.picture_decoder import VideoDecoder
from streamdiff.models.autoencoder.row_decoder import RowDecoder
from streamdiff.models.autoencoder.wan import WanDecoder
from streamdiff.models.catalogue import entries
from streamdiff.pipeline.decode.row_group import RowGroup, row_bounds
from streamdiff.pipeline.planner.costs import Ceilings, split_decode, split_decode_words
from streamdiff.pipeline.planner.model_sizes import entry_sizes, read_sizes
from streamdiff.pipeline.planner.partition import check_split_decode
from streamdiff.session_state import walk
from tests.pipeline.decode.split_process import latents, network_of
from tests.pipeline.processes import run_ranks
from tests.small import AUTOENCODER, small_autoencoder, small_decoder
from tests.small_vae import small_wan_autoencoder

LIMIT_S = 900.0
EXACT = ("wan64/2/5", "wan64/4/7", "wan2.2/2/3", "taehv/2/5", "taehv/4/6")
"""Wan's network in float64: what is left then is that frames are float32 in the end."""
ROUNDED = ("wan/4/7",)


@pytest.mark.slow
def test_ranks_that_share_pictures_by_rows_make_whole_pictures() -> None:
    """Streams in pieces, on two ranks and four, also where some have more rows than others. In float32 a convolution
    of fewer rows may sum in another order: the difference is that of any two such orders, a few units of the last place
    after thirty layers.

    Then two ranks, over links: two streams in turn, one of which begins anew; and at last one rank leaves."""
    told = run_ranks("tests.pipeline.decode.split_process", (*EXACT, *ROUNDED, "stream", "lose"), 4, LIMIT_S)
    first, second, *_ = [[json.loads(line) for line in lines.splitlines()] for lines in told]
    *compared, streamed, lost = first
    for case, found in zip((*EXACT, *ROUNDED), compared, strict=True):
        assert found["spread"] > 0.05, case
        assert found["worst"] <= (1e-6 if case in EXACT else 1e-5), (case, found)
    assert second == [{"chunks": 12}]
    assert streamed["worst"] <= 1, "a rounding of a byte"
    assert lost == {"peers": [1]}, "who is gone is named"


def test_rows_are_shared_as_evenly_as_can_be() -> None:
    assert row_bounds(60, 4) == ((0, 15), (15, 30), (30, 45), (45, 60))
    assert row_bounds(5, 2) == ((0, 2), (2, 5))
    assert row_bounds(3, 3) == ((0, 1), (1, 2), (2, 3))
    group = RowGroup((0, 1), 1, None, 5)
    assert group.count == 3
    assert group.local_rows(torch.arange(10.0).view(10, 1)).flatten().tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="there are 7 rows, but the ranks share pictures of 5"):
        group.local_rows(torch.zeros(7, 1))


def test_what_cannot_be_shared_is_refused() -> None:
    check_split_decode("split", 60, 60)
    check_split_decode("head", 1, 4)
    with pytest.raises(ConfigError, match="61 ranks share a stage and a latent frame has 60 rows"):
        check_split_decode("split", 61, 60)
    with pytest.raises(ConfigError, match=r"each stage has one rank: .*--parallel PxC"):
        check_split_decode("split", 1, 60)


class Counting:
    """`RowExchange` of one rank that has them all, and counts what it would exchange."""

    def __init__(self, count: int) -> None:
        self.count, self.bounds = count, ((0, count),)
        self.halos = self.halo_values = self.attended = 0

    def local_rows(self, whole: Tensor) -> Tensor:
        return whole

    def exchange_halo(self, *parts: Tensor) -> tuple[Tensor, ...]:
        self.halos += 1
        self.halo_values += sum(part[..., :1, :].numel() for part in parts)
        return tuple(F.pad(part, (0, 0, 1, 1)) for part in parts)

    def all_gather(self, own: Tensor) -> Tensor:
        self.attended += own.numel()
        return own

    def gather_to_first(self, own: Tensor) -> Tensor:
        return own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wan", "wan2.2", "taehv"])
def test_what_ranks_remember_of_their_rows_is_put_together_and_cut_again(kind: str) -> None:
    """Of a running stream: to what one rank remembers, and a rank takes back what it had."""
    height, ranks = 5, 2
    network, memory = network_of(kind), network_of(kind).new_memory()
    for count in (1, 3):
        network.decode_video(latents(height, 3, count, count), memory)
    groups = [RowGroup(tuple(range(ranks)), rank, None, height) for rank in range(ranks)]
    decoders = [RowDecoder(network_of(kind), group) for group in groups]
    parts = [each.rows_of(memory, rank) for rank, each in enumerate(decoders)]
    assert walk.nbytes(parts[0]) * 3 == walk.nbytes(parts[1]) * 2 == walk.nbytes(memory) * 6 // 5
    for decoder, part in zip(decoders, parts, strict=True):
        assert decoder.past(latents(height, 3, 1, 7), part), "it goes on with its own rows"
    whole = decoders[1].with_all_rows(parts)
    assert walk.outline(whole) == walk.outline(memory) == walk.outline(decoders[0].as_whole(parts[0]))
    for one, other in zip(walk._tensors(whole, ""), walk._tensors(memory, ""), strict=True):
        assert torch.equal(one, other)
    assert network.past(latents(height, 3, 1, 7), whole).keys() == network.past(latents(height, 3, 1, 7), memory).keys()
    with pytest.raises(ValueError, match="but the ranks share pictures of 7"):
        RowDecoder(network_of(kind), RowGroup(tuple(range(ranks)), 0, None, 7)).rows_of(memory, 0)


LATER = {"is_residual": True, "patch_size": 2, "out_channels": 12, "in_channels": 12}


@pytest.mark.parametrize("kind", ["wan2.1", "wan2.2", "taehv"])
def test_what_ranks_exchange_is_counted_from_the_shape_alone(kind: str) -> None:
    """A chunk of three latent frames in the midst of a stream; Wan's 33 convolutions and its attention among it."""
    height, width, latents = 3, 2, 3
    if kind == "taehv":
        network: VideoDecoder = small_decoder(small_autoencoder(0), torch.zeros(4), torch.ones(4))
        sizes = AUTOENCODER.decoder(height, width)
    else:
        made = small_wan_autoencoder(**(LATER if kind == "wan2.2" else {}))
        network, sizes = WanDecoder(made), wan_decoder(made.config, height, width)
        assert sizes.halos == 33
    rows = Counting(height)
    split, memory = RowDecoder(network, rows), network.new_memory()
    for count in (1, 1, 2, latents):
        rows.halos = rows.halo_values = rows.attended = 0
        split.decode_video(torch.zeros(1, network.latent_channels, count, height, width), memory)
    assert (rows.halos, rows.halo_values) == (sizes.halos, latents * sizes.halo + sizes.kept_halo)
    assert rows.attended == latents * sizes.attended


def test_the_plan_says_which_way_of_decoding_is_faster() -> None:
    large, small = entry_sizes(entries.find("self-forcing")), read_sizes("tiny")
    fast, slow = Ceilings(400.0, 2500.0, 300.0), Ceilings(400.0, 2500.0, 0.5)
    two, four = (split_decode(large, fast, ranks, 2) for ranks in (2, 4))
    assert two.whole_s / 2 < two.split_s < two.whole_s / 1.8
    assert two.whole_s / 4 < four.split_s < two.whole_s / 3
    assert four.nbytes > 2 * 40e6, "41 MB of rows for each of two borders, counted elsewhere"
    assert split_decode_words(large, fast, 2, (2, 4)).endswith("split over 4 is faster; estimated")
    assert split_decode_words(large, slow, 2, (2, 4)).endswith("whole is faster; estimated"), "a link too slow"
    assert split_decode_words(small, fast, 2, (2,)).endswith("whole is faster; estimated"), "too many exchanges"
