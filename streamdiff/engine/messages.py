"""What travels between the web process and the engine process: commands one way, events the other.

Plain frozen dataclasses with JSON-able fields; pictures and snapshots travel beside the header as raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamdiff.core import PROMPT_POLICIES, ModelInfo
from streamdiff.engine.timeline import CHANGE, TimedChange

Pictures = NDArray[np.uint8]
Data = bytes | memoryview
"""A file's content."""
DEFAULT_STRENGTH = 0.4
"""Noise level of a video input that names none."""


@dataclass(frozen=True)
class StreamCommand:
    """A command to one session, by its name. One with a `request`, the caller's id of it, is answered."""

    session: str


@dataclass(frozen=True)
class StreamEvent:
    """What happened to one session, by its name."""

    session: str


# ---- commands: web process to engine ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Open(StreamCommand):
    """Open `session` (any non-empty id). Answered by `Opened` or `Refused`. None means the engine's default.

    `max_ahead_frames`: how many frames may be made beyond those shown; where the pipeline needs more, it gets more.
    Resume after an engine restart: `epoch`, the lowest to use; `made_frames`, number of the next frame; `shown_frames`,
    frames already shown. `background`: a job, which takes the time that other sessions leave. `image`: the picture that
    the stream begins with and continues from, RGB `[1, H, W, 3]` of the model's size; a reset begins with it again.

    `active`: see `SetActive`. `request`: the caller's id of this request, which `Refused` has.

    `snapshot`, a snapshot's file: the stream continues from there with the snapshot's seed and KV context. The rest is
    what has changed since: a `prompt` ("": none) and `steps` other than the snapshot's hold from the next chunk on;
    `image` is for resets; frames are numbered from `made_frames`, or from the snapshot's number where that is higher;
    epochs go on so that the last, which has all of it, is `epoch` or above. A background session takes none.

    `loras`: scales of LoRAs by name, see `SetLora`; None: none, or those of the snapshot.

    `prompt_embeds` to `strength`: see `features.Features`. A session that has the
    first of them has no prompt, and one that continues from a snapshot has what was saved with it.

    `source`, another session, open here: the stream is a branch of its own, from before chunk `chunk` on, see `Rewind`.
    It has no prompt, seed and KV context of its own; nothing is held, and frames are numbered from `made_frames`.

    `changes`: of a log, which the stream plays from its first chunk on, with prompts as the model was given them;
    `facts`: of the model of that (see `RestingStates.facts`).
    """

    prompt: str
    seed: int = 0
    steps: int | None = None
    kv_context: str | None = None
    max_ahead_frames: int | None = None
    epoch: int = 0
    made_frames: int = 0
    shown_frames: int = 0
    background: bool = False
    active: bool = True
    request: str = ""
    image: Pictures | None = field(default=None, repr=False)
    snapshot: Data | None = field(default=None, repr=False)
    prompt_embeds: Data | None = field(default=None, repr=False)
    image_latents: Data | None = field(default=None, repr=False)
    video_latents: Data | None = field(default=None, repr=False)
    poses: Data | None = field(default=None, repr=False)
    intrinsics: Data | None = field(default=None, repr=False)
    strength: float = DEFAULT_STRENGTH
    loras: dict[str, float] | None = None
    source: str = ""
    chunk: int = 0
    changes: tuple[TimedChange, ...] = ()
    facts: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", _as_objects(self.changes))


def _as_objects(changes: tuple[TimedChange | dict[str, Any], ...]) -> tuple[TimedChange, ...]:
    """Changes as objects, also those that came as JSON."""
    return tuple(CHANGE.validate_python(each) for each in changes)


@dataclass(frozen=True)
class Rewind(StreamCommand):
    """Go back to before chunk `chunk` of the stream, see `Kept`: chunks have the numbers that they had, frame numbers
    go on. Chunks from there on are, under the same changes, those of the first time. What is held now holds from there
    on, and `steps` (None: as it was then); a timeline ends, a paused session goes on. Answered by `Accepted` or
    `Refused`, later by `Applied`; requests that come before the chunk is begun wait for it."""

    chunk: int
    steps: int | None = None
    request: str = ""


@dataclass(frozen=True)
class Save(StreamCommand):
    """Take a snapshot of the session, which continues. Answered by `Saved` or `Refused`. What was accepted before is in
    it, and frames that were made and are not shown yet are not."""

    request: str = ""


@dataclass(frozen=True)
class SetPrompt(StreamCommand):
    """Change the prompt from the next chunk on. Answered by `Accepted` or `Refused`, later by `Applied`.

    `request` is the caller's id of this request, echoed in every answer. Of several prompts waiting, the latest wins.
    Where encoding a text is slow, the answer comes when it is done, and the stream continues meanwhile; so for `Open`,
    and for a `Reset` that comes after. `switch`, one of PROMPT_POLICIES, says what becomes of the past. `skip`: frames
    that are not shown when the first ones under this prompt are there will be skipped, so those are made at once.
    `over`: the prompt comes over so many chunks, whose embeddings are mixed `along` a line or the sphere (`BLENDS`);
    the past is kept meanwhile, and a recache runs after the last.
    """

    prompt: str
    request: str = ""
    switch: str = "keep"
    skip: bool = False
    over: int = 1
    along: str = "line"


