"""JPEG of the frame on show. Knows nothing about sessions or HTTP."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from streamdiff.server.media.encoder import as_rgb

QUALITY = 92


class Snapshot:
    """Encodes the frame on show once, on a thread, however many ask for it. Lives on the event loop."""

    def __init__(self, picture: Callable[[], NDArray[np.uint8] | None]) -> None:
        """`picture` returns the frame on show, uint8 as in `streamdiff.video.pixel_format`: the same array until the
        next frame is shown."""
        self._picture = picture
        # Weak: a frame keeps the memory of its whole chunk.
        self._encoded: weakref.ref[NDArray[np.uint8]] | None = None
        self._jpeg: asyncio.Task[bytes] | None = None

    async def jpeg(self) -> bytes | None:
        """The JPEG file, or None before the first frame. Mutates: self."""
        picture = self._picture()
        if picture is None:
            return None
        if self._jpeg is None or self._encoded is None or self._encoded() is not picture:
            self._encoded = weakref.ref(picture)
            self._jpeg = asyncio.create_task(asyncio.to_thread(_encode, picture), name="snapshot")
        return await asyncio.shield(self._jpeg)  # one caller that leaves does not take it from the others


def _encode(picture: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(as_rgb(picture)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
