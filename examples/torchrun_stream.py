"""One stream over several ranks, each with its own blocks of the transformer: to a file, and live with --serve.

    torchrun --nproc-per-node 4 examples/torchrun_stream.py --seconds 10 --output ring.mp4
    torchrun --nproc-per-node 4 examples/torchrun_stream.py --serve --port 8000

Two machines, the same command on both; the first one's name or address in --rdzv-endpoint:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/torchrun_stream.py --output ring.mp4

Only on a private network, that of the GPU machines or a VPN. torchrun's own store listens on all interfaces without a
password, on one machine too: whoever reaches it reads and changes what ranks tell each other. With --rdzv-backend c10d
and --standalone torchrun also unpickles what lies there: whoever reaches it runs code as you. For one machine
`streamdiff serve --stages 4` does the same, on loopback only. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the
interface that ranks listen on.

Ctrl-C ends the stream; the file then holds what was made so far. At the end, without --serve: frames per second, time
to the first frame, and how busy each rank has been.
"""

import argparse
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

import streamdiff
from streamdiff import clock
from streamdiff.config import Config, ModelConfig, ServeConfig, SessionConfig
from streamdiff.server.main import run
from streamdiff.video.files import Frame, check_target, write_video


class Tally:
    """Counts frames by the clock. The rate leaves out the first chunk, which nothing came before."""

    def __init__(self, chunk_frames: int) -> None:
        self.chunk_frames = chunk_frames
        self.frames = 0
        self.asked_s = self.first_s = self.start_s = self.last_s = clock.monotonic_s()

    def add(self, count: int = 1) -> None:
        self.last_s = clock.monotonic_s()
        if self.frames == 0:
            self.first_s = self.last_s
        if self.frames < self.chunk_frames:
            self.start_s = self.last_s
        self.frames += count

    def report(self, occupancy: list[float]) -> None:
        steady, spent_s = self.frames - self.chunk_frames, self.last_s - self.start_s
        rate = f"{steady / spent_s:.1f} frames per second" if steady > 0 and spent_s > 0 else "too short for a rate"
        print(f"{self.frames} frames, {rate}; first frame after {self.first_s - self.asked_s:.2f} s")
        for rank, share in enumerate(occupancy):
            print(f"rank {rank}: {share:4.0%} of the time at work")


def to_file(options: argparse.Namespace, model: dict[str, object]) -> None:
    """Rank 0 without --serve."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with streamdiff.open(options.prompt, seed=options.seed, **model) as session:  # type: ignore[arg-type]
        tally = Tally(session.chunk_frames)

        def frames() -> Iterator[Frame]:
            total = max(1, round(options.seconds * session.fps))
            with tqdm(total=total, unit="frame", desc=options.output.name) as bar:
                for frame in session:
                    tally.add()
                    yield frame
                    bar.update()
                    if stop.is_set() or tally.frames == total:
                        return

        write_video(options.output, frames(), session.fps)
    tally.report(session.occupancy())
    print(f"wrote {options.output}")


def live(options: argparse.Namespace, model: dict[str, object]) -> int:
    """Rank 0 with --serve: a web server, whose engine process is the first rank of the ring. When a rank fails the
    server ends, and torchrun starts all of them again."""
    serve = ServeConfig(
        host=options.host,
        port=options.port,
        max_restarts=0,
        keep_s=options.keep_s,
        state_dir=options.state_dir,
        outputs=[str(options.output)] if options.output else [],
    )
    session = SessionConfig(prompt=options.prompt, seed=options.seed)
    return run(Config(model=ModelConfig.model_validate(model), session=session, serve=serve))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="a red circle moving right over a meadow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help=".mp4 or .webm (default ring.mp4; with --serve: none)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the file (with --serve: all)")
    parser.add_argument("--kv-context", default="staircase", help="staircase (default): one stream fills the ring")
    parser.add_argument("--parallel", metavar="PxC", help="P stages that C ranks share each (default: a stage each)")
    parser.add_argument("--decode-rank", default="head", help="who decodes: head (default), last or dedicated")
    parser.add_argument("--steps", type=int, help="denoise steps per chunk (default: the model's own)")
    parser.add_argument("--compile", default="auto", help="on: every rank makes graphs first (auto: with CUDA)")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--serve", action="store_true", help="also show it live, until Ctrl-C; made while somebody watches"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--keep-s", type=float, help="every N seconds keep what plays in --state-dir")
    parser.add_argument("--state-dir", help="from there it goes on when torchrun (--max-restarts) starts ranks again")
    options = parser.parse_args()
    if not options.serve:  # a server logs by itself
        logging.basicConfig(format="streamdiff: %(message)s")
        logging.getLogger("streamdiff").setLevel(logging.INFO)  # what the start chooses
    world = int(os.environ.get("WORLD_SIZE", "1"))
    stages = world - 1 if options.decode_rank == "dedicated" else world
    model: dict[str, object] = {
        **({"parallel": options.parallel} if options.parallel else {"stages": stages}),
        "decode_rank": options.decode_rank,
        "kv_context": options.kv_context,
        "steps": options.steps,
        "compile": options.compile,
        "device": options.device,
    }
    if int(os.environ.get("RANK", "0")) > 0:
        streamdiff.run_worker(**model)  # type: ignore[arg-type]
        return 0
    if options.output is None and not options.serve:
        options.output = Path("ring.mp4")
    if options.output is not None:
        check_target(options.output)
    if options.serve:
        return live(options, model)
    to_file(options, model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
