"""Messages between ranks: rows to compute, or a session update that all stages apply at the same point of the order.

A `StageMessage` is a fixed-size record of integers (over NCCL it goes ahead, by TCP) and tensors of known shapes.
Ranks do what the record says, in the order it comes; they never decide from a clock of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from streamdiff.core import KV_CONTEXTS, MOST_LORAS, SCALE_UNIT, MicroStep, pack, record_length, unpack
from streamdiff.models.model import StageModel
from streamdiff.models.spec import ModelSpec

_ALIGN = 64


class MessageKind(IntEnum):
    """Kind of a `StageMessage`: rows to compute, or what to do to a session."""

    ROWS = 0
    OPEN = 1
    TEXT = 2
    RESET = 3
    CLOSE = 4
    STOP = 5
    STEPS = 6
    COPY_OUT = 7
    PUT_BACK = 8
    LORA = 9

    @property
    def is_answered(self) -> bool:
        """Whether the record that comes back has an `Outcome`."""
        return self in (MessageKind.COPY_OUT, MessageKind.PUT_BACK)


class Outcome(IntEnum):
    """Result of a message on a stage; that of several stages is the highest."""

    DONE = 0
    NOT_YET = 1
    LOST = 2


@dataclass(frozen=True)
class SessionUpdate:
    """A change to one session. `oldest` is the oldest epoch still in use; chunks of the epoch of TEXT see none before
    `visible_from_chunk` but the sink; `steps` matters to OPEN, RESET, STEPS and PUT_BACK, and `kv_context`.
    COPY_OUT copies what a rank has of the session to the head, where it is `saved`, or to that rank's own `SwapStore`,
    and then its memory is free; PUT_BACK puts it back from there. Both have a ticket in `epoch`; `outcome` is theirs on
    the stages that they have come through. Chunks of the epoch of TEXT have the `loras`, by id with their scale; LORA
    has every stage take the one whose id is `epoch` from the exchange, where it is `saved`, or else drop it."""

    session: int
    epoch: int = 0
    oldest: int = 0
    steps: int = 0
    kv_context: str = "clean"
    visible_from_chunk: int = 0
    outcome: Outcome = Outcome.DONE
    saved: bool = False
    loras: tuple[tuple[int, float], ...] = ()

    def values(self) -> list[int]:
        """All fields in order, as integers."""
        *plain, loras = vars(self).values()
        pairs = [number for lora, scale in loras for number in (lora, round(scale / SCALE_UNIT))]
        values = [KV_CONTEXTS.index(each) if isinstance(each, str) else int(each) for each in plain]
        return values + pairs + [0] * (2 * MOST_LORAS - len(pairs))

    @classmethod
    def of(cls, values: Sequence[int]) -> SessionUpdate:
        """The update that has these `values`."""
        session, epoch, oldest, steps, context, visible_from_chunk, outcome, saved, *pairs = values
        loras = tuple((lora, scale * SCALE_UNIT) for lora, scale in zip(pairs[::2], pairs[1::2], strict=True) if lora)
        context_name, how = KV_CONTEXTS[context], Outcome(outcome)
        return cls(session, epoch, oldest, steps, context_name, visible_from_chunk, how, bool(saved), loras)


UPDATE_LENGTH = len(SessionUpdate(0).values())
"""Integers of a `SessionUpdate`."""


@dataclass(frozen=True)
class StageMessage:
    """`rows` with the tensors of a forward (latents, time embeddings and control vectors into the first stage, then
    hidden states and time embeddings, after the last stage the flow; rows of actions go to every stage), or an `update`
    with the text embeddings of TEXT."""

    kind: MessageKind
    rows: tuple[MicroStep, ...] = ()
    update: SessionUpdate | None = None
    tensors: tuple[Tensor, ...] = ()

    @property
    def bare(self) -> StageMessage:
        """The same without its tensors."""
        return StageMessage(self.kind, self.rows, self.update)

    @property
    def is_long(self) -> bool:
        """Whether its rows are of a forward that travels row by row, as it may have more than a link carries."""
        return bool(self.rows) and self.rows[-1].recaches

    @property
    def as_sent(self) -> list[StageMessage]:
        """The messages that it is sent as: a long forward row by row."""
        if not self.is_long:
            return [self]
        return [
            replace(self, rows=(row,), tensors=tuple(tensor[i : i + 1] for tensor in self.tensors))
            for i, row in enumerate(self.rows)
        ]

    def __str__(self) -> str:
        """Its sessions and rows as text, for error messages: `session 0, chunk 17, step 2`."""
        if self.update is not None:
            return f"session {self.update.session}, {self.kind.name.lower()}"
        return "; ".join(f"session {row.session}, chunk {row.chunk}, step {row.step}" for row in self.rows)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class MessageLayout:
    """Layout of the messages of an edge: shapes and dtypes. Shapes of `rows` leave out the leading number of rows.

    Every message of an edge has the same size, so that receives can be posted before anything is sent.
    """

    max_rows: int
    rows: tuple[tuple[Shape, torch.dtype], ...]
    text: tuple[Shape, torch.dtype] | None

    @classmethod
    def within_first_stage(cls, model: StageModel, max_rows: int) -> MessageLayout:
        """What the head gives the other ranks of its stage: latents with their condition, time embeddings and control
        vectors, and text embeddings."""
        denoiser, spec = model.denoiser, model.spec
        frames, dtype = spec.chunk_latents // denoiser.patch[0], denoiser.dtype
        shapes: list[Shape] = [spec.input_shape, (frames, denoiser.width)]
        shapes += [spec.steering_shape] if spec.control_planes and spec.steering_shape else []
        rows = tuple((shape, dtype) for shape in shapes)
        return cls(max_rows, rows + _action_rows(spec), (spec.text_shape, dtype))

    @classmethod
    def between_stages(cls, model: StageModel, max_rows: int, shares: int = 1) -> MessageLayout:
        """Hidden states, time embeddings and rows of actions forward, and text embeddings; of the hidden states one of
        so many equal `shares`."""
        denoiser, spec = model.denoiser, model.spec
        dtype = denoiser.dtype
        frames, tokens = spec.chunk_latents // denoiser.patch[0], denoiser.tokens(spec.chunk_shape[1:])
        rows = ((tokens // shares, denoiser.width), dtype), ((frames, denoiser.width), dtype)
        return cls(max_rows, rows + _action_rows(spec), (spec.text_shape, dtype))

    @classmethod
    def back_to_head(cls, model: StageModel, max_rows: int) -> MessageLayout:
        """The predicted flow."""
        return cls(max_rows, ((model.spec.chunk_shape, model.denoiser.dtype),), None)

    @property
    def bare(self) -> MessageLayout:
        """The same records without tensors."""
        return MessageLayout(self.max_rows, (), None)

    @property
    def record_length(self) -> int:
        """Integers of a record: the kind, then the rows or the update."""
        return 1 + max(record_length(self.max_rows), 1 + UPDATE_LENGTH)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors of the largest message."""
        of_rows = sum(_padded(prod(shape) * self.max_rows * dtype.itemsize) for shape, dtype in self.rows)
        of_text = _padded(prod(self.text[0]) * self.text[1].itemsize) if self.text else 0
        return max(of_rows, of_text)

    def record(self, message: StageMessage, sequence: int) -> list[int]:
        """The record of `message`, number `sequence` of its edge."""
        body = pack(message.rows, self.max_rows, sequence) if message.kind is MessageKind.ROWS else [sequence]
        if message.update is not None:
            body += message.update.values()
        return [int(message.kind), *body, *[0] * (self.record_length - 1 - len(body))]

    def parse(self, record: Sequence[int]) -> tuple[int, MessageKind, tuple[MicroStep, ...], SessionUpdate | None]:
        """What a record says: the sequence number, and the fields of a message without its tensors."""
        kind = MessageKind(record[0])
        if kind is MessageKind.ROWS:
            sequence, rows = unpack(record[1:])
            return sequence, kind, tuple(rows), None
        return record[1], kind, (), SessionUpdate.of(record[2 : 2 + UPDATE_LENGTH])

    def attach(self, message: StageMessage, buffer: Tensor) -> StageMessage:
        """`message` with tensors that are views of `buffer` `[nbytes]` uint8."""
        return replace(message, tensors=self.views(buffer, message.kind, len(message.rows)))

    def write(self, message: StageMessage, buffer: Tensor) -> None:
        """Copy the tensors of `message` into `buffer` `[nbytes]` uint8. Mutates: buffer."""
        for view, tensor in zip(self.views(buffer, message.kind, len(message.rows)), message.tensors, strict=False):
            view.copy_(tensor, non_blocking=True)

    def views(self, buffer: Tensor, kind: MessageKind, count: int) -> tuple[Tensor, ...]:
        """The tensors of a message of `count` rows, as views of `buffer`."""
        if kind is MessageKind.TEXT and self.text is not None:
            shape, dtype = self.text
            return (buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape),)
        views, offset = [], 0
        for shape, dtype in self.rows if kind is MessageKind.ROWS else ():
            size = prod(shape) * count * dtype.itemsize
            views.append(buffer[offset : offset + size].view(dtype).view(count, *shape))
            offset += _padded(prod(shape) * self.max_rows * dtype.itemsize)
        return tuple(views)


def _action_rows(spec: ModelSpec) -> tuple[tuple[Shape, torch.dtype], ...]:
    """The rows of actions that go with a chunk to every stage, where the model has any."""
    rows = spec.action_rows
    return () if rows is None else ((rows.shape(spec.chunk_latents), torch.float32),)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
