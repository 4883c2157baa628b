"""The figures that benchmarks of speed write: their units, and which direction is better. `benchmarks/README.md` says
what each means; a test holds the two together."""

from __future__ import annotations

from typing import Literal, NamedTuple

Better = Literal["more", "less"]


class Metric(NamedTuple):
    """`better` is the direction that a comparison calls an improvement."""

    unit: str
    better: Better = "less"


BUFFERS_S = (0.0, 0.5, 1.0)


def buffer_name(buffer_s: float) -> str:
    """`0`, `0.5` and `1` of a start buffer, as the names of figures have it."""
    return f"{buffer_s:g}"


_SECONDS = (
    "ttff_s", "ttff_worst_s", "ttfc_s", "second_chunk_s", "chunk_p50_s", "chunk_p95_s", "chunk_p99_s", "control_p50_s",
    "control_worst_s", "text_s", "step_s", "clean_s", "decode_s", "copy_s", "encode_s", "told_s", "kept_past",
    "running_s", "resumed_s", "resumed_worst_s", "still_s", "load_s", "floor_s", "forward_s",
)  # fmt: skip
METRICS: dict[str, Metric] = {
    "fps": Metric("frames/s", "more"),
    "device_fps": Metric("frames/s", "more"),
    "rtf": Metric("s/s"),
    "play_ratio": Metric("of 1", "more"),
    "peak_gib": Metric("GiB", "less"),
    "share": Metric("of 1", "more"),
    "matrix_tflops": Metric("10^12/s", "more"),
    "copy_gbps": Metric("10^9 B/s", "more"),
    **{name: Metric("s") for name in _SECONDS},
    **{f"stalls_{buffer_name(buffer_s)}": Metric("count") for buffer_s in BUFFERS_S},
    **{f"stalled_{buffer_name(buffer_s)}_s": Metric("s") for buffer_s in BUFFERS_S},
}
