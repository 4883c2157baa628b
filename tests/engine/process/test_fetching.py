"""What a published model needs is fetched before an engine starts, from a hub on loopback by the real client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamdiff.config import ModelConfig
from streamdiff.engine.process.fetching import DownloadProgress, fetch
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from tests.hub_server import Hub, running

LIMIT_S = 240.0
WEIGHTS = "checkpoints/self_forcing_dmd.pt"
VAE, INDEX = "Wan2.1_VAE.pth", "model_index.json"
SIZES = {
    "gdhe17/Self-Forcing": {WEIGHTS: 400_000, "another.pt": 7},
    "Wan-AI/Wan2.1-T2V-1.3B": {VAE: 30_000, "diffusion_pytorch_model.safetensors": 9},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {
        "text_encoder/config.json": 20,
        "text_encoder/model-00001-of-00002.safetensors": 50_000,
        "text_encoder/model-00002-of-00002.safetensors": 60_000,
        "tokenizer/tokenizer.json": 500,
        "transformer/diffusion_pytorch_model.safetensors": 10,
    },
    "someone/Wan": {INDEX: 2, "transformer/a.safetensors": 5, "vae/b.safetensors": 6, "notes.txt": 3},
    "Kijai/WanVideo_comfy": {"taew2_1.safetensors": 11, "other.safetensors": 12},
}
NEEDED = {
    *(WEIGHTS, VAE, "text_encoder/config.json", "tokenizer/tokenizer.json"),
    *(f"text_encoder/model-0000{number}-of-00002.safetensors" for number in (1, 2)),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    def content(name: str, size: int) -> bytes:
        return ((b"{}" if name == INDEX else name.encode()) * size)[:size]

    with running(
        {repo: {name: content(name, size) for name, size in some.items()} for repo, some in SIZES.items()}
    ) as hub:
        for name, value in hub.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield hub


def fetched(home: Path) -> dict[str, bytes]:
    """What is in the cache, by repository's name and file."""
    found = {}
    for snapshot in (home / "hub").glob("models--*/snapshots/*"):
        for path in snapshot.rglob("*"):
            if path.is_file():
                found[str(path.relative_to(snapshot))] = path.read_bytes()
    return found


@pytest.mark.slow
async def test_everything_that_is_missing_is_fetched_and_told(hub: Hub, tmp_path: Path) -> None:
    told: list[DownloadProgress] = []
    async with asyncio.timeout(LIMIT_S):
        await fetch(ModelConfig(name="self-forcing"), told.append)
    contents = {name: data for some in hub.files.values() for name, data in some.items()}
    assert fetched(tmp_path) == {name: contents[name] for name in NEEDED}
    assert ("gdhe17/Self-Forcing", WEIGHTS) in {(each.repo, each.file) for each in told}
    sizes = {name: size for some in SIZES.values() for name, size in some.items()}
    assert told[0].missing + told[0].done == sum(sizes[name] for name in NEEDED) and told[0].files == len(NEEDED)
    assert all(each.total == sizes[each.file] and each.done <= each.total for each in told)
    assert f"fetching {WEIGHTS} of gdhe17/Self-Forcing: " in str(told[0]) and "still missing" in str(told[0])
    told.clear()
    hub.transfers.clear()
    async with asyncio.timeout(LIMIT_S):
        await fetch(ModelConfig(name="self-forcing"), told.append)
    assert not told and not hub.transfers, "all of it is there"


@pytest.mark.slow
async def test_a_transfer_that_is_cut_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    piece = 10 * 2**20  # what the client writes at a time
    data = hub.files["gdhe17/Self-Forcing"][WEIGHTS] = bytes(range(256)) * (3 * piece // 256)
    hub.cuts[WEIGHTS] = 1
    async with asyncio.timeout(LIMIT_S):
        await fetch(ModelConfig(name="self-forcing", vae="x", text_encoder="y"), lambda progress: None)
    assert hub.transfers == [(WEIGHTS, 0), (WEIGHTS, piece)]
    assert fetched(tmp_path) == {WEIGHTS: data}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"name": "tiny"}, set()),
        ({"name": "tiny", "vae": "taew2_1"}, {"taew2_1.safetensors"}),
        ({"name": "random:wan2.1-1.3b"}, set()),
        ({"name": "someone/Wan"}, {"model_index.json", "transformer/a.safetensors", "vae/b.safetensors"}),
        ({"name": "someone/Wan", "weights": "x", "vae": "y"}, {"model_index.json"}),
        ({"name": "self-forcing", "weights": "x", "vae": "taew2_1", "text_encoder": "y"}, {"taew2_1.safetensors"}),
    ],
)
async def test_only_what_is_needed_is_fetched(
    hub: Hub, tmp_path: Path, config: dict[str, str], files: set[str]
) -> None:
    async with asyncio.timeout(LIMIT_S):
        await fetch(ModelConfig(**config), lambda progress: None)  # type: ignore[arg-type]
    assert set(fetched(tmp_path)) == files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing", "of nobody/nothing is not in the hub's cache and cannot be fetched"),
        ("nobody/a--b", "of nobody/a--b is not in the hub's cache and cannot be fetched"),
        ("longlive-1.3b", r"models/longlive_base.pt of .* is not in the hub's cache .*`hf download"),
        ("self-forcin", "did you mean self-forcing"),
    ],
)
async def test_what_cannot_be_had_is_told_with_the_way_out(hub: Hub, name: str, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ConfigError, match=words):
            await fetch(ModelConfig(name=name), lambda progress: None)


@pytest.mark.slow
async def test_two_experts_are_refused_before_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["someone/A14B"] = {INDEX: b'{"boundary_ratio": 0.9}', "transformer/a.safetensors": b"x" * 9}
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ConfigError, match="two experts"):
            await fetch(ModelConfig(name="someone/A14B"), lambda progress: None)
    assert set(fetched(tmp_path)) == {INDEX}


FETCH_FOLDER = """
from streamdiff.models import catalogue, hub
hub.fetch_folder(catalogue.parts().text_encoders[catalogue.find("self-forcing").text_encoder].weights)
"""


@pytest.mark.slow
async def test_without_a_network_what_is_there_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(name="self-forcing")
    async with asyncio.timeout(LIMIT_S):
        await fetch(config, lambda progress: None)
        # As the engine does; the listing of the whole repository is kept then.
        engine = await asyncio.create_subprocess_exec(sys.executable, "-c", FETCH_FOLDER)
        assert await engine.wait() == 0
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        await fetch(config, lambda progress: None)


@pytest.mark.slow
async def test_a_cancelled_download_leaves_no_process_and_nothing_half(hub: Hub, tmp_path: Path) -> None:
    hub.held.add(WEIGHTS)
    begun = asyncio.Event()
    fetching = asyncio.create_task(fetch(ModelConfig(name="self-forcing"), lambda progress: begun.set()))
    async with asyncio.timeout(LIMIT_S):
        while (WEIGHTS, 0) not in hub.transfers:
            await asyncio.sleep(0.05)
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    children = [each for each in alive if "streamdiff.models.download" in each.cmdline()]
    assert len(children) == 1
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not children[0].is_running()
    assert not list(tmp_path.rglob("*.incomplete"))


def test_every_published_part_is_on_the_hub() -> None:
    """Else a model by name could not be fetched."""
    shared = catalogue.parts()
    for entry in catalogue.listed():
        needed = [entry.weights, entry.lora, shared.text_encoders[entry.text_encoder].weights]
        assert all(files.repo.count("/") == 1 for files in needed if files is not None)
    assert all(files.repo.count("/") == 1 for files in catalogue.autoencoders().values())
