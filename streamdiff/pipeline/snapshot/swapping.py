"""Swaps idle sessions of a pipeline out of device memory, and back in.

SWAP_OUT and SWAP_IN travel around the ring as all changes do, so every stage swaps at the same place of the order:
after what has entered before, before what enters later; no stage touches what is being sent. Each rank keeps its own
part. A session is held meanwhile, in mid-chunk or between chunks; the head's latents stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate

if TYPE_CHECKING:
    from streamdiff.pipeline.ring import Ring
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


@dataclass
class _Away:
    """A session that is swapped out, or on its way back. `asked`: a SWAP_IN of this `ticket` is in the ring."""

    ticket: int
    decoder_out: bool = False
    coming: bool = False
    asked: bool = False
    stages: Outcome = Outcome.NOT_YET
    decoder: Outcome = Outcome.NOT_YET
    lost: bool = False


class RingSwapping:
    """Swaps sessions of a pipeline out of device memory, and in again, on all ranks."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self.away: dict[int, _Away] = {}
        """Sessions that are swapped out, or on their way back; while there are any, `advance` has work."""
        self._lost: set[int] = set()
        self.tickets = count()
        """Numbers of what is asked of all stages."""

    def at_rest(self, session: int) -> bool:
        """Whether nothing of a session is under way, and nothing of it may enter as things are."""
        return (
            not occupied(self._pipeline, session)
            and not self._pipeline.streams[session].decoding
            and not self._pipeline.scheduler.may_enter(session)
        )

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        """Whether host memory or disk has room for an open session's device state on all ranks, counting the room that
        session `returning` frees by coming back."""
        swaps = self._pipeline.stage.swaps
        if session in self.away or self._pipeline.saving.copies(session):
            return False
        return self._pipeline.budget is None or self._pipeline.budget.away_fits(session, swaps.spills, returning)

    def swap_out(self, session: int) -> None:
        """Give a session's device memory back, of one that `can_swap_out`; it makes nothing until `swap_in`. What is in
        the ring comes back."""
        assert session not in self.away, f"session {session} is swapped out already, or not back yet"
        away = self.away[session] = _Away(next(self.tickets))
        self._pipeline.scheduler.hold(session, True)
        self._pipeline.tell(MessageKind.SWAP_OUT, SessionUpdate(session))
        if self._pipeline.budget is not None:
            self._pipeline.budget.swap_out(session)
        self._swap_decoder_out(session, away)

    def swap_in(self, session: int) -> None:
        """Let a session that is swapped out come back and go on. Does nothing where it is on its way.

        Raises:
            RequestError: there is no memory for it now, code "memory".
        """
        away = self.away[session]
        if not away.coming:
            if self._pipeline.budget is not None:
                self._pipeline.budget.swap_in(session)
            away.coming = True
            self._ask_in(session, away)

    def place(self, session: int) -> str:
        """Location of the head's part of an open session: `device`, `host` or `disk`."""
        name, swaps = f"stage {session}", self._pipeline.stage.swaps
        return "device" if session not in self.away else swaps.location(name) if name in swaps else "host"

    def is_away(self, session: int) -> bool:
        """Whether an open session is swapped out, or not wholly back."""
        return session in self.away

    def is_coming(self, session: int) -> bool:
        """Whether a session is on its way back."""
        return session in self.away and self.away[session].coming

    @property
    def coming(self) -> bool:
        """Whether sessions are on their way back."""
        return any(away.coming for away in self.away.values())

    def take_lost(self) -> list[int]:
        """Sessions that were swapped in without their state, as a file was damaged; each makes nothing before `reset`.
        Each is returned once. Mutates: self."""
        lost, self._lost = sorted(self._lost), set()
        return lost

    def advance(self) -> None:
        """Continue with what is on its way. Mutates: self, ring."""
        for answer in self._pipeline.take_answers(MessageKind.SWAP_IN):
            away = self.away.get(answer.session)
            if away is not None and away.coming and away.ticket == answer.epoch:
                away.asked, away.stages = False, answer.outcome
                if answer.outcome is Outcome.LOST:  # another stage may not be ready: asked once more, it says so
                    away.lost, away.stages = True, Outcome.NOT_YET
        for session, away in list(self.away.items()):
            if not away.coming:
                self._swap_decoder_out(session, away)
                continue
            if away.stages is Outcome.NOT_YET and not away.asked:
                self._ask_in(session, away)
            if away.decoder is Outcome.NOT_YET:
                number = self._pipeline.streams[session].number
                away.decoder = self._pipeline.decoding.swap_in(number) if away.decoder_out else Outcome.DONE
            if Outcome.NOT_YET not in (away.stages, away.decoder):
                del self.away[session]
                if away.lost or away.decoder is Outcome.LOST:
                    self._lost.add(session)
                else:
                    self._pipeline.scheduler.hold(session, False)

    def _ask_in(self, session: int, away: _Away) -> None:
        """Mutates: ring, away."""
        sampler = self._pipeline.sampler.sessions[session]
        steps, kv_context = sampler.schedule.steps, sampler.kv_context
        self._pipeline.tell(
            MessageKind.SWAP_IN, SessionUpdate(session, away.ticket, steps=steps, kv_context=kv_context)
        )  # fmt: skip
        away.asked = True

    def _swap_decoder_out(self, session: int, away: _Away) -> None:
        """What the decoder remembers goes when all that it is to decode of the session has come. Mutates: away."""
        stream = self._pipeline.streams[session]
        if not away.decoder_out and not stream.decoding and not occupied(self._pipeline, session):
            away.decoder_out = True
            self._pipeline.decoding.swap_out(stream.number)

    def forget(self, session: int) -> None:
        """The session restarts, or ends. Mutates: self."""
        self.away.pop(session, None)
        self._lost.discard(session)


def occupied(ring: Ring, session: int) -> bool:
    """Whether something of a session, the present one or one before it, is in the ring or about to enter."""
    return any(
        session in {row.session for row in message.rows}
        or (message.update is not None and message.update.session == session)
        for message in ring.messages
    )
