"""Checks of requests, and how they are refused."""

from __future__ import annotations

import hashlib

from streamdiff.core import MAX_LORA_SCALE, ModelInfo
from streamdiff.engine.features import check_together, features_of
from streamdiff.engine.messages import Command, Open, Pictures, Refused, Reset, SetLora, SetPrompt, Shutdown
from streamdiff.engine.timeline import BLENDS, MAX_BLEND_CHUNKS
from streamdiff.errors import EngineFailure, RequestError, StreamdiffError

SESSION_ERRORS = (StreamdiffError, OSError, RuntimeError, ValueError, MemoryError)
"""Errors of one session's text, picture or memory, which end that session only. Others are bugs and end the engine."""
MAX_PROMPT_CHARACTERS = 2000
MAX_SEED = 2**31 - 1


def check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise RequestError("prompt", "the prompt is empty; describe what to show")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise RequestError("prompt", f"the prompt is {prompt[:60]!r}, which is no UTF-8 text; send it as UTF-8")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            "prompt",
            f"the prompt has {len(prompt):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are read. Shorten it.",
        )


def _check_over(over: int) -> None:
    if not 1 <= over <= MAX_BLEND_CHUNKS:
        raise RequestError("over", f"over is {over}; a change comes over 1 to {MAX_BLEND_CHUNKS} chunks")


def check_blend(command: SetPrompt) -> None:
    """Raises RequestError unless a prompt can come over so many chunks."""
    _check_over(command.over)
    if command.along not in BLENDS:
        raise RequestError("along", f"along is {command.along!r}; it can be {' or '.join(BLENDS)}")
    if command.over > 1 and command.switch in ("flush", "reset"):
        raise RequestError(
            "over", f"a prompt that comes over {command.over} chunks keeps the past; `switch` is {command.switch}"
        )


def check_lora(command: SetLora) -> None:
    """Raises RequestError unless the scale is in range, and the number of chunks over which it comes."""
    if command.scale is not None and not 0 <= command.scale <= MAX_LORA_SCALE:
        why = f"scale is {command.scale}; a LoRA has one from 0 to {MAX_LORA_SCALE:g}"
        raise RequestError("scale", why, "out_of_range")
    _check_over(command.over)


def check_open(command: Open, info: ModelInfo) -> None:
    if not command.session:
        raise RequestError("session", "the session has no id; give any non-empty text")
    features = features_of(command)
    check_together(features, prompt=bool(command.prompt), image=command.image is not None)
    if features.names and command.snapshot is not None:
        raise RequestError(features.names[0], "a session resumed from a snapshot keeps what was saved with it")
    if info.begins_with_picture and command.image is None and command.snapshot is None and not command.source:
        raise RequestError("image", f"{info.model} begins with a picture: give one as image (--image FILE)")
    check_begin(command, info)


def check_begin(command: Open | Reset, info: ModelInfo) -> None:
    """Raises RequestError unless the seed is in range and the picture, if any, `[1, H, W, 3]` of the model's size."""
    seed, image = command.seed, command.image
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise RequestError("seed", f"the seed is {seed}; it must be a whole number from 0 to {MAX_SEED}")
    if info.begins_with_picture and isinstance(command, Reset) and command.no_image:
        raise RequestError("image", f"{info.model} begins with a picture; give another one, or keep this one")
    if image is not None and image.shape != (1, info.height, info.width, 3):
        raise RequestError(
            "image",
            f"the picture is of shape {list(image.shape)}; {info.model} takes [1, {info.height}, {info.width}, 3]",
        )


def digest_of(image: Pictures | None) -> str:
    """SHA-256 of a picture's pixels; "" for none."""
    return "" if image is None else hashlib.sha256(image.tobytes()).hexdigest()


def is_answered(command: Command) -> bool:
    """Whether a command is of a kind that is answered: it has the caller's id for that."""
    return hasattr(command, "request")


def refused(command: Command, error: RequestError) -> Refused:
    session = "" if isinstance(command, Shutdown) else command.session
    return Refused(session, getattr(command, "request", ""), error.field, str(error), error.code)


def closed_before(command: Command) -> Refused:
    """The answer to a command whose session has ended meanwhile."""
    assert not isinstance(command, Shutdown)
    return refused(command, RequestError("session", f"session {command.session!r} was closed before this was done"))


def bad_value(error: Exception, field: str) -> RequestError:
    """A pipeline's error as a RequestError, which names `field` unless it is one already. An EngineFailure is raised
    again."""
    if isinstance(error, EngineFailure):
        raise error
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(field, str(error))
    code = "memory" if "Memory" in type(error).__name__ else ""  # Python's own, or torch's
    return RequestError(field, f"it could not be opened: {reason_of(error)}", code)


def reason_of(error: BaseException) -> str:
    """An error as a reason, for people."""
    return str(error) if isinstance(error, StreamdiffError) else f"{type(error).__name__}: {error}"
