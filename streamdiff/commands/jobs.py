"""What each command takes beside the settings of `Config`. Needs no torch.

A field with a `Flag` is an option of the command, and its docstring is the help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamdiff.config import GPUS, Flag, ModelConfig

LONGEST_S = 24 * 3600
_File = Annotated[Path | None, Flag()]
_Switch = Annotated[bool, Flag()]
_YesOrNo = Annotated[bool | None, Flag()]
_Count = Annotated[int | None, Flag()]
_Number = Annotated[float | None, Flag()]
_Numbers = Annotated[tuple[float, ...] | None, Flag(metavar="N,N,...")]
_Some = Annotated[int, Flag(), Field(ge=1, le=1024)]
_Rate = Annotated[float | None, Flag(rare=True), Field(gt=0, allow_inf_nan=False)]
_Time = Annotated[float | None, Flag(metavar="SECONDS", rare=True), Field(ge=0, allow_inf_nan=False)]


class _Job(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ServeJob(_Job):
    """How `serve` uses GPUs where that is left to the planner."""

    gpus: Annotated[int | None, Flag(group=GPUS), Field(ge=1, le=16)] = None
    """use so many GPUs as the planner finds best: stages, and ranks that share them"""
    goal: Annotated[Literal["one", "many"] | None, Flag("--for", "GOAL", GPUS, rare=True)] = None
    """of --gpus: one stream (default), or many: as many as fit"""


class GenerateJob(_Job):
    """A video, or with `prompts` one for each line of that file, in the folder `output`."""

    output: Annotated[Path, Flag()]
    """.mp4, .webm, or a folder for PNG frames"""
    overwrite: _Switch = False
    """replace what exists (default: refuse)"""
    seconds: Annotated[float, Flag(metavar="S"), Field(gt=0, le=LONGEST_S)] = 10.0
    """length (default 10)"""
    prompt_at: Annotated[tuple[str, ...], Flag(metavar="SECONDS:TEXT")] = ()
    """change the prompt at this time; may be given several times"""
    timeline: _File = None
    """changes to come, as JSON: [{"at": CHUNK or "seconds": S, "prompt": ..., "over": CHUNKS, "steps": ..., "controls":
    {...}}, ...]; see docs/replay.md"""
    replay: _File = None
    """play a session's log again (.jsonl): the same latents, on any number of --stages; see docs/replay.md"""
    prompts: _File = None
    """many videos by one engine, into the folder --output: a prompt a line, or .jsonl with prompt, seed, seconds, size,
    output (below the folder)"""
    resume: _Switch = False
    """with --prompts: skip the videos that are there"""


class PlanJob(_Job):
    """Options of `plan`. `stages` and `dtype` are 4 and float32, with a GPU 1 and bfloat16, unless they are given; with
    `gpus` every way to use so many is compared."""

    gpu: Annotated[str | None, Flag()] = None
    """h100, h200, b200, 4090 or 5090: what to expect of it, estimated"""
    gpus: Annotated[int | None, Flag(), Field(ge=1, le=16)] = None
    """so many of --gpu: every P stages x C ranks that share each, and which is best"""
    link: Annotated[str | None, Flag(metavar="KIND")] = None
    """what GPUs are linked by: nvlink or pcie (default: the fastest that --gpu has)"""
    fps: Annotated[float | None, Flag(), Field(gt=0, allow_inf_nan=False)] = None
    """frames per second of each session that --gpu shall reach (default: the model's own)"""
    stages: Annotated[int | None, Flag(), Field(ge=1, le=1024)] = None
    """stages of the ring, one device each (default 4; 1 with --gpu)"""
    sessions: _Some = 1
    """sessions at the same time (default 1)"""
    max_rows: _Some = 1
    """micro-steps that may share a forward, at most (default 1)"""
    decode_rank: Annotated[Literal["auto", "head", "last", "dedicated", "own-stream"], Flag(metavar="PLACE")] = "auto"
    """where chunks are decoded: head, last, dedicated, own-stream (default auto: head or last)"""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, Flag(metavar="TYPE")] = None
    """float32 or bfloat16 (default float32; bfloat16 with --gpu)"""
    chunks: Annotated[int | None, Flag(rare=True), Field(ge=8, le=10_000)] = None
    """chunks to simulate per session (default 100)"""
    stage_times: Annotated[tuple[float, ...] | None, Flag(metavar="S,S,...", rare=True)] = None
    """seconds of each stage, for a forward of one row"""
    profile: _File = None
    """measured times as JSON, see below"""
    tflops: _Rate = None
    """10^12 operations per second that a device reaches (default 400)"""
    gbps: _Rate = None
    """GB/s of memory that a device reaches (default 2,500)"""
    link_gbps: _Rate = None
    """GB/s of a link between devices (default 25)"""
    link_time: _Time = None
    """of a message between stages, in place of what the times' source says"""
    decode_time: _Time = None
    """of a chunk's decode, in place of what the times' source says"""
    trace: _File = None
    """write a Chrome/Perfetto trace"""
    plot: _File = None
    """draw the first chunks as .png, .svg or .pdf"""
    as_json: Annotated[bool, Flag("--json")] = False
    """print as JSON"""

    def given(self, *names: str) -> list[str]:
        """Those of these options that are given."""
        return [name for name in names if getattr(self, name) is not None]


