"""Carries out a checked control message on a live session, for HTTP and WebSocket alike."""

from __future__ import annotations

from streamdiff.errors import EngineFailure
from streamdiff.server.app_state import AppState
from streamdiff.server.problem import Problem, described
from streamdiff.server.sessions.control import ControlError, ControlMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import Receipt
from streamdiff.server.sessions.spec import SessionEnded

ANSWER_TIMEOUT_S = 5.0
"""How long a caller waits for the engine's answer before it is told that it comes later."""


_REFUSED = described(
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


def bad_control(services: AppState, error: ControlError) -> Problem:
    """What a message that is not obeyed is answered."""
    services.metrics.controls.labels("any", error.code).inc()
    known = {"bad_json": 400, "bad_message": 400, "conflict": 409}
    waits = {"no_capacity": services.hub.retry_after_s(), "restarting": services.restart_s(), "engine_ended": 5}
    headers = {"Retry-After": str(waits[error.code])} if error.code in waits else {}
    status = 503 if error.code in waits else known.get(error.code, 422)
    return Problem(status, str(error), headers, code=error.code, field=error.field, id=error.id)


def status_of(receipts: list[Receipt]) -> int:
    """200 when all was accepted, 202 while some is still to come."""
    return 202 if any(receipt.stage == "asked" for receipt in receipts) else 200


async def carry_out(services: AppState, view: LiveSession, control: ControlMessage) -> Receipt:
    """Have a message obeyed; the receipt says `accepted`, or `asked` when the engine has it and takes its time.

    Raises:
        Problem: it was refused (422, 409), the session has ended (410) or the engine (503, 504).
    """
    try:
        receipt = await view.control_and_wait(control, f"http-{id(control)}", ANSWER_TIMEOUT_S)
    except ControlError as error:
        raise bad_control(services, error) from error
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
