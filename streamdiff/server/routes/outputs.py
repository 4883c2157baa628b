"""`/api/sessions/{session}/outputs`: send a session on, to targets that the operator allows."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from streamdiff.errors import RequestError
from streamdiff.server.problem import Problem, media_type, problem_responses, read_body
from streamdiff.server.routes import schemas
from streamdiff.server.routes.dependencies import JSON, Controlled, State, body, needs
from streamdiff.server.sessions.control import MAX_BODY_BYTES

_PROBLEMS = problem_responses(401, 403, 404, 410, 429, 503)
router = APIRouter(prefix="/api/sessions/{session}/outputs", tags=["sessions"], responses=_PROBLEMS)


@router.get("", summary="Where it is sent", **needs("steer"))
async def list_outputs(state: State, live: Controlled) -> schemas.OutputList:
    found = state.session_outputs.of(live)
    return schemas.OutputList(outputs=[schemas.OutputInfo(id=id, **asdict(status)) for id, status in found.items()])


@router.post(
    "", status_code=201, response_model=schemas.OutputInfo, summary="Record it, or send it on",
    responses=problem_responses(400, 413, 415, s422="The target is not allowed, or cannot be written"),
    **needs("steer", **body(JSON, schemas.NewOutput.model_json_schema())),
)  # fmt: skip
async def add_output(request: Request, state: State, live: Controlled) -> Response:
    given = await read_body(request, MAX_BODY_BYTES)
    if media_type(request) != JSON:
        raise Problem(415, f"The body is {JSON}.")
    wanted = schemas.read(schemas.NewOutput, given)
    try:
        id, status = await state.session_outputs.add(live, wanted.target)
    except RequestError as error:
        raise Problem(422, f"{error}.", code="refused", field=error.field) from error
    made = schemas.OutputInfo(id=id, **asdict(status))
    return JSONResponse(made.model_dump(), 201, {"Location": f"/api/sessions/{live.id}/outputs/{id}"})


@router.delete("/{id}", status_code=204, summary="Send it there no more", **needs("steer"))
async def remove_output(state: State, live: Controlled, id: str) -> Response:
    if not await state.session_outputs.remove(live, id):
        raise Problem(404, "There is no such output.", code="unknown")
    return Response(status_code=204)
