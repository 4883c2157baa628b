"""What travels between the web process and the engine process: commands one way, events the other.

Plain frozen dataclasses with JSON-able fields; the pictures of a `FrameBatch` travel beside its header as raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Pictures = NDArray[np.uint8]
SWITCHES: tuple[str, ...] = ("keep", "recache", "flush", "reset")
"""What a new prompt does to the past: all of it stays as it was cached; it is cached again under the new prompt; only
the oldest chunks that always stay (the sink) are kept; or the stream begins afresh."""


# ---- commands: web process to engine ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Open `session` (any non-empty id). Answered by `Opened` or `Refused`. None means the engine's default.

    `lead_frames`: how many frames may be made beyond those shown; where the pipeline needs more, it gets more.
    Resume after an engine restart: `epoch`, the lowest to use; `made_frames`, number of the next frame; `shown_frames`,
    frames already shown.
    """

    session: str
    prompt: str
    seed: int = 0
    steps: int | None = None
    kv_context: str | None = None
    lead_frames: int | None = None
    epoch: int = 0
    made_frames: int = 0
    shown_frames: int = 0


@dataclass(frozen=True)
class SetPrompt:
    """Change the prompt from the next chunk on. Answered by `Accepted` or `Refused`, later by `Applied`.

    `request` is the caller's id of this request, echoed in every answer. Of several prompts waiting, the latest wins.
    Where encoding a text is slow, the answer comes when it is done, and the stream goes on meanwhile; so for `Open`,
    and for a `Reset` that comes after. `switch`, one of SWITCHES, says what becomes of the past.
    """

    session: str
    prompt: str
    request: str = ""
    switch: str = "keep"


@dataclass(frozen=True)
class Pause:
    """Stop making new chunks. What is made already may still be shown."""

    session: str


@dataclass(frozen=True)
class Resume:
    session: str


@dataclass(frozen=True)
class Reset:
    """Start the stream afresh (chunk 0, frame numbers go on) with `seed`, or the session's present one when None."""

    session: str
    seed: int | None = None
    request: str = ""


@dataclass(frozen=True)
class SetSteps:
    """Make chunks in `steps` denoise steps, one of `Ready.steps_known`, from the next one on that is admitted after
    those begun. Answered by `Accepted` or `Refused`, later by `Applied`; of several waiting, the latest wins."""

    session: str
    steps: int
    request: str = ""


@dataclass(frozen=True)
class SetLead:
    """Let at most `frames` frames be made beyond those shown: the pace of viewing has changed. Has no answer."""

    session: str
    frames: int


@dataclass(frozen=True)
class Close:
    """End the session and free its state. Answered by `Closed`."""

    session: str


@dataclass(frozen=True)
class Shown:
    """Back-pressure: the number of this session's frames that have been shown (or skipped) so far."""

    session: str
    frames: int


@dataclass(frozen=True)
class Shutdown:
    """End the engine process."""


Command = Open | SetPrompt | SetSteps | Pause | Resume | Reset | SetLead | Close | Shown | Shutdown


# ---- events: engine to web process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The engine is warm. Sizes in pixels; `chunk_frames` frames come out of one chunk.

    `steps_known` are the numbers of steps a session may have (none: not told), `work_s` the seconds of work in a chunk
    as measured while warming up, `sessions_fit` how many sessions of the default kind the memory holds; None: unknown.
    """

    model: str
    device: str
    width: int
    height: int
    native_fps: float
    chunk_frames: int
    steps: int
    kv_context: str
    examples: tuple[str, ...] = ()
    vocabulary: str = ""
    steps_known: tuple[int, ...] = ()
    work_s: float | None = None
    sessions_fit: int | None = None


@dataclass(frozen=True)
class Opened:
    """`text` is the prompt as the model was given it; `notice` a friendly remark for the page, or empty. `switches`:
    those of SWITCHES that this session's KV context can do."""

    session: str
    epoch: int
    text: str
    notice: str = ""
    switches: tuple[str, ...] = SWITCHES


@dataclass(frozen=True)
class Accepted:
    """The request is taken and has its epoch; it will be visible from the chunk that `Applied` names. `text` is the
    prompt as the model is given it, empty where the request says nothing of it."""

    session: str
    request: str
    epoch: int
    text: str
    notice: str = ""


@dataclass(frozen=True)
class Applied:
    """The first chunk of `epoch` is made; its first frame has number `first_frame`."""

    session: str
    epoch: int
    chunk: int
    first_frame: int


@dataclass(frozen=True)
class Refused:
    """A command that cannot be carried out, with the field at fault. The session, if there is one, goes on.

    `code` is a word for programs, see `RequestError`; often empty.
    """

    session: str
    request: str
    field: str
    reason: str
    code: str = ""


@dataclass(frozen=True)
class FrameBatch:
    """Consecutive frames of one chunk. `first` numbers frames from 0 over the whole session, across resets.

    `pictures` is uint8 `[count, *P]`, RGB or YUV420 as in `streamdiff.video.pixel_format`. `chunk_s` is the time from
    the chunk's admission until its last frame was decoded, on the last batch of a chunk, else None.
    """

    session: str
    epoch: int
    chunk: int
    first: int
    chunk_s: float | None
    pictures: Pictures = field(repr=False)


@dataclass(frozen=True)
class Closed:
    session: str


@dataclass(frozen=True)
class Measured:
    """Told with every finished chunk: seconds of work in a chunk of late, as for the default number of steps, the share
    of the time each stage was at work (one number per rank; none with one stage), and the seconds of it since its
    process began (one per rank)."""

    work_s: float
    occupancy: tuple[float, ...] = ()
    busy_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Alive:
    """Told twice a second and more: the engine's loop turns. Goes no further than `process.ipc`."""


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on; the process ends after this."""

    reason: str


Event = Ready | Opened | Accepted | Applied | Refused | FrameBatch | Closed | Measured | Alive | Failed
