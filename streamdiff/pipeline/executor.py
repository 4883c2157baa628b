"""Rank 0's side of the ring of stages: sessions go in, finished chunks come out.

Rank 0 decides which micro-step enters next (`StreamBatchScheduler`), supplies its latents and noise, and turns the flow
that comes back into the next latents (`LatentSampler`). With one stage there are no links, and the same loop runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.errors import RequestError
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S
from streamdiff.pipeline.distributed.link import LocalLink, NoLink, Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, SessionUpdate, StageMessage
from streamdiff.pipeline.planner.batching import rows_carried
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.row_faults.returned import ReturnedRows
from streamdiff.pipeline.runner.in_flight_queue import InFlightQueue
from streamdiff.pipeline.runner.model_runner import ModelRunner, Worker
from streamdiff.pipeline.runner.sampler import Finished, LatentSampler, PendingSteps, SamplerSession, StreamInputs
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from streamdiff.pipeline.scheduler.step import MicroStep


class RingExecutor:
    """Rank 0 of a ring: scheduler, sampler and stage 0, with the links to stage 1 and from the last stage."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        max_rows: int = 1,
        *,
        stage: ModelRunner | None = None,
        links: tuple[Sender, Receiver] | None = None,
        timer: DeviceTimer | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """`stage` is this rank's part (all blocks of `model` by default), `links` lead to stage 1 and back; they have
        to carry the rows that `rows_carried` says. `timer` is that of this rank's device; None: one that is made
        here. Where `max_rows` is above 1, a row may wait `wait_s` for others."""
        self.stage = stage or ModelRunner(model, device)
        stages = self.stage.stages
        self.scheduler = StreamBatchScheduler(
            stages=stages,
            chunk_frames=model.spec.chunk_frames,
            max_rows=max_rows,
            first_chunks=model.spec.first_chunks,
        )
        self.sampler = LatentSampler(model, device)
        timer = timer or DeviceTimer.on(device)
        timed = timer.stream()
        loop = NoLink()
        self._sender, self._receiver = links or (loop, loop)
        self._admission = InFlightQueue(
            self.scheduler, self.sampler, stages + 1 if stages > 1 else 1, timed, wait_s,
            lambda name: self.stage.exchange.pop_text(name),
        )  # fmt: skip
        self.worker = Worker(self._admission, self.stage, self._sender, timer, timed)
        self.changes: dict[int, PendingSteps] = {}  # by session

    def step(self, wait_s: float = 0.0) -> tuple[list[MicroStep], list[Finished]]:
        """One micro-step through this rank: the rows that entered the ring (none when nothing may), the chunks that
        came back finished. Waits up to `wait_s` for something to come back when nothing may enter."""
        finished = self._take_back(0.0)
        while (message := self._enter()) is not None and message.kind is not MessageKind.ROWS:  # updates go on at once
            finished += self._take_back(0.0)
        finished += self._take_back(wait_s if message is None and not finished else 0.0)
        return list(message.rows) if message else [], finished

    def await_returns(self, wait_s: float) -> list[Finished]:
        """The chunks that came back finished until nothing is in the ring any more; nothing enters meanwhile.

        Raises:
            LinkClosed: the last stage is gone.
            RuntimeError: nothing came back within `wait_s`.
        """
        finished: list[Finished] = []
        while before := len(self._admission.in_ring):
            finished += self._take_back(wait_s)
            if len(self._admission.in_ring) == before:
                raise RuntimeError(f"nothing came back within {wait_s:g} s; in the ring: {self.contents}")
        return finished

    @property
    def has_work(self) -> bool:
        """Whether something can enter the ring now, or is in it."""
        may_change = any(map(self.scheduler.drained, self.changes))
        return self.scheduler.has_work or bool(self._admission.queued) or may_change or self.waiting

    @property
    def held_s(self) -> float:
        """Seconds for which what could enter still waits for rows of other sessions; 0: for nothing."""
        return self._admission.held_s()

    @property
    def faults(self) -> ReturnedRows:
        """Handles rows that fail and their sessions; the caller sets its `on_fault`."""
        return self._admission.returned

    @property
    def waiting(self) -> bool:
        """Whether something is in the ring that will come back."""
        return bool(self._admission.in_ring)

    @property
    def messages(self) -> list[StageMessage]:
        """What is in the ring, and what enters before anything else."""
        return [*self._admission.in_ring, *self._admission.queued]

    @property
    def contents(self) -> str:
        """What is in the ring, oldest first, for messages."""
        return ", ".join(str(message) for message in self._admission.in_ring) or "nothing"

    def take_answers(self, kind: MessageKind) -> list[SessionUpdate]:
        """What has come back of such messages since the last call, with the outcome on all stages. Mutates: self."""
        answers = self._admission.answers
        self._admission.answers = deque(each for each in answers if each[0] is not kind)
        return [update for each, update in answers if each is kind]

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, when something comes back."""
        self._receiver.notify(call)

    def open(
        self,
        session: int,
        embeddings: Tensor,
        *,
        seed: int = 0,
        epoch: int,
        steps: int | Schedule,
        kv_context: str,
        given: StreamInputs | None = None,
        background: bool = False,
    ) -> None:
        """Open a session on scheduler, sampler and all stages; ValueError on bad values. Where it raises, nothing of
        the session is open. Mutates: self.

        `steps`: a schedule, or a number of the model's own. Its chunks start from the video that is `given`, and do so
        again after a reset. With `background` it takes what others leave.
        """
        schedule = self.sampler.spec.schedule(steps) if isinstance(steps, int) else steps
        steps, first = schedule.steps, schedule.of(0).steps
        if first > steps and self.sampler.spec.first_chunks > 1:
            raise ValueError("a first chunk of another length that also has more steps is not built")
        # All that can fail comes before anybody knows of the session: a slot that is half open could never be used.
        state = self.sampler.prepare(seed, schedule, kv_context, given or StreamInputs())
        self.scheduler.open(
            session, steps=steps, first_steps=first, kv_context=kv_context, epoch=epoch, background=background,
        )  # fmt: skip
        self._begin(session, state)
        self.tell(MessageKind.OPEN, SessionUpdate(session, epoch, epoch, steps, kv_context))
        self.tell(MessageKind.TEXT, SessionUpdate(session, epoch, epoch), embeddings)

    def _begin(self, session: int, state: SamplerSession) -> None:
        """Let a stream that the scheduler knows begin, behind what is given. Mutates: self."""
        self.faults.forget(session)
        if state.given_latents and state.clean_pass:
            self.scheduler.resume_at(session, len(state.given_latents))
        self.sampler.sessions[session] = state

    def set_text(self, session: int, epoch: int, embeddings: Tensor, policy: str = "keep") -> None:
        """Chunks admitted from now on use these embeddings; `policy`, one of PROMPT_POLICIES but `reset`, says what
        they see of earlier chunks. Mutates: self.

        `keep`: all that is cached. `flush`: the sink only. `recache`: the window's latest frames, whose clean latents
        run again under the new text in one forward in which all see each other, and the sink, which keeps its keys
        unless the window still holds the whole stream (LongLive v1.0, arXiv 2509.22622). `recache-causal`: sink and
        window, run again chunk by chunk, each of which sees those before it.

        Raises:
            RequestError: unknown policy, or one that the session's KV context cannot have.
        """
        visible_from, rerun = self.sampler.switch(session, self.scheduler.next_chunk(session), policy)
        if rerun:
            self.scheduler.rerun(session, rerun, as_one=policy == "recache")
        oldest = self.scheduler.oldest_epoch(session)
        update = SessionUpdate(session, epoch, oldest, visible_from_chunk=visible_from)
        self.tell(MessageKind.TEXT, update, embeddings)
        self.scheduler.set_epoch(session, epoch)

    def check_steps(self, session: int, steps: int) -> None:
        """Raises what `set_steps` would."""
        spec = self.sampler.spec
        has = f"model {spec.name} has {', '.join(map(str, spec.steps)) or 'none of its own'}"
        if steps not in spec.steps:
            raise RequestError("steps", f"steps is {steps}; {has}")
        now = self.sampler.sessions[session].schedule
        if now.steps not in spec.steps or now != spec.schedule(now.steps):
            raise RequestError("steps", f"the session has a schedule of its own, and keeps it; {has}")

    def set_steps(self, session: int, epoch: int, steps: int) -> None:
        """Chunks admitted from now on have `steps` of the model's steps; none is admitted before those in flight have
        come back. Of several changes that wait so, the latest holds. Mutates: self.

        Raises:
            RequestError: the model has no such number of steps, or the session a schedule of its own.
        """
        self.check_steps(session, steps)
        schedule = self.sampler.spec.schedule(steps)
        if session not in self.changes and schedule == self.sampler.sessions[session].schedule:
            self._new_epoch(session, epoch, steps)  # nothing else changes, so nothing needs to wait
            return
        self.changes[session] = PendingSteps(epoch, schedule)
        self.scheduler.drain(session)

    def _change_steps(self) -> None:
        """Apply pending step changes of sessions with nothing in flight: here now, on other ranks by a message at the
        same point of the order. Mutates: self."""
        for session in [session for session in self.changes if self.scheduler.drained(session)]:
            epoch, schedule = self.changes.pop(session)
            self.scheduler.set_steps(session, steps=schedule.steps, first_steps=schedule.of(0).steps)
            self.sampler.set_steps(session, schedule)
            # A prompt that came meanwhile has the later epoch.
            self._new_epoch(session, max(epoch, self.scheduler.oldest_epoch(session)), schedule.steps)

    def set_epoch(self, session: int, epoch: int) -> None:
        """Chunks admitted from now on belong to `epoch`: the caller has changed what they start from. Mutates: self."""
        self._new_epoch(session, epoch, self.sampler.sessions[session].schedule.steps)

    def _new_epoch(self, session: int, epoch: int, steps: int) -> None:
        """Chunks admitted from now on belong to `epoch`, with the steps and the text that hold. Mutates: self."""
        oldest = min(self.scheduler.oldest_epoch(session), epoch)
        self.tell(MessageKind.STEPS, SessionUpdate(session, epoch, oldest, steps=steps))
        self.scheduler.set_epoch(session, epoch)

    def reset(
        self, session: int, embeddings: Tensor, *, seed: int = 0, epoch: int, given: StreamInputs | None = None
    ) -> None:
        """Drop what is in flight and start afresh at chunk 0, or from what is given as in `open`, but for its video:
        a stream keeps its own. `epoch` is one the slot never had. Mutates: self."""
        old, change = self.sampler.sessions[session], self.changes.get(session)
        schedule = change.schedule if change else old.schedule
        given = given or StreamInputs()
        given = replace(given, video=old.video if given.given_latents is None else None)
        # What can fail comes first, as in `open`: else the scheduler would begin a stream that nobody else has.
        state = self.sampler.prepare(seed, schedule, old.kv_context, given)
        self.scheduler.reset(session, epoch)
        self._admission.forget(session)
        self._change_steps()
        self._begin(session, state)
        self.tell(MessageKind.RESET, SessionUpdate(session, epoch))
        self.tell(MessageKind.TEXT, SessionUpdate(session, epoch, epoch), embeddings)

    def close(self, session: int) -> None:
        """Free a session everywhere. Mutates: self."""
        self.changes.pop(session, None)
        self.scheduler.close(session)
        self._admission.forget(session)
        self.sampler.sessions.pop(session, None)
        self.tell(MessageKind.CLOSE, SessionUpdate(session))

    def stop(self, limit_s: float = LEAVE_S) -> None:
        """End the loops of all ranks, after what is in the ring has come back. Nothing enters afterwards.

        Raises:
            LinkClosed: a rank is gone.
            RuntimeError: it took longer than `limit_s`.
        """
        self._admission.close()
        self.tell(MessageKind.STOP, SessionUpdate(0))
        end_s = clock.monotonic_s() + limit_s
        while self._admission.queued or self._admission.in_ring:
            if clock.monotonic_s() > end_s:
                raise RuntimeError(f"the ring did not come to rest within {limit_s:g} s")
            self._enter()
            self._take_back(limit_s / 10 if self._admission.in_ring else 0.0)
        self._sender.close()
        self._receiver.close(limit_s)
        self._sender.flush(limit_s)

    def listen(self, wait_s: float) -> None:
        """For `wait_s` let nothing enter, and drop what comes back; used when the ring is about to end. Mutates: self.

        Raises:
            LinkClosed: the last stage is gone.
        """
        end_s = clock.monotonic_s() + wait_s
        while (left_s := end_s - clock.monotonic_s()) > 0:
            if (message := self._receiver.receive(left_s)) is not None:
                self._admission.back(message)

    def _enter(self) -> StageMessage | None:
        """Run one message through this rank if the link can take it: rank 0 never blocks on a send, as it must
        receive."""
        self._change_steps()
        message = self.worker.step() if self._sender.ready else None
        self._send_rest()
        return message

    def _send_rest(self) -> None:
        """Send what is left of a long forward, row by row. That ends whatever comes back meanwhile: so few messages are
        in the ring that the last stage can always send, and the others take what comes."""
        while self.worker.sending:
            self.worker.step()

    def tell(self, kind: MessageKind, update: SessionUpdate, *tensors: Tensor) -> None:
        """Queue an update for all stages, ahead of all forwards that are scheduled later. Mutates: self."""
        self._admission.queued.append(StageMessage(kind, (), update, tensors))

    def _take_back(self, wait_s: float | None) -> list[Finished]:
        finished: list[Finished] = []
        while self._admission.in_ring and (message := self._receiver.receive(wait_s)) is not None:
            finished += self._admission.back(message)
            wait_s = 0.0
        return finished


class LocalRing(RingExecutor):
    """All stages in this process, one after the other in one thread, deterministically; for reference runs and
    tests."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        stages: int,
        max_rows: int = 1,
        link: Callable[[MessageLayout], LocalLink] = LocalLink,
    ) -> None:
        """`link` makes the link between two stages."""
        carried = rows_carried(model.spec, max_rows)
        forward = MessageLayout.between_stages(model, carried)
        links = [link(forward) for _ in range(stages - 1)] + [link(MessageLayout.back_to_head(model, carried))]
        parts = [
            ModelRunner(model.part(*run), device, i, stages) for i, run in enumerate(split_evenly(model.blocks, stages))
        ]
        ends = (links[0], links[-1])
        super().__init__(model, device, max_rows, stage=parts[0], links=ends)
        self.others = [Worker(links[i - 1], part, links[i]) for i, part in enumerate(parts) if i > 0]
        for worker in self.others:
            worker.stage.exchange = self.stage.exchange

    def step(self, wait_s: float = 0.0) -> tuple[list[MicroStep], list[Finished]]:
        """One step of every rank, the last one first: a message moves on by one stage per step, as in processes."""
        for worker in reversed(self.others):
            if worker.sender.ready:
                worker.step()
        return super().step(0.0)

    def _send_rest(self) -> None:
        """In one thread nobody would take it; a row of it goes with each step."""
