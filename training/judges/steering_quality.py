"""Do the first thing and the camera of the embedded model's streams go where keys steer them, and only then?

    python -m training.judges.steering_quality                        # 200 streams to a minute: hours on a CPU
    python -m training.judges.steering_quality --weights runs/tiny/model --streams 24 --marks 5 50

Streams are played with keys that change at random chunks; at each mark there are new ones, which are held for a second
chunk and released with the third. Judged from decoded pixels alone; training/README.md defines every figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report
from streamdiff.device import pick_device
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.taehv import TaehvAutoencoder, TaehvMemory
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.scene import CAMERAS, Scene
from training import embedded as model
from training.batches import TrackEncoder
from training.denoiser import stream_flow
from training.judges.world_judge import Verdict, judge
from training.keys import PAN, STOP, draw_keys
from training.network import Network
from training.on_policy import PAST, next_chunk
from training.rows import LEVELS
from training.scene_rows import from_row, row_of, thing_row
from training.windows import CHUNK
from training.world.scenes import draw_scenes
from training.world.tracks import CHUNK_FRAMES, CONTROLS, PARTS, SIZE, Streams, join

NEAR_PX = 10.0
"""How far, along each axis, a thing may be from where it should have come within a chunk."""
APART_PX = 14.0
"""A key says something else than the prompt where it leads this far from where the prompt does."""
CHANGE = 0.5
"""Share of the chunks between marks at which other keys are held."""
LOOKS = ("first", "held", "released")
"""Chunks at a mark, in order."""
BAR = 0.95


@dataclass(frozen=True)
class Look:
    """What was seen of one chunk: whether the first thing, and the camera, went where they should, and of each whether
    keys wanted it otherwise than the prompt."""

    thing: bool
    camera: bool
    thing_steered: bool
    camera_steered: bool


def place_of(verdict: Verdict, scene: Scene) -> Tensor | None:
    """Where the scene's first thing begins the chunk, (y, x) in pixels; None where it is not seen. The other thing has
    another color (`draw_played`)."""
    color = thing_row(scene.first)[0]
    found = [seen for seen in verdict.things if seen.color == color]
    return torch.tensor(found[0].place) if found else None


def destinations(scene: Scene, place: Tensor, controls: Tensor) -> Tensor:
    """Where the first thing, now at `place` (y, x) in pixels, may be a chunk later under `controls` `[CHUNK, K]`, `[n,
    2]`: one place, but of what bounces one for each way that it may go."""
    ways = [(y, x) for y in (-1, 1) for x in (-1, 1)] if scene.first.motion == "bouncing" else [(1, 1)]
    rows = torch.tensor([row_of(scene)] * len(ways))
    streams = Streams(rows)
    streams.before = rows
    streams.place[:, 0] = place * PARTS
    streams.way[:, 0] = torch.tensor(ways)
    streams.play(rows, controls=controls.expand(len(ways), -1, -1))
    return streams.place[:, 0] / PARTS


def away(places: Tensor, place: Tensor) -> float:
    """How far `place` is from the nearest of `places` `[n, 2]`, along the axis where it is further."""
    apart = ((places - place + SIZE / 2).remainder(SIZE) - SIZE / 2).abs()
    return float(apart.amax(1).min())


def look(scene: Scene, controls: Tensor, now: Verdict, after: Verdict) -> Look:
    """Judge the chunk that `now` is of, made under `controls` `[CHUNK, K]`; `after` is of the next one."""
    free = torch.zeros_like(controls)
    begin, end = place_of(now, scene), place_of(after, scene)
    pan = float(controls[0, PAN])
    camera = scene.camera if pan == 0 else "right" if pan > 0 else "left"
    thing, apart = False, bool((controls[:, [0, 1, STOP]] != 0).any())
    if begin is not None:
        steered = destinations(scene, begin, controls)
        apart = apart and all(away(destinations(scene, begin, free), each) > APART_PX for each in steered)
        thing = end is not None and away(steered, end) <= NEAR_PX
    return Look(thing, now.setting.camera == CAMERAS.index(camera), apart, camera != scene.camera)


def draw_played(count: int, generator: torch.Generator) -> Tensor:
    """Scenes `[count, fields]` whose things have two colors, and whose light does not pass."""
    drawn: list[Tensor] = []
    while len(drawn) < count:
        row = draw_scenes(1, generator)[0]
        scene = from_row(row.tolist())
        if scene.hour != "passing" and (scene.second is None or scene.second.color != scene.first.color):
            drawn.append(row)
    return torch.stack(drawn)


def draw_played_keys(count: int, chunks: int, marks: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Keys `[count, chunks, K]` of whole chunks: new ones at each of `marks`, held for two chunks, then none."""
    held, drawn = torch.zeros(count, len(CONTROLS)), []
    for chunk in range(chunks):
        at = {0: "first", 1: "held", 2: "released", 3: "released"}
        state = next((at[chunk - mark] for mark in marks if chunk - mark in at), "between")
        if state == "first":
            held = draw_keys(count, generator, ("move", "stop", "pan", "both"))
        elif state == "released":
            held = torch.zeros_like(held)
        elif state == "between":
            change = torch.rand(count, 1, generator=generator) < CHANGE
            held = torch.where(change, draw_keys(count, generator), held)
        drawn.append(held)
    return torch.stack(drawn, 1)


