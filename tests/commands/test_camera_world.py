"""A world steered by a camera (LingBot-World): `streamdiff generate --controls` with poses, against the published
equations written out in float64, with windows and sinks that are no whole chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from streamdiff.cli import main
from tests.models.layouts import original
from tests.models.test_camera import wandering
from tests.pipeline.float64_wan import PlainWan, attend, rotated
from tests.small import LATENT_CHANNELS, small_transformer, with_camera

HEIGHT, WIDTH, HEADS, MASKS = 4, 6, 2, 4
TOLD, SIGMAS, RENOISE = (999.0, 947.0, 825.0), (0.9999, 0.947909, 0.825853), (0.947693, 0.825193)
INTRINSICS = (502.0, 480.0, 410.0, 236.0)


class PlainCamera(PlainWan):
    """With what the cameras of some latent frames do to every block. `broken` is what is done wrongly, for the test to
    see that it would be found."""

    broken = ""
    embedding: Tensor

    def see(self, relative: Tensor) -> None:
        """Take the relative poses `[F, 4, 4]` of the latent frames that come next. Mutates: self."""
        fx, fy, cx, cy = (value * size for value, size in zip(INTRINSICS, _SCALE, strict=True))
        y, x = torch.meshgrid(torch.arange(8.0 * HEIGHT) + 0.5, torch.arange(8.0 * WIDTH) + 0.5, indexing="ij")
        rays = torch.stack([(x - cx) / fx, (y - cy) / fy, torch.ones_like(x)]).double()
        rays = torch.einsum("fij,jyx->fiyx", relative[:, :3, :3], rays / rays.norm(dim=0))
        parts = [relative[:, :3, 3, None, None].expand_as(rays), rays]
        pixels = torch.cat(parts[::-1] if self.broken == "directions first" else parts, 1)
        frames = len(relative)
        folded = (
            pixels.view(frames, 6, HEIGHT, 8, WIDTH, 8).permute(0, 1, 3, 5, 2, 4).reshape(frames, 384, HEIGHT, WIDTH)
        )
        patches = folded.view(frames, 384, HEIGHT // 2, 2, WIDTH // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 1536)
        own = self.linear("patch_embedding_wancamctrl", patches)
        self.embedding = own + self.linear(
            "c2ws_hidden_states_layer2", F.silu(self.linear("c2ws_hidden_states_layer1", own))
        )

    def steered(self, at: str, hidden: Tensor) -> Tensor:
        inner = F.silu(self.linear(at + "cam_injector_layer1", self.embedding))
        own = self.embedding + self.linear(at + "cam_injector_layer2", inner)
        scale = 0 if self.broken == "no scale" else self.linear(at + "cam_scale_layer", own)
        return (1 + scale) * hidden + self.linear(at + "cam_shift_layer", own)


_SCALE = (8 * WIDTH / 832, 8 * HEIGHT / 480) * 2


@dataclass
class World:
    """A small checkpoint with the files that go with it, for streams of `chunks` chunks."""

    folder: Path
    chunk: int
    chunks: int
    window: int = 0
    sink: int = 0
    files: dict[str, Tensor] = field(init=False)
    model: WanTransformer3DModel = field(init=False)

    def __post_init__(self) -> None:
        small = small_transformer(5, layers=3, heads=HEADS, planes=MASKS + LATENT_CHANNELS)
        self.model, draw = with_camera(small), torch.Generator().manual_seed(2)
        save_file(original(self.model.state_dict()), self.folder / "world.safetensors")
        sizes = {"num_heads": HEADS, "dim": small.config.attention_head_dim * HEADS}
        (self.folder / "config.json").write_text(str(sizes).replace("'", '"'))
        shape, frames = (LATENT_CHANNELS, self.chunk, HEIGHT, WIDTH), self.chunk * self.chunks
        randn = lambda *size: torch.randn(*size, generator=draw)  # noqa: E731
        self.files = {
            "initial": randn(self.chunks, *shape), "renoise": randn(self.chunks, 2, *shape),
            "prompt_embeds": randn(5, small.config.text_dim), "latents": randn(LATENT_CHANNELS, frames, HEIGHT, WIDTH),
            "poses": torch.from_numpy(wandering(4 * frames - 3)).float(), "intrinsics": torch.tensor([INTRINSICS]),
        }  # fmt: skip
        for name in ("initial renoise", "prompt_embeds", "latents", "poses intrinsics"):
            save_file({each: self.files[each] for each in name.split()}, self.folder / name.split()[0])

    def command(self, *extra: str) -> list[str]:
        files = {"model": "world.safetensors", "model-config": "config.json", "prompt-embeds": "prompt_embeds"}
        files |= {"noise": "initial", "condition": "latents", "controls": "poses", "latents-out": "out.safetensors"}
        said = [part for option, name in files.items() for part in (f"--{option}", str(self.folder / name))]
        numbers = {"steps": TOLD, "sigmas": SIGMAS, "renoise-sigmas": RENOISE}
        said += [part for name, values in numbers.items() for part in (f"--{name}", ",".join(map(str, values)))]
        said += ["--window", str(self.window), "--sink", str(self.sink), "--rope", "absolute", "--no-decode"]
        return ["generate", *said, "--chunks", str(self.chunks), "--overwrite", *extra]

    def latents(self, *extra: str) -> Tensor:
        assert main.main(self.command(*extra)) == 0
        return load_file(self.folder / "out.safetensors")["latents"]

    def expected(self, broken: str = "", positions: int = 0) -> Tensor:
        """The same in float64; with `positions` the sink is never further from a chunk's end."""
        model = PlainCamera(self.model.state_dict(), HEADS)
        model.broken = broken
        poses = self.files["poses"][::4].double()
        relative = torch.linalg.inv(poses[:1]) @ poses
        relative = torch.cat([relative[:1], torch.linalg.inv(relative[:-1]) @ relative[1:]])
        relative[:, :3, 3] /= relative[:, :3, 3].norm(dim=1).max()
        if broken == "a frame late":
            relative = torch.cat([relative[:1], relative[:-1]])
        mask = torch.zeros(MASKS, *self.files["latents"].shape[1:])
        mask[:, 0] = 1
        planes = torch.cat([mask, self.files["latents"]])
        kept: list[tuple[Tensor, Tensor]] = [(torch.empty(0, 0, 0), torch.empty(0, 0, 0))] * model.layers
        made = []
        for chunk in range(self.chunks):
            begin, end = chunk * self.chunk, (chunk + 1) * self.chunk
            model.see(relative[begin:end])
            x, own = self.files["initial"][chunk].double(), kept
            for step in range(4):
                latents = torch.cat([x, planes[:, begin:end].double()])
                flow, own = self._flow(model, latents, (*TOLD, 0.0)[step], kept, end, positions)
                if step < 3:
                    x = x - SIGMAS[step] * flow
                if step < 2:
                    x = (1 - RENOISE[step]) * x + RENOISE[step] * self.files["renoise"][chunk, step].double()
            made.append(x)
            kept = own
        return torch.stack(made)

    def _flow(
        self, model: PlainCamera, latents: Tensor, told: float, kept: list[tuple[Tensor, Tensor]], end: int, span: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The flow, and keys, not rotated, and values of all latent frames so far, of each layer."""
        window, (height, width) = self.window or end, (HEIGHT // 2, WIDTH // 2)
        seen = list(range(end))
        seen = seen if len(seen) <= window else [*seen[: self.sink], *seen[end - (window - self.sink) :]]
        places = [frame + max(0, end - span) if span and frame < self.sink else frame for frame in seen]
        every = []

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = (
                torch.cat([*([old.double()] if len(old) else []), new])
                for old, new in zip(kept[layer], (key, value), strict=True)
            )
            every.append((keys, values))
            keys, values = (each.view(end, -1, *each.shape[1:])[seen] for each in (keys, values))
            turned = [rotated(each, at, height, width) for each, at in zip(keys, places, strict=True)]
            return attend(rotated(query, end - self.chunk, height, width), torch.cat(turned), values.flatten(0, 1))

        return model.flow(latents, told, self.files["prompt_embeds"], attention), every


def far(got: Tensor, expected: Tensor) -> float:
    """The largest relative difference of a chunk."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(got.double(), expected, strict=True))


WORLDS = {"all": (3, 4, 0, 0), "window": (4, 5, 10, 3)}


@pytest.fixture(params=WORLDS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """Chunks of 3 that see everything, as in v1; chunks of 4 whose window and sink are no multiple, as in v2."""
    return World(tmp_path, *WORLDS[request.param])


def test_a_stream_under_a_camera_equals_the_published_equations(world: World) -> None:
    got, expected = world.latents(), world.expected()
    assert far(got, expected) < 1.5e-5
    for broken in ("no scale", "directions first", "a frame late"):
        assert far(world.expected(broken), expected) > 0.01
    for stages in ("2", "3"):
        assert torch.equal(got, world.latents("--stages", stages))
