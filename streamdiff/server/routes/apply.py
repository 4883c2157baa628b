"""Carries out a checked control message on a live session, for HTTP requests."""

from __future__ import annotations

from streamdiff.errors import EngineFailure
from streamdiff.server.app_state import AppState
from streamdiff.server.problem import Problem, described
from streamdiff.server.sessions.control import ControlError, ControlMessage
from streamdiff.server.sessions.live_session import LiveSession, SessionEnded
from streamdiff.server.sessions.receipts import Receipt

ANSWER_TIMEOUT_S = 5.0
"""How long a request waits for the engine's answer before it is answered with 202."""


REFUSED = described(
    s400="Not JSON, or no object",
    s401="This takes a token",
    s403="The token is good for watching only, or the page is of another origin",
    s404="No such session",
    s409="The session has another revision than `if_rev`",
    s410="The session has ended",
    s413="The body is too large",
    s415="The body is not application/json",
    s422="A field is wrong, and `field` names it, or the model has refused",
    s429="Too many messages from one address; Retry-After: when to go on",
    s503="The engine has ended or is started again; Retry-After: when to ask again",
    s504="The engine took no command in time; this one may still be carried out",
)


def bad_control(state: AppState, error: ControlError) -> Problem:
    """The answer to a message that is refused. Mutates: the metrics."""
    state.metrics.controls.labels("any", error.code).inc()
    known = {"bad_json": 400, "bad_message": 400, "conflict": 409}
    engine_s = state.manager.engine.retry_after_s
    waits = {"no_capacity": state.manager.retry_after_s(), "restarting": engine_s, "engine_ended": engine_s}
    headers = {"Retry-After": str(waits[error.code])} if error.code in waits else {}
    status = 503 if error.code in waits else known.get(error.code, 422)
    return Problem(status, str(error), headers, code=error.code, field=error.field, id=error.id)


def status_of(receipts: list[Receipt]) -> int:
    """200 when all was accepted, 202 while some is still to come."""
    return 202 if any(receipt.stage == "asked" for receipt in receipts) else 200


async def carry_out(state: AppState, session: LiveSession, control: ControlMessage) -> Receipt:
    """Carry out a message; the receipt says `accepted`, or `asked` when the engine has it and takes its time.

    Raises:
        Problem: it was refused (422, 409), the session has ended (410) or the engine (503, 504).
    """
    try:
        receipt = await session.control_and_wait(control, f"http-{id(control)}", ANSWER_TIMEOUT_S)
    except ControlError as error:
        raise bad_control(state, error) from error
    except TimeoutError as error:
        message = f"The engine took no command for {ANSWER_TIMEOUT_S:g} s; this one may still be carried out."
        raise Problem(504, message, code="engine") from error
    except SessionEnded as error:
        raise Problem(410, "The session has ended.", code="ended") from error
    except EngineFailure as error:
        raise Problem(503, f"The engine stopped: {error}", {"Retry-After": "5"}, code="engine") from error
    if receipt.stage == "refused":
        raise Problem(422, receipt.reason, code="refused", field=receipt.field, id=receipt.id)
    return receipt
