"""Requests that wait until their text, or the picture that a stream begins with, is encoded, so that no stream waits
with them.

Both are encoded on a thread of their own, one at a time. The requests of one session stay in order, and of several
prompts in a row only the latest is encoded: those before it are carried out with it. Knows nothing about pipelines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

from streamdiff.engine.features import features_of
from streamdiff.engine.messages import (
    InputFrames,
    Open,
    Pause,
    Pictures,
    Reset,
    Resume,
    SetActive,
    SetInput,
    SetMaxAhead,
    SetPrompt,
    SetSteps,
    Shown,
)

_Setting = SetPrompt | SetSteps | SetInput | SetMaxAhead | SetActive
Request = Open | _Setting | InputFrames | Reset | Pause | Resume | Shown


class Encoded(NamedTuple):
    """What a request's parts have become, as the pipeline takes them: the text's embeddings, the encoded picture, and
    what chunks are to start from; None: it has no such part."""

    conditioning: Any = None
    start: Any = None
    video: Any = None


NOTHING = Encoded()


@dataclass(frozen=True)
class PendingRequest:
    """A request; `text` and `notice` are how its prompt was understood, where it has one.

    Once it may run, `made` has what was encoded (no conditioning where a later prompt supersedes the text), or `error`
    says why encoding failed.
    """

    request: Request
    text: str = ""
    notice: str = ""
    made: Encoded = NOTHING
    error: BaseException | None = None


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
            elif _has_text(self.pending[0]) or begins_with(self.pending[0].request):
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
            while self.pending[0] is not target:
                before.append(self.pending.popleft())
            return [*before, replace(self.pending.popleft(), made=encoding.result())]
        if isinstance(target.request, Open):
            gone, self.pending = self.pending, deque()
            return [replace(pending, error=error) for pending in gone]
        self.pending = deque(pending for pending in self.pending if pending is not target)
        return [replace(target, error=error)]


class PromptQueue:
    """The requests of all sessions that wait. For one thread; `encode`, of texts, `encode_picture`, and `read`, of
    features that stand for one or the other, are called on another."""

    def __init__(
        self, encode: Callable[[str], Any], encode_picture: Callable[[Pictures], Any], read: Callable[[Open], Encoded]
    ) -> None:
        self._encode_text, self._encode_picture, self._read = encode, encode_picture, read
        self.lines: dict[str, _Line] = {}
        """Of the sessions whose requests wait, by name."""
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
        return answers

    def encodings(self) -> list[Future[Any]]:
        """Encodings in progress; when one is done, `poll` returns more."""
        return [line.encoding for line in self.lines.values() if line.encoding is not None]

    def close(self) -> None:
        """Forget everything; a text that is being encoded is not waited for. Mutates: self."""
        self.lines.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pending: PendingRequest) -> Future[Encoded]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        return self._thread.submit(self._encode, pending)

    def _encode(self, pending: PendingRequest) -> Encoded:
        """Embeddings of a request's text, its encoded picture, and what stands for them."""
        request = pending.request
        made = self._read(request) if has_features(request) else NOTHING
        if (picture := picture_of(request)) is not None:
            made = made._replace(start=self._encode_picture(picture[0]))
        if _has_text(pending) and pending.text and made.conditioning is None:
            made = made._replace(conditioning=self._encode_text(pending.text))
        return made


def picture_of(request: Request) -> Pictures | None:
    """The picture `[1, H, W, 3]` that a stream begins with by this request, if any."""
    return request.image if isinstance(request, Open | Reset) else None


def has_features(request: Request) -> TypeGuard[Open]:
    """Whether a session is opened with features that were made elsewhere."""
    return isinstance(request, Open) and bool(features_of(request).names)


def begins_with(request: Request) -> bool:
    """Whether a stream begins with more than a text by this request, which is made ready first."""
    return picture_of(request) is not None or has_features(request)


def _has_text(pending: PendingRequest) -> bool:
    """Whether a text goes with a request; with a reset, where that of the session is still to be encoded."""
    return isinstance(pending.request, Open | SetPrompt) or (isinstance(pending.request, Reset) and bool(pending.text))
