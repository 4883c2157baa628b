"""Training on the 256 pixel world: clips, windows, losses, and a few real steps of both stages."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny import model
from streamdiff.models.tiny.training import loop
from streamdiff.models.tiny.training.__main__ import stream_of
from streamdiff.models.tiny.training.autoencoder import initialise
from streamdiff.models.tiny.world256 import prompts
from streamdiff.models.tiny.world256.scene import COLUMN, FIELDS, HOURS, MOTIONS, THING_TABLES, from_row
from streamdiff.models.tiny.world256.text_encoder import TEXT_TOKENS, WorldText
from streamdiff.models.tiny.world256.tracks import PARTS, SIZE, Track, homes
from streamdiff.models.tiny.world256.training import __main__ as train
from streamdiff.models.tiny.world256.training import autoencoder as clips
from streamdiff.models.tiny.world256.training import batches
from streamdiff.models.tiny.world256.training import denoiser as train_denoiser
from streamdiff.models.tiny.world256.training.batches import (
    Pool,
    TrackEncoder,
    Windows,
    draw_window_scenes,
    play,
)
from streamdiff.models.tiny.world256.training.video_windows import VideoPool
from tests.small import CPU

VAE = "vae/diffusion_pytorch_model.safetensors"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training of the 256 pixel world")]


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def autoencoder() -> TAEHV:
    torch.manual_seed(0)
    made = TAEHV(clips.AUTOENCODER)
    initialise(made)
    return made


@pytest.fixture(scope="module")
def pool(autoencoder: TAEHV) -> Pool:
    channels = clips.AUTOENCODER.latent_channels
    tokens = train_denoiser.Network().tokens
    made = Pool(TrackEncoder(autoencoder, torch.zeros(channels), torch.ones(channels), tokens), capacity=6)
    made.grow(6, dice(1))
    return made


def test_clips_lie_on_the_latent_grid_and_weigh_things_more() -> None:
    drawn = clips.draw_clips(6, clips.CROP, dice(), CPU)
    assert drawn.frames.shape == (6, 12, 3, clips.CROP, clips.CROP)
    assert set(drawn.weight.unique().tolist()) == {1.0, 4.0, clips.FALLING}
    track = clips.draw_track(6, dice())
    for window in clips.draw_windows(track, clips.CROP, dice()):
        assert window.top % clips.CELL == window.left % clips.CELL == 0
        assert max(window.top, window.left) + window.side <= SIZE


def test_what_falls_or_blows_weighs_more_too() -> None:
    track = clips.draw_track(8, dice())
    windows = [window for window in clips.draw_windows(track, clips.CROP, dice()) for _ in range(track.place.shape[1])]
    seen = clips._falling(track.flat(), windows).flatten(1).float().mean(1)
    weather = track.flat().scenes[:, COLUMN["weather"]]
    assert ((seen > 0) == (weather > 0)).all() and len(set(weather.tolist())) >= 3
    assert seen.max() < 0.3


def test_scenes_of_a_window_change_now_and_then() -> None:
    scenes = draw_window_scenes(200, 5, dice())
    assert scenes.shape == (200, 5, len(FIELDS))
    same = (scenes[:, 1:] == scenes[:, :-1]).all(-1).float().mean()
    assert 0.4 < same < 0.65


def pick(windows: Windows, rows: torch.Tensor) -> Windows:
    parts = {field.name: getattr(windows, field.name) for field in fields(Windows)}
    return Windows(**{name: part if part is None else part[rows] for name, part in parts.items()})


def test_windows_that_start_begin_at_home_and_others_anywhere() -> None:
    scenes = draw_window_scenes(20, 1, dice())
    start = torch.arange(20) % 2 == 0
    track = play(scenes, start, torch.zeros(20, 2, dtype=torch.bool), dice(1))
    alone = scenes[:, 0, COLUMN["second"]] == 0
    home = (track.place[:, 0, 0] == torch.tensor([128, 128])).all(-1)
    assert home[start & alone].all() and not home[~start].all()


def to_be_worn(windows: Windows) -> torch.Tensor:
    """Which windows are kept without their things as well, bool `[B]`."""
    return (windows.latents != windows.bare).flatten(1).any(1)


def test_the_pool_holds_a_share_of_the_windows_without_their_things_too(pool: Pool) -> None:
    every = pool.sample(40, dice())
    assert 0 < to_be_worn(every).sum() < 40
    some = pick(every, to_be_worn(every).nonzero()[:4, 0])
    assert some.latents.shape == some.bare.shape == (4, 5, 16, 3, 16, 16)
    differs = (some.latents - some.bare).abs().mean(2)
    near, far = some.reach().amin(3) < 1.0, some.reach().amin(3) > 4.0
    far[..., 12:, :] = False  # where shadows lie
    assert differs[near].mean() > 5 * differs[far].mean()
    last = some.cut(torch.tensor([3, 3, 0, 0]), 2)
    assert torch.equal(last.latents[0], some.latents[0, 3:]) and not last.start[:2].any()


class NotedTracks(TrackEncoder):
    """Keeps what it should draw and encode."""

    def __init__(self) -> None:
        super().__init__(TAEHV(clips.AUTOENCODER), torch.zeros(16), torch.ones(16), lambda scenes: scenes)
        self.noted: list[tuple[Track, bool]] = []

    def latents_of(self, track: Track, things: bool = True) -> torch.Tensor:
        self.noted.append((track, things))
        return torch.full((len(track.scroll), track.scroll.shape[1] // 4, 16, 16, 16), float(len(self.noted)))


def test_what_is_missing_begins_again_as_in_a_new_stream() -> None:
    encode = NotedTracks()
    lost = Pool(encode, 40, chunks=2, starts=0.0, lost=1.0)
    lost.grow(40, dice())
    (track, _), (shown, things), (bare, no_things) = encode.noted[:3]
    before, after = (track.each(lambda part, at=at: part[:, at : at + 12]) for at in (0, 12))
    alone = before.scenes[:, 0, COLUMN["second"]] == 0
    assert not no_things and len(bare.scroll) == alone.sum() > 3, "of one thing nothing is shown"
    latents = lost.parts["latents"]
    assert (latents[alone, :3] == 3).all() and (latents[~alone, :3] == 2).all() and (latents[:, 3:] == 1).all()
    home = (after.place[:, 0] == homes(after.scenes[:, 0]) // PARTS).all(2)
    assert home[alone, 0].all()
    assert things and (shown.scenes[..., COLUMN["second"]] == 0).all(), "of two things one"
    still_two = ~alone & (after.scenes[:, 0, COLUMN["second"]] == 1)
    shown, said, after = (each.rows(still_two) for each in (shown, before, after))
    begun = home[still_two]
    assert 0 < begun[:, 0].sum() < len(begun) and 0 < begun[:, 1].sum() < len(begun)
    for row, (first, second) in enumerate(begun.tolist()):
        assert first or second
        if first != second:
            prefix = "second_" if first else ""
            for name in THING_TABLES:
                assert shown.scenes[row, 0, COLUMN[name]] == said.scenes[row, 0, COLUMN[prefix + name]], name
            goes_on = (after.place[row, 0, int(first)] - shown.place[row, -1, 0] + SIZE // 2) % SIZE - SIZE // 2
            assert goes_on.abs().max() <= 6, "the other one goes on: at most 64 pixels in 12 frames"


def test_a_share_of_whole_windows_lacks_a_thing_at_first() -> None:
    encode = NotedTracks()
    pool = Pool(encode, 80)
    pool.grow(80, dice())
    latents, start = pool.parts["latents"], pool.parts["start"]
    lacks = (latents[:, :3] != 1).flatten(1).any(1)
    assert 5 < lacks.sum() < 30 and not lacks[start].any()
    assert (latents[:, 3:] == 1).all(), "from the second chunk on nothing is missing"
    assert torch.equal(latents[lacks], pool.parts["bare"][lacks]), "what lacks a thing is not corrupted too"


def test_a_video_says_where_things_are_and_how_they_move_and_the_prompt_how_they_look() -> None:
    encode = NotedTracks()
    videos = VideoPool(encode, 40)
    videos.grow(40, dice())
    (went, _), (after, _), (film, _) = encode.noted[1:]
    assert 0 < len(went.scroll) < 20, "in a quarter of them the stream was elsewhere"
    for field in ("place", "scroll"):
        assert torch.equal(getattr(film, field), getattr(after, field)), field
    windows = videos.sample(40, dice())
    assert windows.video is not None and windows.video.shape == (40, 16, 3, 16, 16)
    prompt = videos.parts["scenes"][:, 1]
    for name in FIELDS:
        shown, comes, told = (each[:, COLUMN[name]] for each in (film.scenes[:, 0], after.scenes[:, 0], prompt))
        if name == "second":
            assert torch.equal(shown, comes) and torch.equal(comes, told)
        elif name.endswith(("motion", "speed", "camera")):
            assert torch.equal(shown, comes) and not torch.equal(comes, told), name
        else:
            assert torch.equal(comes, told) and not torch.equal(shown, told), name


def test_the_flow_leads_from_what_a_video_shows_to_what_is_to_come_of_it() -> None:
    videos = VideoPool(NotedTracks(), 4)
    videos.grow(4, dice())
    windows = replace(videos.sample(4, dice()), video=torch.randn(4, 16, 3, 16, 16, generator=dice()))
    lesson = train_denoiser.lesson_of(windows, "video", random.Random(0), dice())
    level, target = lesson.sigma.view(4, -1, 1, 1, 1, 1), lesson.rows.target
    comes = (lesson.latents - level.flatten(0, 1) * lesson.wanted).unflatten(0, target.shape)
    assert torch.allclose(comes[target], windows.latents[:, lesson.rows.chunk][target], atol=1e-5)
    noise = lesson.latents.unflatten(0, target.shape) - (1 - level) * windows.video[:, None]
    assert (noise / level)[target].std() == pytest.approx(1.0, abs=0.05), "what is shown is the video, with noise"


def test_losses_weigh_what_is_near_things_and_what_is_there(pool: Pool) -> None:
    some = pool.sample(6, dice())
    night = some.scenes[..., COLUMN["hour"]] == HOURS.index("night")
    assert night.any() and set(some.weight()[~night].unique().tolist()) == {1.0, 6.0}
    assert set(some.weight()[night].unique().tolist()) == {2.0, 12.0}
    alone = some.scenes[..., COLUMN["second"]] == 0
    assert (some.reach()[:, :, :, 1].amin((2, 3, 4))[alone] == 99).all()


@pytest.mark.parametrize("whole", [False, True])
def test_whole_windows_come_after_pairs_of_chunks(pool: Pool, whole: bool) -> None:
    drawn = train_denoiser.draw([pool] * 4, 4, whole, random.Random(0), dice())
    chunks = {kind: windows.latents.shape[:2] for kind, windows in drawn.items()}
    assert chunks.pop("first")[0] == 6 and chunks.pop("again")[0] == chunks.pop("video")[0] == 2
    assert chunks.pop("next") == ((4, 2) if whole else (8, 2))
    assert list(chunks.values()) == ([(2, 5)] if whole else [])


def test_worn_things_lie_between_whole_and_missing_ones(pool: Pool) -> None:
    some = pool.sample(12, dice())
    corrupted = some.corrupted(dice())
    low, high = torch.minimum(some.latents, some.bare), torch.maximum(some.latents, some.bare)
    assert ((corrupted >= low - 1e-4) & (corrupted <= high + 1e-4)).all()
    changed = (corrupted - some.latents).abs().amax((1, 2, 3, 4, 5)) > 0.01
    assert torch.equal(changed, to_be_worn(some)) and changed.any() and not changed.all()


@pytest.mark.parametrize(
    "kind", ["staircase", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("clean", "first", "next"))]
)
def test_every_kind_of_row_has_a_loss_that_trains_the_network(pool: Pool, kind: str) -> None:
    torch.manual_seed(0)
    network = train_denoiser.Network()
    some = pool.sample(2, dice())
    start = torch.ones_like(some.start)
    some = replace(some, start=start)
    some = some.cut(torch.zeros(2, dtype=torch.int64), {"first": 1, "next": 2}.get(kind, 5))
    (loss,) = network.losses({kind: train_denoiser.lesson_of(some, kind, random.Random(0), dice())}).values()
    loss.backward()
    assert loss.isfinite() and loss > 0.1
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.transformer.proj_out.parameters())


def test_reading_asks_only_for_what_the_sentence_says() -> None:
    rows = torch.stack([torch.tensor(prompts.draw(random.Random(seed)).row()) for seed in range(60)])
    for column, name in enumerate(FIELDS):
        told = train_denoiser.is_said(rows, column)
        for row, says in zip(rows.tolist(), told.tolist(), strict=True):
            scene = from_row(row)
            owner = scene.second if name.startswith("second_") else scene.first
            silent = owner is None or (name.endswith("speed") and owner.motion == MOTIONS[4])
            assert says != silent
    network = train_denoiser.Network()
    assert train_denoiser.reading_loss(network, dice(), batch=8).isfinite()


def test_tables_of_all_blocks_are_trained_by_adam(tmp_path: Path) -> None:
    """For what is added to a block's features an orthogonal update makes no sense."""
    network = train_denoiser.Network()
    statistics = (torch.zeros(16), torch.ones(16))
    learner = train_denoiser.Learner(network, tmp_path, train_denoiser.Plan(), CPU, lambda: statistics)
    (matrices, _), _ = learner.optimizer.parts
    by_muon = {id(weight) for weight in matrices.param_groups[0]["params"]}
    tables = [block.scale_shift_table for block in network.transformer.blocks]
    assert len(tables) == 6 and not any(id(table) in by_muon for table in tables)
    assert all(id(block.ffn.net[2].weight) in by_muon for block in network.transformer.blocks)


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools and few statistics: encoding the usual ones takes longer than the test."""
    monkeypatch.setattr(batches, "STATISTICS", 1)
    monkeypatch.setitem(train_denoiser.FILLING, "cpu", train_denoiser.Filling((2, 2, 2, 2), 3, (1, 3, 1, 1)))
    monkeypatch.setattr(train_denoiser, "KEPT", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("few_windows")
@pytest.mark.soak
def test_a_few_steps_write_a_model_that_loads_and_the_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--out", str(out), "--batch", "1", "--threads", "1"]
    assert train.main([*arguments, "--steps", "1"]) == 0
    made = model.load_model(out / "model", CPU)
    assert (made.spec.width, made.spec.height, made.spec.text_shape) == (256, 256, (TEXT_TOKENS, 64))
    assert isinstance(made.text, WorldText)
    reading = made.text.read("a sunflower by the sea", None)
    assert "yellow star" in reading.text
    assert made.text.encode(reading.text).shape == (TEXT_TOKENS, 64)
    decoder = made.decoder
    assert decoder is not None
    assert decoder.decode(torch.zeros(1, 16, 3, 16, 16), decoder.new_memory()).shape == (12, 256, 256, 3)
    assert train.main([*arguments, "--steps", "2", "--stage", "denoiser"]) == 0
    assert torch.load(out / "denoiser.pt", weights_only=True)["step"] == 2
    assert torch.load(out / "autoencoder.pt", weights_only=True)["step"] == 1
    begin = ["--stage", "denoiser", "--begin", str(out / "model"), "--steps", "1"]
    assert train.main(["--out", str(tmp_path / "again"), *arguments[2:], *begin]) == 0
    assert not (tmp_path / "again" / "autoencoder.pt").exists(), "it was there"
    again = tmp_path / "again" / "model"
    assert (again / "vae" / "config.json").is_file()


@pytest.mark.usefixtures("few_windows")
def test_a_transformer_that_is_there_is_gone_on_with(tmp_path: Path, autoencoder: TAEHV) -> None:
    torch.manual_seed(3)
    network = train_denoiser.Network()
    channels = clips.AUTOENCODER.latent_channels
    mean, std = torch.arange(channels) / 10.0, torch.full((channels,), 2.0)
    begin = tmp_path / "begin"
    parts = (network.text, network.transformer)
    model.save(begin, autoencoder, mean, std, parts, stream_of(SIZE // clips.AUTOENCODER.spatial))
    arguments = ["--stage", "denoiser", "--begin", str(begin), "--steps", "1", "--batch", "1", "--threads", "1"]
    assert train.main([*arguments, "--rate", "1e-9", "--out", str(tmp_path / "on")]) == 0
    for part in ("transformer", "text_encoder"):
        before, after = (
            load_file(next((folder / part).glob("*.safetensors"))) for folder in (begin, tmp_path / "on" / "model")
        )
        assert before.keys() == after.keys()
        assert all(torch.allclose(before[name].float(), after[name].float(), atol=1e-3) for name in before), part
    state = torch.load(tmp_path / "on" / "denoiser.pt", weights_only=True)
    assert torch.allclose(state["mean"], mean) and torch.allclose(state["std"], std)


def test_a_decoder_is_trained_alone_and_all_else_of_the_model_stays(autoencoder: TAEHV, tmp_path: Path) -> None:
    begin, out = tmp_path / "begin", tmp_path / "run"
    channels = clips.AUTOENCODER.latent_channels
    model.save(begin, autoencoder, torch.zeros(channels), torch.full((channels,), 2.0), None, {})
    (begin / "transformer").mkdir()
    (begin / "transformer" / "config.json").write_text("{}")
    arguments = ["--stage", "decoder", "--begin", str(begin), "--steps", "1", "--batch", "1", "--threads", "1"]
    assert train.main([*arguments, "--out", str(out)]) == 0
    old, new = (file_contents(folder) for folder in (begin, out / "model"))
    assert {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} == {VAE}
    before, after = (load_file(folder / VAE) for folder in (begin, out / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder"))
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("decoder"))


def file_contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.soak
@pytest.mark.usefixtures("few_windows")
def test_a_denoiser_that_was_stopped_goes_on(autoencoder: TAEHV, tmp_path: Path) -> None:
    plan = train_denoiser.Plan(batch=1)
    train_denoiser.train(tmp_path, autoencoder, loop.Budget(1), 0, CPU, plan)
    first = torch.load(tmp_path / "denoiser.pt", weights_only=True)
    trained = train_denoiser.train(tmp_path, autoencoder, loop.Budget(1), 0, CPU, plan)
    assert torch.equal(trained.statistics[0], first["mean"])
    for name, value in trained.network.state_dict().items():
        assert torch.equal(value, first["average"][name]), name


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "0"], "--steps is 0; it must be more than 0"),
        (["--threads", "-1"], "--threads is -1; it must be at least 1"),
        (["--stage", "denoiser"], "autoencoder.pt; train the autoencoder first"),
        (["--begin", "somewhere"], "--begin goes with --stage denoiser or decoder"),
        (["--stage", "decoder"], "--stage decoder needs --begin"),
        (["--begin", "nowhere", "--stage", "denoiser"], "nowhere, which has no vae/config.json"),
        (
            ["--begin", str(model.WEIGHTS), "--stage", "decoder"],
            "is of another kind; give a model",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_is_not_written_onto_the_one_that_training_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--stage", "decoder", "--begin", str(tmp_path / "model"), "--out", str(tmp_path)]
    assert train.main(arguments) == 2
    assert "which is where --out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
