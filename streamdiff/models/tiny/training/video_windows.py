"""Training windows of video to video: a chunk starts from another scene's video, and shows its prompt's look there.

What the noisy chunk shows has another color, shape and background than the prompt says, and often another motion. What
is to come of it has the prompt's look, and the video's place and motion: where the video is, is the video's to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamdiff.models.tiny import world
from streamdiff.models.tiny.training.batches import FRAMES, LatentEncoder, Windows, draw_scenes, stream_latents

PAST = 2
"""Chunks before the one with a video, at most."""
OTHER_MOTION = 0.8
"""Share of the videos whose motion is drawn apart from the prompt's."""
ELSEWHERE = 0.25
"""Share of the windows whose past is not where the video is: the video has just come."""
ALIKE = 0.15
"""Share of the windows whose video shows the prompt's own look, as what comes of it does from the second step on."""


@torch.no_grad()  # not inference mode: what it makes is trained on
def video_windows(encode: LatentEncoder, count: int, past: int, generator: torch.Generator) -> Windows:
    """`count` new windows of `past` chunks, at most PAST, and one that starts from a video."""
    prompt, video = (draw_scenes(count, 1, generator)[:, 0] for _ in range(2))
    apart = torch.rand(count, generator=generator) < OTHER_MOTION
    video[:, 2] = torch.where(apart, video[:, 2], prompt[:, 2])
    wanted = torch.cat([prompt[:, :2], video[:, 2:3], prompt[:, 3:]], 1)
    video = torch.where(torch.rand(count, 1, generator=generator) < ALIKE, wanted, video)
    place, away = torch.randint(world.SIZE, (2, count, 2), generator=generator)
    elsewhere = torch.rand(count, 1, generator=generator) < ELSEWHERE
    before = place - past * FRAMES * world.velocities()[video[:, 2]]

    def encoded(scenes: Tensor, origin: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        return stream_latents(encode, scenes.to(encode.device), origin.to(encode.device), chunks)

    latents, places = encoded(wanted, place, 1)
    if past:  # one that is elsewhere went on as the prompt says
        went = torch.where(elsewhere, prompt, wanted)
        earlier = encoded(went, torch.where(elsewhere, away, before).remainder(world.SIZE), past)
        latents, places = torch.cat([earlier[0], latents], 1), torch.cat([earlier[1], places], 1)
    scenes = prompt[:, None].expand(-1, past + 1, -1).to(encode.device)
    start = torch.zeros(count, dtype=torch.bool)
    return Windows(latents, scenes, start, places, encoded(video, place, 1)[0][:, 0])
