"""Start pictures over HTTP: sent as a file or as base64, fitted, shown first, kept over resets, refused by name."""

from __future__ import annotations

import base64
from dataclasses import replace
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from streamdiff.engine.messages import Open, Reset
from tests.server.conftest import Site, bearer, open_site
from tests.server.scripted import COLOURS, CONTROLS, INFO, SIZE, Painter


def png(colour: str, width: int = 60, height: int = 90) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def is_all(picture: np.ndarray | None, colour: str) -> bool:
    return picture is not None and picture.shape == (1, SIZE, SIZE, 3) and bool((picture == COLOURS[colour]).all())


def sent(site: Site, kind: type[Any], session: str) -> list[Any]:
    return [each for each in site.client.sent if isinstance(each, kind) and each.session == session]


@pytest.mark.slow
async def test_a_session_is_opened_with_a_picture_as_a_file_or_as_base64() -> None:
    async with open_site() as site:
        form = {"prompt": "blue", "seed": "5"}
        by_form = await site.http.post("/api/sessions", data=form, files={"image": ("a.png", png("green"))})
        url = f"data:image/png;base64,{text(png('green'))}"
        by_url = await site.http.post("/api/sessions", json={"prompt": "blue", "image": url, "seed": 5})
        for answer in (by_form, by_url):
            assert answer.status_code == 201, answer.text
            assert answer.json()["image"] is True and answer.json()["seed"] == 5
            [opened] = sent(site, Open, answer.json()["id"])
            assert is_all(opened.image, "green") and opened.seed == 5
        without = await site.http.post("/api/sessions", json={"prompt": "blue"})
        assert without.json()["image"] is False
        assert sent(site, Open, without.json()["id"])[0].image is None


@pytest.mark.slow
async def test_a_change_begins_afresh_with_a_picture_which_later_resets_keep_until_it_is_taken_away() -> None:
    async with open_site() as site:
        opened = (await site.http.post("/api/sessions", json={"prompt": "blue"})).json()
        where, headers = f"/api/sessions/{opened['id']}", bearer(opened["control_token"])

        async def change(**body: Any) -> tuple[dict[str, Any], Reset]:
            answer = await site.http.patch(where, headers=headers, **body)
            assert answer.status_code == 200, answer.text
            assert [each["stage"] for each in answer.json()["receipts"]] == ["accepted"]
            return answer.json()["session"], sent(site, Reset, opened["id"])[-1]

        session, reset = await change(json={"image": text(png("green")), "seed": 9})
        assert session["image"] and session["seed"] == 9
        assert is_all(reset.image, "green") and reset.seed == 9
        session, reset = await change(files={"image": ("a.png", png("red"))}, data={"fit": "contain"})
        assert session["image"] and session["seed"] == 9 and reset.image is not None
        session, reset = await change(json={"seed": 4})
        assert session["image"] and reset.image is None and not reset.no_image
        session, reset = await change(json={"image": ""})
        assert not session["image"] and reset.image is None and reset.no_image


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "an address": ({"json": {"image": "http://127.0.0.1/cat.png"}}, 422, "image"),
    "no base64": ({"json": {"image": "%%%"}}, 422, "image"),
    "no picture": ({"files": {"image": ("a.png", b"GIF89a nothing")}}, 422, "image"),
    "an empty file": ({"files": {"image": ("a.png", b"")}}, 422, "image"),
    "a number": ({"json": {"image": 7}}, 422, "image"),
    "an unknown fit": ({"json": {"image": text(png("red")), "fit": "stretch"}}, 422, "fit"),
    "another file": ({"files": {"video": ("a.mp4", b"...")}}, 422, "video"),
    "two pictures": ({"files": [("image", ("a", png("red"))), ("image", ("b", png("red")))]}, 422, "image"),
    "no form": ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, 400, ""),
    "a large form": ({"files": {"image": ("a.png", bytes(17 * 2**20))}}, 413, ""),
    "a large picture": ({"files": {"image": ("a.png", bytes(11 * 2**20))}}, 422, "image"),
    "a large text": ({"json": {"image": "A" * (15 * 2**20)}}, 413, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["post", "patch"])
async def test_what_cannot_be_used_is_refused_by_name_and_nothing_changes(method: str) -> None:
    async with open_site() as site:
        opened = (await site.http.post("/api/sessions", json={"prompt": "blue"})).json()
        where = "/api/sessions" if method == "post" else f"/api/sessions/{opened['id']}"
        own = bearer(opened["control_token"])
        headers = {} if method == "post" else own
        for name, (request, status, field) in BAD.items():
            more = headers | request.get("headers", {})
            answer: httpx.Response = await site.http.request(method, where, **request | {"headers": more})
            assert answer.status_code == status, f"{name}: {answer.text[:300]}"
            assert answer.json().get("field", "") == field, f"{name}: {answer.text[:300]}"
        assert (await site.http.get(f"/api/sessions/{opened['id']}", headers=own)).json()["rev"] == 0
        assert len(site.state.manager.sessions) == 2, "the default one, and this"
        assert not sent(site, Reset, opened["id"])


async def test_a_server_of_a_world_has_no_session_until_one_is_opened_with_a_picture() -> None:
    world = replace(INFO, begins_with_picture=True, controls=CONTROLS)
    async with open_site(painter=Painter(chunk_s=0.02, info=world)) as site:
        told = (await site.http.get("/api/sessions")).json()
        assert told["sessions"] == [] and told["capacity"]["begins_with_picture"] is True
        assert [each["name"] for each in told["capacity"]["controls"]] == ["move_x", "jump"]
        assert (await site.http.get("/readyz")).status_code == 200
        refused = await site.http.post("/api/sessions", json={"prompt": "blue"})
        assert (refused.status_code, refused.json()["field"]) == (422, "image")
        opened = await site.http.post("/api/sessions", json={"image": text(png("green"))})
        assert opened.status_code == 201 and is_all(sent(site, Open, opened.json()["id"])[0].image, "green")
