"""How long each part of making a chunk takes by itself, on the model of a runtime that is loaded and has nothing to do.

Denoise steps and clean passes go around the runtime's own ring one at a time, with the window full: over several stages
each takes what all its ranks and the links between them take. The device is waited for before and after what is timed,
never inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.core import MicroStep
from streamdiff.models.loader import RandomText
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.sampler import Finished
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.server.media.encoder import Format, VideoEncoder, choose
from streamdiff.video.pixel_format import size_of

SESSION = 10**6
"""A slot that no stream of the engine has."""
_LIMIT_S = 600.0
Parts = dict[str, list[float]]


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of `work`, the device's included, and its result."""
    synchronise(device)
    begun_s = clock.monotonic_s()
    result = work()
    synchronise(device)
    return clock.monotonic_s() - begun_s, result


def measure(
    runtime: StreamingPipeline, rounds: int, at_once: int, step: Callable[[str], None]
) -> tuple[Parts, list[str]]:
    """Seconds of every part, `rounds` values each (steps: one per chunk and step), and remarks on what is not there.

    `at_once` latent frames are decoded by one call; `step` is told what is measured next. Mutates: the runtime's ring,
    which has the sessions of before at the end.
    """
    device = runtime.stage.device
    parts: Parts = {}
    remarks: list[str] = []
    if isinstance(runtime.text, RandomText):
        remarks.append(
            "text_s: there is no text encoder, embeddings are drawn; ttff_s and control_p50_s have none in them"
        )
    else:
        step("text")
        parts["text"] = _text(runtime, rounds, device)
    step("denoise steps")
    taken, latents = turns(runtime, rounds, device)
    parts |= taken
    decoder = runtime.model.decoder
    if decoder is None:
        remarks.append("decode_s, copy_s, encode_s: another rank decodes, and they are measured on the head only")
        return parts, remarks
    step("decode and copy")
    with ThreadPoolExecutor(1, "decode", lambda: torch.set_num_threads(DECODE_THREADS)) as alike:  # as it is in service
        decoded = alike.submit(_decode, decoder, latents, at_once, device).result()
    parts["decode"], parts["copy"], pictures = decoded
    step("encode")
    codec, parts["encode"] = _encode(pictures, runtime.info.native_fps)
    if codec != "h264":
        remarks.append(f"encode_s: {codec}, for there is no H.264 here")
    return parts, remarks


def _text(runtime: StreamingPipeline, rounds: int, device: torch.device) -> list[float]:
    """Texts that no cache knows; the first one loads the weights and does not count."""
    texts = [runtime.text.read(f"{runtime.text.examples[0]} ({n})", None).text for n in range(-1, rounds)]
    return [timed(device, partial(runtime.text.encode, text))[0] for text in texts][1:]


def turns(runtime: StreamingPipeline, rounds: int, device: torch.device) -> tuple[Parts, list[Tensor]]:
    """Times of single micro-steps around the ring, by what they are, and the measured chunks' latents."""
    ring, spec = runtime, runtime.model.spec
    info = runtime.info
    times: defaultdict[str, list[float]] = defaultdict(list)
    latents: list[Tensor] = []
    text = torch.zeros(spec.text_shape, device=device)
    ring.open(SESSION, text, seed=0, epoch=0, steps=info.steps, kv_context=info.kv_context)
    full = spec.window_chunks(info.kv_context)
    end_s = clock.monotonic_s() + _LIMIT_S
    passes = 0 if info.kv_context == "same_step" else rounds  # clean ones, which come after a chunk's latents

    def enough() -> bool:
        return len(latents) >= rounds and len(times["clean"]) >= passes

    while not enough() and clock.monotonic_s() < end_s:
        ring.scheduler.set_frame_credit(SESSION, 10**6)
        took_s, (rows, finished) = timed(device, partial(_around, ring))
        if rows and min(row.chunk for row in rows) > full:
            times[name_of(rows)].append(took_s)
        latents += [done.latents for done in finished if done.row.chunk > full]
    ring.close_session(SESSION)
    _around(ring)
    return {name: values for name, values in times.items() if values}, latents[:rounds]


def _around(ring: Ring) -> tuple[list[MicroStep], list[Finished]]:
    """The rows that enter next, none or those of one forward, and what is finished when they are back."""
    rows, finished = ring.step_latents()
    while before := len(ring.in_ring):  # nothing enters meanwhile
        finished += ring.sample(_LIMIT_S)
        if len(ring.in_ring) == before:
            raise RuntimeError(f"nothing came back within {_LIMIT_S:g} s; in the ring: {ring.contents}")
    return rows, finished


def name_of(rows: Sequence[MicroStep]) -> str:
    """`step 0` and so on, or `clean`."""
    if len(rows) > 1:
        return f"{len(rows)} steps"
    return "clean" if rows[0].clean else f"step {rows[0].step}"


def _decode(
    decoder: Any, latents: Sequence[Tensor], at_once: int, device: torch.device
) -> tuple[list[float], list[float], list[Tensor]]:
    """Seconds of each chunk's decode and of its way to the host, and the pictures; the first chunk goes twice, and does
    not count the first time."""
    decode_s, copy_s, pictures = [], [], []
    memory = decoder.new_memory()
    for chunk in (latents[0], *latents):
        decoded = copied = 0.0
        made = []
        for part in chunk[None].split(at_once, 2):  # as pipeline.decoding has it
            took_s, piece = timed(device, partial(decoder.decode, part, memory))
            decoded += took_s
            took_s, piece = timed(device, piece.cpu)
            copied += took_s
            made.append(piece)
        decode_s.append(decoded)
        copy_s.append(copied)
        pictures.append(torch.cat(made))
    return decode_s[1:], copy_s[1:], pictures[1:]


def _encode(chunks: Sequence[Tensor], fps: float) -> tuple[str, list[float]]:
    """The best codec there is, and seconds of each chunk's pictures, one after the other; the first does not count."""
    codec = choose("auto")[0]
    height, width = size_of(chunks[0].shape[1:])
    encoder = VideoEncoder(codec, Format(width, height, fps))
    times, pts = [], 0
    for chunk in (chunks[0], *chunks):
        begun_s = clock.monotonic_s()
        for picture in chunk.numpy():
            encoder.encode(picture, pts, key=pts == 0)
            pts += round(90_000 / fps)
        times.append(clock.monotonic_s() - begun_s)
    return codec, times[1:]
