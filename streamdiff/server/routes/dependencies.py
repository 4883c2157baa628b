"""FastAPI dependencies of the routes, and what it does not derive for OpenAPI: needed tokens, problems, bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from pydantic import Field

from streamdiff.server.app_state import AppState, state_of
from streamdiff.server.problem import DOCUMENT
from streamdiff.server.routes.bodies import FORM, JSON
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION

_TOKEN = HTTPBearer(
    scheme_name="token",
    description=(
        "The server's view or control token, or one of the session's own. An operation that names `watch` takes any of "
        "them, one that names `steer` a control token. A server that was started without tokens asks for none, but to "
        "steer a session that was opened over this API; one with a control token alone lets everybody watch the "
        "default session. The WebSocket /api/sessions/{session}/control takes the token as this header too, or, since "
        "pages can set none, as the subprotocol `streamdiff.token.TOKEN`, offered beside `streamdiff`. Who has a "
        "session's wheel shows that by the header `Wheel-Token`, and may steer it then with a token good for watching."
    ),
    auto_error=False,
)


SessionId = Annotated[str, Field(description="which session")]
"""A parameter of the path, or else, with a default, of the query."""


def _watchable_session(request: Request, session: SessionId = DEFAULT_SESSION) -> LiveSession:
    return state_of(request).session(request)


def _controllable_session(request: Request, session: SessionId = DEFAULT_SESSION) -> LiveSession:
    return state_of(request).controllable_session(request)


def _steerable_session(request: Request, session: SessionId = DEFAULT_SESSION) -> LiveSession:
    return state_of(request).controllable_session(request, wheel=True)


State = Annotated[AppState, Depends(state_of)]
Watched = Annotated[LiveSession, Depends(_watchable_session)]
"""The session of a request that may watch it, see `AppState.session`."""
Controlled = Annotated[LiveSession, Depends(_controllable_session)]
"""The session of a request that may change it, see `AppState.controllable_session`."""
Steered = Annotated[LiveSession, Depends(_steerable_session)]
"""The same, also for who has its wheel; whether somebody else has it is checked when the request is carried out."""

Responses = dict[int | str, dict[str, Any]]
Body = dict[str, Any]
BINARY = {"type": "string", "format": "binary"}
PROBLEMS = {
    400: "The body or a parameter cannot be read, or lacks what it must have",
    401: "This takes a token",
    403: "The token is good for watching only, or the page is of another origin",
    404: "No such session, viewer, sender, output, video or model",
    406: "The offer's media cannot be taken, or not all of it",
    409: "It is not as the request expects it, or cannot be done now; `detail` says why",
    410: "The session has ended; `reason` says why",
    413: "The body is too large",
    415: "The body is of another type",
    422: "A field is wrong, and `field` names it, or the model has refused",
    429: "Too many requests from one address, or no place is left; Retry-After: when to go on",
    503: "No place, or the engine does not run; `code` says which, and Retry-After when to ask again",
    504: "The engine took no command in time; this one may still be carried out",
    507: "The server's disk takes nothing; Retry-After: when to ask again",
}


def problems(*statuses: int) -> Responses:
    """Problems that an operation may answer, for its `responses`."""
    return {status: {"description": PROBLEMS[status], **DOCUMENT} for status in statuses}


def operation(
    need: Literal["watch", "steer"] | None,
    *statuses: int,
    optional: bool = False,
    body: Body | None = None,
    answers: Responses | None = None,
) -> dict[str, Any]:
    """Arguments of a route's decorator: it takes a token good for `need`, None: no token; `optional`: all are answered,
    who shows a token gets more.

    `statuses` are its problems beside those that follow from `need` and from having a `body`.
    """
    follow = {None: (), "watch": (401,), "steer": (401, 403, 429)}[need] + ((400, 413, 415, 422) if body else ())
    described: dict[str, Any] = {"requestBody": body} if body else {}
    if need is None:
        described["security"] = []
    elif optional:
        described["security"] = [{}]  # is added to the token: either will do
    return {
        "dependencies": [] if need is None else [Security(_TOKEN, scopes=[need])],
        "responses": problems(*follow, *statuses) | (answers or {}),
        "openapi_extra": described,
    }


def body_of(media_type: str, schema: dict[str, Any] | None = None) -> Body:
    """A body for `operation`; without a `schema`, text."""
    return {"required": True, "content": {media_type: {"schema": schema or {"type": "string"}}}}


def json_or_form(schema: dict[str, Any], files: Mapping[str, str], *, required: bool = True) -> Body:
    """A body for `operation`, as JSON or as a form, where fields may be files: by name what they are."""
    as_files = {name: {"description": text, **BINARY} for name, text in files.items()}
    form = schema | {"properties": schema["properties"] | as_files}
    return {"required": required, "content": {JSON: {"schema": schema}, FORM: {"schema": form}}}


FEATURES = {
    "prompt_embeds": "a safetensors file with `prompt_embeds` [L, D], instead of `prompt`",
    "image_latents": "a safetensors file with `latents` of the first chunks, instead of a picture",
    "video_latents": (
        "a safetensors file with `latents` of chunks, which the stream starts from with noise of level `strength` "
        "mixed in"
    ),
    "poses": "NumPy's file with a camera's poses [frames, 4, 4], which move it as far as they go",
    "intrinsics": "NumPy's file with its intrinsics [1 or frames, 4], beside `poses`",
}
"""Files of features, for `json_or_form`."""


def answer(says: str, media_type: str = "", schema: dict[str, Any] | None = None, status: int = 200) -> Responses:
    """An answer that is no JSON, or has no body, for `operation`."""
    content = {"content": {media_type: {"schema": schema or {"type": "string"}}}} if media_type else {}
    return {status: {"description": says, **content}}
