"""A snapshot from a stranger, with any of its values changed: it is refused by the value's name, or its session works;
no other session is touched by it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Close, Event, FrameBatch, Open, Opened, Refused, SetPrompt, Shown
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.pipeline.kv_cache.geometry import cache_geometry
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.snapshot_header import FORMAT, MAX_HEADER_BYTES, read_saved_session
from tests.saving import saved
from tests.small import BLUE, CPU, RED, WHITE, small_model

PLAIN = small_model(4, layers=2, sink=2)
ADAPTIVE = replace(PLAIN, spec=replace(PLAIN.spec, adaptive_sink=0.97, rope="absolute"))
CHUNK = PLAIN.spec.chunk_frames
CASES = {"staircase": PLAIN, "same_step": ADAPTIVE}
STRUCTURE = ("fields", "class", "order", "tensor")
CHANGES_EACH = 3
"""Of each value; the whole list over several values of a kind."""
VALUES = (
    -1,
    0,
    2**31,
    2**70,
    -(2**53),
    1.5,
    1e300,
    True,
    None,
    "",
    "x" * 100_000,
    [],
    {},
    [1],
    {"class": "dict", "fields": 3},
)


class Place:
    """An engine with a session of its own that goes on all the time."""

    def __init__(self, model: Model, stages: int) -> None:
        self.engine = Engine(StreamingPipeline(model, CPU, parts=local_parts(model, CPU, stages)), 4 * CHUNK)
        self.own: list[np.ndarray] = []
        self.engine.handle(Open("own", WHITE, seed=9))

    def go_on(self, session: str, chunks: int, events: list[Event]) -> int:
        """Step until a session has so many more chunks; returns how many frames of it came. Mutates: events."""
        came, turns = 0, 0
        while came < chunks * CHUNK:
            events += self.engine.step(0.1)
            for event in events:
                if not isinstance(event, FrameBatch):
                    continue
                self.engine.handle(Shown(event.session, event.first + len(event.pictures)))
                came += len(event.pictures) * (event.session == session)
                self.own += list(event.pictures) if event.session == "own" else []
            events.clear()
            turns += 1
            assert turns < 2000, f"session {session} stands still"
        return came

    def offer(self, data: bytes) -> str:
        """Open a session from a file, and play it if it was taken; returns why it was not."""
        events = self.engine.handle(Open("guest", "", snapshot=data))
        refusals = [event for event in events if isinstance(event, Refused)]
        if refusals:
            assert refusals[0].field == "snapshot"
            assert "Traceback" not in refusals[0].reason
            return refusals[0].reason
        assert any(isinstance(event, Opened) for event in events)
        self.engine.handle(SetPrompt("guest", BLUE))
        self.go_on("guest", 3, events)
        self.engine.handle(Close("guest"))
        return ""


def taken(kv_context: str, stages: int = 2) -> bytes:
    """A snapshot in mid-stream, with chunks in flight where the context has some."""
    place = Place(CASES[kv_context], stages)
    place.engine.handle(Open("guest", RED, seed=3, kv_context=kv_context))
    place.go_on("guest", 4, [])
    while kv_context != "clean" and not place.engine._pipeline.waiting:  # type: ignore[attr-defined]
        place.engine.step(0.1)
    snapshot = saved(place.engine, "guest")
    place.engine.close()
    return snapshot.to_bytes()


def parts(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    return json.loads(metadata["header"]), load(data)


def whole(header: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return save(tensors, {"kind": "streamdiff session", "format": str(FORMAT), "header": text})


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a header, and to every object that names its class."""
    if isinstance(node, dict):
        if "class" in node:
            yield path
        for key, each in node.items():
            yield from leaves(each, (*path, key))
    elif isinstance(node, list):
        for index, each in enumerate(node):
            yield from leaves(each, (*path, index))
    else:
        yield path