@dataclass(frozen=True)
class SetPaused(StreamCommand):
    """Stop making new chunks, or go on. What is made already may still be shown."""

    paused: bool


@dataclass(frozen=True)
class Reset(StreamCommand):
    """Restart the stream at chunk 0; frame numbers go on. `seed`: None keeps the session's; `image`: see `Open`, None
    keeps the session's, unless `no_image`, which removes it."""

    seed: int | None = None
    request: str = ""
    image: Pictures | None = field(default=None, repr=False)
    no_image: bool = False


@dataclass(frozen=True)
class SetSteps(StreamCommand):
    """Make chunks in `steps` denoise steps, one of `Ready.steps_known`, from the next one on that is admitted after
    those begun. Answered by `Accepted` or `Refused`, later by `Applied`; of several waiting, the latest wins."""

    steps: int
    request: str = ""


@dataclass(frozen=True)
class SetLora(StreamCommand):
    """Have the LoRA of a file of `model.lora_dir`, by its name without the suffix, at `scale`, from 0 to 2, from the
    next chunk on; it goes there over so many chunks, from where it is (0 where it is new). None: take it out. Answered
    by `Accepted`, once its file is read, or `Refused`, later by `Applied`."""

    name: str
    scale: float | None = 1.0
    over: int = 1
    request: str = ""


@dataclass(frozen=True)
class SetInput(StreamCommand):
    """Let the next chunks start from the video that `InputFrames` bring, with noise of level `strength`, above 0 and at
    most 1, mixed in; or change the strength. None: the input ends, and the session continues from its text alone.
    Answered by `Accepted` or `Refused`, later by `Applied`; of several waiting, the latest wins."""

    strength: float | None
    request: str = ""


@dataclass(frozen=True)
class SetControls(StreamCommand):
    """Hold the controls named in `values` (`ModelInfo.controls`) at these values from the next chunk on that is
    admitted; others stay as they are. One that is set and back at rest before that holds for the chunk's first latent
    frame. With a `request` answered by `Accepted` or `Refused`, later by `ControlsApplied`. From the first one on the
    session is never further ahead than it must be."""

    values: dict[str, float]
    request: str = ""


@dataclass(frozen=True)
class SetTimeline(StreamCommand):
    """Play these changes instead of those of a timeline before; none: there is no timeline any more. Chunks count from
    `begin` on, and after a reset from the stream's beginning; None: from the next one that is admitted. Answered by
    `Accepted` or `Refused`; each prompt that takes effect sends `Accepted` without a request, and is read after the one
    before it."""

    changes: tuple[TimedChange, ...]
    request: str = ""
    begin: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", _as_objects(self.changes))


@dataclass(frozen=True)
class GetLog(StreamCommand):
    """Tell what has steered the stream since it began. Answered by `Saved` or `Refused`."""

    request: str = ""


@dataclass(frozen=True)
class InputFrames(StreamCommand):
    """The next frames of the session's input, RGB `[n, H, W, 3]` of the model's size, at the rate at which its own are
    shown; the oldest of too many are dropped. Has no answer, but `InputUsed` tells what becomes of them."""

    pictures: Pictures = field(repr=False)


@dataclass(frozen=True)
class SetMaxAhead(StreamCommand):
    """Let at most `frames` frames be made beyond those shown: the pace of viewing has changed. Has no answer."""

    frames: int


@dataclass(frozen=True)
class SetActive(StreamCommand):
    """Whether the session's next chunk is needed; of a new session `Open` says so. An inactive one may be swapped out
    if another needs its memory, and with `swap_out` as soon as none of its chunks is in flight; it is swapped in when
    active. Has no answer, but `Swapped` follows when its location changes."""

    active: bool
    swap_out: bool = False


@dataclass(frozen=True)
class Close(StreamCommand):
    """End the session and free its state. Answered by `Closed`."""


@dataclass(frozen=True)
class Shown(StreamCommand):
    """Back-pressure: the number of this session's frames that have been shown (or skipped) so far."""

    frames: int


@dataclass(frozen=True)
class Shutdown:
    """End the engine process."""


Command = StreamCommand | Shutdown


