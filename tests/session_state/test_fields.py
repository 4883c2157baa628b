"""A field that is added to any class of a session is seen by all that is generated; one that does not say its kind is
refused."""

from __future__ import annotations

import copy
import json
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import pytest
import torch

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder import taehv, wan
from streamdiff.models.transformer.lora import Factors
from streamdiff.pipeline.kv_cache.over_time import ActionCaches
from streamdiff.pipeline.runner.init_latents import ChunkLevels
from streamdiff.pipeline.runner.sampler import PendingSteps
from streamdiff.pipeline.snapshot.parts import head_state
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state import fields as declared
from streamdiff.session_state import walk
from streamdiff.session_state.fields import DERIVED, KEPT, STATE, session_state
from tests.small import CPU, RED, small_model


def held(state: Any) -> Iterator[Any]:
    """A declared object and all those that it holds."""
    if isinstance(state, (torch.Tensor, *walk._PLAIN)):
        return
    if not isinstance(state, dict | list) and type(state) is not tuple:
        yield state
    for _, each in walk._parts(state, ""):
        yield from held(each)


@torch.inference_mode()
def copied(state: Any) -> Any:
    return copy.deepcopy(state)


def examples() -> dict[str, Any]:
    """An object of every declared class: of a stream in mid-chunk, and, of what it has not met, by hand."""
    model = small_model(1, sink=2)
    pipeline = StreamingPipeline(model, CPU)
    pipeline.open(0, model.text.encode(RED), seed=1, epoch=0, steps=4, kv_context="same_step")
    pipeline.set_frame_credit(0, 100)
    for _ in range(6):
        pipeline.step()
    decoding = taehv.TaehvMemory({3: torch.ones(1, 2, 2, 2)}, False)
    there = [
        *(head_state(pipeline, 0), pipeline.stage.sessions[0], decoding, taehv.EncodeMemory(decoding)),
        wan.WanMemory([None, "Rep", torch.ones(1, 2, 1, 2, 2)], (1, 2, 2)),
        *(PendingSteps(1, 2), ChunkLevels((0.5, 0.25), (500.0, 250.0))),
        ActionCaches(*(torch.ones(1, 2, 3, 2, tokens, 2, 4) for tokens in (4, 4, 1, 1))),
        Factors(torch.ones(2, 4), torch.ones(4, 2)),
    ]
    found = {declared.name_of(type(each)): each for state in there for each in held(state)}
    pipeline.close()
    pipeline.sampler.sessions[0].noise = None  # type: ignore[assignment]  # a thread is not copied
    return {name: each for name, each in found.items() if name is not None}


EXAMPLES = examples()
STATES = [name for name, each in EXAMPLES.items() if declared.mutable(each)]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_CLASSES", dict(declared._CLASSES))
    monkeypatch.setattr(declared, "_NAMES", dict(declared._NAMES))


def grown(name: str, metadata: Mapping[str, str] = STATE) -> Any:
    """The example of a class in a copy of that class with one more field: `added`, a tensor."""
    example, extra = copied(EXAMPLES[name]), torch.arange(6.0).view(2, 3).t()
    kind: Any = type(example)
    if hasattr(kind, "_fields"):
        more: Any = session_state("grown")(namedtuple(kind.__name__, (*kind._fields, "added")))
        return more(*example, extra)
    if not declared.mutable(example):
        more = make_dataclass("Grown", [("added", Any, field(default=None))], bases=(kind,), frozen=True)
        given = {each.name: getattr(example, each.name) for each in fields(example)}
        return session_state("grown")(more)(**given, added=extra)
    # The extra one has no default, so it is to be zeros after a reset.
    more = make_dataclass("Grown", [("added", Any, field(metadata=metadata, kw_only=True))], bases=(kind,))
    result = object.__new__(session_state("grown")(more))
    for each in fields(example):
        setattr(result, each.name, getattr(example, each.name))
    result.added = extra
    return result


def written(state: object) -> tuple[Any, Any]:
    tensors, tree = walk.save(state)
    return {name: (each.shape, each.flatten().tolist()) for name, each in tensors.items()}, tree


