"""Waiting for events and for the end of tasks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def wait_at_most(event: asyncio.Event, limit_s: float | None) -> None:
    """Wait for an event, but no longer than `limit_s`; None: as long as it takes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
