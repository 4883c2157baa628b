"""Training windows of video to video: a chunk starts from another scene's video, and shows its prompt's look there.

What the noisy chunk shows has another color, shape and background than the prompt says, and often another motion. What
is to come of it has the prompt's look, and the video's place and motion: where the video is, is the video's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models.tiny import world
from streamdiff.models.tiny.training.batches import CHUNK, Pool, Windows, draw_scenes, render_windows

PAST = 2
OTHER_MOTION = 0.5
"""Share of the prompts that say another motion than the video has."""
ELSEWHERE = 0.25
"""Share of the windows whose past is not where the video is: the video has just come."""
ALIKE = 0.15
"""Share of the windows whose video shows the prompt's own scene, as it does from the second step on."""
GROUP = 8
_FRAMES = CHUNK * world.FRAMES_PER_LATENT


@dataclass(frozen=True)
class _Scenes:
    """Rows `[N, 4]` of the world's tables: what the prompt says, what the video shows, what is to come of them."""

    prompt: Tensor
    video: Tensor
    wanted: Tensor


class VideoPool:
    """Grows to `capacity` windows of PAST + 1 chunks with the video of the last, then replaces the oldest."""

    def __init__(self, like: Pool, capacity: int) -> None:
        """Windows encoded and normalised as those of `like`."""
        self.like, self.capacity = like, capacity
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._written = 0

    @torch.inference_mode()
    def grow(self, count: int, generator: torch.Generator) -> None:
        """Render and encode `count` new windows, a few at a time to bound memory. Mutates: the pool."""
        for done in range(0, count, GROUP):
            for window in self._make(min(GROUP, count - done), generator):
                if len(self._kept) < self.capacity:
                    self._kept.append(window)
                else:
                    self._kept[self._written % self.capacity] = window
                self._written += 1

    def _make(self, count: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        scenes = _draw(count, generator)
        anywhere = torch.randint(world.SIZE, (2, count, 2), generator=generator)
        step = world.velocities()[scenes.video[:, 2]] * _FRAMES
        away = torch.rand(count, 1, generator=generator) < ELSEWHERE
        # a past that is not the video's went on as its prompt said
        went = torch.where(away, scenes.prompt, scenes.wanted)
        origin = torch.where(away, anywhere[1], anywhere[0] - PAST * step).remainder(world.SIZE)
        past, past_place = self._encode(went, origin, PAST)
        last, place = self._encode(scenes.wanted, anywhere[0], 1)
        video, _ = self._encode(scenes.video, anywhere[0], 1)
        latents, places = torch.cat([past, last], 1), torch.cat([past_place, place], 1)
        return list(zip(latents.half(), video[:, 0].half(), scenes.prompt, places, strict=True))

    def _encode(self, scenes: Tensor, origin: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        """Latents `[B, chunks, C, CHUNK, h, w]` and places `[B, chunks, CHUNK, 2]`."""
        device = self.like.device
        every = scenes[:, None].expand(-1, chunks, -1).to(device)
        frames, place = render_windows(every, origin.to(device))
        latents = self.like.encode(frames).unflatten(1, (chunks, CHUNK)).transpose(2, 3)
        return latents, place.unflatten(1, (chunks, CHUNK))

    def sample(self, count: int, chunks: int, generator: torch.Generator) -> Windows:
        """`count` windows of the last `chunks` chunks, 1 to PAST + 1."""
        rows = torch.randint(len(self._kept), (count,), generator=generator).tolist()
        latents, video, scenes, place = (
            torch.stack(each) for each in zip(*(self._kept[row] for row in rows), strict=True)
        )
        device = self.like.device
        start = torch.zeros(count, dtype=torch.bool, device=device)
        every = scenes[:, None].expand(-1, chunks, -1).to(device)
        return Windows(latents[:, -chunks:].float(), every, start, place[:, -chunks:], video.float())


def _draw(count: int, generator: torch.Generator) -> _Scenes:
    prompt, video = (draw_scenes(count, 1, generator)[:, 0] for _ in range(2))
    same_motion = torch.rand(count, generator=generator) >= OTHER_MOTION
    video[:, 2] = torch.where(same_motion, prompt[:, 2], video[:, 2])
    wanted = prompt.clone()
    wanted[:, 2] = video[:, 2]
    alike = torch.rand(count, 1, generator=generator) < ALIKE
    return _Scenes(prompt, torch.where(alike, wanted, video), wanted)
