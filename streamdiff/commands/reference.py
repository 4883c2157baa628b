"""A stream to the letter, from numbers and files: what `streamdiff generate` does when it is told more than a prompt.

Knows nothing about the command line. `parts` finds and loads the model, `pipeline.reference_run` makes the latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands import reference_model
from streamdiff.commands.reference_model import ReferenceJob
from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import tensor_file
from streamdiff.models.interfaces import StreamDecoder
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule
from streamdiff.pipeline import reference_run
from streamdiff.pipeline.reference_run import ReferenceRun, Switch
from streamdiff.video import writer as files


@torch.inference_mode()
def run(job: ReferenceJob) -> int:
    """Make the latents, and the video unless that is not wanted; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    _check(job)
    found = reference_model.load(job)
    model, device = found.model, found.device
    script = _script(job, model, found.schedule)
    decoder = None if job.no_decode else found.loader.decoder()
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        bar = stack.enter_context(tqdm(total=script.chunks, unit="chunk", dynamic_ncols=True))
        writer = None
        if job.latents_out is not None:
            about = {
                **tensor_file.NORMALISED,
                "model": job.model.name,
                "kv_context": job.model.kv_context,
                "timesteps": str(script.schedule.timesteps),
            }
            writing = tensor_file.writing(job.latents_out, "latents", model.spec.chunk_shape, about)
            writer = stack.enter_context(writing)
        making = _Making(model, device, script, job.model.stages, writer, bar)
        if decoder is not None and job.output is not None:
            files.write_video(job.output, making.frames(decoder), job.fps or model.spec.native_fps)
        else:
            for _ in making.chunks():
                pass
    for path in filter(None, (job.latents_out, job.output if decoder is not None else None)):
        print(f"{path}: {script.chunks} chunks of {model.spec.chunk_latents} latent frames")
    return 0


@dataclass
class _Making:
    """The run itself: latents come once, and are written, counted and decoded as they come."""

    model: Model
    device: torch.device
    script: ReferenceRun
    stages: int
    writer: tensor_file.TensorWriter | None
    bar: tqdm[NoReturn]
    began: bool = True  # whether the next chunk is the first of a stream

    def chunks(self) -> Iterator[Tensor]:
        """Latents `[C, F, h, w]` of each chunk. Mutates: writer, bar, self."""

        def fresh() -> None:
            self.began = True

        for latents in reference_run.play(self.model, self.device, self.script, stages=self.stages, fresh=fresh):
            if self.writer is not None:
                self.writer.add(latents)
            yield latents
            self.bar.update()

    def frames(self, decoder: StreamDecoder) -> Iterator[NDArray[np.uint8]]:
        """Pictures; a fresh stream begins with a fresh memory."""
        memory = decoder.new_memory()
        for latents in self.chunks():
            if self.began:
                memory, self.began = decoder.new_memory(), False
            for latent in latents.split(1, 1):  # a chunk may be a whole clip
                yield from decoder.decode(latent[None], memory).cpu().numpy()


# ---- what was asked for -------------------------------------------------------------------------------------------


def _check(job: ReferenceJob) -> None:
    """Everything that can be known before anything is loaded."""
    if job.latents_out is None and (job.output is None or job.no_decode):
        raise ConfigError("nothing would be written; give --latents-out FILE, or --output FILE without --no-decode")
    if job.chunks is None:
        raise ConfigError("--chunks is missing: how many chunks to make; for example --chunks 8")
    if job.video_latents is None and (job.strength is not None or job.motion_noise):
        raise ConfigError("--strength and --motion-noise say how input is mixed with noise; give it as --video-latents")
    for option, is_given in (("--context-alone", job.context_alone), ("--context-pictures", job.context_pictures)):
        if is_given and job.model.kv_context == "matched":
            raise ConfigError(f"{option} is about the clean pass, which KV context matched does not have")
    if job.prompt_mix is not None and not job.prompt_switch:
        raise ConfigError("--prompt-mix says over how many chunks a --prompt-switch comes; there is none")
    if job.chunks < 1:
        raise ConfigError(f"--chunks is {job.chunks}; at least 1 is needed")
    if job.no_decode and job.output is not None:
        raise ConfigError("--no-decode makes latents only, so there is nothing to write to --output; leave one out")
    if job.latents_out is not None:
        tensor_file.check_target(job.latents_out)
    if job.output is not None:
        files.check_target(job.output)


def _script(job: ReferenceJob, model: Model, schedule: Schedule) -> ReferenceRun:
    """What the ring plays: files are read and checked against the model here."""
    assert job.chunks is not None
    spec = model.spec
    noise = None
    if job.noise is not None:
        noise = tensor_file.read_noise(job.noise, spec.chunk_shape, steps=schedule.of(0).steps, chunks=job.chunks)
    video = None
    if job.video_latents is not None:
        video = tensor_file.read_latents(job.video_latents, spec.chunk_shape, whole=True)
        if video.ndim == 4:  # a clip: what is left over of a last chunk is not used, as chunks that are not asked for
            count = video.shape[1] // spec.chunk_latents
            video = video[:, : count * spec.chunk_latents].unflatten(1, (count, -1)).transpose(0, 1)
    if job.prompt_embeds is not None:
        embeddings = tensor_file.read_rows(job.prompt_embeds, spec.text_shape)
    else:
        embeddings = reference_model.encode(model, job.prompt)
    return ReferenceRun(
        embeddings,
        job.chunks,
        schedule,
        kv_context=job.model.kv_context,
        seed=job.seed,
        initial=None if noise is None else noise.initial,
        renoise=None if noise is None else noise.renoise,
        switches=tuple(_switch(text, model) for text in job.prompt_switch),
        video=video,
        strength=job.strength,
        motion_noise=job.motion_noise,
        mix=1 if job.prompt_mix is None else job.prompt_mix,
    )


def _switch(text: str, model: Model) -> Switch:
    """`CHUNK:FILE[:POLICY]`; a file's name may have colons."""
    number, _, rest = text.partition(":")
    name, _, policy = rest.rpartition(":")
    if policy not in reference_run.POLICIES or not name:
        name, policy = rest, "keep"
        if not Path(name).exists() and ":" in name:
            policies = ", ".join(reference_run.POLICIES)
            raise ConfigError(f"--prompt-switch is {text!r}; there is no file {name}, and POLICY can be {policies}")
    if not number.isdigit() or not name:
        raise ConfigError(f"--prompt-switch is {text!r}; it must be CHUNK:FILE or CHUNK:FILE:POLICY")
    return Switch(int(number), tensor_file.read_rows(Path(name), model.spec.text_shape), policy)
