"""Tokens and what they are good for; read from files, or refused with words that help."""

from __future__ import annotations

import base64
import hmac
import time
from pathlib import Path

import pytest
from aiortc import RTCSessionDescription

from streamdiff.config import ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server.auth import Role, Tokens, link_role, read_tokens, role_of
from tests.server.conftest import CONTROL as SITE_CONTROL
from tests.server.conftest import bearer, locked, open_site

VIEW, CONTROL, OWN_VIEW, OWN_CONTROL = (f"{name}-token-of-some-length" for name in ("v", "c", "ov", "oc"))
OWN = Tokens(OWN_VIEW, OWN_CONTROL)
NOBODY, VIEWER, CONTROLLER = Role


@pytest.mark.parametrize(
    ("server", "session", "roles"),
    [
        # no token, view, control, the session's view, the session's control, a wrong one, an empty one
        (Tokens(), None, (CONTROLLER, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY)),
        (Tokens(), OWN, (VIEWER, NOBODY, NOBODY, VIEWER, CONTROLLER, NOBODY, NOBODY)),
        (Tokens(None, CONTROL), None, (VIEWER, NOBODY, CONTROLLER, NOBODY, NOBODY, NOBODY, NOBODY)),
        (Tokens(None, CONTROL), OWN, (NOBODY, NOBODY, CONTROLLER, VIEWER, CONTROLLER, NOBODY, NOBODY)),
        (Tokens(VIEW, CONTROL), None, (NOBODY, VIEWER, CONTROLLER, NOBODY, NOBODY, NOBODY, NOBODY)),
        (Tokens(VIEW, CONTROL), OWN, (NOBODY, VIEWER, CONTROLLER, VIEWER, CONTROLLER, NOBODY, NOBODY)),
    ],
)
def test_what_each_token_is_good_for(server: Tokens, session: Tokens | None, roles: tuple[Role, ...]) -> None:
    shown = (None, VIEW, CONTROL, OWN_VIEW, OWN_CONTROL, "wrong\ud800\N{SNOWMAN}", "")
    assert tuple(role_of(token, server, session) for token in shown) == roles


def signed(session: str, expiry: int, key: str) -> str:
    """A link as docs/serving.md has one made."""
    return f"{expiry}.{hmac.new(key.encode(), f'view {session} {expiry}'.encode(), 'sha256').hexdigest()}"


def test_a_link_lets_watch_its_session_until_it_expires() -> None:
    signers = (Tokens(VIEW, CONTROL), OWN)
    for key in (CONTROL, OWN_CONTROL):
        link = signed("s-1", 100, key)
        assert link_role(link, "s-1", 99.9, signers) is VIEWER
        assert link_role(link, "s-1", 100.0, signers) is NOBODY
        assert link_role(link, "s-2", 0.0, signers) is NOBODY
        assert link_role(link, "s-1", 0.0, (Tokens(VIEW), Tokens())) is NOBODY
        assert link_role(f"9{link}", "s-1", 0.0, signers) is NOBODY
    strange = ("100.", "100", "", ".", "\N{SNOWMAN}", "100.\ud800", "9" * 5000, "-1.0", "\N{ARABIC-INDIC DIGIT ONE}.0")
    for wrong in (signed("s-1", 100, VIEW), *strange):
        assert link_role(wrong, "s-1", 0.0, signers) is NOBODY


@pytest.mark.slow
async def test_a_link_shows_a_stream_and_a_picture_where_links_are_taken(tmp_path: Path) -> None:
    expiry = round(time.time()) + 600
    link = {"token": signed("default", expiry, SITE_CONTROL)}
    async with open_site(locked(tmp_path, view_links=True)) as site:
        peer = await site.offer()
        sdp = {"Content-Type": "application/sdp"}
        answer = await site.http.post("/whep", params=link, content=peer.pc.localDescription.sdp, headers=sdp)
        await peer.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        await peer.frame()
        assert (await peer.message({"type": "hello"}))["role"] == "viewer"
        assert (await site.http.get("/frame.jpg", params=link)).status_code == 200
        opened = (await site.http.post("/api/sessions", json={}, headers=bearer(SITE_CONTROL))).json()
        other = f"/api/sessions/{opened['id']}"
        own = {"token": signed(opened["id"], expiry, opened["control_token"])}
        assert (await site.http.get(other, params=own)).status_code == 200
        for refused in (
            await site.http.get("/frame.jpg", params={"token": signed("default", 1, SITE_CONTROL)}),
            await site.http.get("/frame.jpg", params=own),
            await site.http.get(other, params=link),
            await site.http.post("/api/control", params=link, json={"type": "pause", "id": 1}),
            await site.http.patch(other, params=own, json={"fps": 10}),
            await site.http.post("/api/sessions", params=link, json={}),
        ):
            assert (refused.status_code, refused.json()["code"]) == (401, "token")
        listed = (await site.http.get("/api/sessions", params=link)).json()
        assert opened["id"] not in str(listed), listed
    async with open_site(locked(tmp_path)) as site:
        assert (await site.http.get("/frame.jpg", params=link)).status_code == 401


def test_tokens_are_read_from_files_and_not_printed(tmp_path: Path) -> None:
    (tmp_path / "v").write_text(VIEW + "\n")
    (tmp_path / "c").write_bytes(b"\xef\xbb\xbf" + CONTROL.encode() + b"\r\n")  # as Windows' editors write it
    config = ServeConfig(view_token_file=str(tmp_path / "v"), control_token_file=str(tmp_path / "c"))
    tokens = read_tokens(config)
    assert tokens == Tokens(VIEW, CONTROL)
    assert VIEW not in f"{config!r} {tokens!r} {config.model_dump_json()}"
    assert read_tokens(ServeConfig()) == Tokens()
    for token in ("!#$%&'*+-.^_`|~09AZaz", Tokens.fresh().view):  # what is a subprotocol's token is one here
        (tmp_path / "c").write_text(f"{token}\n")
        assert read_tokens(config).control == token


UNUSABLE = ["short", "", "two words of some length", "two-lines-of\nsome-length", "ü" * 20, "\udcff" * 20]
UNUSABLE += [base64.b64encode(b"\xff" * 32).decode(), "a(token)with-odd-signs", "a\ttoken-with-a-tab-in-it"]


@pytest.mark.parametrize("content", UNUSABLE)
def test_a_token_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_tokens(ServeConfig(control_token_file=str(path)))
    assert caught.value.field == "serve.control_token_file"
    assert str(path) in str(caught.value) and (not content or content not in str(caught.value))


def test_a_file_that_is_not_there_and_a_view_token_alone(tmp_path: Path) -> None:
    for name in ("control_token_file", "view_token_file"):
        with pytest.raises(ConfigError) as caught:
            read_tokens(ServeConfig(**{name: str(tmp_path / "nothing")}))
        assert caught.value.field == f"serve.{name}"


def test_fresh_tokens_are_long_and_all_different() -> None:
    made = {token for _ in range(20) for token in (lambda pair: (pair.view, pair.control))(Tokens.fresh())}
    assert len(made) == 40 and all(token is not None and len(token) >= 32 for token in made)
