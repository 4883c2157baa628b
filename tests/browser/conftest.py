"""One Chromium for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with chromium() as browser:
        yield browser
