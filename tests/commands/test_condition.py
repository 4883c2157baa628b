"""A picture as the condition of an image-to-video model: `streamdiff generate --condition`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from tests.commands.conftest import CHUNK, CHUNKS, SIDE, STEPS, Given, checkpoint
from tests.pipeline.float64_wan import PlainWan
from tests.pipeline.plain_wan import Layers, PlainStream
from tests.small import LATENT_CHANNELS

MASKS, FRAMES = 4, 7


@pytest.fixture
def given(tmp_path: Path) -> Given:
    made = checkpoint(tmp_path, planes=MASKS + LATENT_CHANNELS)
    draw = torch.Generator().manual_seed(4)
    save_file({"latents": torch.randn(LATENT_CHANNELS, FRAMES, SIDE, SIDE, generator=draw)}, tmp_path / "picture")
    return made


@dataclass
class Conditioned(PlainStream):
    """A stream whose model is given `planes` `[masks + C, n, h, w]` behind the latents, by latent frame."""

    planes: Tensor = field(default_factory=lambda: torch.empty(0))
    _at: int = 0

    def _input(self, chunk: int, step: int) -> Tensor:
        latents = super()._input(chunk, step)
        self._at = chunk  # which `_flow` is asked about next
        return latents

    def _flow(self, latents: Tensor, timesteps: Tensor, before: list[Layers]) -> tuple[Tensor, Layers]:
        own = self.planes[:, self._at * CHUNK : (self._at + 1) * CHUNK]
        return super()._flow(torch.cat([latents, own.double()]), timesteps, before)


def expected(given: Given, latents: Tensor, mask: Tensor) -> Tensor:
    """Latents of the whole stream, in float64; what is given has as many latent frames as it."""
    noise = load_file(given.folder / "noise.safetensors")
    initial, renoise = noise["initial"], noise["renoise"]
    levels = {
        (c, s): (torch.full((CHUNK,), at), torch.full((CHUNK,), at / 1000)) for c in range(CHUNKS)
        for s, at in enumerate(STEPS)
    }  # fmt: skip
    plain = Conditioned(
        PlainWan(given.model.state_dict(), given.model.config.num_attention_heads), given.text[0], len(STEPS), "clean",
        window=3, sink=0, levels=levels, start=dict(enumerate(initial)),
        noise={(c, s): renoise[c, s - 1] for c in range(CHUNKS) for s in range(1, len(STEPS))},
        planes=torch.cat([mask, latents]),
    )  # fmt: skip
    return torch.stack([plain.latents(chunk) for chunk in range(CHUNKS)])


def test_the_condition_goes_with_each_latent_frame_and_its_last_one_is_repeated(given: Given) -> None:
    """Against float64: mask before latents, chunk by chunk, in each step and in the clean pass."""
    latents = load_file(given.folder / "picture")["latents"]
    whole = latents[:, [min(frame, FRAMES - 1) for frame in range(CHUNKS * CHUNK)]]
    mask = torch.zeros(MASKS, CHUNKS * CHUNK, SIDE, SIDE)
    mask[:, 0] = 1
    options = ["--window", "9", "--condition", str(given.folder / "picture")]
    got = given.latents(*options)
    torch.testing.assert_close(got.double(), expected(given, whole, mask), rtol=1e-4, atol=1e-4)
    assert torch.equal(got, given.latents(*options, "--stages", "3"))
    save_file({"latents": whole, "mask": mask}, given.folder / "whole")
    assert torch.equal(got, given.latents("--window", "9", "--condition", str(given.folder / "whole")))
    mask[0, 4:] = 1
    save_file({"latents": whole, "mask": mask}, given.folder / "whole")
    other = given.latents("--window", "9", "--condition", str(given.folder / "whole"))
    assert torch.equal(other[0], got[0]) and (other[1] - got[1]).abs().max() > 1e-3
    torch.testing.assert_close(other.double(), expected(given, whole, mask), rtol=1e-4, atol=1e-4)


def test_a_condition_and_its_model_belong_together(
    given: Given, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = checkpoint(tmp_path_factory.mktemp("plain"))
    save_file({"latents": torch.zeros(LATENT_CHANNELS, 2, SIDE + 2, SIDE)}, given.folder / "wide")
    for command, told in (
        (given.command(), "--condition"),
        (given.command("--condition", str(given.folder / "wide")), "expected"),
        (plain.command("--condition", str(given.folder / "picture")), "--condition"),
        (checkpoint(tmp_path_factory.mktemp("odd"), planes=3).command(), "channels"),
    ):
        assert main.main(command) == 2
        assert told in capsys.readouterr().err