@torch.no_grad()
def play(
    network: Network, encode: TrackEncoder, scenes: Tensor, keys: Tensor, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Chunks `[N, C, CHUNK, h, w]` that the network makes of streams of `scenes` `[N, fields]` under `keys` `[N,
    chunks, K]`, in `clean`; they begin with `PAST` chunks of the world, which are not among them."""
    streams, ids = Streams(scenes), encode.tokens(scenes)
    track = join([streams.play(scenes) for _ in range(PAST)])
    past = encode.latents_of(track).unflatten(1, (-1, CHUNK)).transpose(2, 3)
    controls = torch.zeros(len(scenes), PAST, CHUNK, len(CONTROLS), device=past.device)
    flow = stream_flow(network, steps, False, generator)
    for held in keys.to(past.device).unbind(1):
        controls = torch.cat([controls, held[:, None, None].expand(-1, 1, CHUNK, -1)], 1)
        chunk = next_chunk(past, ids, controls, flow, LEVELS[steps], generator)
        past, controls = torch.cat([past[:, 1:], chunk[:, None]], 1), controls[:, 1:]
        yield chunk


@torch.no_grad()
def frames_of(encode: TrackEncoder, before: Tensor, chunk: Tensor) -> Tensor:
    """The frames `[T, 3, SIZE, SIZE]` of one stream's `chunk` `[C, CHUNK, h, w]`, as decoded after the one before."""
    latents = torch.cat([before, chunk], 1).transpose(0, 1)[None] * encode.std + encode.mean
    return encode.autoencoder.decode(latents, TaehvMemory())[0, -CHUNK_FRAMES:].clamp(0, 1).cpu()


def measure(
    network: Network, encode: TrackEncoder, count: int, marks: tuple[int, ...], steps: int, seed: int
) -> dict[str, dict[str, float | None]]:
    """Figures of `count` streams by mark and chunk there, `LOOKS`."""
    generator = torch.Generator().manual_seed(seed)
    scenes = draw_played(count, generator)
    keys = draw_played_keys(count, marks[-1] + len(LOOKS) + 1, marks, generator)
    wanted = {mark + i for mark in marks for i in range(-1, len(LOOKS) + 1)}
    made: dict[int, Tensor] = {}
    chunks = play(network, encode, scenes, keys, steps, generator)
    for number, chunk in enumerate(tqdm(chunks, total=keys.shape[1], unit="chunk")):
        if number in wanted:
            made[number] = chunk
    results: dict[str, dict[str, float | None]] = {}
    for mark in marks:
        looks: dict[str, list[Look]] = {name: [] for name in LOOKS}
        for stream in tqdm(range(count), desc=f"chunk {mark}", unit="stream"):
            scene = from_row(scenes[stream].tolist())
            frames = [frames_of(encode, made[mark + i - 1][stream], made[mark + i][stream]) for i in range(4)]
            verdicts = [judge(each) for each in frames]
            for i, name in enumerate(LOOKS):
                controls = keys[stream, mark + i].expand(CHUNK, -1)
                looks[name].append(look(scene, controls, verdicts[i], verdicts[i + 1]))
        results |= {f"{mark} {name}": figures(some) for name, some in looks.items()}
    return results


def figures(looks: list[Look]) -> dict[str, float | None]:
    """Shares of `looks`; None where none is of the kind."""

    def share(right: list[bool]) -> float | None:
        return sum(right) / len(right) if right else None

    things = [each.thing for each in looks if each.thing_steered]
    cameras = [each.camera for each in looks if each.camera_steered]
    return {
        "thing": share([each.thing for each in looks]),
        "camera_right": share([each.camera for each in looks]),
        "thing_steered": share(things),
        "camera_steered": share(cameras),
        "obeyed": share([*things, *cameras]),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.judges.steering_quality", description=__doc__)
    parser.add_argument("--weights", type=Path, default=EMBEDDED_WEIGHTS, help="model folder (default: the packaged)")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--marks", type=int, nargs="+", default=[5, 50, 200], help="chunks to judge, rising, 5 apart")
    parser.add_argument("--steps", type=int, choices=(4, 2), default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON file (default: training/results/steering_quality.json)")
    options = parser.parse_args(argv)
    marks = tuple(options.marks)
    if options.streams < 1 or marks[0] < 1 or any(after - mark < 5 for mark, after in pairwise(marks)):
        parser.error("--streams at least 1, --marks from 1 on, each at least 5 above the one before")
    head = report.header(warm_up="none: nothing here is timed")
    device = pick_device(options.device)
    network = Network().to(device).eval()
    mean, std = network.load_model(model.load_model(options.weights, device))
    half = load_autoencoder(options.weights, "decoder", device)
    assert isinstance(half, TaehvAutoencoder)
    encode = TrackEncoder(half.autoencoder.float(), mean, std, network.tokens)
    results = measure(network, encode, options.streams, marks, options.steps, options.seed)
    print(report.table([{"at": at, **some} for at, some in results.items()]))
    out = options.out or report.ROOT / "training" / "results" / "steering_quality.json"
    report.write_json(out, head, results, streams=options.streams, steps=options.steps, bar=BAR)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
