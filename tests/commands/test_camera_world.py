"""A world steered by a camera (LingBot-World): `streamdiff generate --controls` with poses, against the published
equations written out in float64, with windows and sinks that are no whole chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.commands.conftest import CHUNK, CHUNKS, SIDE, Given, checkpoint
from tests.models.layouts import original
from tests.models.test_camera import wandering
from tests.pipeline.float64_wan import PlainWan, attend, rotated
from tests.small import LATENT_CHANNELS, with_camera

MASKS, FRAMES, PIXELS = 4, CHUNK * CHUNKS, 8 * SIDE
TOLD, SIGMAS, RENOISE = (999.0, 947.0, 825.0), (0.9999, 0.947909, 0.825853), (0.947693, 0.825193)
INTRINSICS = (502.0, 480.0, 410.0, 236.0)
Kept = list[tuple[Tensor, Tensor]]
"""Keys, not rotated, and values of all latent frames so far `[frames, tokens, H, d]`, of each layer."""


class PlainCamera(PlainWan):
    """With what the cameras of some latent frames do to every block. `broken` is what is done wrongly, for the test to
    see that it would be found."""

    broken = ""
    embedding: Tensor

    def see(self, relative: Tensor) -> None:
        """Take the relative poses `[F, 4, 4]` of the latent frames that come next. Mutates: self."""
        across, down = PIXELS / 832, PIXELS / 480
        fx, fy, cx, cy = (value * size for value, size in zip(INTRINSICS, (across, down) * 2, strict=True))
        y, x = torch.meshgrid(torch.arange(PIXELS) + 0.5, torch.arange(PIXELS) + 0.5, indexing="ij")
        rays = torch.stack([(x - cx) / fx, (y - cy) / fy, torch.ones_like(x)]).double()
        rays = torch.einsum("fij,jyx->fiyx", relative[:, :3, :3], rays / rays.norm(dim=0))
        parts = [relative[:, :3, 3, None, None].expand_as(rays), rays]
        pixels = torch.cat(parts[::-1] if self.broken == "directions first" else parts, 1)
        folded = pixels.view(-1, 6, SIDE, 8, SIDE, 8).permute(0, 1, 3, 5, 2, 4).reshape(-1, 384, SIDE, SIDE)
        patches = folded.view(-1, 384, SIDE // 2, 2, SIDE // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 1536)
        own = self.linear("patch_embedding_wancamctrl", patches)
        inner = F.silu(self.linear("c2ws_hidden_states_layer1", own))
        self.embedding = own + self.linear("c2ws_hidden_states_layer2", inner)

    def steered(self, at: str, hidden: Tensor) -> Tensor:
        inner = F.silu(self.linear(at + "cam_injector_layer1", self.embedding))
        own = self.embedding + self.linear(at + "cam_injector_layer2", inner)
        scale = 0 if self.broken == "no scale" else self.linear(at + "cam_scale_layer", own)
        return (1 + scale) * hidden + self.linear(at + "cam_shift_layer", own)

    def forward(self, latents: Tensor, told: float, text: Tensor, kept: Kept, seen: list[int]) -> tuple[Tensor, Kept]:
        """The flow, and what is kept then; `seen` are numbers of the latent frames that are seen."""
        every, side = Kept(), SIDE // 2

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = (each.unflatten(0, (CHUNK, -1)) for each in (key, value))
            keys, values = (torch.cat(pair) for pair in zip(kept[layer], own, strict=True))
            every.append((keys, values))
            keys, values = (each[seen] for each in (keys, values))
            turned = torch.cat([rotated(each, at, side, side) for each, at in zip(keys, seen, strict=True)])
            return attend(rotated(query, seen[-CHUNK], side, side), turned, values.flatten(0, 1))

        return self.flow(latents, told, text, attention), every


@pytest.fixture
def world(tmp_path: Path) -> Given:
    made = checkpoint(tmp_path, planes=MASKS + LATENT_CHANNELS)
    model, draw = with_camera(made.model), torch.Generator().manual_seed(2)
    torch.save(original(model.state_dict()), tmp_path / "wan.pt")
    picture = torch.randn(LATENT_CHANNELS, FRAMES, SIDE, SIDE, generator=draw)
    save_file({"latents": picture}, tmp_path / "condition.safetensors")
    poses = torch.from_numpy(wandering(4 * FRAMES - 3)).float()
    save_file({"poses": poses, "intrinsics": torch.tensor([INTRINSICS])}, tmp_path / "controls.safetensors")
    return Given(tmp_path, model)


def expected(world: Given, window: int, sink: int, broken: str = "") -> Tensor:
    """Latents of the whole stream, in float64."""
    model = PlainCamera(world.model.state_dict(), world.model.config.num_attention_heads)
    model.broken = broken
    files = [load_file(world.folder / f"{name}.safetensors") for name in ("noise", "condition", "controls")]
    noise, poses = files[0], files[2]["poses"][::4].double()
    relative = torch.linalg.inv(poses[:1]) @ poses
    relative = torch.cat([relative[:1], torch.linalg.inv(relative[:-1]) @ relative[1:]])
    relative[:, :3, 3] /= relative[:, :3, 3].norm(dim=1).max()
    relative = torch.cat([relative[:1], relative[:-1]]) if broken == "a frame late" else relative
    mask = torch.zeros(MASKS, FRAMES, SIDE, SIDE)
    mask[:, 0] = 1
    planes = torch.cat([mask, files[1]["latents"]]).double()
    none = torch.empty(0, SIDE**2 // 4, model.heads, model.head_dim, dtype=torch.float64)
    kept: Kept = [(none, none)] * model.layers
    made, text = [], world.text.flatten(0, -2)
    for chunk in range(CHUNKS):
        begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
        seen = [*range(sink), *range(end - (window - sink), end)] if window and end > window else list(range(end))
        model.see(relative[begin:end])
        x, own = noise["initial"][chunk].double(), kept
        for step in range(4):
            given = torch.cat([x, planes[:, begin:end]])
            flow, own = model.forward(given, (*TOLD, 0.0)[step], text, kept, seen)
            x = x - SIGMAS[step] * flow if step < 3 else x
            if step < 2:
                x = (1 - RENOISE[step]) * x + RENOISE[step] * noise["renoise"][chunk, step].double()
        made.append(x)
        kept = own
    return torch.stack(made)


def far(got: Tensor, expected: Tensor) -> float:
    """The largest relative difference of a chunk."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(got.double(), expected, strict=True))


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (10, 4)])
def test_a_stream_under_a_camera_equals_the_published_equations(world: Given, window: int, sink: int) -> None:
    """Chunks of 3 that see everything, as in v1, and with a window and a sink that are no multiple of them."""
    numbers = {"sigmas": SIGMAS, "renoise-sigmas": RENOISE}
    options = [part for name, values in numbers.items() for part in (f"--{name}", ",".join(map(str, values)))]
    options += ["--window", str(window), "--sink", str(sink), "--rope", "absolute"]
    got, plain = world.latents(*options, steps=",".join(map(str, TOLD))), expected(world, window, sink)
    assert far(got, plain) < 1.5e-5
    for broken in ("no scale", "directions first", "a frame late"):
        assert far(expected(world, window, sink, broken), plain) > 0.01
    for stages in ("2", "3"):
        assert torch.equal(got, world.latents(*options, "--stages", stages, steps=",".join(map(str, TOLD))))
