"""Figures of what the embedded model shows, and the world itself: shares of right verdicts, and which bars they meet.

Defined in training/README.md. Knows nothing about models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from streamdiff.models.tiny.scene import THING_TABLES, Scene
from training.judges.world_judge import judge, shares
from training.scene_rows import row_of
from training.world.render import render
from training.world.tracks import Streams, Track, join

WITHOUT_BAR = ("same_step",)
BARS = {"color": 0.98, "place": 0.98, "motion": 0.95, "shape": 0.92, "camera": 0.90}
BOTH_BAR, CHANGE_BAR, DRIFT_BAR = 0.85, 0.95, 0.02
TOGETHER = 2
"""Chunks that are judged together, 0.6 s of a stream that goes on: things that cross hide each other for one of them at
times."""
Rights = list[dict[str, bool]]
"""`Verdict.right` of one look at each stream."""


def figures_of(rights: Rights, scenes: Sequence[Scene]) -> dict[str, float]:
    """Shares of right verdicts; `both` of those scenes that have two things, whether all of both is right."""
    things = (*THING_TABLES, "count")
    two = [all(right[name] for name in things) for right, scene in zip(rights, scenes, strict=True) if scene.second]
    return {**shares(rights), **({"both": sum(two) / len(two)} if two else {})}


def change_figures(rights: dict[str, Rights], scenes: Sequence[Scene]) -> dict[str, float]:
    """Figures of the second chunk under a new prompt, and whether what is new was right in it, and in the first."""
    first, second = rights.values()
    seen = [[right["color"] and right["place"] for right in each] for each in (first, second)]
    at_once, then = (sum(each) / len(each) for each in seen)
    return {**figures_of(second, scenes), "color_and_place_at_once": at_once, "color_and_place": then}


def bars_met(context: str, marks: dict[str, dict[str, float]], after: dict[str, float]) -> dict[str, bool]:
    """Which bars are met; none are set for some contexts, nor for two things where no scene has them."""
    if context in WITHOUT_BAR:
        return {}
    parts = list(marks.values())
    met = {f"{name} >= {bar:.2f}": all(part[name] >= bar for part in parts) for name, bar in BARS.items()}
    if all("both" in part for part in parts):
        met[f"both things >= {BOTH_BAR}"] = all(part["both"] >= BOTH_BAR for part in parts)
    met[f"drift within {DRIFT_BAR}"] = all(parts[-1][name] - parts[0][name] >= -DRIFT_BAR - 1e-9 for name in BARS)
    met[f"change within 2 chunks >= {CHANGE_BAR}"] = after["color_and_place"] >= CHANGE_BAR
    return met


def truth_figures(scenes: Sequence[Scene], marks: Sequence[int]) -> dict[str, dict[str, float]]:
    """The figures of `scenes` at the chunks `marks`, rising, of the world as it is drawn: what a model may reach, since
    of what hides behind another thing nobody can say what it is."""
    rows = torch.tensor([row_of(scene) for scene in scenes])
    streams, found, last = Streams(rows), {}, deque[Track](maxlen=TOGETHER)
    for chunk in range(marks[-1] + 1):
        last.append(streams.play(rows))
        if chunk in marks:
            track = join(list(last))
            each = (render(track.rows(slice(at, at + 1)).flat()).frames for at in range(len(scenes)))
            rights = [judge(frames).right(scene) for frames, scene in zip(each, scenes, strict=True)]
            found[str(chunk)] = figures_of(rights, scenes)
    return found
