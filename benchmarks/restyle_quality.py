"""Does a prompt change colour, shape and background of a video that comes in, while its place and motion stay?

    python -m benchmarks.restyle_quality                       # 100 clips at the default strength
    python -m benchmarks.restyle_quality --strengths 0.4,0.6,0.8 --clips 20

Clips of the embedded model's world go in as a camera's frames do, each under a prompt for another colour, shape and
background; what comes out is judged by its pixels alone, in each clip's last chunk.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import streamdiff
from benchmarks import report, world_clips
from benchmarks.world_judge import judge, wrapped
from streamdiff.engine.messages import DEFAULT_STRENGTH
from streamdiff.models.tiny import world
from streamdiff.models.tiny.prompts import canonical

CHUNKS = 4
NEAR_PX = 6.0
BARS = {"place": 0.90, "motion": 0.90, "color": 0.90, "background": 0.90}


def other_scenes(scenes: Tensor, generator: torch.Generator) -> Tensor:
    """Rows `[N, 4]` of other colours, shapes and backgrounds, and the same motions."""
    sizes = (len(world.COLOR_NAMES), len(world.SHAPES), 1, len(world.BACKGROUNDS))
    other = scenes.clone()
    for column, size in enumerate(sizes):
        if size > 1:
            shift = torch.randint(1, size, (len(scenes),), generator=generator)
            other[:, column] = (scenes[:, column] + shift) % size
    return other


def prompt_of(row: Tensor, with_motion: bool) -> str:
    """The prompt for a scene; without its motion the video alone says that."""
    color, shape, motion, background = (int(each) for each in row)
    scene = world.Scene(
        world.COLOR_NAMES[color], world.SHAPES[shape], world.MOTION_NAMES[motion], world.BACKGROUNDS[background]
    )
    return canonical(scene) if with_motion else re.sub(r" (moving \w+|standing still)", "", canonical(scene))


def restyled(session: streamdiff.StreamSession, prompt: str, frames: np.ndarray, strength: float, seed: int) -> Tensor:
    """What the stream makes of `frames` `[n, H, W, 3]`, uint8 like them: as many."""
    session.restart(prompt, seed=seed)
    session.video(strength)
    made = []
    for begin in range(0, len(frames), session.chunk_frames):
        session.feed(frames[begin : begin + session.chunk_frames])
        made += list(session)
    return torch.from_numpy(np.stack(made))


def measure(
    session: streamdiff.StreamSession, clips: int, strength: float, with_motion: bool, seed: int
) -> dict[str, float]:
    """Shares of clips that are as they should be, at one strength."""
    generator = torch.Generator().manual_seed(seed)
    scenes = world_clips.rows_of(world_clips.draw_scenes(clips, generator))
    wanted = other_scenes(scenes, generator)
    start = torch.randint(0, world.SIZE, (clips, 2), generator=generator)
    length = CHUNKS * session.chunk_frames
    last = slice(length - session.chunk_frames, length)
    found: list[Tensor] = []
    for clip in tqdm(range(clips), desc=f"strength {strength:g}", disable=None):
        film = world_clips.film(scenes[clip : clip + 1], start[clip : clip + 1], length)
        pixels = (film.frames[0].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
        out = restyled(session, prompt_of(wanted[clip], with_motion), pixels, strength, seed + clip)
        verdict = judge(out[None, last])
        distance = wrapped(verdict.position - film.position[:, last]).norm(dim=-1).amax()
        named = verdict.right(wanted[clip : clip + 1])[0]
        found.append(torch.cat([named, (distance <= NEAR_PX)[None]]))
    shares = torch.stack(found).double().mean(0).tolist()
    return dict(zip((*world_clips.ATTRIBUTES, "place"), shares, strict=True))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when every share at the first strength meets its bar."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restyle_quality", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--clips", type=int, default=100, metavar="N")
    parser.add_argument(
        "--strengths", default=f"{DEFAULT_STRENGTH:g}", metavar="S,S", help="the first is held to the bars"
    )
    parser.add_argument("--steps", type=int, default=None, metavar="N")
    parser.add_argument("--name-motion", action="store_true", help="the prompt names the clip's motion too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    results: dict[str, Any] = {}
    with streamdiff.open("a red circle", steps=given.steps) as session:
        for strength in map(float, given.strengths.split(",")):
            results[f"{strength:g}"] = measure(session, given.clips, strength, given.name_motion, given.seed)
    print(report.table([{"strength": strength, **shares} for strength, shares in results.items()]))
    first = next(iter(results.values()))
    met = {name: first[name] >= bar for name, bar in BARS.items()}
    if given.out is not None:
        head = report.header(argv, warm_up="none")
        report.write_json(given.out, head, results, clips=given.clips, bars=BARS, met=met)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
