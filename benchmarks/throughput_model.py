"""How fast the transformer could be on this device, and how much of that it reaches.

Operations and bytes of a forward by arithmetic (`forward_cost.py` has the formula), the device's ceilings by measuring
a large matrix product and a large copy, the floor that follows, and the measured forward beside it. The floor is of the
transformer alone: decoding is not in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import fps_ttff, report, stream_case, stream_options, stream_parts
from benchmarks.forward_cost import Ceilings, Part, forward
from benchmarks.stream_case import Case
from streamdiff.device import own_device
from streamdiff.errors import ConfigError
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.output import ModelInfo

EPILOG = """examples:
  python -m benchmarks.throughput_model                                  the embedded model
  python -m benchmarks.throughput_model --preset wan-1.3b --decoder tiny --device cuda --out floor.json
  python -m benchmarks.throughput_model --preset wan-1.3b --decoder tiny --kv-context clean,matched

Reading it: `share` is floor / measured. A part whose floor is set by `copy` gains from moving less (batching, smaller
numbers), one set by `matrix` from fewer operations or a faster number format. What the floor leaves out (norms, rotary
positions, softmax, launches) is what fusing and CUDA graphs can win back.
"""
_SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
_LEAST_S = 0.3
_TRIES = 5


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of some matrix products and copies on the device, in this dtype, with torch's present threads."""
    flops = bytes_per_s = 0.0
    for size in _SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        flops = max(flops, 2.0 * size**3 / _best_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))
    source = torch.ones(_COPY_BYTES[device.type] // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    bytes_per_s = 2.0 * source.nbytes / _best_s(lambda: target.copy_(source), device)
    return Ceilings(flops, bytes_per_s)


def _best_s(work: Any, device: torch.device) -> float:
    """Seconds of one call, the best of some tries of many; the device is waited for around a try, not inside."""
    once_s, _ = stream_parts.timed(device, work)
    once_s, _ = stream_parts.timed(device, work)
    calls = max(1, round(_LEAST_S / _TRIES / once_s))

    def many() -> None:
        for _ in range(calls):
            work()

    return min(stream_parts.timed(device, many)[0] for _ in range(_TRIES)) / calls


def measure(case: Case, step: Any) -> dict[str, Any]:
    """The result of one case: its runtime is loaded, measured and closed."""
    config = case.config
    step("load")
    runtime = build_pipeline(config)
    try:
        device, dtype = runtime.ring.stage.device, runtime.model.denoiser.dtype
        step("ceilings")
        found = ceilings(device, dtype)
        step("forwards")
        times, _ = stream_parts.turns(runtime, case.amount.rounds, device)
    finally:
        runtime.close()
    parts = forward(plan_load(config, device).sizes, config.kv_context)
    forward_s = median([value for name, values in times.items() if name.startswith("step ") for value in values])
    return judged(parts, found, dtype.itemsize, forward_s, runtime.info) | {
        "raw": times,
        "dtype": str(dtype).removeprefix("torch."),
    }


def judged(
    parts: Sequence[Part], found: Ceilings, value_bytes: int, forward_s: float, info: ModelInfo
) -> dict[str, Any]:
    """Floor and share from parts, ceilings and a measured forward."""
    rows = []
    for part in parts:
        floor_s = part.floor_s(found, value_bytes)
        matrix = part.flops / found.flops_per_s >= floor_s
        rows.append(
            {
                "part": part.name,
                "gflop": part.flops / 1e9,
                "mb": part.values * value_bytes / 1e6,
                "floor_ms": 1000 * floor_s,
                "set by": "matrix" if matrix else "copy",
            }
        )
    floor_s = sum(part.floor_s(found, value_bytes) for part in parts)
    forwards = info.steps + (info.kv_context != "matched")
    return {
        "figures": {
            "floor_s": floor_s,
            "forward_s": forward_s,
            "share": floor_s / forward_s,
            "matrix_tflops": found.flops_per_s / 1e12,
            "copy_gbps": found.bytes_per_s / 1e9,
        },
        "parts": rows,
        "forwards_per_chunk": forwards,
        "tflop_per_forward": sum(part.flops for part in parts) / 1e12,
        "fps_at_the_floor": info.chunk_frames / (forwards * floor_s),
        "fps_as_measured": info.chunk_frames / (forwards * forward_s),
    }


def tell(label: str, result: Mapping[str, Any]) -> None:
    figures = result["figures"]
    print(f"\n{label}, {result['dtype']}")
    print(report.table(result["parts"]))
    print(f"ceilings: matrix {figures['matrix_tflops']:.3g} TFLOP/s, copy {figures['copy_gbps']:.3g} GB/s")
    print(
        f"forward: floor {1000 * figures['floor_s']:.4g} ms, measured {1000 * figures['forward_s']:.4g} ms, "
        f"share {figures['share']:.1%}"
    )
    print(
        f"{result['forwards_per_chunk']} forwards a chunk, transformer alone, in frames per second: "
        f"{result['fps_as_measured']:.1f} as measured, {result['fps_at_the_floor']:.1f} at the floor"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput_model",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stream_options.add(parser)
    options = parser.parse_args(argv)
    options.stages = options.stages or (1,)
    try:
        cases = stream_options.cases_of(options)
        if options.stages != (1,) or options.parallel:
            raise ConfigError("--stages must be 1: a forward is measured on one device, without --parallel")
        device = own_device(cases[0].config.device)
        torch.set_num_threads(cases[0].config.threads)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return fps_ttff.USAGE
    if options.list:
        print("\n".join(case.label for case in cases))
        return fps_ttff.OK
    head = report.header(["benchmarks.throughput_model", *argv] if argv is not None else None, warm_up="a full window")
    if text := fps_ttff.note(cases):
        print(f"note: {text}", file=sys.stderr)
    results: dict[str, Any] = {}
    try:
        with tqdm(cases, unit="case", dynamic_ncols=True, leave=False) as bar:
            for case in bar:
                results[case.label] = measure(case, bar.set_postfix_str)
    except KeyboardInterrupt:
        print(f"\nstopped: {len(results)} of {len(cases)} cases are measured", file=sys.stderr)
        return fps_ttff.INTERRUPTED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return fps_ttff.USAGE
    for label, result in results.items():
        tell(label, result)
    if options.out is not None:
        stored = stream_case.settings(cases, device.type)
        report.write_json(options.out, head, results, benchmark="throughput_model", settings=stored)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    return fps_ttff.OK


if __name__ == "__main__":
    raise SystemExit(main())
