"""A world that is steered live: what is held is what a file would say, and a session keeps all that it obeys."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from streamdiff.api import StreamSession
from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import messages
from streamdiff.engine.engine import Engine
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models import catalogue
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.clip_vision import ClipVision, load_tower
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.pipeline.planner.model_sizes import entry_sizes
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.controls import HeldControls, action_rows, tracked_rows
from streamdiff.pipeline.runner.sampler import StreamInputs
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.playing import local_ring
from tests.saving import save
from tests.small import ACTIONS, CPU, KEYS, LATENT_CHANNELS, small_encoder, small_model, small_transformer

WIDTH, TOKENS = 160, 5
PICTURE = np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def tower_file(folder: Path) -> Path:
    """A small vision tower of three blocks, in the names and the layout of Wan's file."""
    draw = torch.Generator().manual_seed(9)
    shapes: dict[str, tuple[int, ...]] = {"cls_embedding": (1, 1, WIDTH), "pos_embedding": (1, TOKENS, WIDTH)}
    shapes |= {"patch_embedding.weight": (WIDTH, 3, 14, 14), "head": (WIDTH, 8)}
    shapes |= {f"{name}_norm.{leaf}": (WIDTH,) for name in ("pre", "post") for leaf in ("weight", "bias")}
    for number in range(3):
        layers = {"attn.to_qkv": (480, WIDTH), "attn.proj": (WIDTH, WIDTH), "mlp.0": (64, WIDTH), "mlp.2": (WIDTH, 64)}
        for name, shape in {**layers, "norm1": (WIDTH,), "norm2": (WIDTH,)}.items():
            shapes |= {f"transformer.{number}.{name}.weight": shape, f"transformer.{number}.{name}.bias": shape[:1]}
    tensors = {f"visual.{name}": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    save_file({**tensors, "log_scale": torch.ones(1)}, folder / "clip.safetensors")
    return folder / "clip.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    plain = small_model(1)
    planes = 4 + LATENT_CHANNELS
    network = small_transformer(2, layers=3, planes=planes, features=WIDTH, actions=ACTIONS)
    spec = replace(
        plain.spec, text_shape=(TOKENS, WIDTH), controls=KEYS, condition_channels=planes, actions=ACTIONS,
        action_rows=ACTIONS.rows, kv_contexts=("clean",),
    )  # fmt: skip
    text = ClipVision(tower_file(tmp_path_factory.mktemp("clip")), spec.text_shape, CPU)
    return Model(spec, WanDenoiser(network, condition=planes), text, plain.decoder)


def opened(model: Model, stages: int = 1) -> StreamingPipeline:
    pictures = ImageEncoder(lambda: small_encoder(1), model.spec)
    return StreamingPipeline(model, CPU, parts=local_parts(model, CPU, stages), pictures=pictures)


def begin(pipeline: StreamingPipeline, session: int, seed: int, kv_context: str = "clean") -> None:
    seen, start = pipeline.image_features(PICTURE), pipeline.encode_picture(PICTURE)
    pipeline.open(session, seen, seed=seed, epoch=0, steps=4, kv_context=kv_context, start=start)


def more(pipeline: StreamingPipeline, count: int, keys: dict[int, dict[str, float]] | None = None) -> list[np.ndarray]:
    """So many more pictures of session 0; before a chunk is admitted its keys are set."""
    pictures: list[np.ndarray] = []
    for _ in range(2000):
        if len(pictures) >= count:
            return pictures
        following = pipeline.next_chunk(0)
        if keys and following in keys:
            pipeline.set_controls(0, keys[following])
        for session in pipeline.streams:
            pipeline.set_frame_credit(session, pipeline.model.spec.chunk_frames)
        pictures += [each for frames in pipeline.step(0.1) if frames.session == 0 for each in frames.pictures]
    raise AssertionError(f"{len(pictures)} of {count} pictures came")


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_what_is_held_makes_the_rows_that_a_file_would_say(frames: int) -> None:
    """One action per chunk is that of frames 0 to 8, then of 12 more each; history stays, and a tap is short."""
    held, before, track, live = HeldControls(), None, list[Tensor](), list[Tensor]()
    for chunk, values in enumerate(({}, {1: 1.0}, {1: 0.0, 2: -1.0}, {2: 0.5}, {2: 0.0}, {1: 1.0})):
        held.set(values)
        if chunk == 5:
            held.set({1: 0.0})
        vectors = held.take(frames, KEYS)
        before = action_rows(vectors, before, ACTIONS.rows)
        live.append(before)
        track.append(vectors.repeat_interleave(4, 0)[3 if chunk == 0 else 0 :])
    assert torch.equal(torch.stack(live), tracked_rows(torch.cat(track), 6, frames, ACTIONS.rows))
    assert live[0].unique(dim=0).tolist() == [[1, 0, 0]], "still: the idle button is down by itself"
    assert live[2][-1].tolist() == [0, 0, pytest.approx(-0.1)]
    assert vectors.tolist() == [[0, 1, 0], *[[1, 0, 0]] * (frames - 1)]


@pytest.mark.parametrize("kv_context", ["clean", "same_step"])
def test_a_saved_world_goes_on_on_another_number_of_stages(model: Model, kv_context: str) -> None:
    model = replace(model, spec=replace(model.spec, kv_contexts=KV_CONTEXTS))
    keys: dict[int, dict[str, float]] = {1: {"walk": 1.0}, 3: {"walk": 0.0, "yaw": 1.0}, 4: {"yaw": 0.0}}
    before, after = opened(model, 2), opened(model, 3)
    begin(before, 0, 5, kv_context)
    more(before, 5 * model.spec.chunk_frames, keys)
    for _ in range(3):
        before.step()
    snapshot, frames = save(before, 0)
    waiting = [picture for each in frames for picture in each.pictures]
    got = waiting + more(before, 40)
    after.resting.load(0, snapshot)
    assert all(map(np.array_equal, got[len(waiting) :][:40], more(after, 40)))
    state = after.sampler.sessions[0]
    assert state.condition is not None and state.condition.shape == (8, 30, 4, 4)
    before.close()
    after.close()


def played(model: Model, keys: dict[int, dict[int, dict[str, float]]], stages: int, max_rows: int) -> dict[int, Tensor]:
    """Latents of six chunks of each session, whose keys are set before a chunk is admitted."""
    ring, chunks = local_ring(model, CPU, stages, max_rows), 6
    condition = ImageEncoder(lambda: small_encoder(1), model.spec).encode(PICTURE)
    seen, done = model.text.image_features(PICTURE), {session: list[Tensor]() for session in keys}
    for session in keys:
        given = StreamInputs(condition=condition)
        ring.open(session, seen, seed=session, epoch=0, steps=4, kv_context="clean", given=given)
    while any(len(each) < chunks for each in done.values()):
        for session, own in keys.items():
            following = ring.scheduler.next_chunk(session)
            ring.set_controls(session, own.get(following, {}))
            ring.scheduler.set_frame_credit(session, model.spec.chunk_frames * (following < chunks))
        assert ring.has_work, "the ring stands still"
        for row, latents in ring.step_latents(1.0)[1]:
            done[row.session].append(latents.clone())
    return {session: torch.stack(each) for session, each in done.items()}


@pytest.mark.parametrize("stages", [1, 3])
def test_worlds_share_a_forward_and_each_obeys_its_own_keys(model: Model, stages: int) -> None:
    steered, other = {1: {"yaw": 1.0}, 3: {"walk": 1.0}}, {2: {"walk": 1.0}}
    alone, still = (played(model, {0: keys}, 1, 1)[0] for keys in (steered, {}))
    assert torch.equal(alone[0], still[0]) and (alone[1:] - still[1:]).abs().amax((1, 2, 3, 4)).min() > 5e-3
    together = played(model, {0: steered, 1: other}, stages, 1), played(model, {0: steered, 1: other}, stages, 2)
    assert torch.equal(together[0][0], alone)
    torch.testing.assert_close(together[1], {0: alone, 1: together[0][1]}, rtol=1e-5, atol=1e-5)


def test_a_played_world_has_the_same_frames_again_from_its_log_and_picture(tmp_path: Path, model: Model) -> None:
    played: list[np.ndarray] = []
    live, again = StreamSession(opened(model), "a street", seed=3, image=PICTURE), opened(model, 2)
    for keys in ({"walk": 1.0}, {"walk": 0.0, "yaw": 0.3}, {"yaw": 0.0}, {"walk": 1.0}):
        live.control(**keys)
        played += islice(iter(live), 5)
    (path := tmp_path / "world.jsonl").write_bytes(live.log())
    live.close()
    session = StreamSession(again, None)
    with pytest.raises(RequestError) as refusal:
        session.replay(path, PICTURE[::-1])
    assert refusal.value.field == "image"
    session.replay(path, PICTURE)
    assert np.array_equal(list(islice(iter(session), len(played))), played)
    told = path.read_text().replace('"changes":', '"changes":1') + '{"at":9999,"prompt":"night"}\n'
    path.write_text(re.sub(r'"changes":1(\d+)', lambda found: f'"changes":{int(found[1]) + 1}', told))
    with pytest.raises(RequestError) as refusal:
        session.replay(path, PICTURE)
    assert refusal.value.field == "prompt", "it reads no words"
    session.close()


def test_a_world_begins_with_a_picture_and_reads_no_words(model: Model) -> None:
    engine = Engine(opened(model), 8 * model.spec.chunk_frames)
    (refused,) = engine.handle(messages.Open("s", "a street", 3))
    assert isinstance(refused, messages.Refused) and refused.field == "image"
    engine.handle(messages.Open("s", "a street", 3, image=PICTURE[None]))
    stepped = (each for _ in range(500) for each in engine.step(0.1) if isinstance(each, messages.FrameBatch))
    assert next(stepped).chunk == 0 and engine._sessions["s"].embeddings.shape == (TOKENS, WIDTH)
    for command in (messages.SetPrompt("s", "night", "a"), messages.Reset("s", 4, "b", no_image=True)):
        (refused,) = engine.handle(command)
        assert isinstance(refused, messages.Refused) and refused.field in ("prompt", "image")
    with pytest.raises(RequestError) as error:
        engine._pipeline.open(7, torch.zeros(TOKENS, WIDTH), epoch=0, steps=4, kv_context="staircase")
    assert error.value.field == "kv_context"
    engine.close()


def test_what_is_seen_in_a_picture_equals_the_towers_equations(tmp_path: Path, model: Model) -> None:
    path = tower_file(tmp_path)
    own = {name.removeprefix("visual."): each.double() for name, each in load_file(path).items()}

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), own[name + ".weight"], own[name + ".bias"], 1e-5)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[name + ".weight"].T + own[name + ".bias"]

    shown = torch.from_numpy(PICTURE).permute(2, 0, 1)[None].double() / 255
    shown = F.interpolate(shown, (28, 28), mode="bicubic", align_corners=False)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    shown = (shown - mean.double()[:, None, None]) / std.double()[:, None, None]
    patches = F.conv2d(shown, own["patch_embedding.weight"], stride=14).flatten(2)[0].T
    x = norm("pre_norm", torch.cat([own["cls_embedding"][0], patches]) + own["pos_embedding"][0])
    for at in ("transformer.0.", "transformer.1."):  # the last block is not run
        q, k, v = linear(at + "attn.to_qkv", norm(at + "norm1", x)).unflatten(1, (3, 2, 80)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + linear(at + "attn.proj", mixed)
        x = x + linear(at + "mlp.2", F.gelu(linear(at + "mlp.0", norm(at + "norm2", x))))
    text = ClipVision(path, (TOKENS, WIDTH), CPU)
    torch.testing.assert_close(text.image_features(PICTURE).double(), x, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError):
        ClipVision(path, (TOKENS, 32), CPU).image_features(PICTURE)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError):
        load_tower(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("matrix-game-2", 1_619_242_304),
        ("matrix-game-2-gta", 1_619_238_464),
        ("matrix-game-2-templerun", 1_508_715_584),
    ],
)
def test_sizes_are_counted_as_published(name: str, count: int) -> None:
    """Of its blocks, of what stands around them, and of the norms that are stored and not used."""
    sizes = entry_sizes(catalogue.find(name))
    own = sizes.spec.actions
    assert own is not None and len(catalogue.find(name).controls) == own.rows.width == own.keyboard + own.mouse
    unused = len(own.blocks) * (4 if own.mouse else 2) * own.head_dim
    counted = sizes.blocks * sizes.block_values + sizes.shared_values + sizes.embed_values + sizes.output_values
    assert counted + sizes.action_values(0, 7) + sizes.action_values(7, 30) + unused == count
