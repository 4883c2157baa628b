"""Training windows of video to video: a chunk starts from another scene's video, and shows its prompt's look there.

What the noisy chunk shows has other colors, shapes, sizes, scenery and weather than the prompt says, and often other
motions. What is to come of it has the prompt's look, and the video's places and motions: where the video is, is the
video's to say (training/DIARY.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.batches import Pool, TrackEncoder
from training.scene_rows import COLUMN
from training.world.scenes import draw_scenes
from training.world.tracks import Streams, join

OTHER_MOTION = 0.8
"""Share of the videos whose motions are drawn apart from the prompt's."""
ELSEWHERE = 0.25
"""Share of the windows whose past is not where the video is: the video has just come."""
ALIKE = 0.15
"""Share of the windows whose video shows the prompt's own look, as what comes of it does from the second step on."""
MOVES = [COLUMN[name] for name in ("motion", "speed", "second_motion", "second_speed", "camera")]


class VideoPool(Pool):
    """Windows of a chunk and one that starts from a video of as many things."""

    def __init__(self, encode: TrackEncoder, capacity: int) -> None:
        super().__init__(encode, capacity, chunks=2, starts=0.0)

    @torch.no_grad()
    def grow(self, count: int, generator: torch.Generator) -> None:
        prompt, video, wanted = _draw(count, generator)
        streams, filmed = Streams(wanted, generator), Streams(video, generator)
        before = streams.play(wanted)
        filmed.follow(streams)
        after, film = streams.play(wanted), filmed.play(video)
        past = self.encode.latents_of(before)
        away = (torch.rand(count, generator=generator) < ELSEWHERE).nonzero()[:, 0]
        if len(away):  # the video has just come: the stream went on as the prompt says
            went = Streams(prompt[away], generator).play(prompt[away])
            past[away.to(past.device)] = self.encode.latents_of(went)
        latents = torch.cat([past, self.encode.latents_of(after)], 1)
        every, start = prompt[:, None].expand(-1, 2, -1), torch.zeros(count, dtype=torch.bool)
        video_latents = self.encode.latents_of(film).half()
        self._keep(latents, latents, start, every, join([before, after]), video=video_latents)


def _draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scenes `[count, fields]` of prompts, of videos, and of what is to come of them."""
    prompt = draw_scenes(count, generator)
    video = draw_scenes(count, generator, prompt[:, COLUMN["second"]])
    apart = torch.rand(count, 1, generator=generator) < OTHER_MOTION
    video[:, MOVES] = torch.where(apart, video[:, MOVES], prompt[:, MOVES])
    wanted = prompt.clone()
    wanted[:, MOVES] = video[:, MOVES]
    video = torch.where(torch.rand(count, 1, generator=generator) < ALIKE, wanted, video)
    return prompt, video, wanted
