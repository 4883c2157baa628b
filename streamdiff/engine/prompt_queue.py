"""Requests that wait until their text, or the picture that a stream begins with, is encoded, so that no stream waits
with them.

Both are encoded on a thread of their own, one at a time. The requests of one session stay in order, and of several
prompts in a row only the latest is encoded: those before it are carried out with it. A text that is encoded fast, as
those of the embedded model, is not waited for at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from streamdiff.engine.features import decode, features_of
from streamdiff.engine.messages import Open, Pictures, Reset, SetPrompt, StreamCommand
from streamdiff.engine.validation import SESSION_ERRORS, reason_of
from streamdiff.errors import RequestError

if TYPE_CHECKING:
    from streamdiff.pipeline.loras import LoadedLora
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


class Encoded(NamedTuple):
    """What a request's parts have become, as the pipeline takes them: the text's embeddings, or a
    picture's features in their place, the encoded picture, what chunks are to start from, and a camera's way (None: it
    has no such part), and LoRAs that were read."""

    conditioning: Any = None
    start: Any = None
    video: Any = None
    image_features: Any = None
    controls: Any = None
    loras: tuple[LoadedLora, ...] = ()


NOTHING = Encoded()


@dataclass(frozen=True)
class PendingRequest:
    """A request; `text` and `notice` are how its prompt was understood, where it has one that is to be encoded.

    `loras` are labels of those that are to be read. Once it may run, `made` has what was encoded (no conditioning where
    a later prompt supersedes the text), or `error` says why encoding failed.
    """

    request: StreamCommand
    text: str = ""
    notice: str = ""
    made: Encoded = NOTHING
    loras: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def begins_with(self) -> bool:
        """Whether a stream begins with more than a text by this request: a picture, features or LoRAs."""
        image = isinstance(self.request, Open | Reset) and self.request.image is not None
        return bool(image or self.loras or (isinstance(self.request, Open) and features_of(self.request).names))


@dataclass
class _Line:
    """One session's requests, in order; `target` is the one whose text is being encoded."""

    pending: deque[PendingRequest] = field(default_factory=deque)
    target: PendingRequest | None = None
    encoding: Future[Encoded] | None = None

    def poll(self, submit: Callable[[PendingRequest], Future[Encoded]]) -> list[PendingRequest]:
        """Take the requests that may run now. Mutates: self."""
        ready: list[PendingRequest] = []
        while self.pending:
            if self.encoding is not None and not self.encoding.done():
                break
            if self.encoding is not None:
                ready += self._encoded(self.encoding)
            elif self.pending[0].text or self.pending[0].begins_with:
                self.target = self._latest()
                self.encoding = submit(self.target)
            else:
                ready.append(self.pending.popleft())
        return ready

    def _latest(self) -> PendingRequest:
        """The first request, or the last one of several prompts in a row at the front."""
        found = self.pending[0]
        for pending in self.pending:
            if not isinstance(pending.request, SetPrompt):
                break
            found = pending
        return found

    def _encoded(self, encoding: Future[Encoded]) -> list[PendingRequest]:
        target, error = self.target, encoding.exception()
        assert target is not None
        self.target = self.encoding = None
        if error is None:
            before = []
            while self.pending[0] is not target:  # prompts whose text is not to be seen
                earlier = self.pending.popleft()
                assert isinstance(earlier.request, SetPrompt)
                before.append(replace(earlier, request=replace(earlier.request, switch="keep")))
            return [*before, replace(self.pending.popleft(), made=encoding.result())]
        if isinstance(target.request, Open):
            gone, self.pending = self.pending, deque()
            return [replace(pending, error=error) for pending in gone]
        self.pending = deque(pending for pending in self.pending if pending is not target)
        return [replace(target, error=error)]