def changed(header: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(header)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


def check_other_session(place: Place, model: Model, stages: int) -> None:
    alone = Place(model, stages)
    place.go_on("own", 2, [])
    alone.go_on("own", -(-len(place.own) // CHUNK), [])
    alone.engine.close()
    count = min(len(place.own), len(alone.own))
    assert np.array_equal(np.stack(place.own[:count]), np.stack(alone.own[:count]))


def offer_changed_values(kv_context: str, most: int | None) -> None:
    """A file per changed value of the header, at `most` so many."""
    data, draw = taken(kv_context), random.Random(1)
    header, tensors = parts(data)
    place = Place(CASES[kv_context], 2)
    assert not place.offer(data), "as it is, it goes on"
    changes = [
        (path, value)
        for path in leaves(header)
        if path[0] not in ("model", "streamdiff") or len(path) < 3
        for value in draw.sample(VALUES, CHANGES_EACH)
    ]
    for path, value in changes if most is None else draw.sample(changes, most):
        why = place.offer(whole(changed(header, path, value), tensors))
        names = [str(key) for key in path if isinstance(key, str) and key not in STRUCTURE]
        assert not why or any(re.search(rf"\b{re.escape(name)}\b", why) for name in names), (path, value, why)
    check_other_session(place, CASES[kv_context], 2)
    place.engine.close()


def offer_changed_tensors(kv_context: str, most: int | None) -> None:
    """The same of tensors: another shape, type or content, or none."""
    header, tensors = parts(taken(kv_context))
    place = Place(CASES[kv_context], 2)
    changes: list[tuple[str, torch.Tensor | None]] = []
    for name, tensor in tensors.items():
        contents = (-1, 2**40) if tensor.dtype == torch.int64 else (torch.nan, torch.inf)
        odd = [tensor.reshape(-1), tensor[..., :-1], tensor.to(torch.float16), torch.zeros((2**20, 0))]
        odd += [torch.full_like(tensor, content) for content in contents if tensor.numel()]
        changes += [(name, None), *((name, each.contiguous()) for each in odd if unlike(each, tensor))]
    for name, each in changes if most is None else random.Random(1).sample(changes, most):
        others = {key: value for key, value in tensors.items() if key != name}
        why = place.offer(whole(header, others if each is None else others | {name: each}))
        assert any(part in why for part in (name, name.rpartition(".")[2].split("[")[0])), (name, each, why)
    assert "but nothing in its header says what it is" in place.offer(whole(header, tensors | {"more": torch.ones(1)}))
    check_other_session(place, CASES[kv_context], 2)
    place.engine.close()


def unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) != (other.shape, other.dtype) or not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CASES)
def test_some_values_and_tensors_are_anything(kv_context: str) -> None:
    offer_changed_values(kv_context, 16)
    offer_changed_tensors(kv_context, 6)


@pytest.mark.soak
@pytest.mark.parametrize("kv_context", CASES)
def test_every_value_and_tensor_is_anything(kv_context: str) -> None:
    offer_changed_values(kv_context, None)
    offer_changed_tensors(kv_context, None)


@pytest.mark.slow
def test_what_has_no_dimensions_no_numbers_or_no_meaning_is_refused_by_name() -> None:
    header, tensors = parts(taken("staircase"))
    place = Place(CASES["staircase"], 2)
    odd = {"video": torch.zeros(()), "video_levels": torch.zeros(())}
    assert "video is float32 []" in place.offer(whole(header, tensors | odd))
    data = whole(header, tensors)
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for name in ("start", "more"):  # without numbers, and with more than can be counted
        entries[name] = {"dtype": "U8", "shape": [2**31, 2**31, 2**31, 0], "data_offsets": [0, 0]}
        text = json.dumps(entries).encode()
        why = place.offer(len(text).to_bytes(8, "little") + text + data[8 + length :])
        assert f"tensor '{name}' has the shape [2147483648, 2147483648, 2147483648, 0]" in why
        del entries[name]
    decoder = {"class": "list", "fields": [header["trees"]["decoder"]]}
    keyed = header | {"trees": header["trees"] | {"decoder": {"class": "dict", "fields": [[decoder, 0]]}}}
    assert "key is" in place.offer(whole(keyed, tensors))
    about = {"session": header["about"]["session"] | {"text": "a\ud800b"}}
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        read_saved_session(whole(header | {"about": about}, tensors))
    check_other_session(place, CASES["staircase"], 2)
    place.engine.close()


@pytest.mark.slow
def test_a_header_is_looked_at_first_and_one_that_is_refused_is_not_written(tmp_path: Path) -> None:
    header, tensors = parts(taken("staircase"))
    for text in ("[" * 100_000, "[]", '{"model": NaN}', '{"a": ' + "9" * 5000 + "}", json.dumps(header | {"trees": 3})):
        with pytest.raises(ConfigError, match="header"):
            Snapshot.from_bytes(whole(text, tensors))
    with pytest.raises(ConfigError, match=r"has a header of 1,\d+,\d+ bytes; a snapshot's has at most 1,048,576"):
        Snapshot.from_bytes(whole(header | {"more": "x" * MAX_HEADER_BYTES}, tensors))
    for metadata in (None, {"kind": "streamdiff session", "format": "1", "header": "{}"}):
        with pytest.raises(ConfigError):
            Snapshot.from_bytes(save(tensors, metadata))
    with pytest.raises(ConfigError, match="not a safetensors file, or cut off"):
        Snapshot.from_bytes(whole(header, tensors)[:50])
    large = replace(Snapshot.from_bytes(taken("staircase")), about={"more": "x" * MAX_HEADER_BYTES})
    for write in (large.to_bytes, lambda: large.write(tmp_path / "a.safetensors")):
        with pytest.raises(ConfigError, match="it can have at most 1,048,576"):
            write()
    assert list(tmp_path.iterdir()) == []
    whole_file = whole(header, tensors)
    with pytest.raises(ConfigError, match="of tensors, but"):
        Snapshot.from_bytes(whole_file[:-8])


@pytest.mark.slow
def test_an_adaptive_rings_queue_a_chunk_in_flight_and_the_first_visible_chunk_have_bounds() -> None:
    header, tensors = parts(taken("same_step"))
    place = Place(CASES["same_step"], 2)
    ring = cache_geometry(CASES["same_step"].spec, "same_step", steps=4)
    queues = [name for name in tensors if "queue" in name]
    assert queues
    for name in queues:
        # the next of the slots behind the sink, how many of the sink's wait, the first that waits
        for column, beyond in enumerate((ring.slots - ring.pinned, ring.slots + 1, ring.pinned)):
            for value in (-1, beyond):
                queue = tensors[name].clone()
                queue[..., column] = value
                assert "queue" in place.offer(whole(header, tensors | {name: queue})), (name, column, value)
    # A finished chunk in flight would stay there, and the stream stand still behind it.
    entered = next(path for path in leaves(header) if path[-1] == "entered")
    assert "chunks[0].entered is 3 in the snapshot" in place.offer(whole(changed(header, entered, 3), tensors))
    visible = [path for path in leaves(header) if path[-1] == "visible_from_chunk" and "sampler" in path]
    assert visible
    for path in visible:
        assert "visible_from_chunk" in place.offer(whole(changed(header, path, 10**6), tensors))
    place.engine.close()
