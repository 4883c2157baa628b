"""Checks of requests, and how they are refused."""

from __future__ import annotations

from typing import Any

from streamdiff.engine.messages import Command, Open, Pictures, Refused, Reset, SetPrompt, SetSteps, Shutdown
from streamdiff.engine.pipeline_api import Pipeline
from streamdiff.engine.prompt_queue import PendingRequest
from streamdiff.errors import RequestError, StreamdiffError
from streamdiff.pipeline.output import ModelInfo

MAX_PROMPT_CHARACTERS = 2000
MAX_SEED = 2**31 - 1

# What can go wrong with one text or picture (memory, files, numbers), and ends nothing else. Others are faults of a
# program.
TEXT_ERRORS = (StreamdiffError, OSError, RuntimeError, ValueError, MemoryError)


def check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise RequestError("prompt", "the prompt is empty; describe what to show")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            "prompt",
            f"the prompt has {len(prompt):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are read. Shorten it.",
        )


def check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise RequestError("seed", f"the seed is {seed}; it must be a whole number from 0 to {MAX_SEED}")


def check_picture(image: Pictures | None, info: ModelInfo) -> None:
    """A start picture has the model's size: whoever sends it has fitted it."""
    if image is not None and image.shape != (1, info.height, info.width, 3):
        raise RequestError(
            "image",
            f"the picture is of shape {list(image.shape)}; {info.model} takes [1, {info.height}, {info.width}, 3]",
        )


def encode_picture(pipeline: Pipeline, picture: Pictures) -> Any:
    """Raises RequestError for a picture that the pipeline cannot encode."""
    try:
        return pipeline.encode_picture(picture)
    except RequestError:
        raise
    except TEXT_ERRORS as error:
        what = str(error) if isinstance(error, StreamdiffError) else f"{type(error).__name__}: {error}"
        raise RequestError("image", f"the picture could not be encoded: {what}") from error


def expects_answer(pending: PendingRequest) -> bool:
    """Whether the request is of a kind that is answered."""
    return isinstance(pending.request, Open | SetPrompt | SetSteps | Reset)


def refused(command: Command, error: RequestError) -> Refused:
    session = "" if isinstance(command, Shutdown) else command.session
    request = command.request if isinstance(command, SetPrompt | SetSteps | Reset) else ""
    return Refused(session, request, error.field, str(error), error.code)


def bad_value(error: ValueError, field: str) -> RequestError:
    """What the pipeline cannot run, as what was wrong with the request: `field`, unless the error knows better."""
    return error if isinstance(error, RequestError) else RequestError(field, str(error))
