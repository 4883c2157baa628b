"""`python -m streamdiff.server.outputs.muxer`: writes encoded packets from standard input to a file or a network
address.

A process of its own per output, since FFmpeg may wait for the other side for as long as it likes, and PyAV holds the
interpreter's lock while it connects. Standard input: one JSON line (`url`, `container`, FFmpeg's `options` of
that, `codec`, `width`, `height`, `fps`), then records of `RECORD` and a payload, until it ends. Standard output: a byte
for each packet that was taken. Exit: 0 everything written, 1 with a line on standard error that says why not.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av

from streamdiff.atomic_write import open_private

RECORD = struct.Struct("<qqI")
"""Presentation time in 90 kHz ticks, 1 for a key frame, length of the payload in bytes."""
_BOX = struct.Struct(">I4s")
TIME_BASE = Fraction(1, 90_000)


def write(source: BinaryIO, reports: BinaryIO) -> None:
    """Write until `source` ends, with a byte to `reports` for each packet that was taken. The first is a key frame. A
    new file is readable by its user only, and is removed where nothing of it can be played.

    Raises:
        av.FFmpegError, OSError: the target cannot be opened or written any more.
    """
    header = json.loads(source.readline())
    if "://" in header["url"]:
        return _write(source, reports, header)
    path = Path(header["url"])
    open_private(path).close()
    try:
        _write(source, reports, header)
    finally:
        if header["container"] == "mp4":
            _cut_off_half(path)
        if not _plays(path):
            path.unlink(missing_ok=True)


def _cut_off_half(path: Path) -> None:
    """Cut an mp4 file off behind its last whole piece, `moof` and `mdat`: on a full disk FFmpeg leaves half of one, and
    at the end of a file without an error. Mutates: the file."""
    with path.open("r+b") as file:
        size, box, whole = os.fstat(file.fileno()).st_size, 0, 0
        while box < size:
            file.seek(box)
            length, kind = _BOX.unpack(file.read(_BOX.size).ljust(_BOX.size, b"\0"))
            box += max(length, _BOX.size)
            if kind != b"moof" and box <= size:
                whole = box
        file.truncate(whole)


def _plays(path: Path) -> bool:
    try:
        with av.open(path) as container:
            return any(packet.size for packet in container.demux(video=0))
    except (av.FFmpegError, IndexError):
        return False


def _write(source: BinaryIO, reports: BinaryIO, header: dict[str, Any]) -> None:
    zero, fps, size = None, header["fps"], {"width": header["width"], "height": header["height"]}
    with av.open(header["url"], "w", format=header["container"], container_options=header["options"]) as file:
        stream = file.add_mux_stream(header["codec"], rate=Fraction(fps).limit_denominator(1001), **size)
        stream.time_base = TIME_BASE
        while len(record := source.read(RECORD.size)) == RECORD.size:
            pts, key, length = RECORD.unpack(record)
            packet = av.Packet(source.read(length))
            zero = pts if zero is None else zero
            packet.pts = packet.dts = pts - zero
            packet.duration = round(90_000 / fps)
            packet.time_base, packet.stream, packet.is_keyframe = TIME_BASE, stream, bool(key)
            file.mux(packet)  # the first one connects
            reports.write(b".")
            reports.flush()


def main() -> int:
    """Write standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the end of the input is the end
    try:
        write(sys.stdin.buffer, sys.stdout.buffer)
    except (av.FFmpegError, OSError, ValueError) as error:
        # Without the address: a stream key is often part of it.
        print(getattr(error, "strerror", None) or error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
