"""Features that were made elsewhere, as files of a form: looked at before they are read or anything is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from streamdiff.engine.features import NAMES, NOTHING, Features, check_file, check_together, contract, decode
from streamdiff.engine.messages import DEFAULT_STRENGTH, Ready
from streamdiff.errors import RequestError
from streamdiff.server.problem import Problem
from streamdiff.server.routes.dependencies import BINARY
from streamdiff.server.routes.forms import DECODER, Fields

_STRENGTH = "strength"
DESCRIBED: dict[str, dict[str, Any]] = {
    "prompt_embeds": {
        "description": "a safetensors file with `prompt_embeds` [L, D], instead of `prompt`", **BINARY,
    },
    "image_latents": {
        "description": "a safetensors file with `latents` of the first chunk, instead of a picture", **BINARY,
    },
    "video_latents": {
        "description": "a safetensors file with `latents` of chunks, which the stream starts from with noise of level "
        "`strength` mixed in", **BINARY,
    },
}  # fmt: skip
"""The files in the API's description."""


def largest(ready: Ready) -> dict[str, int]:
    """Bytes that the form may have of each file; none where the model takes none, which `looks` says."""
    return {name: contract(name, ready).max_bytes for name in NAMES} if ready.text_shape else {}


def looks(ready: Ready) -> Callable[[str, BinaryIO, int], None]:
    """What looks at the header of a form's file, of which nothing else is read then. It raises Problem 422 for features
    that the model does not take, naming tensor, what it has and what is allowed."""

    def look(name: str, file: BinaryIO, file_bytes: int) -> None:
        if name in NAMES:
            try:
                check_file(name, file, file_bytes, ready)
            except RequestError as error:
                raise _refused(error) from error

    return look


def take_files(fields: Fields | None) -> Fields:
    """The features among the fields of a form. Mutates: fields."""
    return {name: fields.pop(name) for name in NAMES if name in fields} if fields else {}


async def given_features(files: Fields, strength: float | None, ready: Ready, *, prompt: bool, image: bool) -> Features:
    """The features of a request that has a `prompt` and an `image`, or not; all their numbers have been looked at.

    Raises:
        Problem: 422 for one that is no file, that would be ignored beside something else, or is not finite.
    """
    for name, file in files.items():
        if isinstance(file, str):
            raise Problem(422, f"`{name}` is a text; it must be a file of the form.", code="invalid", field=name)
    if strength is not None and "video_latents" not in files:
        why = "`strength` says how much noise is mixed into `video_latents`; give both."
        raise Problem(422, why, code="invalid", field=_STRENGTH)
    if not files:
        return NOTHING
    features = Features(**files, strength=DEFAULT_STRENGTH if strength is None else strength)  # type: ignore[arg-type]
    try:
        check_together(features, prompt=prompt, image=image)
        await asyncio.get_running_loop().run_in_executor(DECODER, partial(decode, features, ready))
    except RequestError as error:
        raise _refused(error) from error
    return features


def _refused(error: RequestError) -> Problem:
    return Problem(422, f"{error}.", code="features", field=error.field)
