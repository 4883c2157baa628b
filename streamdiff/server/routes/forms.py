"""Forms with files among their fields, read within bounds; pictures are decoded beside the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import Request

from streamdiff.engine.features import NAMES, NOTHING, Features, check_file, check_together, contract, decode
from streamdiff.engine.messages import DEFAULT_STRENGTH, Pictures, Ready
from streamdiff.errors import RequestError
from streamdiff.server.problem import Problem
from streamdiff.server.routes.dependencies import BINARY
from streamdiff.video import picture

FORM, URLENCODED = "multipart/form-data", "application/x-www-form-urlencoded"
MAX_FORM_BYTES, MAX_TEXT_BYTES = 16 * 1024 * 1024, 64 * 1024
MAX_JSON_BYTES = 4 * (picture.MAX_BYTES // 3 + 1) + 256 * 1024
"""Of a body with a picture as base64."""
_MAX_FIELDS, _MAX_FILES = 64, 4
_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^\s;,]+))', re.IGNORECASE)
_TAIL_BYTES = 1024
# One at a time: a large picture takes some hundred megabytes while it is decoded.
DECODER = ThreadPoolExecutor(1, "pictures")

Fields = dict[str, str | bytes]
"""A form's fields, each given once; bytes: of a file."""


async def read_form(
    request: Request,
    kind: str,
    files: Sequence[str],
    refuse: Callable[[str, str, str], Exception],
    features_for: Ready | None = None,
    large: Mapping[str, int] | None = None,
) -> Fields:
    """The fields of a form. Only those named in `files` may be files, and features where there is a model that they are
    for; MAX_FORM_BYTES bound the form, and `large` adds bytes for some files, by name. `refuse(field, why, code)` makes
    the error for a wrong field.

    Raises:
        Problem: 400 for what is no form, 413, 422 for features that the model does not take, or as `refuse`.
    """
    large = dict(large or {})
    if features_for is not None:
        files = (*files, *NAMES)
        if features_for.text_shape:  # else `check_file` says that the model takes none
            large |= {name: contract(name, features_for).max_bytes for name in NAMES}
    try:
        if kind == FORM:
            stated = _BOUNDARY.search(request.headers["content-type"])
            end = b"" if stated is None else f"--{stated[1] or stated[2]}--".encode()
            body = _limited(request.stream(), MAX_FORM_BYTES + sum(large.values()), end)
            limits = {"max_files": _MAX_FILES, "max_fields": _MAX_FIELDS}
            form = await MultiPartParser(request.headers, body, max_part_size=MAX_TEXT_BYTES, **limits).parse()
        else:
            form = await FormParser(request.headers, _limited(request.stream(), MAX_FORM_BYTES)).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        why = getattr(error, "message", None) or "it cannot be read"
        raise Problem(400, f"The body is no valid form: {str(why)[:120].rstrip('.')}.", code="bad_form") from error
    except OSError as error:  # files are on the disk while they are read
        raise Problem(
            507, f"The form cannot be kept: {error.strerror}.", {"Retry-After": "10"}, code="storage"
        ) from error
    try:
        fields: Fields = {}
        uploads = [(name, value.size or 0) for name, value in form.multi_items() if isinstance(value, UploadFile)]
        if sum(nbytes for name, nbytes in uploads if name not in large) > MAX_FORM_BYTES:
            raise _too_large(MAX_FORM_BYTES)
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name not in files:
                raise refuse(name, f"`{name[:40]}` is a file, which would be ignored.", "unsupported")
            if name in fields:
                raise refuse(name, f"`{name[:40]}` is given {len(form.getlist(name))} times; give it once.", "invalid")
            if isinstance(value, UploadFile) and name in NAMES and features_for is not None:
                _check_features(name, value, features_for)
            fields[name] = await value.read() if isinstance(value, UploadFile) else value
        return fields
    finally:
        await form.close()


async def _limited(stream: AsyncIterator[bytes], max_bytes: int, end: bytes = b"") -> AsyncGenerator[bytes, None]:
    """The pieces of a body that has to have `end` near its end: a parser takes one that is cut off for a whole one."""
    length, tail = 0, b""
    async for piece in stream:
        length += len(piece)
        if length > max_bytes:
            raise _too_large(max_bytes)
        tail = (tail + piece)[-_TAIL_BYTES:]
        yield piece
    if end not in tail:
        raise MultiPartException("it is cut off")


def _too_large(max_bytes: int) -> Problem:
    message = f"The form is larger than {max_bytes // 1024 // 1024} MiB, the most this address takes."
    return Problem(413, message, {"Connection": "close"}, code="too_large")


async def given_picture(
    image: str | bytes | None, ready: Ready, fit: str | None, *, status: int, field: str
) -> Pictures | None:
    """A request's picture, its `field`, as the engine takes it: RGB `[1, H, W, 3]` of the model's size. `image` is a
    file's bytes, or base64; None or empty: none.

    Raises:
        Problem: with `status`, naming the field at fault.
    """
    if image is None or image == "":
        return None
    try:
        data = image if isinstance(image, bytes) else picture.from_base64(image)
        sized = partial(picture.decode_picture, data, ready.width, ready.height, fit or "cover")
        return (await asyncio.get_running_loop().run_in_executor(DECODER, sized))[None]
    except RequestError as error:
        raise Problem(status, f"{str(error)[:1].upper()}{str(error)[1:]}.", code="picture", field=field) from error


# ---- features made elsewhere --------------------------------------------------------------------------------------

FEATURE_FILES: dict[str, dict[str, Any]] = {
    name: {"description": f"a safetensors file with {content}", **BINARY}
    for name, content in {
        "prompt_embeds": "`prompt_embeds` [L, D], instead of `prompt`",
        "image_latents": "`latents` of the first chunks, instead of a picture",
        "video_latents": "`latents` of chunks, which the stream starts from with noise of level `strength` mixed in",
    }.items()
}
"""The files in the API's description."""


def _check_features(name: str, upload: UploadFile, ready: Ready) -> None:
    """Look at the header of a form's file, of which nothing else is read. Raises Problem 422 for features that the
    model does not take, naming tensor, what it has and what is allowed."""
    try:
        check_file(name, upload.file, upload.size or 0, ready)
    except RequestError as error:
        raise _refused(error) from error


def take_features(fields: Fields | None) -> Fields:
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
        raise Problem(422, why, code="invalid", field="strength")
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