class PromptQueue:
    """The requests of all sessions that wait. For one thread; slow texts, pictures and features are encoded on
    another."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self.lines: dict[str, _Line] = {}
        """Of the sessions whose requests wait, by name."""
        self.texts_encoded = self.pictures_encoded = 0
        self.ahead: list[Future[Encoded]] = []
        """Texts of timelines that are being encoded."""
        self._thread: ThreadPoolExecutor | None = None

    def __contains__(self, session: str) -> bool:
        return session in self.lines

    def opening(self) -> list[str]:
        """The sessions that wait to be opened."""
        return [name for name, line in self.lines.items() if isinstance(line.pending[0].request, Open)]

    def latest_text(self, session: str) -> str | None:
        """The text of the latest prompt that waits."""
        pending = self.lines[session].pending if session in self.lines else ()
        return next((each.text for each in reversed(pending) if isinstance(each.request, Open | SetPrompt)), None)

    def ask(self, pending: PendingRequest) -> None:
        """Put a request at the end of its session's line. Mutates: self."""
        self.lines.setdefault(pending.request.session, _Line()).pending.append(pending)

    def drop(self, session: str) -> list[PendingRequest]:
        """Forget a session's requests; returns them. Mutates: self."""
        line = self.lines.pop(session, None)
        if line is None:
            return []
        if line.encoding is not None:
            line.encoding.cancel()
        return list(line.pending)

    def poll(self) -> list[PendingRequest]:
        """Take the requests that may run now, each session's in order, and start encoding the next texts. Mutates:
        self."""
        answers = [answer for line in self.lines.values() for answer in line.poll(self._submit)]
        self.lines = {name: line for name, line in self.lines.items() if line.pending}
        self.ahead = [each for each in self.ahead if not each.done()]
        return answers

    def encodings(self) -> list[Future[Any]]:
        """Encodings in progress; when one is done, `poll` returns more, or a timeline continues."""
        return [*self.ahead, *(line.encoding for line in self.lines.values() if line.encoding is not None)]

    def encode_ahead(self, text: str) -> Future[Encoded]:
        """Have a text encoded, for later; at once where that is fast. Mutates: self."""
        self.ahead.append(encoding := self._submit(PendingRequest(StreamCommand(""), text)))
        return encoding

    def close(self) -> None:
        """Forget everything; a text that is being encoded is not waited for. Mutates: self."""
        self.lines.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pending: PendingRequest) -> Future[Encoded]:
        if not self._pipeline.text.slow and not pending.begins_with:
            encoding: Future[Encoded] = Future()
            try:
                encoding.set_result(self._encode(pending))
            except SESSION_ERRORS as error:
                encoding.set_exception(error)
            return encoding
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        return self._thread.submit(self._encode, pending)

    def _encode(self, pending: PendingRequest) -> Encoded:
        """Embeddings of a request's text, its encoded picture, and what stands for them."""
        request, made = pending.request, NOTHING
        if isinstance(request, Open) and (given := features_of(request)).names:
            numbers = decode(given, self._pipeline.info)  # or a RequestError that names features which do not fit
            embeddings, latents, video, motion = map(
                numbers.get, ("prompt_embeds", "image_latents", "video_latents", "motion")
            )
            made = Encoded(*self._pipeline.features_of(embeddings, latents, video, given.strength, motion))
            made = made._replace(controls=self._pipeline.cameras_of(numbers)) if given.poses is not None else made
        if isinstance(request, Open | Reset) and request.image is not None:
            start, features = self._encode_picture(request.image[0])
            made = made._replace(start=start, image_features=features)
            made = made if features is None else made._replace(conditioning=features)
        if pending.loras:
            made = made._replace(loras=tuple(map(self._pipeline.loras.read, pending.loras)))
        if pending.text and made.conditioning is None:
            made = made._replace(conditioning=self.encode_text(pending.text))
        return made

    def encode_text(self, text: str) -> Any:
        """A text's conditioning, as the pipeline takes it. From any thread."""
        self.texts_encoded += 1
        return self._pipeline.text.encode(text)

    def _encode_picture(self, picture: Pictures) -> tuple[Any, Any]:
        """The encoded picture, and its features, if the model takes these. Raises RequestError for a picture that
        the pipeline cannot encode."""
        self.pictures_encoded += 1
        try:
            return self._pipeline.encode_picture(picture), self._pipeline.image_features(picture)
        except RequestError:
            raise
        except SESSION_ERRORS as error:
            raise RequestError("image", f"the picture could not be encoded: {reason_of(error)}") from error
