"""Validates a snapshot against the model and session that it is loaded into, before any rank gets a part of it.

A snapshot may come from a stranger. What it says has to be of the declared types (`session_state.fields`); every number
that counts or points at something is held against a session that has just been opened in the same way, and tensors
against its sizes, without their content. So whatever is taken in can be run, and what a stranger makes up
is at worst a stream that looks wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamdiff.core import PER_STEP, StreamProgress
from streamdiff.errors import ConfigError
from streamdiff.models.sampling import TIMESTEPS
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.pipeline.runner.init_latents import ChunkLevels
from streamdiff.pipeline.runner.model_runner import StageState
from streamdiff.pipeline.runner.sampler import PendingSteps, SamplerState, SeededNoise
from streamdiff.pipeline.scheduler.scheduler import SchedulerState
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.session_state import walk
from streamdiff.session_state.fields import LARGEST, STATE, check_tree, session_state, shown

_MOST = 2**40
"""Chunks, frames and epochs are numbered up to that; at 16 frames per second it lasts two thousand years."""
_MOST_COST = 1000.0


@session_state("ring-head")
@dataclass
class HeadState:
    """What the head alone has of a session."""

    scheduled: SchedulerState = field(metadata=STATE)
    sampler: SamplerState = field(metadata=STATE)
    pending: PendingSteps | None = field(default=None, metadata=STATE)


@dataclass(frozen=True)
class Opened:
    """A session that has just been opened as a snapshot says. Of `stages` all layers and heads, without content;
    `pictures`: what the head's decoder may remember of a stream, as outlines, see `walk`."""

    spec: ModelSpec
    head: HeadState
    stages: StageState
    stream: StreamProgress
    pictures: tuple[Any, ...] = (None,)


_TREES: dict[str, Any] = {"stages": StageState, "head": HeadState, "stream": StreamProgress, "decoder": Any}


def check_session(snapshot: Snapshot, opened: Opened, loose: Iterable[str]) -> None:
    """Whether a session like `opened` could have come to be what a snapshot says. Tensors called `loose` belong to
    nobody.

    Raises:
        ConfigError: for the first thing that cannot be, with its name, what it is, and what it may be.
    """
    shapes, trees, session = snapshot.outline, snapshot.trees, snapshot.about.get("session")
    if set(trees) != set(_TREES):
        raise ConfigError(f"trees are {', '.join(sorted(trees))} in the snapshot; they must be {', '.join(_TREES)}")
    dimensions = {name: tensor.ndim for name, tensor in shapes.items()}
    named = {name for tree, kind in _TREES.items() for name in check_tree(trees[tree], kind, tree, dimensions)}
    if over := sorted(set(shapes) - named - set(loose)):
        raise ConfigError(f"tensor {over[0]!r} is in the snapshot, but nothing in its header says what it is")
    head = walk.load(walk.to_device(opened.head, walk.META), shapes, trees["head"], walk.META)
    stages = walk.load(walk.copy(opened.stages), shapes, trees["stages"], walk.META)
    stream = walk.load(walk.copy(opened.stream), shapes, trees["stream"], walk.META)
    _check_pending(head.pending, opened.spec, head.scheduled.epoch)
    _check_scheduled(head, opened.head.scheduled)
    _check_sampler(head, opened)
    _check_stages(stages, opened, head.scheduled)
    _check_stream(stream, opened, head.scheduled)
    for name, value in opened_with(head).items():
        theirs = snapshot.session.get(name)
        _must(theirs == value, f"session.{name}", theirs, f"{value}, as `head` says")
    if session is not None:
        _check_session(session, head, stream)


def check_memory(shapes: Mapping[str, Tensor], tree: Any, examples: Iterable[Any], name: str) -> None:
    """Whether what a decoder remembers is like one of these outlines. Raises ConfigError."""
    _one_of(walk.outline(walk.restored(shapes, tree, walk.META)), list(examples), name)


