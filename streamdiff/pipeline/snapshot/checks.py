"""Bounds of what is put back: a snapshot is held against a session that has just been opened in the same way, before
any rank gets a part of it.

A snapshot may come from a stranger. What it says is read by the declared types (`session_state.walk`). What follows
from other values is recomputed, not believed; every other number that counts or points at something is bounded, and
tensors have the sizes of the new session. So whatever is taken in can be run, and what a stranger makes up is at worst
a stream that looks wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamdiff.core import MAX_LORA_SCALE, PER_STEP
from streamdiff.errors import ConfigError
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.runner.model_runner import StageState
from streamdiff.pipeline.runner.sampler import PendingSteps, SamplerState
from streamdiff.pipeline.scheduler.scheduler import SchedulerState
from streamdiff.pipeline.snapshot.file import LOOSE, Snapshot
from streamdiff.session_state import walk
from streamdiff.session_state.fields import STATE, session_state
from streamdiff.session_state.walk import shown
from streamdiff.snapshot_header import OpenedWith

_MOST = 2**40
"""Chunks and epochs are numbered up to that."""
_TREES = ("stages", "head", "decoder")


@session_state("ring-head")
@dataclass
class HeadState:
    """What the head alone has of a session. `given` is its noise as it was supplied."""

    scheduled: SchedulerState = field(metadata=STATE)
    sampler: SamplerState = field(metadata=STATE)
    pending: PendingSteps | None = field(default=None, metadata=STATE)

    @property
    def opened_with(self) -> OpenedWith:
        """What a session is opened with where it continues. Raises ConfigError where its noise was given as tensors."""
        sampler, pending = self.sampler, self.pending
        if sampler.given.initial is not None:
            raise ConfigError("a session whose noise was given as tensors cannot be saved; give it a seed")
        return OpenedWith(
            sampler.given.seed, sampler.schedule.steps, self.scheduled.epoch, self.scheduled.kv_context,  # type: ignore[arg-type]
            None if pending is None else pending.steps,
        )  # fmt: skip

    def settle(self) -> None:
        """Compute what follows from the rest for a session at rest, with nothing in the ring. Mutates: self."""
        self.scheduled.draining = self.pending is not None
        for chunk in self.scheduled.chunks:
            chunk.back = chunk.entered


def unfinished(scheduled: SchedulerState) -> dict[int, int]:
    """The epochs of the chunks that are not finished, by their numbers."""
    return {
        number: chunk.epoch
        for chunk in scheduled.chunks
        if chunk.back < scheduled.steps - 1
        for number in _numbers(scheduled, chunk.number)
    }


def load_head(
    snapshot: Snapshot, spec: ModelSpec, head: HeadState, stages: StageState, pictures: Sequence[Any],
    decoder: Sequence[Any], device: torch.device, loras: Collection[int] = (),
) -> None:  # fmt: skip
    """Load the head's part of a snapshot into that of a session that has just been opened as it says, and check all.
    Mutates: head, stages.

    Args:
        stages: of the same session, with all layers and heads, without content.
        pictures, decoder: what may be remembered of a stream, as outlines (`walk`), by the autoencoder that encodes the
            past again and by the decoder.
        loras: ids of those that are loaded.

    Raises:
        ConfigError: for the first value that a session cannot continue with, with its name, what it is and may be.
    """
    shapes, trees = snapshot.outline, snapshot.trees
    if set(trees) != set(_TREES):
        raise ConfigError(f"trees are {', '.join(sorted(trees))} in the snapshot; they must be {', '.join(_TREES)}")
    texts = walk.outline(next(iter(stages.text.values())))
    walk.load(head, snapshot.tensors, trees["head"], device, where="head").settle()
    walk.load(stages, shapes, trees["stages"], walk.META, where="stages")
    memory = walk.restored(shapes, trees["decoder"], walk.META, where="decoder")
    if over := sorted(set(shapes) - walk.tensor_names(trees) - set(LOOSE)):
        raise ConfigError(f"tensor {over[0]!r} is in the snapshot, but nothing in its header says what it is")
    if head.pending is not None:
        _must(head.pending.steps in spec.steps, "head.pending.steps", head.pending.steps, f"of {spec.steps}")
        _within("head.pending.epoch", head.pending.epoch, 0, _MOST)
    _check_scheduled(head.scheduled)
    _check_sampler(head, spec)
    oldest = min([head.scheduled.epoch, *(chunk.epoch for chunk in head.scheduled.chunks)])
    used = [*head.sampler.loras_from(oldest).values(), *(each for of, each in stages.loras.items() if of >= oldest)]
    for lora, scale in (pair for own in used for pair in own.items()):
        _must(lora in loras, "loras", lora, f"one of {sorted(loras)}, which are loaded")
        _within(f"loras[{lora}]", scale, 0, MAX_LORA_SCALE)
    _one_of(head.sampler.pictures and walk.outline(head.sampler.pictures), pictures, "head.sampler.pictures")
    _check_stages(stages, spec, head, texts)
    _one_of(walk.outline(memory), decoder, "decoder")
    snapshot.check_loose(spec)
    _check_content(snapshot.tensors, trees, head)


def _check_scheduled(new: SchedulerState) -> None:
    where, epoch = "head.scheduled", 0
    _within(f"{where}.next_chunk", new.next_chunk, 0, _MOST)
    number = new.chunks[0].number if new.chunks else new.next_chunk
    for index, chunk in enumerate(new.chunks):
        at = f"{where}.chunks[{index}]"
        _must(chunk.number == number and _begins(new, number), f"{at}.number", chunk.number, "of those in flight")
        number += new.together(chunk.number)
        _within(f"{at}.epoch", chunk.epoch, epoch, new.epoch)
        epoch = chunk.epoch
        # The oldest of those that have come back whole is not in flight any more.
        _within(f"{at}.entered", chunk.entered, -chunk.extra, new.passes - 1 - (index == 0))
        _must(new._behind(index, chunk.entered), f"{at}.entered", chunk.entered, "behind the chunk before it")
    _must(
        number == new.next_chunk and _begins(new, number),
        f"{where}.next_chunk",
        new.next_chunk,
        "behind those in flight",
    )


def _check_sampler(head: HeadState, spec: ModelSpec) -> None:
    new, where, scheduled = head.sampler, "head.sampler", head.scheduled
    _within(f"{where}.visible_from_chunk", new.visible_from_chunk, 0, scheduled.next_chunk)
    shape = walk.described(torch.empty(spec.chunk_shape, device=walk.META))
    condition = spec.condition_channels, spec.latent_height, spec.latent_width
    for name, latents in (
        *((f"latents[{key}]", each) for key, each in new.latents.items()),
        *((f"kept[{key}]", each) for key, (each, _) in new.kept.items()),
        *((f"given_latents[{key}]", each) for key, each in new.given_latents.items()),
    ):
        _must(walk.described(latents) == shape, f"{where}.{name}", walk.described(latents), shape)
    planes = new.condition
    fits = planes is None or (
        planes.ndim == 4 and (len(planes), *planes.shape[2:]) == condition and planes.shape[1] > 0
    )
    _must(fits, f"{where}.condition", planes, "of this model")
    vectors = walk.described(torch.empty(spec.steering_shape or (0, 0), device=walk.META))
    given = {} if new.given_controls is None else {"given": new.given_controls[0]}
    for key, each in (new.controls | given).items():
        _must(walk.described(each) == vectors, f"{where}.controls[{key}]", walk.described(each), vectors)
    in_flight = {
        (number, chunk.epoch): chunk.back
        for chunk in scheduled.chunks
        if chunk.back < scheduled.passes - 1
        for number in _numbers(scheduled, chunk.number)
    }
    _must(set(new.latents) == set(in_flight), f"{where}.latents", sorted(new.latents), f"of {sorted(in_flight)}")
    clean = {number for (number, _), back in in_flight.items() if back >= scheduled.steps - 1}
    there = new.kept.keys() | new.given_latents.keys()
    _must(clean <= there, f"{where}.kept", sorted(there), f"of {sorted(clean)}, whose clean pass is to come")
    steered, known = set(new.controls), new.kept.keys() | {number for number, _ in in_flight}
    known |= {min((number for number, _ in in_flight), default=scheduled.next_chunk) - 1}
    _must(
        not steered or (spec.steering_shape is not None and steered <= known),
        f"{where}.controls",
        sorted(steered),
        "of chunks",
    )
    # A rerun waits for the chunks in flight, whose latents are kept by then.
    rerun, coming = scheduled.rerun, {number for number, _ in in_flight}
    possible = rerun == sorted(set(rerun)) and set(rerun) <= there | coming and (new.clean_pass or not rerun)
    if rerun and scheduled.rerun_as_one:
        last, geometry = scheduled.next_chunk - 1, new.geometry
        firsts = {0, *range(max(0, last - geometry.slots), scheduled.next_chunk + 1)}
        possible &= rerun in [geometry.recached(last, first) for first in firsts]
    _must(possible, "head.scheduled.rerun", rerun, "chunks with a clean pass, kept or in flight, oldest first")


def _check_stages(new: StageState, spec: ModelSpec, head: HeadState, texts: Any) -> None:
    where, scheduled, geometry = "stages", head.scheduled, head.sampler.geometry
    for name, mine in (
        ("geometry", geometry), ("steps", scheduled.steps), ("same_step", scheduled.kv_context in PER_STEP),
    ):  # fmt: skip
        _must(getattr(new, name) == mine, f"{where}.{name}", getattr(new, name), str(mine))
    known = {*spec.steps, scheduled.steps}
    _must(new.cached_steps in known, f"{where}.cached_steps", new.cached_steps, f"one of {sorted(known)}")
    _within(f"{where}.newest", new.newest, -1, scheduled.next_chunk - 1)
    epochs, here = {scheduled.epoch, *(chunk.epoch for chunk in scheduled.chunks)}, set(new.text)
    _must(epochs <= here and max(here) == scheduled.epoch, f"{where}.text", sorted(here), f"of epochs {sorted(epochs)}")
    for epoch, layers in new.text.items():
        _one_of(walk.outline(layers), [texts], f"{where}.text[{epoch}]")
    seen = new.visible_from_chunk
    _must(set(seen) == here, f"{where}.visible_from_chunk", sorted(seen), f"of epochs {sorted(here)}, as `text`")
    for epoch, chunk in seen.items():
        _within(f"{where}.visible_from_chunk[{epoch}]", chunk, 0, scheduled.next_chunk)


def _check_content(tensors: Mapping[str, Tensor], trees: Mapping[str, Any], head: HeadState) -> None:
    """Numbers are finite; and the queue of an adaptive ring points at slots, on the device, where nothing checks it."""
    scheduled, geometry = head.scheduled, head.sampler.geometry
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"tensor {name!r} has values that are not finite in the snapshot; all must be")
    if not geometry.adaptive:
        return
    queue = tensors[trees["stages"]["fields"]["state"]["fields"]["queue"]["tensor"]]
    for cache, each in enumerate(queue):
        # No more wait than chunks have been written to this cache.
        written = scheduled.next_chunk - sum(chunk.entered < cache for chunk in scheduled.chunks)
        for part, low, high in (
            (each[:, 0], 0, geometry.slots - geometry.pinned - 1),
            (each[:, 1], 0, min(geometry.slots, max(written, 0))),
            (each[:, 2:], 0, geometry.pinned - 1),
        ):
            _within("stages.state.queue", int(part.min()), low, high)
            _within("stages.state.queue", int(part.max()), low, high)


# ---- what they have in common -----------------------------------------------------------------------------------


def _numbers(scheduled: SchedulerState, number: int) -> range:
    """The chunks that one in flight stands for."""
    return range(number, number + scheduled.together(number))


def _begins(scheduled: SchedulerState, number: int) -> bool:
    """Whether a chunk of that number is in flight as such: those made together with chunk 0 are not."""
    return number == 0 or number >= max(1, scheduled.first_chunks)


def _one_of(outline: Any, known: Sequence[Any], where: str) -> None:
    """Raises ConfigError where an outline is not like one of those known; says how it differs from the last."""
    if outline not in known:
        found = walk.difference(outline, known[-1], where) or (where, outline, known[-1])
        raise ConfigError("{} is {} in the snapshot, but {} here".format(found[0], *map(shown, found[1:])))


def _within(where: str, value: float, low: float, high: float) -> None:
    _must(low <= value <= high, where, value, f"from {low} to {high}" if low <= high else "absent")


def _must(holds: bool, where: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{where} is {shown(value)} in the snapshot; it must be {allowed}")
