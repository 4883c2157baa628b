"""Bodies of requests, JSON or forms with files among their fields, read within bounds; pictures and features in them.

A route reads its body when it knows that the caller may send it. FastAPI reads bodies before it asks a dependency, and
its operations take JSON or a form, not both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import Request

from streamdiff.engine.features import NAMES, NOTHING, Features, check_file, check_together, decode, max_bytes
from streamdiff.engine.messages import DEFAULT_STRENGTH, Pictures, Ready
from streamdiff.errors import RequestError
from streamdiff.server.problem import Problem, Unavailable, refused_as
from streamdiff.video import picture

JSON, FORM, URLENCODED = "application/json", "multipart/form-data", "application/x-www-form-urlencoded"
MAX_FORM_BYTES, MAX_TEXT_BYTES = 16 * 1024 * 1024, 64 * 1024
MAX_JSON_BYTES = 4 * (picture.MAX_BYTES // 3 + 1) + 256 * 1024
"""Of a body with a picture as base64."""
DRAIN_BYTES = 1024 * 1024
SNAPSHOT = "snapshot"
_FILES_ONLY = (SNAPSHOT, "log", *NAMES)
_MAX_FIELDS, _MAX_FILES = 64, 4
_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^\s;,]+))', re.IGNORECASE)
_TAIL_BYTES = 1024
# One at a time: a large picture takes some hundred megabytes while it is decoded.
DECODER = ThreadPoolExecutor(1, "pictures")

Files = dict[str, bytes]
"""The content of a form's files, by the field's name."""


def media_type(request: Request) -> str:
    """Content-Type without its parameters, in lower case."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def read_bytes(request: Request, limit_bytes: int) -> bytes:
    """The whole body; nothing beyond the limit is kept, with or without a Content-Length.

    A little more than the limit is read and thrown away: who is still sending when the connection closes never sees
    the answer.

    Raises:
        Problem: 413; 415 for a body that is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"The body has Content-Encoding {encoding[:40]!r}; send it as it is, without one."
        raise Problem(415, message, {"Accept-Encoding": "identity"}, code="encoding")
    body = bytearray()
    length = 0
    async for piece in request.stream():
        length += len(piece)
        if length <= limit_bytes:
            body += piece
        elif length > limit_bytes + DRAIN_BYTES:
            break
    if length > limit_bytes:
        message = f"The body is larger than {limit_bytes // 1024} KiB, the most this address takes."
        raise Problem(413, message, {"Connection": "close"})
    return bytes(body)


async def read_json(request: Request, limit_bytes: int, *, required: bool = True, forms: Sequence[str] = ()) -> Any:
    """The JSON value of a body; an empty one is an object without fields. Where it is not `required`, an empty one has
    no type. `forms` are other types that the address takes.

    Raises:
        Problem: 400 for what is no JSON, 413, 415.
    """
    body = await read_bytes(request, limit_bytes)
    if (body or required) and media_type(request) != JSON:
        raise Problem(415, f"The body is {' or '.join((JSON, *forms))}.", code="media_type")
    try:
        return await asyncio.to_thread(from_json, body or b"{}")  # which may be large: pictures are in it
    except ValueError as error:
        raise Problem(400, f"The body is not JSON: {str(error)[:120]}.", code="bad_json") from error


async def read_fields(
    request: Request,
    status: int,
    files: Mapping[str, int],
    ready: Ready,
    *,
    required: bool = False,
    forms: Sequence[str] = (FORM,),
) -> tuple[Any, Files | None]:
    """The JSON value of a body, see `read_json`, or the texts of a form and its files; None: it is no form.

    A form, of one of the types `forms`, may have `files` alone as files: by name, bytes that each may have beyond
    MAX_FORM_BYTES, which bound all else together. `status` is that of the answer to a wrong field.

    Raises:
        Problem: 400 for what is no JSON or no form, 413, 415, `status`, or 422 for features that `ready` does not take.
    """
    kind = media_type(request)
    if kind in forms:
        return await _read_form(request, kind, status, files, ready)
    return await read_json(request, MAX_JSON_BYTES, required=required, forms=forms[:1]), None


async def _read_form(
    request: Request, kind: str, status: int, files: Mapping[str, int], ready: Ready
) -> tuple[dict[str, str], Files]:
    """The texts and the files of a form, each field given once. Raises Problem as `read_fields`."""
    try:
        if kind == FORM:
            stated = _BOUNDARY.search(request.headers["content-type"])
            end = b"" if stated is None else f"--{stated[1] or stated[2]}--".encode()
            body = _limited(request.stream(), MAX_FORM_BYTES + sum(files.values()), end)
            limits = {"max_files": _MAX_FILES, "max_fields": _MAX_FIELDS}
            form = await MultiPartParser(request.headers, body, max_part_size=MAX_TEXT_BYTES, **limits).parse()
        else:
            form = await FormParser(request.headers, _limited(request.stream(), MAX_FORM_BYTES)).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        why = getattr(error, "message", None) or "it cannot be read"
        raise Problem(400, f"The body is no valid form: {str(why)[:120].rstrip('.')}.", code="bad_form") from error
    except OSError as error:  # files are on the disk while they are read
        raise Unavailable("storage", f"The form cannot be kept: {error.strerror}.", 10, 507) from error
    try:
        texts, found = dict[str, str](), Files()
        uploads = [(name, value.size or 0) for name, value in form.multi_items() if isinstance(value, UploadFile)]
        if sum(nbytes for name, nbytes in uploads if not files.get(name)) > MAX_FORM_BYTES:
            raise _too_large(MAX_FORM_BYTES)
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name not in files:
                why, code = f"`{name[:40]}` is a file, which would be ignored.", "unsupported"
                raise Problem(status, why, code=code, field=name[:40])
            if name in texts or name in found:
                why = f"`{name[:40]}` is given {len(form.getlist(name))} times; give it once."
                raise Problem(status, why, code="invalid", field=name[:40])
            if not isinstance(value, UploadFile):
                if name in files and name in _FILES_ONLY:
                    raise Problem(
                        422, f"`{name}` is a text; it must be a file of the form.", code="invalid", field=name
                    )
                texts[name] = value
                continue
            if name in NAMES:
                with refused_as("features"):  # by its header: nothing else of it is read before
                    check_file(name, value.file, value.size or 0, ready)
            found[name] = await value.read()
        return texts, found
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


def feature_files(ready: Ready) -> dict[str, int]:
    """The features that a form may have as files, see `read_fields`. Where a model takes none `check_file` says so."""
    return {name: max_bytes(name, ready) for name in NAMES}


async def given_features(files: Files, strength: float | None, ready: Ready, *, prompt: bool, image: bool) -> Features:
    """The features among the files of a request that has a `prompt` and an `image`, or not; all their numbers have been
    looked at.

    Raises:
        Problem: 422 for one that would be ignored beside something else, or is not finite.
    """
    given = {name: files[name] for name in NAMES if name in files}
    if strength is not None and "video_latents" not in given:
        why = "`strength` says how much noise is mixed into `video_latents`; give both."
        raise Problem(422, why, code="invalid", field="strength")
    if not given:
        return NOTHING
    features = Features(**given, strength=DEFAULT_STRENGTH if strength is None else strength)
    with refused_as("features"):
        check_together(features, prompt=prompt, image=image)
        await asyncio.get_running_loop().run_in_executor(DECODER, partial(decode, features, ready))
    return features
