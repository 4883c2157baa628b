"""States that are away from their device: in host memory, the one away longest on disk, and back to the bit."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.session_state import swap_store
from streamdiff.session_state.fields import STATE, session_state
from streamdiff.session_state.swap_store import Lost, SwapStore
from tests.swap_files import damage, swap_files

NBYTES = 4 * 100_000


@session_state("test-swapped")
@dataclass
class Held:
    values: Tensor = field(metadata=STATE)
    number: int = field(default=0, metadata=STATE)


def held(number: int) -> Held:
    return Held(torch.arange(NBYTES // 4, dtype=torch.float32) + number, number)


def empty() -> Held:
    return Held(torch.zeros(NBYTES // 4))


def settled(store: SwapStore) -> dict[str, str]:
    """Where everything is once nothing is being written or read."""
    store._thread.submit(lambda: None).result()
    return {name: store.location(name) for name in store._kept}


def back(store: SwapStore, name: str) -> int:
    """Take a state back, and see that it is whole; its number."""
    while not store.ready(name):
        settled(store)
    taken = store.take(name, empty())
    assert torch.equal(taken.values, held(taken.number).values)
    return taken.number


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    store = SwapStore(host_bytes=2 * NBYTES, state_dir=tmp_path)
    yield store
    store.close()
    assert not swap_files(tmp_path) and not list(tmp_path.iterdir()), "nothing is left"


def test_the_one_away_longest_goes_to_disk_and_comes_back_whole(store: SwapStore, tmp_path: Path) -> None:
    for number in range(4):
        store.put(f"{number}", held(number))
    assert settled(store) == {"0": "disk", "1": "disk", "2": "host", "3": "host"}
    assert len(swap_files(tmp_path)) == 2 and not list(tmp_path.iterdir()), "without a name: they end with the process"
    assert not store.ready("0"), "its file is read first"
    assert [back(store, name) for name in ("0", "2", "1", "3")] == [0, 2, 1, 3]
    assert not swap_files(tmp_path)


def test_what_is_read_stays_and_what_is_dropped_leaves_no_file(store: SwapStore, tmp_path: Path) -> None:
    for number in range(3):
        store.put(f"{number}", held(number))
    settled(store)
    for name in ("0", "2"):
        tensors, _ = store.read(name)
        assert torch.equal(next(iter(tensors.values())), held(int(name)).values)
    store.drop("0")
    store.drop("0")
    assert settled(store) == {"1": "host", "2": "host"}
    assert not swap_files(tmp_path)


def test_a_damaged_file_is_lost_and_said_so(store: SwapStore, tmp_path: Path) -> None:
    for number in range(4):
        store.put(f"{number}", held(number))
    settled(store)
    damaged, cut = swap_files(tmp_path)
    damage(damaged)
    cut.write_bytes(b"no tensors")
    for name in ("0", "1"):
        assert not store.ready(name)
        settled(store)
        with pytest.raises(Lost):
            store.ready(name)
        assert name not in store
    assert back(store, "2") == 2


@pytest.mark.parametrize("by", ["another that comes", "asking for room"])
def test_on_a_full_disk_it_stays_in_host_memory_and_goes_when_there_is_room(
    by: str, store: SwapStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_store, "DISK_RETRY_S", math.inf)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES // 2, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                store.put(f"{number}", held(number))
            assert set(settled(store).values()) == {"host"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "stays in host memory, as it cannot be written" in caplog.text and "File too large" in caplog.text
    assert not store.spills, "nobody else is to come"
    assert not swap_files(tmp_path)
    if by == "another that comes":
        store.put("3", held(3))
    else:
        monkeypatch.setattr(swap_store, "DISK_RETRY_S", 0.0)
        assert not store.spills, "it is being written"
    assert settled(store)["0"] == "disk" and store.spills
    assert back(store, "0") == 0


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refusal:
        SwapStore(state_dir=tmp_path / "file")
    assert refusal.value.field == "serve.state_dir"
