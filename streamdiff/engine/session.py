"""One stream's life, without I/O: requests come in, the pipeline is called, events come out.

Knows nothing about torch, sockets or clocks; prompts are already parsed when they get here.

Epochs: every accepted prompt, number of steps and reset gets the next one, the pipeline stamps it on the chunks made
under it, and the first frames that bring a new epoch produce `Applied`. Prompts and steps do not go to the pipeline one
by one: they wait until `apply_pending`, and of each kind the latest that waits wins. So an accepted epoch may be
skipped, never undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamdiff.core import PROMPT_POLICIES, exact_scale, lora_id, split_label
from streamdiff.engine.change_log import ChangeLog, KeptPlace
from streamdiff.engine.messages import Accepted, Applied, ControlsApplied, Event, FrameBatch, Opened, Pictures
from streamdiff.engine.timeline import TimedChange, Timeline
from streamdiff.errors import RequestError
from streamdiff.snapshot_header import SavedStream

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


MOST_CONTROL_REQUESTS = 256
"""Of a session, that wait for their first frame; the oldest is forgotten first, as the web process does."""


@dataclass
class Blend:
    """A prompt that comes over `over` chunks: `share` of them have been given their mix of what held `before` and what
    comes `after`, which is encoded when the first is; the latest of them is chunk `chunk`. `switch` holds from the last
    one on."""

    before: Any
    over: int
    along: str
    switch: str
    text: str = ""
    after: Any = None
    share: int = 0
    chunk: int = -1


@dataclass
class Fade:
    """A change of a LoRA's scale `before` to `after` (None: it is taken out then) over so many chunks, of which `share`
    have been given theirs; the latest of them is chunk `chunk`."""

    before: float
    after: float | None
    over: int
    share: int = 0
    chunk: int = -1

    @property
    def scale(self) -> float | None:
        if self.share >= self.over:
            return self.after
        return exact_scale(self.before + ((self.after or 0.0) - self.before) * self.share / self.over)


@dataclass(eq=False)
class Session:
    """One stream, in slot `slot` of `_pipeline`. Every method calls the pipeline as needed and returns the events."""

    name: str
    _pipeline: StreamingPipeline
    slot: int
    _encode: Callable[[str], Any]
    """A text's conditioning, as the pipeline takes it."""
    _: KW_ONLY
    text: str
    seed: int
    kv_context: str
    """That the pipeline has opened it with."""
    epoch: int
    """The latest; at first that of the first chunk."""
    max_ahead_frames: int
    """How many frames may be made beyond those reported as shown."""
    min_ahead_frames: int = 0
    """What the pipeline needs; wins over `max_ahead_frames`."""
    start: Any = None
    """The encoded picture that the pipeline has begun with; a reset begins with it again. It is no JSON: a snapshot has
    it among its tensors."""
    image: str = ""
    """SHA-256 of the pixels of that picture; empty where they are not known."""
    steps: int = 0
    """Denoise steps of the chunks that are admitted next."""
    origin: str = ""
    """Why its streams cannot be made of a prompt, a seed and a picture; empty: they can."""
    embeddings: Any = None
    """Given instead of a text, which is "" as long as they hold. A snapshot has them as it has `start`."""
    encoded: tuple[str, Any] | None = None
    """The text that was encoded last, and its conditioning; slow texts are encoded by the prompt queue, which has it
    put here."""
    failure: str = field(default="", init=False)
    """Why it has failed, until the engine ends it."""
    chunk: int = field(default=-1, init=False)
    """The last chunk of which frames have come; -1 before the first. Starts again with a reset."""
    log: ChangeLog = field(default_factory=ChangeLog, init=False)
    """What has steered its stream since that began."""
    _pending: dict[str, tuple[int, Any]] = field(default_factory=dict, init=False)
    """What was accepted and is not applied yet, in order: by kind (prompt, steps, input) its epoch, and what becomes of
    the past, the steps, or the strength."""
    _blend: Blend | None = field(default=None, init=False)
    loras: dict[int, float] = field(default_factory=dict, init=False)
    """Scales of LoRAs, by id, as the latest requests have them."""
    _scales: dict[int, float] = field(default_factory=dict, init=False)
    """As the pipeline was given them last."""
    _fades: dict[int, Fade] = field(default_factory=dict, init=False)
    _given: Any = field(default=None, init=False)
    """The conditioning that the pipeline was given last; None, in a resumed session: that of the text."""
    stream: object = field(default_factory=object, init=False)
    """Stands for its stream: a reset begins another, a rewind does not."""
    catch_up: int | None = field(default=None, init=False)
    """While chunks are made again that nobody sees: the first that is seen."""
    later: list[Any] = field(default_factory=list, init=False)
    """Requests that hold from there on."""
    _held: dict[str, float] = field(default_factory=dict, init=False)
    """The controls that do."""
    _hidden: int = field(default=0, init=False)
    """Frames of chunks before this one are not seen."""
    _timeline: Timeline | None = field(default=None, init=False)
    _waits_at: int | None = field(default=None, init=False)
    """The chunk that is not admitted before the next change of a blend or the timeline, as the pipeline was told."""
    fed: bool = field(default=False, init=False)
    """Whether it has a live input."""
    _applied_epoch: int = field(init=False)
    _oldest_epoch: int = field(init=False)
    _skip_epoch: int = field(init=False)
    """The last prompt's for which frames that wait are to be skipped."""
    _paused: bool = field(default=False, init=False)
    made_frames: int = field(default=0, init=False)
    _shown_frames: int = field(default=0, init=False)
    _controlled: bool = field(default=False, init=False)
    """Whether somebody has steered it by controls."""
    _control_requests: dict[str, int] = field(default_factory=dict, init=False)
    """Those that no frame obeys yet: the number of the change."""
    _epoch_shift: int = field(default=0, init=False)
    """What is added to the pipeline's epochs, so that a stream resumed from a snapshot continues its own."""

    def __post_init__(self) -> None:
        self._applied_epoch = self.epoch - 1
        self._oldest_epoch = self._skip_epoch = self.epoch

    @property
    def frame_credit(self) -> int:
        """Frames that may still be made beyond those shown. In a steered stream they are those that the pipeline
        needs, less what `max_ahead_frames` is short of two chunks: so the next chunk is admitted late."""
        ahead_frames = max(self.max_ahead_frames, self.min_ahead_frames)
        if self._controlled:
            chunk_frames = self._pipeline.info.chunk_frames if self.chunk >= 0 else 0
            late_frames = min(max(0, 2 * chunk_frames - self.max_ahead_frames), chunk_frames)
            ahead_frames = self.min_ahead_frames - late_frames
        return ahead_frames - (0 if self._skips else self.made_frames - self._shown_frames)

    @property
    def _skips(self) -> bool:
        """Whether the frames that wait will be skipped, for a prompt whose first ones are still to come."""
        return self._skip_epoch > max(self._applied_epoch, self._oldest_epoch)

    @property
    def conditioning(self) -> Any:
        """Of its latest text, or what was given instead."""
        if self.embeddings is not None:
            return self.embeddings
        if self.encoded is None or self.encoded[0] != self.text:
            self.encoded = self.text, self._encode(self.text)
        return self.encoded[1]

    def begins(self) -> None:
        """Its stream begins with what holds now: so does its log. Mutates: self."""
        self.stream = object()
        self._given, why = self.conditioning, self.origin or ("video is fed to it" if self.fed else "")
        if (self.embeddings is not None or self.start is not None) and not (self.image and self.text):
            why = "it began with embeddings, or with a picture that is not known"
        self._begin_log(why)

    def _begin_log(self, why: str) -> None:
        """`why`: the reason why its stream cannot be played again; empty: it can. Mutates: self."""
        about = {"steps": self.steps, "kv_context": self.kv_context, "image": self.image}
        self.log = ChangeLog(why, prompt=self.text, seed=self.seed, **about)

    def open(self, notice: str = "", switches: tuple[str, ...] = PROMPT_POLICIES) -> list[Event]:
        """Begin: the pipeline has opened the stream with this session's text, seed and epoch; it can do `switches`."""
        self._set_frame_credit()
        about = notice, switches, self.start is not None, self._named_loras
        return [Opened(self.name, self.epoch, self.text, *about)]

    def saved(self) -> dict[str, Any]:
        """How far it is, as JSON has it, see `SavedStream`; to be called with nothing pending."""
        assert not self.changes, "apply_pending comes first"
        epoch, made, shown = self.epoch - self._epoch_shift, self.made_frames, self._shown_frames
        loras = sorted({*self.loras, *self._pipeline.loras_of(self.slot)})
        return {
            "text": self.text, "epoch": epoch, "made_frames": made, "shown_frames": shown,
            "blending": self._blend is not None,
            "loras": {self.label(lora): self.loras.get(lora) for lora in loras},
        }  # fmt: skip

    def resume_at(self, saved: SavedStream, chunk: int, oldest_epoch: int, epoch: int, paused: bool) -> None:
        """Go on where a session was saved whose stream the pipeline has loaded, and is so far. Mutates: self."""
        self.chunk, self._paused = chunk, paused
        self.epoch = max(saved.epoch, epoch)
        self._oldest_epoch = self._skip_epoch = oldest_epoch
        self.made_frames, self._shown_frames = saved.made_frames, min(saved.shown_frames, saved.made_frames)
        self._begin_log(f"it continues from a snapshot that was taken at chunk {chunk + 1}")

    def catch_up_with(
        self, source: Session, place: KeptPlace, chunk: int, again: bool, encode: Callable[[str], Future[Any]]
    ) -> None:
        """Go on as `source` did from a place of its log, unseen before `chunk`. `again`: instead of `source`, whose
        stream it goes on with, and what is held there holds. Mutates: self."""
        self.log, changes = source.log.back(place, chunk)
        self._timeline = Timeline(changes, 0, encode) if changes else None
        self.catch_up = self._hidden = chunk
        if again:
            self.stream, self._held = source.stream, dict(source.log.held)
            self._control_requests = dict.fromkeys(source._control_requests, 0)  # the first frame that is seen obeys
        self.set_paused(False)
        self._set_frame_credit()
        self._wait()

    def begins_at(self, request: str) -> Event:
        """It has been rewound."""
        return Accepted(self.name, request, self._oldest_epoch, self.text, loras=self._named_loras)

    @property
    def _caught_up(self) -> bool:
        """Whether the next chunk is the first that is seen."""
        return self.catch_up is not None and self.catch_up <= self._pipeline.next_chunk(self.slot)

    def _go_on(self) -> None:
        """What is held now holds from the next chunk on. Mutates: self."""
        self.catch_up = self._timeline = None
        if values := {name: self._held.get(name, 0.0) for name in self.log.held | self._held}:
            self.set_controls(values, "", pressed=False)

    def place(self) -> KeptPlace:
        """Where it is, at rest."""
        return self.log.place(self._pipeline.next_chunk(self.slot), self.stream)

    @property
    def settled(self) -> bool:
        """Whether a snapshot, and its log from there on, have all that it takes to go on from it."""
        waits = self.changes or self._moving or self.fed or self.catch_up is not None
        return not waits and self.log.end is None

    def renumber(self, epoch: int, made_frames: int, shown_frames: int) -> None:
        """Before the first frames: raise the epoch to at least `epoch` and the frame count to at least `made_frames`,
        those of a stream that this one resumes; the next frames bring `Applied`. `made_frames - shown_frames` frames,
        if above 0, count as not shown yet. Mutates: self."""
        self._epoch_shift = max(0, epoch - self.epoch)
        self.epoch += self._epoch_shift
        self._oldest_epoch += self._epoch_shift
        self._applied_epoch = self._oldest_epoch - 1
        self.made_frames = max(self.made_frames, made_frames)
        self._shown_frames = self.made_frames - max(0, made_frames - shown_frames)

    def set_prompt(
        self, text: str, notice: str, request: str, switch: str = "keep", skip: bool = False, over: int = 1,
        along: str = "line",
    ) -> list[Event]:  # fmt: skip
        """Accept a prompt; `apply_pending` gives it to the pipeline, unless a later one comes first. With `switch`
        "reset" the stream restarts with it, at once; with `skip` its first frames need not wait for those that
        were made before them; `over` and `along` as in `SetPrompt`."""
        before = self.conditioning if over > 1 and self._given is None else None
        self.text, self.embeddings = text, None
        if switch == "reset":
            self.reset(None, request)
        else:
            self._change("prompt", Blend(before, over, along, switch, text))
            if skip:
                self._skip_epoch = self.epoch
                self._set_frame_credit()
        return [Accepted(self.name, request, self.epoch, text, notice)]

    def set_steps(self, steps: int, min_ahead_frames: int, request: str) -> list[Event]:
        """Accept a number of steps, for which the pipeline needs `min_ahead_frames`; `apply_pending` gives it to the
        pipeline, unless a later one comes first."""
        self._change("steps", steps)
        self.min_ahead_frames = min_ahead_frames
        self._set_frame_credit()
        return [Accepted(self.name, request, self.epoch, "")]

    def set_lora(self, lora: int, scale: float | None, over: int, request: str) -> list[Event]:
        """Accept a scale of a LoRA that is loaded, or its end; `apply_pending` gives it to the pipeline, unless a later
        one comes first."""
        if scale is None:
            del self.loras[lora]
        else:
            scale = self.loras[lora] = exact_scale(scale)
        self._change(f"lora {lora}", (lora, self.label(lora), scale, over))
        return [Accepted(self.name, request, self.epoch, "", loras=self._named_loras)]

    @property
    def _named_loras(self) -> dict[str, float]:
        return {name: self.loras[lora] for name, lora in self.lora_names.items()}

    @property
    def lora_names(self) -> dict[str, int]:
        """Ids of its LoRAs by name."""
        return {split_label(self.label(lora))[0]: lora for lora in self.loras}

    @property
    def all_loras(self) -> set[int]:
        """Ids of the LoRAs that it has, or its timeline will."""
        to_come = () if self._timeline is None else self._timeline.changes
        return {*self.loras, *(lora_id(each.lora.name) for each in to_come if each.lora is not None)}

    def resume_loras(self, scales: Mapping[int, float | None]) -> None:
        """After `resume_at`: have these LoRAs, where those of the snapshot are at other scales. Mutates: self."""
        self._scales = dict(self._pipeline.sampler.sessions[self.slot].latest_loras)
        self.loras = dict(self._scales)
        for lora, scale in scales.items():
            if scale != self._scales.get(lora):
                self.set_lora(lora, scale, 1, "")

    def label(self, lora: int) -> str:
        """The label of a LoRA that is loaded."""
        return self._pipeline.loras.loaded[lora]

    def set_input(self, strength: float | None, request: str) -> list[Event]:
        """Accept an input, or its strength, or its end; `apply_pending` gives it to the pipeline, unless a later one
        comes first."""
        self._change("input", strength)
        return [Accepted(self.name, request, self.epoch, "")]

    def set_controls(self, values: Mapping[str, float], request: str, pressed: bool = True) -> list[Event]:
        """Give the pipeline controls that are held; no epoch begins with them. `pressed` as in `HeldControls.set`.

        Raises:
            RequestError: the model has no such control, or it cannot have that value.
        """
        change = self._pipeline.set_controls(self.slot, values, pressed)
        self.log.hold(self._pipeline.next_chunk(self.slot), values, pressed)
        if not self._controlled:
            self._controlled = True
            self._set_frame_credit()
        if not request:
            return []
        self._control_requests[request] = change
        if len(self._control_requests) > MOST_CONTROL_REQUESTS:  # while it is paused no chunk obeys them
            del self._control_requests[next(iter(self._control_requests))]
        return [Accepted(self.name, request, self.epoch, "")]

    def _change(self, kind: str, value: Any) -> None:
        """Note what `apply_pending` gives to the pipeline, under the next epoch; the one before that is for a chunk of
        the present blend. Mutates: self."""
        self.epoch += 2 if self._blend or self._fades else 1
        self._pending.pop(kind, None)
        self._pending[kind] = self.epoch, value

    @property
    def changes(self) -> bool:
        """Whether something that was accepted is not applied yet, or the next chunk is another one of a blend."""
        return bool(self._pending) or self._blends

    @property
    def _blends(self) -> bool:
        """Whether the next chunk is another one of a blend, or of a change of a scale."""
        moving = self._moving
        return bool(moving) and any(each.chunk != self._pipeline.next_chunk(self.slot) for each in moving)

    @property
    def _moving(self) -> list[Blend | Fade]:
        """What comes over several chunks."""
        return [*self._fades.values()] if self._blend is None else [self._blend, *self._fades.values()]

    @property
    def due(self) -> bool:
        """Whether `apply_changes` has something to do; until then the pipeline may wait in vain."""
        changes = self.changes or self._due_timeline is not None or self._caught_up
        return changes and not self._pipeline.reruns(self.slot)

    @property
    def _due_timeline(self) -> Timeline | None:
        """The timeline, while the next chunk waits for a change of it."""
        chunk = None if self._timeline is None else self._timeline.chunk
        return None if chunk is None or chunk > self._pipeline.next_chunk(self.slot) else self._timeline

    def apply_changes(self) -> list[Event]:
        """Give the pipeline what holds from the next chunk on: what was accepted, then what the timeline has. Each
        waits until chunks that run once more under the prompt before it have done so, so that it does not matter when
        it comes. Returns the prompts of the timeline.

        Raises:
            StreamdiffError, OSError, RuntimeError, ValueError: a prompt of the timeline could not be encoded.
        """
        events: list[Event] = []
        if self._caught_up:
            self._go_on()
        self.apply_pending(in_order=True)
        while not self._pending and not self._pipeline.reruns(self.slot) and (timeline := self._due_timeline):
            if (taken := timeline.take()) is None:
                break
            events += self._play(*taken)
        self._wait()
        return events

    def _play(self, change: TimedChange, conditioning: Any) -> list[Event]:
        """Carry out a change of the timeline. Mutates: self."""
        events: list[Event] = []
        if change.prompt is not None:
            self.encoded = change.prompt, conditioning
            events += self.set_prompt(change.prompt, "", "", change.switch or "keep", False, change.over, change.along)
        if (own := change.lora) is not None and (own.scale is not None or lora_id(own.name) in self.loras):
            events += self.set_lora(lora_id(own.name), own.scale, own.over, "")
        if change.steps is not None:
            ahead = self._pipeline.min_ahead_frames(steps=change.steps, kv_context=self.kv_context)
            self.set_steps(change.steps, ahead, "")
        for values in (change.controls, change.taps, dict.fromkeys(change.taps, 0.0)):
            if values:
                self.set_controls(values, "")
        self.apply_pending(in_order=True)
        return events

    def set_timeline(
        self, changes: tuple[TimedChange, ...], begin: int | None, encode: Callable[[str], Future[Any]], request: str
    ) -> list[Event]:
        """Play these changes, see `SetTimeline`; `encode` encodes a prompt of theirs ahead. Mutates: self."""
        begin = self._pipeline.next_chunk(self.slot) if begin is None else begin
        self._timeline = Timeline(changes, begin, encode) if changes else None
        self._wait()
        return [Accepted(self.name, request, self.epoch, "", begin=begin)]

    def _wait(self) -> None:
        """Tell the pipeline which chunk waits for the next change. Mutates: self."""
        chunks = [each.chunk + 1 for each in self._moving]
        if self._timeline is not None and self._timeline.chunk is not None:
            chunks.append(self._timeline.chunk)
        if self.catch_up is not None:
            chunks.append(self.catch_up)
        if (chunk := min(chunks, default=None)) != self._waits_at:
            self._waits_at = chunk
            self._pipeline.wait_at(self.slot, chunk)

    def apply_pending(self, in_order: bool = False) -> None:
        """Give the pipeline the latest prompt, steps and input that it does not have yet, in the order of their
        epochs; `in_order`: those that may be given now, see `apply_changes`."""
        renew: int | None = None
        while self._pending:
            if (early := self._pipeline.reruns(self.slot)) and in_order:
                return
            chunk = self._pipeline.next_chunk(self.slot)
            if early:
                self.log.cut(chunk, "a prompt was replaced while the past ran again under it")
            kind = next(iter(self._pending))
            epoch, value = self._pending[kind]
            epoch -= self._epoch_shift
            if kind == "prompt" and self._blend is not None and self._blend.chunk != chunk:
                # Its last prompt is the same, whenever this one has come.
                self._blend_on(epoch - 1)
                continue
            del self._pending[kind]
            renew = epoch if kind.startswith("lora") else None
            if kind == "prompt":
                self._blend = value
                if self._given is not None:
                    value.before = self._given
                how = {"over": value.over, "along": value.along} if value.over > 1 else {}
                self.log.add(chunk, prompt=value.text, switch=value.switch, **how)
                self._blend_on(epoch)
            elif renew is not None:
                lora, label, scale, over = value
                self._fades[lora] = Fade(self._scales.get(lora, 0.0), scale, over)
                self.log.add(chunk, lora={"name": label, "scale": scale, "over": over})
            elif kind == "steps":
                if value != self.steps:
                    self.log.add(chunk, steps=value)
                self.steps = value
                self._pipeline.set_steps(self.slot, value, epoch=epoch)
            else:
                self.fed = value is not None
                self.log.cut(chunk, "video was fed to it from then on")
                self._pipeline.set_input(self.slot, value, epoch=epoch)

        if self._blends:
            self.epoch += renew is None
            self._blend_on(self.epoch - self._epoch_shift if renew is None else renew)
        self._wait()

    def _blend_on(self, epoch: int) -> None:
        """Give the pipeline the conditioning of the next chunk of the blend, and scales of LoRAs. Mutates: self."""
        blend, switch, chunk = self._blend, "keep", self._pipeline.next_chunk(self.slot)
        if blend is not None and blend.chunk != chunk:
            if not blend.share:
                blend.after = self.conditioning
            blend.share += 1
            self._given = blend.after
            if blend.share < blend.over:
                blend.chunk = chunk
                self._given = self._pipeline.blended(blend.before, blend.after, blend.share / blend.over, blend.along)
            else:
                switch, self._blend = blend.switch, None
        self._given = self.conditioning if self._given is None else self._given
        loras = self._faded(chunk)
        self._pipeline.set_conditioning(self.slot, self._given, epoch=epoch, switch=switch, loras=loras)

    def _faded(self, chunk: int) -> dict[int, float]:
        """The scales of LoRAs for `chunk`. Mutates: self."""
        for lora, fade in list(self._fades.items()):
            fade.share += fade.chunk != chunk
            fade.chunk = chunk
            if (scale := fade.scale) is None:
                self._scales.pop(lora, None)
            else:
                self._scales[lora] = scale
            if fade.share >= fade.over:
                del self._fades[lora]
        return dict(self._scales)

    def reset(self, seed: int | None, request: str) -> list[Event]:
        """Restart the stream, with the latest prompt and steps, and from `start`. A paused stream stays paused.

        Frames made so far count as shown: the web process drops those that were not.
        """
        self.seed = self.seed if seed is None else seed
        self.epoch += 1
        self.chunk = -1
        self._oldest_epoch = self.epoch
        self._shown_frames = self.made_frames
        # It begins with what blends and fades lead to.
        self._pending = {kind: each for kind, each in self._pending.items() if kind in ("steps", "input")}
        self._blend, self._hidden = None, 0
        self._fades.clear()
        self._scales = dict(self.loras)
        if self.catch_up is not None:
            self._timeline = self.catch_up = None
        self.apply_pending()
        before, next_chunk = self.log, self._pipeline.next_chunk(self.slot)
        epoch, conditioning = self.epoch - self._epoch_shift, self.conditioning
        how = {"start": self.start, "loras": dict(self._scales)}
        self._pipeline.reset(self.slot, conditioning, seed=self.seed, epoch=epoch, **how)
        self._pipeline.set_paused(self.slot, self._paused)
        self.begins()
        self.log.begin_with(chunk := self._pipeline.next_chunk(self.slot), before, next_chunk)
        for lora, scale in self._scales.items():
            self.log.add(chunk, lora={"name": self.label(lora), "scale": scale})
        if self._timeline is not None:
            self._timeline = replace(self._timeline, begin=0, place=0)
        self._wait()
        self._set_frame_credit()
        return [Accepted(self.name, request, self.epoch, self.text)]

    def set_paused(self, paused: bool) -> None:
        """Pause or go on; saying it twice does nothing."""
        if paused != self._paused:
            self._paused = paused
            self._pipeline.set_paused(self.slot, paused)

    def set_max_ahead(self, frames: int) -> None:
        """Allow at most `frames` frames beyond those shown from now on."""
        self.max_ahead_frames = frames
        self._set_frame_credit()

    def shown(self, frames: int) -> None:
        """So many frames have been shown in all. Never goes back, and never beyond what was made."""
        shown_frames = min(max(frames, self._shown_frames), self.made_frames)
        if shown_frames != self._shown_frames:
            self._shown_frames = shown_frames
            self._set_frame_credit()

    def made(
        self, *, epoch: int, chunk: int, pictures: Pictures, chunk_s: float | None, control: int = 0
    ) -> list[Event]:
        """Number decoded frames, of a chunk whose latest change of controls has number `control`. Those of before the
        last reset are dropped."""
        epoch += self._epoch_shift
        if epoch < self._oldest_epoch:
            return []
        if chunk < self._hidden:
            self.chunk = chunk
            self.log.frames += len(pictures)
            self._set_frame_credit()
            return []
        assert epoch <= self.epoch, f"frames of epoch {epoch}, but the last one asked for is {self.epoch}"
        same_chunk = chunk == self.chunk and epoch == self._applied_epoch
        next_chunk = chunk == self.chunk + 1 and epoch >= self._applied_epoch
        assert same_chunk or next_chunk, (
            f"chunk {chunk} of epoch {epoch} came after chunk {self.chunk} of epoch {self._applied_epoch}"
        )
        events: list[Event] = []
        first = self.made_frames
        if epoch > self._applied_epoch:
            skip = self._skips and epoch >= self._skip_epoch
            if skip:
                self._shown_frames = first
            self._applied_epoch = epoch
            events.append(Applied(self.name, epoch, chunk, first, skip))
        if applied := tuple(name for name, change in self._control_requests.items() if change <= control):
            events.append(ControlsApplied(self.name, applied, chunk, first))
            for name in applied:
                del self._control_requests[name]
        self.chunk = chunk
        self.log.frames += len(pictures)
        self.made_frames += len(pictures)
        self._set_frame_credit()
        events.append(FrameBatch(self.name, epoch, chunk, first, chunk_s, pictures))
        return events

    def _set_frame_credit(self) -> None:
        self._pipeline.set_frame_credit(self.slot, max(0, self.frame_credit))


def possible_switches(pipeline: StreamingPipeline, slot: int) -> tuple[str, ...]:
    """What a new prompt may do to the past of an open session, as the pipeline says; first what the model was made for,
    if that can be."""
    possible, own = [], pipeline.info.switch
    for switch in (own, *(switch for switch in PROMPT_POLICIES if switch != own)):
        with suppress(RequestError):
            pipeline.check_switch(slot, switch)
            possible.append(switch)
    return tuple(possible)