class ModelsJob(_Job):
    """What `models` prints."""

    name: str | None = None
    as_json: Annotated[bool, Flag("--json")] = False
    """print as JSON"""


class RemoteJob(_Job):
    """A server that runs elsewhere."""

    url: Annotated[str, Flag(metavar="URL")] = "http://127.0.0.1:8000"
    """address of the server (default http://127.0.0.1:8000)"""
    token_file: _File = None
    """a file with the token to show it"""


class McpJob(RemoteJob):
    """Tools for assistants."""

    folder: Annotated[Path, Flag(metavar="DIR")] = Path(".")
    """where recordings are put (default: here)"""


class OscJob(RemoteJob):
    """A session that is steered by OSC."""

    session: Annotated[str, Flag()] = "default"
    """the session to steer (default default)"""
    listen: Annotated[str, Flag(metavar="HOST:PORT")] = "127.0.0.1:9000"
    """where messages come in (default 127.0.0.1:9000)"""
    send: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """where what the session tells goes (default: nowhere)"""


class ConvertJob(_Job):
    """What `decode` and `encode` have in common."""

    vae: Annotated[str, Flag(metavar="PATH")]
    """the autoencoder: a path or name, see below"""
    source: Path
    out: Annotated[Path, Flag()]
    overwrite: _Switch = False
    """replace what exists (default: refuse)"""
    chunk_latents: Annotated[int | None, Flag("--chunk-frames"), Field(ge=1)] = None
    """latent frames per call of the network (default: the file's chunks, else 4); the result is the same"""
    latent_space: Annotated[Literal["normalised", "raw"] | None, Flag(metavar="SPACE")] = None
    """what a TAEHV file takes: normalised or raw (default: by its published name: taew2_1, lighttaew2_1)"""
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda (default auto)"""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Flag(metavar="TYPE")] = "auto"
    """float32 or bfloat16 of the network (default: float32 on a CPU, bfloat16 on CUDA)"""


class DecodeJob(ConvertJob):
    """Latents in a file to a video."""

    source: Annotated[Path, Flag("--latents")]
    """a tensor file with `latents`, see below"""
    out: Annotated[Path, Flag()]
    """what to write: .mp4, .webm, a folder for PNG frames, or .safetensors with `video`"""
    fps: _Number = None
    """of a video file (default: the model's own; Wan's is 16)"""


class EncodeJob(ConvertJob):
    """A video to latents in a file."""

    source: Annotated[Path, Flag("--video")]
    """a video, a folder of .png pictures, or a tensor file with `video`, see below"""
    out: Annotated[Path, Flag()]
    """what to write: .safetensors with `latents`"""
    raw: _Switch = False
    """write latents as the network gives them, not normalised, and say so in the file (default: normalised)"""


class ReferenceJob(_Job):
    """Options of a reference run: `model` selects the model and how it runs. None: the model's own value, or nothing.
    `window`, `sink` and `rope` override those of `model`; a window of 0 is the whole stream.
    """

    model: ModelConfig
    prompt: str = ""
    seed: int = 0
    output: Path | None = None
    overwrite: bool = False
    fps: float | None = None
    chunks: Annotated[_Count, Field(ge=1)] = None
    """chunks to make, instead of --seconds"""
    latents_out: _File = None
    """write the latents"""
    prompt_embeds: _File = None
    """the prompt's embeddings, instead of --prompt"""
    noise: _File = None
    """noise instead of --seed"""
    video_latents: _File = None
    """encoded video that chunks start from instead of noise alone, as `streamdiff encode` writes it: [C, F, h, w], or
    in chunks, see below"""
    strength: Annotated[float | None, Flag(metavar="S")] = None
    """noise level, 0 to 1, that --video-latents is mixed with for the first step, whose timestep is 1000 S (default:
    those of the first of --steps)"""
    first_steps: _File = None
    """timestep and noise level of each chunk's first step, or of every step, also by latent frame, instead of those of
    --steps and --strength; see below"""
    condition: _File = None
    """what the picture that the stream begins with is to an image-to-video model (36 input channels): latents [C, F, h,
    w], the picture's and of what comes after it (grey, in published models), and, if not 1 on the first latent frame
    alone, mask [4, F, h, w]; beyond its end the last latent frame is repeated"""
    image_features: _File = None
    """what CLIP sees in that picture, clip_features [T, D], for a model that has this in the prompt's place"""
    controls: _File = None
    """what steers a world in each frame of the video. LingBot-World: poses [frames, 4, 4] (camera to world) and
    intrinsics [1 or frames, 4], also as poses.npy with intrinsics.npy beside it, or keyboard [frames, 8] (W, A, S, D,
    I, J, K, L); Matrix-Game: keyboard [frames, K] and mouse [frames, 2] (pitch, yaw)"""
    given_latents: _File = None
    """finished latents of the stream's first chunks, which it continues from; they count in --chunks and are output.
    Where finished chunks have a pass of their own (--kv-context clean, staircase) they get that alone, at timestep 0
    without noise; in same_step every step sees them at its own noise level"""
    architecture: Annotated[Path | None, Flag("--model-config")] = None
    """config.json of diffusers, or of the model's authors, for what shapes cannot tell (the number of heads; the window
    and the action modules of a world)"""
    shift: _Number = None
    """timestep shift of --warp and --nearest (default 1: none)"""
    sigmas: _Numbers = None
    """noise levels of the steps, if they are not timestep / 1000; a 0 at the end of --steps is a step where it has a
    level above 0 here, and is dropped otherwise"""
    renoise_sigmas: _Numbers = None
    """noise levels that the second step and later ones begin with, where they are not those that clean latents are made
    with (--sigmas): one less than --steps (LingBot-World)"""
    first_chunk_steps: _Numbers = None
    """the list of --steps for a stream's first chunk, where that has another, at least as long; its noise levels are
    timestep / 1000, or follow from --shift and --warp"""
    window: _Count = None
    """latent frames a chunk can see, the sink and the chunk itself included; 0: all"""
    sink: _Count = None
    """latent frames at the stream's beginning that stay in sight (default: the model's own, or 0)"""
    rope: Annotated[Literal["absolute", "relative"] | None, Flag(metavar="KIND")] = None
    """absolute (positions count from the stream's beginning, without end) or relative (the sink stands next to the
    window); default: the model's own, or relative"""
    chunk_latents: Annotated[int | None, Flag("--chunk-frames"), Field(ge=1)] = None
    """latent frames of a chunk (default: those of --noise, or the model's own)"""
    first_chunk_latents: Annotated[int | None, Flag("--first-chunk-frames"), Field(ge=1)] = None
    """latent frames that are made together at the beginning, a multiple of the chunk's (default: the model's own); in
    files, and for --chunks, they are several chunks"""
    context_noise: Annotated[float | None, Flag(metavar="T"), Field(ge=0, le=1000)] = None
    """timestep, 0 to 1000, at which a finished chunk is remembered (default: the model's own, or 0)"""
    prompt_mix: Annotated[_Count, Field(ge=1)] = None
    """chunks over which each --prompt-switch (keep, recache, recache-causal) comes: they see 1/N, 2/N, ... 1 of its
    embeddings and the rest of those before it (default 1: at once; Krea's server has 3)"""
    adaptive_sink: Annotated[float | None, Flag(metavar="THRESHOLD")] = None
    """a chunk takes the place of the sink chunk that it is least like, if their keys and values are less alike than
    this (cosine, -1 to 1; StreamDiffusionV2 has 0.2; -1: never): with --kv-context same_step and --rope absolute
    instead of a place in the window, as published, else beside it"""
    averaged_sink: Annotated[float | None, Flag(metavar="KEEP")] = None
    """a chunk that leaves the window is folded into the sink, of which this share stays (0 to 1; Reward-Forcing has
    0.999; 1: the sink stays as it is); the sink is then one chunk"""
    warp: _Switch = False
    """--steps are meant before the shift"""
    nearest: _Switch = False
    """the noise level of a timestep, also of one that --strength or motion gives, is the nearest of 1,000 shifted ones,
    as Self-Forcing's and StreamDiffusionV2's code looks it up (with --shift)"""
    motion_noise: _Switch = False
    """the more --video-latents move, the less noise is mixed in, down to 0.1 below --strength; the model is given 0.1
    less than that (StreamDiffusionV2, with --strength 0.8); motion is that of the pixels where the file says it, as one
    of `streamdiff encode` does, else of the latents"""
    context_alone: _YesOrNo = None
    """a finished chunk is remembered as it is without what was before it, but the sink (default: the model's own; Krea
    recomputes its past for every chunk, which with a window of two chunks is the same)"""
    context_pictures: _YesOrNo = None
    """from the second chunk on a finished chunk is remembered with its first latent frame encoded again, by itself,
    from the last of its pictures; takes both halves of the autoencoder (default: the model's own; Krea)"""
    no_decode: _Switch = False
    """make latents only"""
    processes: _Switch = False
    """a process for each of --stages, started here, instead of turns in this one"""
    prompt_switch: Annotated[tuple[str, ...], Flag(metavar="CHUNK:FILE[:POLICY]")] = ()
    """other prompt embeddings from this chunk on; POLICY is keep (default: only the text changes), flush (the past is
    forgotten but for the sink), recache (the window's clean latents are run through the model again under the new text,
    all in one forward, as LongLive does), recache-causal (the same chunk by chunk, each of which sees those before it)
    or reset (a fresh stream); may be given several times"""
