"""Firefox watches over WHEP, headless, on a page that reports what comes of it. `tools/interop.sh` installs it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlencode

import pytest

from streamdiff.config import Config, ServeConfig
from tests.interop.test_players import Quiet
from tests.server.conftest import LIMIT_S, open_site

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.firefox]

HERE = Path(__file__).parent
SETTINGS = {
    "app.update.enabled": False,
    "browser.aboutwelcome.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "media.autoplay.default": 0,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}


class Reports(Quiet):
    """Serves the page, and keeps what it reports."""

    def __init__(self, *args: Any, reports: Queue[dict[str, Any]], **options: Any) -> None:
        self._reports = reports
        super().__init__(*args, **options)

    def do_POST(self) -> None:
        self._reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


@contextmanager
def page_origin(reports: Queue[dict[str, Any]]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Reports, directory=str(HERE), reports=reports)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def firefox(profile: Path, url: str) -> Iterator[None]:
    """A headless Firefox with a new profile shows a page."""
    lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in SETTINGS.items())
    (profile / "user.js").write_text("".join(lines))
    words = ("firefox-esr", "--headless", "--no-remote", "--profile", str(profile), url)
    log = (profile / "log").open("w")
    with log, subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"HOME": str(profile)}) as process:
        try:
            yield
        finally:
            process.terminate()


async def test_firefox_watches_whether_it_gathers_first_or_offers_at_once(tmp_path: Path) -> None:
    """Without STUN what it gathers are names (`.local`), which cannot be used, and then their end."""
    reports: Queue[dict[str, Any]] = Queue()

    with page_origin(reports) as origin:
        async with open_site(Config(serve=ServeConfig(cors_origins=[origin]))) as site:
            with firefox(tmp_path, f"{origin}/firefox.html?{urlencode({'whep': f'{site.base}/whep'})}"):
                for gathered in (True, False):
                    for policy in ("balanced", "max-bundle"):
                        report = await asyncio.to_thread(reports.get, timeout=LIMIT_S)
                        assert (report["gathered"], report["bundlePolicy"]) == (gathered, policy)
                        assert report.get("status") == 201 and report["ended"] == gathered, report
                        assert report["frames"] >= 20
            await site.until(lambda: site.state.viewers.count == 0)
