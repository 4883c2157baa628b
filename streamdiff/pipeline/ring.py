"""Rank 0's side of the ring of stages: sessions go in, finished latents come out.

Rank 0 decides which micro-step enters next (`StreamBatchScheduler`), supplies its latents and noise, and turns the flow
that comes back into the next latents (`LatentSampler`). With one stage there are no links, and the same loop runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.core import MicroStep, control_values
from streamdiff.errors import NOT_FINITE, RequestError
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule
from streamdiff.models.spec import context_fault
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.cuda_streams import one_stage_link
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S
from streamdiff.pipeline.distributed.link import NoLink, Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate, StageMessage
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.row_faults import ROW_ERRORS, ReturnedRows, at, check_own, describe, fault_key
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.runner.model_runner import ModelRunner, Worker
from streamdiff.pipeline.runner.sampler import Finished, LatentSampler, PendingSteps, SamplerState, StreamInputs
from streamdiff.pipeline.scheduler.row_limit import RingSlots
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler


class RingParts(NamedTuple):
    """What a rank has of a ring: its stage; `links` to the next stage and from the one before, None with one stage. On
    rank 0 `fellows` lead to the ranks that share its stage, and `local` run the other stages where they are in this
    process."""

    stage: ModelRunner
    links: tuple[Sender, Receiver] | None = None
    fellows: Sequence[Sender] = ()
    local: Sequence[Worker] = ()

    def worker(self) -> Worker:
        """The loop of a rank that is not rank 0."""
        assert self.links is not None, "a ring of several ranks has links"
        return Worker(self.links[1], self.stage, self.links[0])


class Ring:
    """Rank 0 of a ring: scheduler, sampler and stage 0, with the links to stage 1 and from the last stage.

    `schedule`, `run` and `sample` are one step. At most `limit` messages are in the ring at once, updates of sessions
    included. Every link has two slots, so the ring can never fill up and stand still.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        max_rows: int = 1,
        parts: RingParts | None = None,
    ) -> None:
        """`parts`: this rank's stage and links, which have to carry the rows that `rows_carried` says; None: one stage
        with all blocks of `model`."""
        self.stage, links, self._fellows, self.local = parts or RingParts(ModelRunner(model, device))
        stages = self.stage.stages
        self.scheduler = StreamBatchScheduler(
            stages=stages,
            chunk_frames=model.spec.chunk_frames,
            max_rows=max_rows,
            first_chunks=model.spec.first_chunks,
        )
        self.sampler = LatentSampler(model, device)
        timer = DeviceTimer.on(device)
        self._timed = timer.stream()
        self._sender, self._receiver = links or (loop := one_stage_link(device), loop)
        self.worker = Worker(self._receiver, self.stage, self._sender, timer, self._timed)
        self.limit = stages + 1 if stages > 1 else 1
        self.changes: dict[int, PendingSteps] = {}  # by session
        self.queued: deque[StageMessage] = deque()  # what enters before anything that the scheduler hands out
        self.in_ring: deque[StageMessage] = deque()  # in order; rows with their inputs, as they may be tried again
        self._row_states: deque[list[SamplerState | None]] = deque()  # of each message in the ring that of each row
        self._finished: list[Finished] = []  # that `sample` has not returned yet
        self._answers: list[tuple[MessageKind, SessionUpdate]] = []  # come back, of messages that are answered
        self.faults = ReturnedRows()
        """Handles rows that fail and their sessions; the caller sets its `on_fault`."""
        self._stopping = False

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StageMessage | None:
        """The rows that enter the ring next, with their inputs; None: none may. Updates of sessions enter before, at
        once. Mutates: self, scheduler, sampler.

        Raises:
            LinkClosed: another rank is gone.
            EngineFailure: one session after the other fails.
        """
        if self.local and self._step_local():
            return None
        self._send_updates()
        if self.queued and self._has_room:
            return self.queued.popleft()  # rows that run once more
        if self.queued or self._stopping or not self._has_room:
            return None
        rows = self.scheduler.next(background=len(self.in_ring) < self.scheduler.stages, slots=self._slots())
        return self._with_inputs(rows) if rows else None

    def run(self, message: StageMessage | None) -> None:
        """Run what `schedule` returned through this rank's stage, and send it on. Mutates: self, the stage. Raises
        LinkClosed."""
        if message is None:
            return
        self.in_ring.append(message if message.kind is MessageKind.ROWS else message.bare)
        self._row_states.append([self.sampler.sessions.get(row.session) for row in message.rows])
        for part in message.as_sent if self._fellows else ():
            for fellow in self._fellows:
                fellow.send(part)
        self.worker.execute(message)
        # What is left of a long forward goes row by row. That ends whatever comes back meanwhile: so few messages are
        # in the ring that the last stage can always send, and the others take what comes.
        while self.worker.sending and not self.local:  # in one thread nothing would receive it, see `_step_local`
            self.worker.step()

    def sample(self, wait_s: float = 0.0) -> list[Finished]:
        """Take over what has come back from the last stage; returns the chunks that are finished. Waits up to `wait_s`
        for something to come back. Mutates: self, scheduler, sampler. Raises as `schedule`."""
        self._finished += self._take_back(0.0 if self._finished or self.local else wait_s)
        finished, self._finished = self._finished, []
        return finished

    def step_latents(self, wait_s: float = 0.0) -> tuple[list[MicroStep], list[Finished]]:
        """One step, for those that decode nothing: the rows that entered the ring (none when nothing may), the chunks
        that came back finished. Waits up to `wait_s` for something to come back when nothing may enter."""
        message = self.schedule()
        self.run(message)
        return list(message.rows) if message else [], self.sample(wait_s if message is None else 0.0)

    def _send_updates(self) -> None:
        """Have the updates of sessions enter, as far as there is room; rank 0 never blocks on a send, as it must
        receive. Mutates: self."""
        self._finished += self._take_back(0.0)
        self._change_steps()
        while self.queued and self.queued[0].kind is not MessageKind.ROWS and self._has_room:
            self.run(self.queued.popleft())
            self._finished += self._take_back(0.0)
            self._change_steps()

    @property
    def _has_room(self) -> bool:
        """Whether something may enter the ring."""
        return len(self.in_ring) < self.limit and all(each.ready for each in (self._sender, *self._fellows))

    def _slots(self) -> RingSlots | None:
        """Over what the scheduler spreads rows, where they may share a forward."""
        if self.scheduler.max_rows == 1:
            return None
        live = sum(not self.scheduler.is_background(each.rows) for each in self.in_ring)
        return RingSlots(self.limit - len(self.in_ring), self.limit - live, self.limit)

    def _with_inputs(self, rows: list[MicroStep]) -> StageMessage | None:
        """A forward of rows, with their inputs; None where none of them has any. Mutates: self, sampler."""
        with self._timed.work(StageMessage(MessageKind.ROWS, tuple(rows))):
            rows, tensors = self._inputs(rows)
        self.sampler.look_ahead(rows)
        return StageMessage(MessageKind.ROWS, tuple(rows), None, tensors) if rows else None

    def _inputs(self, rows: list[MicroStep]) -> tuple[list[MicroStep], tuple[Tensor, ...]]:
        """Those of the rows that have inputs, and these; sessions of which they cannot be made are over. Mutates: self,
        sampler."""
        try:
            return rows, self.sampler.inputs(rows)
        except ROW_ERRORS as error:
            check_own(error)
        kept, parts = [], []
        for session in dict.fromkeys(row.session for row in rows):
            own = [row for row in rows if row.session == session]
            try:
                parts.append(self.sampler.inputs(own))
                kept += own
            except ROW_ERRORS as error:
                check_own(error)
                self.faults.fail_session(session, describe(error, f"{at(own[0])} could not begin"))
        return kept, tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _step_local(self) -> bool:
        """A step of every other stage in this process, the last one first: a message moves on by one stage per step, as
        between processes. Whether this stage is sending a long forward, of which a row goes with each step. Mutates:
        self, the stages."""
        for worker in reversed(self.local):
            if worker.sender.ready:
                worker.step()
        sending = self.worker.sending
        if sending and self._sender.ready:
            self.worker.step()
        return sending

    def _take_back(self, wait_s: float | None) -> list[Finished]:
        finished: list[Finished] = []
        while self.in_ring and (message := self._receiver.receive(wait_s)) is not None:
            finished += self._back(message)
            wait_s = 0.0
        return finished

    def _back(self, message: StageMessage) -> list[Finished]:
        """Process a message that has come back; returns finished chunks. Mutates: self, scheduler, sampler.

        Raises:
            EngineFailure: one session after the other fails.
        """
        entered, streams = self.in_ring.popleft(), self._row_states.popleft()
        if message.kind.is_answered and message.update is not None:
            self._answers.append((message.kind, message.update))
        if message.kind is not MessageKind.ROWS:
            return []
        finished: list[Finished] = []
        with self._timed.work(entered.bare):
            for row, flow, ok in zip(
                message.rows, message.tensors[0].unbind(), self.faults.rows_ok(message), strict=True
            ):
                row_index = entered.rows.index(row)
                if ok:
                    finished += self._advance(row, flow)
                elif streams[row_index] is not None and self.sampler.sessions.get(row.session) is streams[row_index]:
                    self._failed(entered, row_index)
        return finished

    def _advance(self, row: MicroStep, flow: Tensor) -> list[Finished]:
        """Take over a row's flow `[C, F, h, w]`. Mutates: self, scheduler, sampler."""
        try:
            finished = self.sampler.advance(row, flow)
        except ROW_ERRORS as error:
            check_own(error)
            self.faults.fail_session(row.session, describe(error, f"{at(row)} could not be taken over"))
            return []
        self.scheduler.returned(row)
        return [] if finished is None else [finished]

    def _failed(self, entered: StageMessage, row_index: int) -> None:
        """Handle a row that came back as NaN, of a stream that continues: queue it once more, alone and before anything
        else, or fail its session. Mutates: self."""
        row = entered.rows[row_index]
        if self._stopping or row.session in self.faults.failed_sessions:
            return
        fault = self.stage.exchange.pop_text(fault_key(row.session, row.epoch))
        behind = [replace(entered.bare, rows=entered.rows[row_index + 1 :]), *self.in_ring]
        may_repeat = self.sampler.spec.repeats and not row.recaches
        if may_repeat and self.faults.should_retry(row, fault, behind, self.sampler.sessions[row.session].kv_context):
            tensors = tuple(tensor[row_index : row_index + 1] for tensor in entered.tensors)
            self.queued.appendleft(StageMessage(MessageKind.ROWS, (row,), None, tensors))
        else:
            nan = f"{at(row)}: what the model computes for it are {NOT_FINITE}"
            self.faults.fail_session(row.session, fault or nan)

    # ---- what is in the ring -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether something can enter the ring now, or is in it."""
        may_change = any(map(self.scheduler.drained, self.changes))
        return self.scheduler.has_work or bool(self.queued) or may_change or self.waiting

    @property
    def waiting(self) -> bool:
        """Whether something is in the ring that will come back."""
        return bool(self.in_ring)

    def occupied(self, session: int) -> bool:
        """Whether something of a session, the present one or one before it, is in the ring or about to enter."""
        return any(
            session in {row.session for row in message.rows}
            or (message.update is not None and message.update.session == session)
            for message in (*self.in_ring, *self.queued)
        )

    @property
    def contents(self) -> str:
        """What is in the ring, oldest first, for messages."""
        return ", ".join(str(message) for message in self.in_ring) or "nothing"

    def take_answers(self) -> list[tuple[MessageKind, SessionUpdate]]:
        """What has come back since the last call of messages that are answered, with the outcome on all stages.
        Mutates: self."""
        answers, self._answers = self._answers, []
        return answers

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, when something comes back."""
        self._receiver.notify(call)

    def open(
        self, session: int, conditioning: Tensor, *, seed: int = 0, epoch: int, steps: int | Schedule, kv_context: str,
        background: bool = False, start: Tensor | None = None, video: GivenVideo | None = None,
        given: StreamInputs | None = None,
    ) -> None:  # fmt: skip
        """Open a session on scheduler, sampler and all stages; where it raises, nothing of it is open. Mutates: self.

        Args:
            steps: a schedule, or a number of the model's own.
            background: it takes what other sessions leave.
            start: finished latents `[n, C, F, h, w]` of its first n chunks, from which it continues.
            video: what its chunks start from, as far as it goes, in this stream and in those after resets, until one
                has a `start` or the session has a live input.
            given: what a reference run gives besides.

        Raises:
            RequestError: a KV context that the model does not stream in.
            ValueError: a bad KV context, or the session is open.
        """
        schedule = self.sampler.spec.schedule(steps) if isinstance(steps, int) else steps
        steps, first = schedule.steps, schedule.of(0).steps
        if fault := context_fault(self.sampler.spec, kv_context):
            raise RequestError("kv_context", fault)
        if first > steps and self.sampler.spec.first_chunks > 1:
            raise ValueError("a first chunk of another length that also has more steps is not built")
        # All that can fail comes before anybody knows of the session: a slot that is half open could never be used.
        state = self.sampler.prepare(seed, schedule, kv_context, start, video, given)
        self.scheduler.open(
            session, steps=steps, first_steps=first, kv_context=kv_context, epoch=epoch, background=background,
        )  # fmt: skip
        self._begin_at(session, state)
        self.tell(MessageKind.OPEN, SessionUpdate(session, epoch, epoch, steps, kv_context))
        self.tell(MessageKind.TEXT, SessionUpdate(session, epoch, epoch), conditioning)

    def _begin_at(self, session: int, state: SamplerState) -> None:
        """Let a stream that the scheduler knows begin, behind what is given. Mutates: self."""
        self.faults.forget(session)
        if state.given_latents and state.clean_pass:
            self.scheduler.resume_at(session, len(state.given_latents))
        self.sampler.sessions[session] = state

    def set_conditioning(
        self, session: int, conditioning: Tensor, *, epoch: int, switch: str = "keep",
        loras: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Chunks admitted from now on use this conditioning, and have `loras` at these scales, by id (None: as before);
        `switch`, one of PROMPT_POLICIES but `reset`, says what they see of earlier chunks. Mutates: self.

        `keep`: all that is cached. `flush`: the sink only. `recache`: the window's latest frames, whose clean latents
        run again under the new text in one forward in which all see each other, and the sink, which keeps its keys
        unless the window still holds the whole stream (LongLive v1.0, arXiv 2509.22622). `recache-causal`: sink and
        window, run again chunk by chunk, each of which sees those before it.

        Raises:
            RequestError: unknown policy, or one that the session's KV context cannot have.
        """
        visible_from, rerun = self.sampler.switch(session, self.scheduler.next_chunk(session), switch)
        if rerun:
            self.scheduler.rerun(session, rerun, as_one=switch == "recache")
        update = SessionUpdate(session, epoch, self.scheduler.oldest_epoch(session), visible_from_chunk=visible_from)
        self._tell_text(update, conditioning, loras)
        self.scheduler.set_epoch(session, epoch)

    def _tell_text(self, update: SessionUpdate, conditioning: Tensor, loras: Mapping[int, float] | None = None) -> None:
        """Queue TEXT with the session's LoRAs, of which `loras` are new. Mutates: self, sampler."""
        state = self.sampler.sessions[update.session]
        if loras is not None:
            state.set_loras(update.epoch, loras, update.oldest)
        own = tuple(state.latest_loras.items())
        self.tell(MessageKind.TEXT, replace(update, loras=own), conditioning)

    def loras_of(self, session: int) -> set[int]:
        """Ids of the LoRAs that a session's chunks have which are in flight, or admitted next."""
        own = self.sampler.sessions[session].loras_from(self.scheduler.oldest_epoch(session))
        return {lora for scales in own.values() for lora in scales}

    def check_switch(self, session: int, switch: str) -> None:
        """Raises RequestError for a change of prompt that the session cannot have: an unknown one, or one of RECACHES
        in a KV context without a clean pass."""
        if switch != "reset":
            self.sampler.check_switch(session, switch)

    def check_steps(self, session: int, steps: int) -> None:
        """Raises what `set_steps` would."""
        spec = self.sampler.spec
        has = f"model {spec.name} has {', '.join(map(str, spec.steps)) or 'none of its own'}"
        if steps not in spec.steps:
            raise RequestError("steps", f"steps is {steps}; {has}")
        now = self.sampler.sessions[session].schedule
        if now.steps not in spec.steps or now != spec.schedule(now.steps):
            raise RequestError("steps", f"the session has a schedule of its own, and keeps it; {has}")

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
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
        self.changes[session] = PendingSteps(epoch, steps)
        self.scheduler.drain(session)

    def _change_steps(self) -> None:
        """Apply pending step changes of sessions with nothing in flight: here now, on other ranks by a message at the
        same point of the order. Mutates: self."""
        for session in [session for session in self.changes if self.scheduler.drained(session)]:
            epoch, steps = self.changes.pop(session)
            schedule = self.sampler.spec.schedule(steps)
            self.scheduler.set_steps(session, steps=schedule.steps, first_steps=schedule.of(0).steps)
            self.sampler.set_steps(session, schedule)
            # A prompt that came meanwhile has the later epoch.
            self._new_epoch(session, max(epoch, self.scheduler.oldest_epoch(session)), schedule.steps)

    def set_controls(self, session: int, values: Mapping[str, float], pressed: bool = True) -> int:
        """Chunks admitted from now on have these controls; others stay as they are. Returns the number of this change,
        see `Chunk.control`; `pressed` as in `HeldControls.set`. Mutates: self.

        Raises:
            RequestError: the model has no such control, or it cannot have that value.
        """
        return self.sampler.sessions[session].held.set(control_values(self.sampler.spec.controls, values), pressed)

    def wait_at(self, session: int, chunk: int | None) -> None:
        """As `StreamBatchScheduler.wait_at`. Mutates: self."""
        self.scheduler.wait_at(session, chunk)

    def reruns(self, session: int) -> bool:
        """Whether chunks are to run once more under the present prompt, before another may replace it."""
        return bool(self.scheduler.session(session).rerun)

    def set_epoch(self, session: int, epoch: int) -> None:
        """Chunks admitted from now on belong to `epoch`: the caller has changed what they start from. Mutates: self."""
        self._new_epoch(session, epoch, self.sampler.sessions[session].schedule.steps)

    def _new_epoch(self, session: int, epoch: int, steps: int) -> None:
        """Chunks admitted from now on belong to `epoch`, with the steps and the text that hold. Mutates: self."""
        oldest = min(self.scheduler.oldest_epoch(session), epoch)
        self.tell(MessageKind.STEPS, SessionUpdate(session, epoch, oldest, steps=steps))
        self.scheduler.set_epoch(session, epoch)

    def reset(
        self, session: int, conditioning: Tensor, *, seed: int = 0, epoch: int, start: Tensor | None = None,
        given: StreamInputs | None = None, loras: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Drop what is in flight and restart at chunk 0, or from `start`, as in `open`. `epoch` is one the slot
        never had; `loras` as in `set_conditioning`. Mutates: self."""
        old, change = self.sampler.sessions[session], self.changes.get(session)
        schedule = self.sampler.spec.schedule(change.steps) if change else old.schedule
        # What can fail comes first, as in `open`: else the scheduler would begin a stream that no one else has.
        video = old.video if start is None else None
        state = self.sampler.prepare(seed, schedule, old.kv_context, start, video, given)
        state.held = old.held  # keys stay down
        for name in ("condition", "given_controls"):
            setattr(state, name, getattr(old if getattr(state, name) is None else state, name))
        self.scheduler.reset(session, epoch)
        self._forget_retries(session)
        self._change_steps()
        self._begin_at(session, state)
        update = SessionUpdate(session, epoch, steps=schedule.steps, kv_context=old.kv_context)
        self.tell(MessageKind.RESET, update)
        begin = SessionUpdate(session, epoch, epoch)
        self._tell_text(begin, conditioning, old.latest_loras if loras is None else loras)

    def close_session(self, session: int) -> None:
        """Free a session everywhere. Mutates: self."""
        self.changes.pop(session, None)
        self.scheduler.close(session)
        self._forget_retries(session)
        self.sampler.sessions.pop(session, None)
        self.tell(MessageKind.CLOSE, SessionUpdate(session))

    def _forget_retries(self, session: int) -> None:
        """Rows of the session's stream that were to run once more no longer are. Mutates: self."""
        for message in [each for each in self.queued if each.rows and each.rows[0].session == session]:
            self.queued.remove(message)

    def stop(self, limit_s: float = LEAVE_S) -> None:
        """End the loops of all ranks, after what is in the ring has come back. Nothing enters afterwards.

        Raises:
            LinkClosed: a rank is gone.
            RuntimeError: it took longer than `limit_s`.
        """
        self._stopping = True
        self.tell(MessageKind.STOP, SessionUpdate(0))
        end_s = clock.monotonic_s() + limit_s
        while self.queued or self.in_ring:
            if clock.monotonic_s() > end_s:
                raise RuntimeError(f"the ring did not come to rest within {limit_s:g} s")
            self.run(self.schedule())
            self.sample(limit_s / 10 if self.in_ring else 0.0)
        senders = self._sender, *self._fellows
        for sender in senders:
            sender.close()
        self._receiver.close(limit_s)
        for sender in senders:
            sender.flush(limit_s)

    def listen(self, wait_s: float) -> None:
        """For `wait_s` let nothing enter, and drop what comes back; used when the ring is about to end. Mutates: self.

        Raises:
            LinkClosed: the last stage is gone.
        """
        end_s = clock.monotonic_s() + wait_s
        while (left_s := end_s - clock.monotonic_s()) > 0:
            if (message := self._receiver.receive(left_s)) is not None:
                self._back(message)

    def tell(self, kind: MessageKind, update: SessionUpdate, *tensors: Tensor) -> None:
        """Queue an update for all stages, ahead of all forwards that are scheduled later. Mutates: self."""
        self.queued.append(StageMessage(kind, (), update, tensors))


def local_parts(model: Model, device: torch.device, stages: int, links: Sequence[NoLink] | None = None) -> RingParts:
    """All stages in this process, which take turns in one thread, deterministically: for reference runs and tests.
    `links` lead from each stage to the next, the last one back to the head."""
    if stages == 1:
        return RingParts(ModelRunner(model, device))
    links = links or [NoLink() for _ in range(stages)]
    first, *others = [
        ModelRunner(model.part(*run), device, i, stages) for i, run in enumerate(split_evenly(model.blocks, stages))
    ]
    for stage in others:
        stage.exchange = first.exchange
    workers = [Worker(links[i], stage, links[i + 1]) for i, stage in enumerate(others)]
    return RingParts(first, (links[0], links[-1]), local=workers)