# ---- events: engine to web process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready(ModelInfo):
    """The engine is warm, and what its model is. `chunk_compute_s`: seconds of work in a chunk, measured while warming
    up (None: not measured); `max_sessions`: sessions of the default kind that fit into memory (None: unknown);
    `max_swapped_sessions`: how many more may be open while swapped out (None: no limit); `loras`: names of those that
    sessions may load."""

    examples: tuple[str, ...] = ()
    suggestions: tuple[tuple[str, ...], ...] = ()
    vocabulary: str = ""
    chunk_compute_s: float | None = None
    max_sessions: int | None = None
    max_swapped_sessions: int | None = 0
    loras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened(StreamEvent):
    """`text` is the prompt as the model was given it; `notice` a friendly remark for the page, or empty. `switches`:
    those of PROMPT_POLICIES that this session's KV context can do. `image`: whether a reset begins with a picture;
    `loras`: scales of LoRAs by name."""

    epoch: int
    text: str
    notice: str = ""
    switches: tuple[str, ...] = PROMPT_POLICIES
    image: bool = False
    loras: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved(StreamEvent):
    """A snapshot of the session after the frames of the events before this, or its log. `data`: the content of its
    file."""

    request: str
    data: Data = field(repr=False)


@dataclass(frozen=True)
class Kept(StreamEvent):
    """Snapshots are kept of the session: it can be rewound to `chunks`, the first of which there is one and those after
    it; the second number is the latest of which there is one. None: it cannot be."""

    chunks: tuple[int, int] | None


@dataclass(frozen=True)
class Accepted(StreamEvent):
    """The request is taken and has its epoch; it will be visible from the chunk that `Applied` names. `text` is the
    prompt as the model is given it, empty where the request says nothing of it; `begin`: the chunk from which a
    timeline counts; `loras` as of `Opened`, None: as before."""

    request: str
    epoch: int
    text: str
    notice: str = ""
    begin: int = 0
    loras: dict[str, float] | None = None


@dataclass(frozen=True)
class Applied(StreamEvent):
    """The first chunk of `epoch` is made; its first frame has number `first_frame`. `skip`: frames before that count as
    shown, and what waits of them is to be skipped."""

    epoch: int
    chunk: int
    first_frame: int
    skip: bool = False


@dataclass(frozen=True)
class ControlsApplied(StreamEvent):
    """The first chunk that has the controls of these `requests` is made; its first frame has number `first_frame`."""

    requests: tuple[str, ...]
    chunk: int
    first_frame: int


@dataclass(frozen=True)
class Refused(StreamEvent):
    """A command that cannot be carried out, with the field at fault. The session, if there is one, continues.

    `code` is a word for programs, see `RequestError`; often empty.
    """

    request: str
    field: str
    reason: str
    code: str = ""


@dataclass(frozen=True)
class FrameBatch(StreamEvent):
    """Consecutive frames of one chunk. `first` numbers frames from 0 over the whole session, across resets.

    `pictures` is uint8 `[count, *P]`, RGB or YUV420 as in `streamdiff.video.pixel_format`. `chunk_s` is the time from
    the chunk's admission until its last frame was decoded, on the last batch of a chunk, else None.
    """

    epoch: int
    chunk: int
    first: int
    chunk_s: float | None
    pictures: Pictures = field(repr=False)


@dataclass(frozen=True)
class InputUsed(StreamEvent):
    """Sent with every finished chunk of a session that has, or had, an input. `level`: noise level of the latest chunk
    that started from it; `used`, `dropped`: frames used, and frames that came too fast, since it began; `fault`: why
    it failed, else empty."""

    level: float | None
    used: int
    dropped: int
    fault: str = ""


@dataclass(frozen=True)
class Swapped(StreamEvent):
    """The session's caches have moved. `place`: where they are now, `device`, `host` (memory) or `disk`."""

    place: str


@dataclass(frozen=True)
class Closed(StreamEvent):
    """The session has ended; no event of it follows. `reason`: what failed; empty where its end was requested."""

    reason: str = ""


@dataclass(frozen=True)
class LoadFigures:
    """Sent with every finished chunk. `chunk_compute_s`: seconds of work per chunk of the default number of steps, of
    late; `occupancy`: share of the time each rank was at work (empty with one rank); `busy_s`: seconds of work of each
    rank since its process began. `forwards`: their number since then with 1 row, 2 rows, and so on; `alone`: the
    reasons why those of one row had no more (see `ForwardCounts`), and `alone_forwards`, how many had each.
    `encodings`: how many texts, pictures and pieces of video were encoded since its process began. `memory_bytes`: what
    the first rank has taken of its GPU, or without one of the machine's memory."""

    chunk_compute_s: float
    occupancy: tuple[float, ...] = ()
    busy_s: tuple[float, ...] = ()
    forwards: tuple[int, ...] = ()
    alone: tuple[str, ...] = ()
    alone_forwards: tuple[int, ...] = ()
    encodings: tuple[int, ...] = (0, 0, 0)
    memory_bytes: int = 0


@dataclass(frozen=True)
class Alive:
    """Heartbeat of the engine loop, at least twice a second. Consumed by `process.ipc`."""


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on; the process ends after this."""

    reason: str


Event = StreamEvent | Ready | LoadFigures | Alive | Failed