def check_content(tensors: Mapping[str, Tensor], trees: Mapping[str, Any], geometry: CacheGeometry) -> None:
    """Whether the numbers of tensors that have the right shapes can be used. Raises ConfigError."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"tensor {name!r} has values that are not finite in the snapshot; all must be")
    if geometry.adaptive:
        fields = trees["stages"]["fields"]
        queue = tensors[fields["state"]["fields"]["queue"]["tensor"]]
        _check_queue(queue, geometry, trees["head"]["fields"]["scheduled"]["fields"])


def opened_with(head: HeadState) -> dict[str, Any]:
    """What a session is opened with where it goes on. Raises ConfigError where its noise was given as tensors."""
    sampler, scheduled = head.sampler, head.scheduled
    if not isinstance(sampler.given, SeededNoise):
        raise ConfigError("a session whose noise was given as tensors cannot be saved; give it a seed")
    return {
        "seed": sampler.given.seed,
        "steps": sampler.schedule.steps,
        "next_steps": (sampler if head.pending is None else head.pending).schedule.steps,
        "kv_context": sampler.kv_context,
        "epoch": scheduled.epoch,
        "next_chunk": scheduled.next_chunk,
    }


# ---- one part after the other -----------------------------------------------------------------------------------


def _check_pending(pending: PendingSteps | None, spec: ModelSpec, epoch: int) -> None:
    if pending is not None:
        known = [spec.schedule(steps) for steps in spec.steps]
        _must(pending.schedule in known, "head.pending.schedule", pending.schedule, f"one of those of {spec.name}")
        _within("head.pending.epoch", pending.epoch, 0, _MOST)


def _check_scheduled(head: HeadState, fresh: SchedulerState) -> None:
    new, where = head.scheduled, "head.scheduled"
    _alike(new, fresh, where, ("steps", "first_extra", "kv_context", "epoch"))
    _within(f"{where}.epoch", new.epoch, 0, _MOST)
    _within(f"{where}.next_chunk", new.next_chunk, 0, _MOST)
    _within(f"{where}.frame_credit", new.frame_credit, -_MOST, _MOST)
    _must(new.draining == (head.pending is not None), f"{where}.draining", new.draining, "true while steps change only")
    _must(new.next_chunk == 0 or new.next_chunk >= new.first_chunks, f"{where}.next_chunk", new.next_chunk,
          f"0, or at least {new.first_chunks}, which are made together")  # fmt: skip
    number, epoch = new.chunks[0].number if new.chunks else new.next_chunk, 0
    _must(not 0 < number < new.first_chunks, f"{where}.chunks[0].number", number, f"0 or at least {new.first_chunks}")
    for index, chunk in enumerate(new.chunks):
        at = f"{where}.chunks[{index}]"
        _must(chunk.number == number, f"{at}.number", chunk.number, str(number))
        number += new.together(chunk.number)
        _within(f"{at}.number", chunk.number, 0, new.next_chunk - 1)
        _within(f"{at}.epoch", chunk.epoch, epoch, new.epoch)
        epoch = chunk.epoch
        _must(chunk.extra == new.extra(chunk.number), f"{at}.extra", chunk.extra, str(new.extra(chunk.number)))
        # The oldest of those that have come back whole is not in flight any more.
        _within(f"{at}.entered", chunk.entered, -chunk.extra, new.passes - 1 - (index == 0))
        _must(
            chunk.back == chunk.entered, f"{at}.back", chunk.back, f"{chunk.entered}, as `entered`: nothing is between"
        )
        _must(new._behind(index, chunk.entered), f"{at}.entered", chunk.entered, "behind the chunk before it")
    _must(number == new.next_chunk, f"{where}.next_chunk", new.next_chunk, f"{number}, the one after those in flight")
    _check_rerun(head)


def _check_rerun(head: HeadState) -> None:
    new, sampler = head.scheduled, head.sampler
    if new.kv_context in PER_STEP:
        _must(not new.rerun, "head.scheduled.rerun", new.rerun, "empty without a clean pass")
        return
    # A rerun waits for the chunks in flight, whose latents are kept by then.
    coming = {number for chunk in new.chunks for number in _numbers(new, chunk.number)}
    there = sampler.kept.keys() | sampler.given_latents.keys() | coming
    ascending = all(a < b for a, b in zip(new.rerun, new.rerun[1:], strict=False))
    _must(ascending and set(new.rerun) <= there, "head.scheduled.rerun", new.rerun,
          f"ascending, of the chunks kept or in flight: {sorted(there)}")  # fmt: skip
    if new.rerun and new.rerun_as_one:
        last, geometry = new.next_chunk - 1, sampler.geometry
        firsts = {0, *range(max(0, last - geometry.slots), new.next_chunk + 1)}
        possible = [geometry.recached(last, first) for first in firsts]
        _must(new.rerun in possible, "head.scheduled.rerun", new.rerun, f"the window's chunks, such as {possible[0]}")


def _check_sampler(head: HeadState, opened: Opened) -> None:
    new, fresh, where, scheduled = head.sampler, opened.head.sampler, "head.sampler", head.scheduled
    names = ("given", "schedule", "kv_context", "geometry", "times", "source", "source_levels", "levels", "begin_times")
    _alike(new, fresh, where, names)
    _within(f"{where}.visible_from_chunk", new.visible_from_chunk, 0, scheduled.next_chunk)
    shape = torch.empty(opened.spec.chunk_shape, dtype=torch.float32, device=walk.META)
    for name, latents in (
        *((f"latents[{key}]", each) for key, each in new.latents.items()),
        *((f"kept[{key}]", each) for key, (each, _) in new.kept.items()),
        *((f"given_latents[{key}]", each) for key, each in new.given_latents.items()),
    ):
        _must(walk.described(latents) == walk.described(shape), f"{where}.{name}", walk.described(latents),
              walk.described(shape))  # fmt: skip
    in_flight = {
        (number, chunk.epoch)
        for chunk in scheduled.chunks
        if chunk.back < scheduled.passes - 1
        for number in _numbers(scheduled, chunk.number)
    }
    _must(set(new.latents) == in_flight, f"{where}.latents", sorted(new.latents), f"of {sorted(in_flight)}")
    for key, levels in new.video_levels.items():
        _check_levels(levels, new.schedule.of(key).steps, f"{where}.video_levels[{key}]")
    beginning = {number for number, _ in in_flight}
    _must(set(new.video_levels) <= beginning, f"{where}.video_levels", sorted(new.video_levels), f"of {beginning}")
    given = set(new.given_latents)
    _must(all(0 <= key <= _MOST for key in given), f"{where}.given_latents", sorted(given), "of chunks from 0")
    if new.clean_pass:
        _must(
            given <= set(scheduled.rerun), f"{where}.given_latents", sorted(given), "of chunks that are to be run again"
        )
    kept = _kept(new, scheduled)
    _must(set(new.kept) == kept, f"{where}.kept", sorted(new.kept), f"of {sorted(kept)}")
    counts = {each for steps in opened.spec.steps for each in (steps, opened.spec.schedule(steps).of(0).steps)}
    for key, (_, steps) in new.kept.items():
        _must(steps in counts, f"{where}.kept[{key}][1]", steps, f"one of {sorted(counts)}")
    _one_of(None if new.pictures is None else walk.outline(new.pictures), opened.pictures, f"{where}.pictures")


def _check_levels(levels: ChunkLevels, steps: int, where: str) -> None:
    for name, values, most in (("sigmas", levels.sigmas, 1.0), ("timesteps", levels.timesteps, TIMESTEPS)):
        well = len(values) == steps and all(0 <= value <= most for value in values)
        _must(well, f"{where}.{name}", values, f"{steps} numbers from 0 to {most:g}")


def _check_stages(new: StageState, opened: Opened, scheduled: SchedulerState) -> None:
    fresh, where = opened.stages, "stages"
    _alike(new, fresh, where, ("geometry", "steps", "same_step"))
    known = {*opened.spec.steps, fresh.steps}
    _must(new.cached_steps in known, f"{where}.cached_steps", new.cached_steps, f"one of {sorted(known)}")
    _within(f"{where}.newest", new.newest, -1, scheduled.next_chunk - 1)
    for cache, position in new.state.sink_at.items():
        _within(f"{where}.state.sink_at", cache, 0, len(new.state.key) - 1)
        _within(f"{where}.state.sink_at[{cache}]", position, 0, LARGEST)
    epochs = {scheduled.epoch, *(chunk.epoch for chunk in scheduled.chunks)}
    here = set(new.text)
    _must(epochs <= here and max(here) == scheduled.epoch and min(here) >= 0, f"{where}.text", sorted(here),
          f"of epochs up to {scheduled.epoch}, {sorted(epochs)} among them")  # fmt: skip
    like = walk.outline(next(iter(fresh.text.values())))
    for epoch, layers in new.text.items():
        if (found := walk.difference(walk.outline(layers), like, f"{where}.text[{epoch}]")) is not None:
            raise ConfigError(_unlike(*found))
    seen = new.visible_from_chunk
    _must(set(seen) == here, f"{where}.visible_from_chunk", sorted(seen), f"of epochs {sorted(here)}, as `text`")
    for epoch, chunk in seen.items():
        _within(f"{where}.visible_from_chunk[{epoch}]", chunk, 0, scheduled.next_chunk)


def _check_stream(new: StreamProgress, opened: Opened, scheduled: SchedulerState) -> None:
    epochs = _unfinished(scheduled)
    theirs = {number: chunk.epoch for number, chunk in new.chunks.items()}
    _must(theirs == epochs, "stream.chunks", f"{theirs} (epochs by chunk)", f"{epochs}, as `head.scheduled.chunks`")
    for number, chunk in new.chunks.items():
        _within(f"stream.chunks[{number}].cost", chunk.cost, 0, _MOST_COST)
    frames = opened.spec.chunk_frames * len(epochs)
    _must(new.ahead_frames == frames, "stream.ahead_frames", new.ahead_frames, f"{frames}, of {len(epochs)} chunks")


def _check_session(session: Mapping[str, Any], head: HeadState, stream: StreamProgress) -> None:
    """What the engine says of the session. Its types have been looked at."""
    where, scheduled, given = "about.session", head.scheduled, head.sampler.given
    for name, value in (("seed", getattr(given, "seed", None)), ("kv_context", scheduled.kv_context)):
        _must(session[name] == value, f"{where}.{name}", session[name], f"{value}, as `head` says")
    pending = head.pending
    last = max(scheduled.epoch, 0 if pending is None else pending.epoch)
    first = min((chunk.epoch for chunk in stream.chunks.values()), default=last)
    _within(f"{where}.epoch", session["epoch"], last, _MOST)
    _within(f"{where}._applied_epoch", session["_applied_epoch"], -1, first)
    _within(f"{where}._oldest_epoch", session["_oldest_epoch"], 0, first)
    chunk = min(stream.chunks, default=scheduled.next_chunk) - 1
    _must(session["chunk"] == chunk, f"{where}.chunk", session["chunk"], f"{chunk}, the one before those to come")
    _must(session["_paused"] == scheduled.paused, f"{where}._paused", session["_paused"], "as `head.scheduled.paused`")
    _within(f"{where}._made_frames", session["_made_frames"], 0, _MOST)
    _within(f"{where}._shown_frames", session["_shown_frames"], 0, session["_made_frames"])


def _check_queue(queue: Tensor, geometry: CacheGeometry, scheduled: Mapping[str, Any]) -> None:
    """The queue of an adaptive ring points at slots, on the device, where nothing checks it."""
    where, chunks = "stages.state.queue", [pair["fields"] for pair in scheduled["chunks"]["fields"]]
    for cache, each in enumerate(queue):
        # No more wait than chunks have been written to this cache.
        written = scheduled["next_chunk"] - sum(chunk["entered"] < cache for chunk in chunks)
        for part, low, high in (
            (each[:, 0], 0, geometry.slots - geometry.pinned - 1),
            (each[:, 1], 0, min(geometry.slots, max(written, 0))),
            (each[:, 2:], 0, geometry.pinned - 1),
        ):
            _within(where, int(part.min()), low, high)
            _within(where, int(part.max()), low, high)


# ---- what they have in common -----------------------------------------------------------------------------------


def _numbers(scheduled: SchedulerState, number: int) -> range:
    """The chunks that one in flight stands for."""
    return range(number, number + scheduled.together(number))


def _unfinished(scheduled: SchedulerState) -> dict[int, int]:
    """The epochs of the chunks that are not finished, by their numbers."""
    return {
        number: chunk.epoch
        for chunk in scheduled.chunks
        if chunk.back < scheduled.steps - 1
        for number in _numbers(scheduled, chunk.number)
    }


def _kept(sampler: SamplerState, scheduled: SchedulerState) -> set[int]:
    """Finished chunks whose latents the sampler has, see `SamplerState.keep`."""
    if not sampler.clean_pass:
        return set()
    geometry, gone = sampler.geometry, {*_unfinished(scheduled), *sampler.given_latents}
    last = next((number for number in range(scheduled.next_chunk - 1, -1, -1) if number not in gone), -1)
    first = max(0, last - geometry.slots + 1)
    return {*range(first, last + 1), *range(min(geometry.pinned, last + 1))} - gone


def _alike(new: Any, fresh: Any, where: str, names: Iterable[str]) -> None:
    """Raises ConfigError where a field is not what it is in a session that has just been opened."""
    for name in names:
        one, other = walk.outline(getattr(new, name)), walk.outline(getattr(fresh, name))
        if (found := walk.difference(one, other, f"{where}.{name}")) is not None:
            raise ConfigError(_unlike(*found))


def _one_of(outline: Any, known: Sequence[Any], where: str) -> None:
    """Raises ConfigError where an outline is not like one of those known; says how it differs from the last."""
    if outline not in known:
        found = walk.difference(outline, known[-1], where)
        raise ConfigError(_unlike(*(found or (where, outline, known[-1]))))


def _within(where: str, value: float, low: float, high: float) -> None:
    _must(low <= value <= high, where, value, f"from {low} to {high}" if low <= high else "absent")


def _must(holds: bool, where: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{where} is {shown(value)} in the snapshot; it must be {allowed}")


def _unlike(where: str, theirs: object, ours: object) -> str:
    return f"{where} is {shown(theirs)} in the snapshot, but {shown(ours)} here"
