"""How viewers' connections end, whatever they are doing just then, and that nothing of them is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamdiff.serve.session_view import SessionView
from streamdiff.serve.whep import Viewer, Viewers
from tests.serve.conftest import Site, run_scene


@pytest.mark.parametrize("joins", ["before the viewers are sent away", "after it"])
def test_nobody_joins_a_session_that_is_being_ended(joins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The viewer's negotiation begins before the DELETE and ends in the middle of it."""
    negotiate = Viewers._negotiate

    async def scene(site: Site) -> None:
        opened = (await site.http.post("/api/sessions", json={"prompt": "purple"})).json()
        view = site.services.hub.view(opened["id"])
        assert view is not None
        negotiating, ending = asyncio.Event(), asyncio.Event()
        end_viewers = site.services.hub.on_end
        assert end_viewers is not None

        async def slow_negotiate(self: Viewers, viewer: Viewer, *rest: Any) -> str:
            answer = await negotiate(self, viewer, *rest)
            negotiating.set()
            await ending.wait()
            return answer

        monkeypatch.setattr(Viewers, "_negotiate", slow_negotiate)
        peer = await site.offer()
        headers = {"Authorization": f"Bearer {opened['control_token']}"}
        posting = asyncio.create_task(site.post(peer, session=view.session, token=opened["view_token"]))
        await negotiating.wait()

        async def on_end(ended: SessionView, reason: str) -> None:
            if joins.startswith("after"):
                await end_viewers(ended, reason)
            ending.set()
            await posting
            if joins.startswith("before"):
                await end_viewers(ended, reason)

        site.services.hub.on_end = on_end
        assert (await site.http.delete(f"/api/sessions/{view.session}", headers=headers)).status_code == 200
        response = await posting
        assert response.status_code == 410, response.text
        assert response.json()["code"] == "ended"
        assert site.services.viewers.count == 0
        assert view.fanout.codecs == (), "nothing is encoded for a session that has ended"

    run_scene(scene)
