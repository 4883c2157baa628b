"""How fast the transformer could be on this device, and how much of that it reaches.

The floor is the planner's roofline (`pipeline/planner/costs.py`) at ceilings that are measured: a large matrix product
and a large copy. The measured forward stands beside it. Both are of the transformer alone: decoding is not in them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import fps_ttff, report, stream_case, stream_options, stream_parts
from benchmarks.stream_case import Case
from streamdiff.device import own_device
from streamdiff.errors import ConfigError
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.planner.costs import Ceilings, estimate

EPILOG = """examples:
  python -m benchmarks.throughput_model                                  the embedded model
  python -m benchmarks.throughput_model --preset wan-1.3b --decoder tiny --device cuda --out floor.json

Reading it: `share` is floor / measured. What the floor leaves out (norms, rotary positions, softmax, launches) is what
fusing and CUDA graphs can win back.
"""
_SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
_LEAST_S = 0.3
_TRIES = 5


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of some matrix products and copies on the device, in this dtype, with torch's present threads."""
    flops = 0.0
    for size in _SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        flops = max(flops, 2.0 * size**3 / _best_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))
    source = torch.ones(_COPY_BYTES[device.type] // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return Ceilings(flops / 1e12, 2.0 * source.nbytes / _best_s(lambda: target.copy_(source), device) / 1e9)


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
        device, dtype, info = runtime.stage.device, runtime.model.denoiser.dtype, runtime.info
        step("ceilings")
        found = ceilings(device, dtype)
        step("forwards")
        times, _ = stream_parts.turns(runtime, case.amount.rounds, device)
    finally:
        runtime.close()
    sizes = plan_load(config, device).sizes
    costs = estimate(sizes, found, kv_context=info.kv_context, max_rows=1, value_bytes=dtype.itemsize)
    floor_s = costs.embed_s[0] + sum(block[0] for block in costs.block_s) + costs.head_s[0]
    forward_s = median([value for name, values in times.items() if name.startswith("step ") for value in values])
    forwards = info.steps + (info.kv_context != "same_step")
    return {
        "figures": {
            "floor_s": floor_s,
            "forward_s": forward_s,
            "share": floor_s / forward_s,
            "matrix_tflops": found.tflops,
            "copy_gbps": found.gbps,
        },
        "dtype": str(dtype).removeprefix("torch."),
        "forwards_per_chunk": forwards,
        "fps_at_the_floor": info.chunk_frames / (forwards * floor_s),
        "fps_as_measured": info.chunk_frames / (forwards * forward_s),
        "raw": times,
    }


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
        if options.list:
            print("\n".join(case.label for case in cases))
            return fps_ttff.OK
        head = report.header(["benchmarks.throughput_model", *argv] if argv is not None else None, warm_up="a window")
        with tqdm(cases, unit="case", dynamic_ncols=True, leave=False) as bar:
            results = {case.label: measure(case, bar.set_postfix_str) for case in bar}
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return fps_ttff.USAGE
    if text := fps_ttff.note(cases):
        print(f"note: {text}", file=sys.stderr)
    told = ("dtype", "forwards_per_chunk", "fps_as_measured", "fps_at_the_floor")
    rows = [
        {"case": label, **found["figures"], **{name: found[name] for name in told}} for label, found in results.items()
    ]
    print(report.table(rows))
    if options.out is not None:
        stored = stream_case.settings(cases, device.type)
        report.write_json(options.out, head, results, benchmark="throughput_model", settings=stored)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    return fps_ttff.OK


if __name__ == "__main__":
    raise SystemExit(main())
