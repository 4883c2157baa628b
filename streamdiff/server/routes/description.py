"""The API's description (OpenAPI): what FastAPI derives from the routes, completed by what `api.yaml` says of them."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from streamdiff.server.problem import OPENAI, PROBLEM_TYPE
from streamdiff.server.routes.bodies import FORM, JSON
from streamdiff.server.routes.schemas import NewOutput, NewSession, SessionChange
from streamdiff.server.routes.videos import NewVideo
from streamdiff.server.sessions.control import message_schema

_BINARY = {"type": "string", "format": "binary"}
_OF_TOKEN, _OF_BODY = {None: (), "watch": (401,), "steer": (401, 403, 429)}, (400, 413, 415, 422)
"""Problems that follow from the token that an operation takes, and from its body."""


def complete(described: dict[str, Any]) -> None:
    """Add to what FastAPI derived. Mutates: described."""
    table = yaml.safe_load((resources.files("streamdiff.server") / "api.yaml").read_text(encoding="utf-8"))
    schemas = {
        name: {"type": "object", "required": list(schema.get("properties", ())), **schema}
        for name, schema in table["schemas"].items()
    }
    described["components"] = {"securitySchemes": {"token": table["token"]}, "schemas": schemas}
    models = {model.__name__: model.model_json_schema() for model in (NewSession, SessionChange, NewOutput, NewVideo)}
    models["ControlMessage"] = message_schema()
    for path, operations in described["paths"].items():
        kind, problem = (JSON, "OpenAIProblem") if path.startswith(OPENAI) else (PROBLEM_TYPE, "Problem")
        content = {kind: {"schema": schemas[problem]}}
        for method, operation in operations.items():
            facts = table["operations"][f"{method.upper()} {path}"]
            need = facts.get("token")
            operation["summary"] = facts["summary"]
            # Where the empty one is added to the token, either will do.
            operation["security"] = [{"token": [need]}, *([{}] if "optional" in facts else [])] if need else []
            statuses = {*_OF_TOKEN[need], *facts.get("problems", ())}
            if "body" in facts:
                operation["requestBody"] = _body(facts["body"], models)
                statuses |= {*_OF_BODY}
            operation["responses"] = {str(status): _answer(each, schemas) for status, each in facts["answers"].items()}
            for status in sorted(statuses):
                operation["responses"][str(status)] = {"description": table["problems"][status], "content": content}


def _body(given: Any, models: dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"required": True, "content": {given: {"schema": {"type": "string"}}}}
    schema = models[given["json"]]
    content = {JSON: {"schema": schema | ({"required": given["needs"]} if "needs" in given else {})}}
    if "files" in given:
        files = {name: {"description": text, **_BINARY} for name, text in given["files"].items()}
        content[FORM] = {"schema": schema | {"properties": schema["properties"] | files}}
    return {"required": "optional" not in given, "content": content}


def _answer(given: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    facts = {"json": given, "says": schemas[given]["description"]} if isinstance(given, str) else given
    described = {"description": facts["says"]}
    if "json" in facts:
        described["content"] = {JSON: {"schema": {"$ref": f"#/components/schemas/{facts['json']}"}}}
    elif "type" in facts:
        described["content"] = {facts["type"]: {"schema": _BINARY if "binary" in facts else {"type": "string"}}}
    return described
