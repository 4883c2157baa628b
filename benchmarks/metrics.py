"""The figures that benchmarks of speed write: their names, units, and which direction is better. One place.

`benchmarks/README.md` says the same to people; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["more", "less"]


@dataclass(frozen=True)
class Metric:
    """`better` is the direction that a comparison calls an improvement."""

    unit: str
    better: Better
    meaning: str


BUFFERS_S = (0.0, 0.5, 1.0)


def buffer_name(buffer_s: float) -> str:
    """`0`, `0.5` and `1` of a start buffer, as the names of figures have it."""
    return f"{buffer_s:g}"


METRICS: dict[str, Metric] = {
    "fps": Metric(
        "frames/s", "more", "pixel frames handed out per second in steady state, decode included; never latent frames"
    ),
    "ttff_s": Metric(
        "s", "less", "from the request for a stream to its first decoded frame, median; engine warm, text included"
    ),
    "ttff_worst_s": Metric("s", "less", "the same, the slowest stream"),
    "second_chunk_s": Metric("s", "less", "from the request to the first frame of the second chunk, median"),
    "chunk_p50_s": Metric("s", "less", "from a chunk's admission to its last decoded frame, steady state, median"),
    "chunk_p95_s": Metric("s", "less", "the same, 95th percentile"),
    "chunk_p99_s": Metric("s", "less", "the same, 99th percentile"),
    "control_p50_s": Metric(
        "s",
        "less",
        "from a prompt in mid-stream to the first decoded frame made under it, median; viewers' buffers out",
    ),
    "control_worst_s": Metric("s", "less", "the same, the slowest"),
    **{
        f"stalls_{buffer_name(buffer_s)}": Metric(
            "count",
            "less",
            f"times that a viewer who starts {buffer_name(buffer_s)} s after the first frame waits for a frame, from "
            "the stream's start, at the playback rate",
        )
        for buffer_s in BUFFERS_S
    },
    **{
        f"stalled_{buffer_name(buffer_s)}_s": Metric("s", "less", "how long that viewer waits in all")
        for buffer_s in BUFFERS_S
    },
    "text_s": Metric("s", "less", "one prompt through the text encoder, alone, median"),
    "step_s": Metric("s", "less", "one denoise step of a chunk through all blocks, window full, alone, median"),
    "clean_s": Metric("s", "less", "the pass that writes a finished chunk into the cache, alone, median"),
    "decode_s": Metric("s", "less", "one chunk's latents to pictures on the device, alone, median"),
    "copy_s": Metric("s", "less", "one chunk's pictures from the device to the host, alone, median"),
    "encode_s": Metric("s", "less", "one chunk's pictures to H.264 (or VP8) on the host, alone, median"),
    "peak_gib": Metric("GiB", "less", "most memory in use: on CUDA of tensors on a device, on a CPU of a process"),
    "told_s": Metric("s", "less", "from the kill of a rank until every viewer is told `restarting`, median"),
    "kept_past": Metric("s", "less", "of the stream that a kill lost, where it went on from what was kept; the most"),
    "running_s": Metric("s", "less", "from the kill until every viewer is told that the engine runs again, median"),
    "resumed_s": Metric("s", "less", "from the kill until every viewer has decoded a new picture, median"),
    "resumed_worst_s": Metric("s", "less", "the same, the slowest restart"),
    "still_s": Metric("s", "less", "how long the picture stood still, the worst viewer, median"),
    "load_s": Metric("s", "less", "from the process's start to a warm engine"),
    "floor_s": Metric("s", "less", "a forward if every part ran at the device's measured ceilings"),
    "forward_s": Metric("s", "less", "a forward as it was measured, window full"),
    "share": Metric("of 1", "more", "floor through measured time: how much of what is possible is reached"),
    "matrix_tflops": Metric("10^12/s", "more", "operations per second of the best large matrix product"),
    "copy_gbps": Metric("10^9 B/s", "more", "bytes read and written per second by a large copy on the device"),
}
