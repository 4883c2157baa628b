"""Does a prompt change the look of a video that comes in, while things stay where they are and move as they do?

    python -m training.judges.restyle_quality                       # 100 clips at the default strength
    python -m training.judges.restyle_quality --strengths 0.4,0.6,0.8 --clips 20

Clips of the embedded model's world go in as a camera's frames do, each under a prompt for other colors, other shapes
and another place; what comes out is judged by its pixels alone, in each clip's last chunk.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import streamdiff
from benchmarks import report
from streamdiff.engine.messages import DEFAULT_STRENGTH
from streamdiff.models.tiny.prompts import canonical
from streamdiff.models.tiny.scene import COLOR_NAMES, PHRASES, PLACES, SHAPES, Scene, Thing
from training.judges.autoencoder_quality import hidden
from training.judges.thing_judge import Seen
from training.judges.world_judge import judge
from training.scene_rows import row_of
from training.world.render import render
from training.world.scenes import random_scene
from training.world.tracks import SIZE, Streams, join

CHUNKS = 4
NEAR_PX = 12.0
JUDGED = ("color", "shape", "motion", "place", "camera")
BARS = {"where": 0.90, "motion": 0.90, "color": 0.90, "place": 0.90}
_MOVES = re.compile(f" ({'|'.join(PHRASES['motion'].values())})({'|'.join(filter(None, PHRASES['speed'].values()))})?")


@dataclass(frozen=True)
class Clip:
    """A video of `scene`: frames uint8 `[T, H, W, 3]`, and where its things, (y, x) in pixels, are when its last chunk
    begins, int64 `[things, 2]`."""

    scene: Scene
    frames: np.ndarray
    places: Tensor


def draw_clip(chance: random.Random) -> Clip:
    """A random clip of `CHUNKS` chunks from the middle of a stream's life, whose things do not hide each other in the
    last one."""
    while True:
        scene = random_scene(chance)
        rows = torch.tensor([row_of(scene)])
        streams = Streams(rows, torch.Generator().manual_seed(chance.getrandbits(31)))
        tracks = [streams.play(rows) for _ in range(CHUNKS)]
        if not hidden(scene, tracks[-1]):
            break
    frames = render(join(tracks).flat()).frames.movedim(1, -1).mul(255).round().to(torch.uint8).numpy()
    return Clip(scene, frames, tracks[-1].place[0, 0, : len(scene.things)])


def restyled_scene(scene: Scene, chance: random.Random) -> Scene:
    """Another color and shape of every thing, and another place; the rest stays."""

    def other(names: tuple[str, ...], name: str) -> str:
        return chance.choice([each for each in names if each != name])

    def anew(thing: Thing) -> Thing:
        return replace(thing, color=other(COLOR_NAMES, thing.color), shape=other(SHAPES, thing.shape))

    second = anew(scene.second) if scene.second else None
    return replace(scene, first=anew(scene.first), second=second, place=other(PLACES, scene.place))


def prompt_of(scene: Scene, with_motion: bool) -> str:
    """The prompt for a scene; without the motions of its things, which the video alone says then."""
    return canonical(scene) if with_motion else _MOVES.sub("", canonical(scene))


def restyled(session: streamdiff.StreamSession, prompt: str, frames: np.ndarray, strength: float, seed: int) -> Tensor:
    """What the stream makes of `frames` `[n, H, W, 3]`, uint8 like them: as many."""
    session.restart(prompt, seed=seed)
    session.video(strength)
    made = []
    for begin in range(0, len(frames), session.chunk_frames):
        session.feed(frames[begin : begin + session.chunk_frames])
        made += list(session)
    return torch.from_numpy(np.stack(made))


def in_place(things: Sequence[Seen], places: Tensor) -> bool:
    """Whether `things` are at `places` `[things, 2]`, in any order, each within `NEAR_PX` on the torus."""
    if len(things) != len(places):
        return False
    seen = torch.tensor([thing.place for thing in things])
    away = [(order - places + SIZE // 2).remainder(SIZE) - SIZE // 2 for order in (seen, seen.flip(0))]
    return any(bool((each.float().norm(dim=1) <= NEAR_PX).all()) for each in away)


def measure(
    session: streamdiff.StreamSession, clips: int, strength: float, with_motion: bool, seed: int
) -> dict[str, float]:
    """Shares of clips that are as they should be, at one strength."""
    chance = random.Random(seed)
    found: list[dict[str, bool]] = []
    for number in tqdm(range(clips), desc=f"strength {strength:g}", disable=None):
        clip = draw_clip(chance)
        wanted = restyled_scene(clip.scene, chance)
        out = restyled(session, prompt_of(wanted, with_motion), clip.frames, strength, seed + number)
        verdict = judge(out[-session.chunk_frames :].movedim(-1, 1).float() / 255)
        right = verdict.right(wanted)
        found.append({**{name: right[name] for name in JUDGED}, "where": in_place(verdict.things, clip.places)})
    return {name: sum(each[name] for each in found) / len(found) for name in (*JUDGED, "where")}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when every share at the first strength meets its bar."""
    parser = argparse.ArgumentParser(
        prog="python -m training.judges.restyle_quality", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--clips", type=int, default=100, metavar="N")
    parser.add_argument(
        "--strengths", default=f"{DEFAULT_STRENGTH:g}", metavar="S,S", help="the first is held to the bars"
    )
    parser.add_argument("--steps", type=int, default=None, metavar="N")
    parser.add_argument("--name-motion", action="store_true", help="the prompt names the motions of the clip too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if given.clips < 1:
        parser.error(f"--clips {given.clips}: at least 1")
    head = report.header(warm_up="none: nothing here is timed")
    results: dict[str, Any] = {}
    with streamdiff.open("a red circle", steps=given.steps) as session:
        for strength in map(float, given.strengths.split(",")):
            results[f"{strength:g}"] = measure(session, given.clips, strength, given.name_motion, given.seed)
    print(report.table([{"strength": strength, **shares} for strength, shares in results.items()]))
    first = next(iter(results.values()))
    met = {name: first[name] >= bar for name, bar in BARS.items()}
    if given.out is not None:
        report.write_json(given.out, head, results, clips=given.clips, bars=BARS, met=met)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
