"""FFmpeg's WHIP sender, as PyAV's FFmpeg has it: `ffmpeg_sender.py URL CERTIFICATE KEY [TOKEN]` sends green until it is
told to end. On a command line it is

    ffmpeg -re -i clip.mp4 -an -c:v libx264 -profile:v baseline -bf 0 -g 30 -f whip \
        -cert_file cert.pem -key_file key.pem -authorization TOKEN http://HOST:8000/whip
"""

from __future__ import annotations

import sys
import time

import av
import numpy as np

WIDTH, HEIGHT, FPS = 320, 240, 30
GREEN = (20, 200, 30)


def main(url: str, certificate: str, key: str, token: str = "") -> None:
    given = {"cert_file": certificate, "key_file": key} | ({"authorization": token} if token else {})
    coding = {"preset": "ultrafast", "tune": "zerolatency", "profile": "baseline", "g": str(FPS), "bf": "0"}
    picture = np.broadcast_to(np.array(GREEN, np.uint8), (HEIGHT, WIDTH, 3)).copy()
    with av.open(url, "w", format="whip", options=given) as container:
        stream = container.add_stream("libx264", rate=FPS, options=coding)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        begin_s, number = time.monotonic(), 0
        while True:
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, number = number, number + 1
            container.mux(stream.encode(frame))
            time.sleep(max(0.0, begin_s + number / FPS - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
