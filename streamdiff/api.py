"""streamdiff in your own process, in three verbs: open a stream, steer it, take its frames.

- *open*: `open(prompt)`, or `load(path)` from a file that `save` wrote; `stream` opens one and only yields frames.
- *steer*: `set_prompt`, `set_steps`, `control`, `timeline`, `video` and `feed`, `pause` and `resume`, `rewind`,
  `reset`, at any time, from any thread.
- *frames*: iterate over the session; each frame is a uint8 array, made as fast as it is taken.

    with streamdiff.open("a red circle") as session:
        for number, frame in zip(range(200), session):
            if number == 100:
                session.set_prompt("a blue star")

Runs the engine and the pipeline that `streamdiff serve` runs, without its processes. Knows nothing about viewers or
codecs. torch is imported when a model is loaded, not before.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from copy import copy
from itertools import count, islice
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamdiff.atomic_write import check_parent
from streamdiff.config import RENAMED, ModelConfig
from streamdiff.config_file import load as load_config
from streamdiff.core import PROMPT_POLICIES, Control
from streamdiff.engine import messages
from streamdiff.engine.change_log import Log, read_log
from streamdiff.engine.engine import Engine
from streamdiff.engine.timeline import TimedChange, parse_timeline, placed
from streamdiff.engine.validation import digest_of
from streamdiff.errors import ConfigError, RequestError, StreamdiffError
from streamdiff.heavy_import import heavy_import
from streamdiff.snapshot_header import read_header, read_saved_session
from streamdiff.video.picture import Image, fit_picture

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

Frame = NDArray[np.uint8]
"""One picture: uint8 `[H, W, 3]`, RGB."""

# Chunks made ahead of what is taken: the second is computed while the first is decoded.
_MAX_AHEAD_CHUNKS = 2
_STEP_WAIT_S = 0.05


class StreamSession:
    """An endless stream that can be steered while it is taken; made by `streamdiff.open`.

    Iterate to get frames, uint8 `[H, W, 3]`. A prompt shows after the frames made so far, at most two chunks later.
    While paused, an iteration ends when the frames made so far are taken; after `resume` iterate again. The methods
    may be called from other threads than the one that iterates.
    """

    def __init__(
        self,
        pipeline: StreamingPipeline,
        prompt: str | None,
        *,
        seed: int = 0,
        image: Image | None = None,
        fit: str = "cover",
        rewind_mb: int = 0,
    ) -> None:
        """Take over `pipeline`, and close it at the end. With None nothing is made before `restart`. `image`, `fit` and
        `rewind_mb`: see `streamdiff.open`.

        Raises:
            RequestError: a prompt, seed or picture that cannot be used; the pipeline is closed then.
        """
        info = pipeline.info
        self.fps: float = info.native_fps
        """Frames per second at which the motion looks as intended."""
        self.chunk_frames: int = info.chunk_frames
        """Frames that are made together."""
        self.controls: dict[str, Control] = {each.name: each for each in info.controls}
        """What steers it while it plays, by name; see `control`."""
        self.width: int = info.width
        self.height: int = info.height
        self._engine = Engine(pipeline, _MAX_AHEAD_CHUNKS * info.chunk_frames, rewind_mb * 1_000_000)
        self._lock = threading.Lock()
        self._numbers = count()
        self._streams: dict[str, StreamSession] = {}
        """Those of the engine that are not closed, by name: this one, and its branches."""
        self._clear("stream")
        self.text, self.notice, self._switch = "", "", PROMPT_POLICIES[0]
        if prompt is None:
            return
        try:
            self.restart(prompt, seed=seed, image=image, fit=fit)
        except BaseException:
            self.close()
            raise

    def _clear(self, name: str) -> None:
        """Have no stream yet, and a name. Mutates: self."""
        self._name, self._streams[name] = name, self
        self._frames: deque[Frame] = deque()
        self._made = 0
        self._answers: dict[str, messages.Accepted | messages.Opened | messages.Refused] = {}  # by request
        self._closed = self._is_open = False
        self._failure = ""
        """Why the stream has ended by itself; empty: it has not."""
        self._takes_video = False
        self._video_fault = ""
        """Why the latest video cannot be encoded; empty: it can."""

    def restart(self, prompt: str, *, seed: int = 0, image: Image | None = None, fit: str = "cover") -> None:
        """End the stream, and begin another on the same model: it gives what `streamdiff.open` would. Frames not taken
        yet are dropped.

        Raises:
            RequestError: a prompt, seed or picture that cannot be used; there is no stream then.
        """
        self._restart(messages.Open(self._name, prompt, seed, image=self._fitted(image, fit)))

    def _restart(self, opening: messages.Open) -> None:
        """Raises RequestError as `restart`."""
        if self._is_open:
            self._tell(messages.Close(self._name))
        self._clear(self._name)
        self._ask(opening)

    def replay(self, log: Log | Path | str, image: Image | None = None, fit: str = "cover") -> None:
        """End the stream, and play that of a log again, a file or one that was read: the same latents, on the same
        kind of hardware, on any number of stages. `image`: the start picture, if it had one. Frames not taken yet are
        dropped.

        Raises:
            ConfigError: it is no log, or one that cannot be played again.
            RequestError: it is of another model, size, weights or picture, or asks for what the model cannot do.
        """
        log = log if isinstance(log, Log) else read_log(Path(log))
        header, picture = log.header, self._fitted(image, fit)
        if digest_of(picture) != header.image:
            why = f"the log's stream began {'from another' if header.image else 'without a'} picture; give what it had"
            raise RequestError("image", why, "image")
        begin = self._name, header.prompt, header.seed, header.steps, header.kv_context
        self._restart(messages.Open(*begin, image=picture, changes=log.changes, facts=header.model))
        if self.text != header.prompt:
            why = f"the log's prompt {header.prompt[:60]!r} is read as {self.text[:60]!r} by this version"
            raise RequestError("prompt", why, "model")

    # ---- frames -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        """The next frame; None when there will be none: paused, or closed."""
        while True:
            with self._lock:
                if self._frames:
                    frame = self._frames.popleft()
                    self._engine.handle(messages.Shown(self._name, self._made - len(self._frames)))
                    return frame
                self._check_well()
                if self._closed or not self._engine.busy:
                    return None
                self._take(self._engine.step(_STEP_WAIT_S))

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each rank of a ring was at work; empty with one rank."""
        return self._engine.occupancy()

    # ---- control ------------------------------------------------------------------------------------------------

    def set_prompt(self, text: str, switch: str | None = None, *, over: int = 1, along: str = "line") -> str:
        """Change what is shown, from the next chunk on. Returns the model's remark on the prompt, or "".

        `switch` says what becomes of the past: `keep` it, `recache` it under the new prompt (in one forward; chunk by
        chunk with `recache-causal`), `flush` all but the first chunks, or `reset`: restart. None: what the model
        was made for; the embedded one has `keep`. With `over` it comes over so many chunks, whose embeddings are mixed
        `along` the `line` from the old to the new ones, or the `sphere`.

        Waits until the prompt is encoded; frames may be taken in another thread meanwhile.

        Raises:
            RequestError: a prompt that cannot be used or encoded; the stream continues as before.
        """
        switch = switch or self._switch
        request = f"{'reset' if switch == 'reset' else 'prompt'} {next(self._numbers)}"
        accepted = self._ask(messages.SetPrompt(self._name, text, request, switch, over=over, along=along))
        self.text, self.notice = accepted.text, accepted.notice
        return accepted.notice

    def lora(self, name: str, scale: float | None = 1.0, *, over: int = 1) -> None:
        """Have the LoRA of a file of `lora_dir`, by its name without the suffix, at `scale`, from 0 to 2, from the next
        chunk on; with `over` the scale goes there over so many chunks, from where it is. None: take it out.

        Waits until the file is read; frames may be taken in another thread meanwhile.

        Raises:
            RequestError: no such file, one that does not fit the model, or too many (`max_loras`).
        """
        self._ask(messages.SetLora(self._name, name, scale, over, f"lora {next(self._numbers)}"))

    def set_steps(self, number: int) -> None:
        """Change the denoise steps per chunk, of those the model has: fewer are less work. The first chunk that has
        them is made when those begun are finished; a reset keeps them.

        Raises:
            RequestError: a number that the model does not have, which the error names.
        """
        self._ask(messages.SetSteps(self._name, number, f"steps {next(self._numbers)}"))

    def control(self, **values: float) -> None:
        """Hold controls, by name (`controls`): an axis from -1 to 1, a button 0 or 1; 0 lets it go, others stay as they
        are. The next chunk that is begun obeys, at most one chunk after those that are made: one that is let go before
        holds for that chunk's first latent frame.

        Raises:
            RequestError: a control that the model does not have, or a value that it cannot take.
        """
        self._ask(messages.SetControls(self._name, values, f"control {next(self._numbers)}"))

    def timeline(self, changes: Sequence[Mapping[str, Any] | TimedChange], *, fps: float | None = None) -> None:
        """Let changes come by themselves: a list of `{"at": chunk, ...}` or `{"seconds": s, ...}` (docs/replay.md),
        counted from the next chunk that is begun, and from 0 after a reset; it replaces the one before, and an empty
        one ends it. `fps`: frames that a second has, if not the model's own rate.

        Raises:
            RequestError: no such list, or a change that the model cannot do.
        """
        placed_changes = placed(parse_timeline(list(changes)), self.chunk_frames / (fps or self.fps))
        request = f"timeline {next(self._numbers)}"
        self._ask(messages.SetTimeline(self._name, placed_changes, request, None if self._made else 0))

    def log(self) -> bytes:
        """What has steered the stream since it began or was reset, as a file of JSON lines, which `streamdiff generate
        --replay` plays again; see docs/replay.md."""
        with self._lock:
            self._check_open()
            self._catch_up()
            (saved,) = self._engine.handle(messages.GetLog(self._name))
        assert isinstance(saved, messages.Saved), "it is open"
        return bytes(saved.data)

    def rewind(self, chunk: int) -> None:
        """Go back to before a chunk, from 0 on, of those that are kept (`rewind_mb` of `streamdiff.open`): from there
        on chunks are, under the same changes, those of the first time, to the bit. What is held stays held, a timeline
        ends, frames not taken yet are dropped. Chunks after the snapshot before it are made again meanwhile.

        Raises:
            RequestError: nothing of it is kept, or video feeds it; says which chunks it can be.
        """
        self._ask(messages.Rewind(self._name, chunk, request=f"rewind {next(self._numbers)}"))

    def branch(self, chunk: int) -> StreamSession:
        """Another stream, which goes on from before a chunk as `rewind` would; this one goes on too. Both have the same
        model, and take turns; that is freed when both are closed. Raises RequestError as `rewind`."""
        other = copy(self)
        other._clear(f"stream {next(self._numbers)}")
        try:
            other._ask(messages.Open(other._name, "", source=self._name, chunk=chunk))
        except BaseException:
            del self._streams[other._name]
            raise
        return other

    def reset(self, seed: int | None = None, *, image: Image | EllipsisType | None = ..., fit: str = "cover") -> None:
        """Restart from the latest prompt, with `seed` or the present one; from the picture `image`, with None from
        none, else from the present one if there is one. Frames not taken yet are dropped.

        Raises:
            RequestError: a seed out of range, or a picture that cannot be used.
        """
        begin = None if image is ... else self._fitted(image, fit)
        request = f"reset {next(self._numbers)}"
        self._ask(messages.Reset(self._name, seed, request, begin, no_image=image is None))

    def video(self, strength: float | None = messages.DEFAULT_STRENGTH) -> None:
        """Let the next chunks start from the video that `feed` brings, with noise of level `strength` mixed in: near 0
        the video as it is, at 1 the prompt alone; where the video moves, less. Called again it changes the strength;
        with None the stream continues from its prompt alone.

        A chunk is made when its video is there, so an iteration ends when the frames made so far are taken: feed
        `chunk_frames` more, and iterate again.

        Raises:
            RequestError: a strength out of range, or a model that encodes no video.
        """
        self._video_fault = ""
        self._ask(messages.SetInput(self._name, strength, f"video {next(self._numbers)}"))
        self._takes_video = strength is not None

    def feed(self, frames: Frame, fit: str = "cover") -> None:
        """The next frames of the video, RGB uint8 `[H, W, 3]` or `[n, H, W, 3]` of any size, at the stream's rate. Of
        more than two chunks that wait to be encoded the oldest are dropped, as of a camera.

        Raises:
            RequestError: they are no such frames, or `video` was not called.
            StreamdiffError: those before could not be encoded; `video` begins again.
        """
        if not self._takes_video:
            raise RequestError("input", "the stream takes no video: call video(strength) first, then feed its frames")
        if self._video_fault:
            raise StreamdiffError(f"the video cannot be encoded, and has ended: {self._video_fault}", field="input")
        each = [frames] if np.ndim(frames) < 4 else frames
        fitted = [fit_picture(frame, self.width, self.height, fit) for frame in each]
        if fitted:
            self._tell(messages.InputFrames(self._name, np.stack(fitted)))

    def pause(self) -> None:
        """Make no more chunks; one that is begun is finished after `resume`."""
        self._tell(messages.SetPaused(self._name, True))

    def resume(self) -> None:
        """Continue making chunks after a pause."""
        self._tell(messages.SetPaused(self._name, False))

    def save(self, path: str | Path) -> None:
        """Write the stream's state to a file, from which `streamdiff.load` continues with the next frame to be taken.
        This session continues too. Gigabytes for large models. Raises ConfigError where it cannot be written."""
        check_parent(Path(path))
        with self._lock:
            self._check_open()
            events = self._engine.handle(messages.Save(self._name))
            while not (answers := [each for each in events if isinstance(each, messages.Saved | messages.Refused)]):
                self._take(events)
                events = self._engine.step(_STEP_WAIT_S)
            self._take(events)
            if not isinstance(saved := answers[0], messages.Saved):
                raise RequestError(saved.field, saved.reason)
            from streamdiff.pipeline.snapshot.file import Snapshot

            later = self._made - read_saved_session(saved.data).made_frames
            waiting = list(self._frames)[: len(self._frames) - later]
            Snapshot.from_bytes(saved.data).with_pictures(waiting).write(Path(path))

    def resume_from(self, data: messages.Data) -> None:
        """Open the session from the content of a file that `save` or a server has written.

        Raises:
            ConfigError: it is no snapshot.
            RequestError: it does not fit.
        """
        from streamdiff.pipeline.snapshot.file import Snapshot

        # A server's snapshot has none of the frames that were made and not shown.
        pictures, made = Snapshot.from_bytes(data).pictures, read_saved_session(data).made_frames
        shown = made - len(pictures)
        self._ask(messages.Open(self._name, "", snapshot=data, made_frames=made, shown_frames=shown))
        self._frames.extend(pictures)
        self._made = made
        self._tell(messages.SetPaused(self._name, False))

    def close(self) -> None:
        """End the stream and free the model. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._frames.clear()
            self._take(self._engine.handle(messages.Close(self._name)))
            del self._streams[self._name]
            if not self._streams:
                self._engine.close()

    def __enter__(self) -> StreamSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fitted(self, image: Image | None, fit: str) -> messages.Pictures | None:
        return None if image is None else fit_picture(image, self.width, self.height, fit)[None]

    def _tell(self, command: messages.Command) -> None:
        """Send a command that is carried out at once."""
        with self._lock:
            self._check_open()
            self._take(self._engine.handle(command))

    def _ask(self, command: messages.Command) -> messages.Accepted | messages.Opened:
        """Send a command, and wait for its answer without making frames: how long that takes does not change from which
        chunk on it holds. Raises RequestError where it is refused."""
        self._tell(command)
        while True:
            with self._lock:
                self._check_open()
                self._take(self._engine.settle())
                self._catch_up()
                event = self._answers.pop(getattr(command, "request", ""), None)
                waited_for = self._engine.encodings()
            if isinstance(event, messages.Refused):
                raise RequestError(event.field, event.reason)
            if event is not None:
                return event
            assert waited_for, f"{command} was not answered"
            futures.wait(waited_for, _STEP_WAIT_S, futures.FIRST_COMPLETED)

    def _catch_up(self) -> None:
        """Make the chunks again that nobody sees, after a rewind. Mutates: self, whose lock is held."""
        while self._engine.catches_up(self._name):
            self._take(self._engine.step(_STEP_WAIT_S))

    def _take(self, events: Sequence[messages.Event]) -> None:
        """Apply events of the engine, also those of other streams. Mutates: all, whose lock is held."""
        for event in events:
            if isinstance(event, messages.StreamEvent) and event.session in self._streams:
                self._streams[event.session]._apply(event)

    def _apply(self, event: messages.StreamEvent) -> None:
        """Apply an event: frames, answers, failures. Mutates: self."""
        if isinstance(event, messages.FrameBatch):
            self._frames.extend(event.pictures)
            self._made = event.first + len(event.pictures)
        elif isinstance(event, messages.Closed):
            self._failure, self._is_open = event.reason, False
        elif isinstance(event, messages.InputUsed):
            self._video_fault = event.fault
        elif isinstance(event, messages.Opened):
            self._answers[""], self._failure, self._is_open = event, "", True
            self.text, self.notice, self._switch = event.text, event.notice, event.switches[0]
        elif isinstance(event, messages.Accepted | messages.Refused):
            if event.request or isinstance(event, messages.Refused):
                self._answers[event.request] = event
            if isinstance(event, messages.Accepted):
                self.text = event.text or self.text
                if event.request.startswith(("reset", "rewind")):
                    self._frames.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamdiffError("the stream is closed; open another with streamdiff.open", code="closed")
        self._check_well()

    def _check_well(self) -> None:
        if self._failure:
            raise StreamdiffError(f"the stream failed and has ended: {self._failure}", code="failed")


def load_model(config: ModelConfig) -> StreamingPipeline:
    """The model, loaded and warm; what a `StreamSession` takes over."""
    with heavy_import():
        from streamdiff.pipeline.build import load_pipeline  # imports torch

    return load_pipeline(config)


def model_config(options: Mapping[str, object]) -> ModelConfig:
    """The configuration of keyword arguments: settings of section `model`, where `model` is its `name`.

    Raises:
        ConfigError: a value out of range, or weights that do not tell whose they are.
        TypeError: an option that there is not.
    """
    known = ["model", *(name for name in ModelConfig.model_fields if name != "name")]
    for option in options:
        if option not in known:
            renamed = RENAMED.get(f"model.{option}")
            near = [renamed.removeprefix("model.")] if renamed else difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise TypeError(f"{option} is no option; {hint}")
    names = {f"model.{'name' if option == 'model' else option}": option for option in options}
    from streamdiff.models.resolve import completed

    return completed(load_config(None, {key: options[name] for key, name in names.items()}, names).model)


def open(
    prompt: str, *, seed: int = 0, image: Image | None = None, fit: str = "cover", rewind_mb: int = 0, **options: Any
) -> StreamSession:
    """Load a model and open a stream that can be steered. Use it in a `with`, or call `close`.

    Args:
        prompt: what to show.
        seed: the same seed, prompt, picture and model give the same frames. A prompt that comes later holds from the
            first chunk that is not begun: which one that is depends on how fast chunks are made and decoded.
        image: the picture that the stream begins with and continues from: a file, its bytes, or an array.
        fit: how a picture of other proportions is fitted: `cover` (what is over is cut) or `contain` (black bars).
        rewind_mb: MB of memory for snapshots that `rewind` and `branch` need, one for two to four seconds.
        options: what runs, and where: `model`, as --model of the command line, and the other settings of the section
            `model` by their names (docs/settings.md): `weights`, `steps`, `device`, `stages`, ...

    Raises:
        ConfigError: an option that cannot be used, or an unknown model.
        RequestError: a prompt, seed or picture that cannot be used.
    """
    model = load_model(model_config(options))
    return StreamSession(model, prompt, seed=seed, image=image, fit=fit, rewind_mb=rewind_mb)


def load(path: str | Path, **options: Any) -> StreamSession:
    """Load a model, and continue a stream that `StreamSession.save` wrote: the next frame is the one that was to be
    taken next, and all that follow are those of the stream that was saved, to the bit, on the same hardware. Of a file
    that a server gave the next frame is the one after those that it had made. A stream that was paused continues too.

    Args:
        path: the file.
        options: those that the stream was opened with, see `open`. `stages`, `threads`, `decode_rank` and
            `device` may be others. The file names no model, so that a file from elsewhere has nothing loaded.

    Raises:
        ConfigError: no snapshot, one of another format, or an option that cannot be used.
        RequestError: it is of another model, other weights, another size or window; says which.
    """
    config = model_config(options)
    with heavy_import():
        from streamdiff.pipeline.snapshot.file import mapped  # imports torch
    data = mapped(Path(path))
    read_header(data, str(path))
    session = StreamSession(load_model(config), None)
    try:
        session.resume_from(data)
    except BaseException:
        session.close()
        raise
    return session


def run_worker(**options: Any) -> None:
    """Work for rank 0 as one stage of its ring, until it closes the stream. For ranks 1 and up under torchrun.

    The options are those of `streamdiff.open`, and must be the same on all ranks. The process ends with exit code 1
    when the ring breaks.

    Raises:
        ConfigError: an option that cannot be used, or ranks that are not alike.
    """
    config = model_config(options)
    with heavy_import():
        from streamdiff.pipeline import rank_process  # imports torch

    rank_process.run_worker(config)


def stream(prompt: str, *, seed: int = 0, seconds: float | None = None, **options: Any) -> Iterator[Frame]:
    """Frames of a video of `prompt`, uint8 `[H, W, 3]`: `seconds` of it at the model's own rate, or without end.

    The model is loaded when the first frame is asked for, and freed when the iteration ends. The options and the errors
    are those of `streamdiff.open`.
    """
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"seconds is {seconds}; it must be above 0, or None for an endless stream", field="seconds")
    return _frames(model_config(options), prompt, seed, seconds)


def _frames(config: ModelConfig, prompt: str, seed: int, seconds: float | None) -> Iterator[Frame]:
    with StreamSession(load_model(config), prompt, seed=seed) as session:
        limit = None if seconds is None else max(1, round(seconds * session.fps))
        yield from islice(session, limit)