def test_every_declared_class_has_an_example() -> None:
    product = {name for name, kind in declared._CLASSES.items() if kind.__module__.startswith("streamdiff.")}
    assert set(EXAMPLES) == product


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_new_field_is_counted_saved_and_loaded(name: str) -> None:
    state = grown(name)
    tensors, tree = walk.save(state)
    assert walk.nbytes(state) == walk.nbytes(EXAMPLES[name]) + state.added.nbytes
    blank = copied(state)
    if declared.mutable(state):
        walk.save(blank, fetch=torch.Tensor.zero_)
    loaded = walk.load(blank, tensors, json.loads(json.dumps(tree)))
    assert torch.equal(loaded.added, state.added)
    assert loaded.added.stride() == state.added.stride()
    assert written(loaded) == written(state)


@pytest.mark.parametrize("name", STATES)
def test_a_new_field_is_reset_unless_it_is_kept(name: str) -> None:
    state, other = grown(name), EXAMPLES[name]
    place = state.added.data_ptr()
    with torch.inference_mode():
        declared.reset(state)
    assert not state.added.any()
    assert state.added.data_ptr() == place
    for each in fields(other):
        if each.metadata == KEPT:
            assert str(getattr(state, each.name)) == str(getattr(other, each.name)), f"{each.name} is kept"
    declared._CLASSES.pop("grown")
    kept = grown(name, KEPT)
    with torch.inference_mode():
        declared.reset(kept)
    assert kept.added.any()


def test_what_is_held_twice_is_counted_and_saved_once() -> None:
    tensor = torch.ones(4)
    memory = taehv.TaehvMemory({0: tensor, 1: tensor})
    assert walk.nbytes(memory) == tensor.nbytes
    tensors, tree = walk.save(memory)
    assert len(tensors) == 1
    made = walk.load(taehv.TaehvMemory(), tensors, tree)
    assert made.past[0] is made.past[1] is not tensor


def test_a_field_says_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"Forgotten\.size does not say what it is to a session"):

        @session_state("forgotten")
        @dataclass
        class Forgotten:
            size: int = 0

    @session_state("opaque")
    @dataclass
    class Opaque:
        lock: object = field(metadata=STATE)
        own: object = field(default=None, metadata=DERIVED)

    for use in (walk.nbytes, walk.save):
        with pytest.raises(TypeError, match=r"Opaque\.lock is a object|state\.lock is a object"):
            use(Opaque(object()))
    assert walk.nbytes(Opaque(1, object())) == 0
    with pytest.raises(TypeError, match=r"Opaque\.lock has no default to be reset to"):
        declared.reset(Opaque(1))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"fields.key": {"tensor": "state.value"}}, "KVCache.key"),
        ({"fields.key.tensor": "none"}, "KVCache.key"),
        ({"fields.key.order": [0, 0]}, "KVCache.key"),
        ({"fields.sink_at.fields": [[{"class": "list", "fields": []}, 1]]}, "KVCache.sink_at"),
        ({"fields.sink_at.fields": [[0, 2**60]]}, "KVCache.sink_at"),
        ({"fields.sink_at.fields": [[0, 1.5]]}, "KVCache.sink_at"),
        ({"fields.queue": None}, "KVCache"),
        ({"class": "taehv-memory"}, "KVCache"),
        ({"class": "later"}, "KVCache"),
    ],
)
def test_what_is_not_of_the_declared_types_is_refused_by_name(change: dict[str, Any], where: str) -> None:
    caches = EXAMPLES["kv-cache"]
    tensors, tree = walk.save(caches)
    tree = json.loads(json.dumps(tree))
    for path, value in change.items():
        *above, last = path.split(".")
        node = tree
        for key in above:
            node = node[key]
        node[last] = value
    with pytest.raises(ConfigError, match=where):
        walk.load(copied(caches), tensors, tree)


def test_a_tensor_of_another_size_is_refused_by_name() -> None:
    caches = EXAMPLES["kv-cache"]
    tensors, tree = walk.save(caches)
    smaller = {name: each[:, :, :1] if name.endswith(".key") else each for name, each in tensors.items()}
    with pytest.raises(ConfigError, match=r"KVCache\.key is float32 \[.*, but float32 .* here"):
        walk.load(copied(caches), smaller, tree)
