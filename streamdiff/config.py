"""Every setting, once: a frozen tree, validated once. Knows nothing about what its values do.

Names, types, limits and docstrings of the fields make the keys of YAML files (`config_file`), the command line
(`cli.parser`), the keyword arguments of `streamdiff.open`, and the table of docs/settings.md (tools/reference.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from streamdiff.core import KVContext

EMBEDDED = "tiny"
"""The model that comes with the package."""

RENAMED = {
    "model.decode": "model.decode_rank",
    "model.memory_gb": "model.device_memory_gb",
    "model.timesteps": "model.steps",
    "batching.mode": "batching.max_rows",
    "model.hang_s": "model.watchdog_s",
    "playback.lead_s": "playback.max_ahead_s",
    "serve.grace_s": "serve.pause_after_s",
    "serve.load": "serve.max_utilization",
    "serve.restarts": "serve.max_restarts",
    "serve.scale": "serve.upscale",
    "serve.spare": "serve.warm_standby",
    "--decode": "--decode-rank",
    "--batching": "--max-rows",
    "--lead": "--max-ahead-s",
    "--scale": "serve.upscale",
    "matched": "same_step",
    "own-rank": "dedicated",
}
"""Settings, flags and values by the names that they had; what has one is refused with its new name."""


@dataclass(frozen=True)
class Flag:
    """Marks a field that can be typed on the command line; another one is in files only."""

    name: str = ""
    """Default: that of the field, as --max-viewers. Two with a space between are switches, one for each value."""
    metavar: str = ""
    """What its value is called in the help; default: by the field's type."""
    group: str = ""
    """Heading under which --help lists it; a setting without one is listed by --help-all only."""
    rare: bool = False
    """Only --help-all lists it."""


MODEL, STREAM, GPUS, SERVER, ACCESS = "model", "stream", "device and GPUs", "server", "access"


def _like(pattern: str, words: str) -> AfterValidator:
    """A check of a text, and what is said of one that fails it."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


# What a browser sends as Origin, or * for every page there is; a DNS name, as in a Host header but without the port.
Origin = Annotated[str, _like(r"\*|https?://[^\s/?#@]+", "an origin such as https://example.org, or *")]
PREFIX = r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/?"
"""A path prefix: plain segments, none of which begins with a dot."""
PathPrefix = Annotated[str, _like(PREFIX, "a path such as /ai"), AfterValidator(lambda value: value.rstrip("/"))]
_HOST = _like(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", "a name such as stream.example.org, without a port")
HostName = Annotated[str, Field(max_length=253), _HOST]


def _network(value: str) -> str:
    try:
        ip_network(value)
    except ValueError:
        raise ValueError("must be an address or a network such as 10.0.0.5 or 10.0.0.0/8") from None
    return value


Proxy = Annotated[str, AfterValidator(_network)]
_PARALLEL = _like(r"[1-9][0-9]?x[1-9][0-9]?", "PxC, a number of stages and of ranks that share each, such as 2x2")
Parallel = Annotated[str, _PARALLEL]
Ports = Annotated[str, _like(r"\d{1,5}-\d{1,5}", "LOW-HIGH, as 50000-50100")]
Attention = Literal["auto", "sdpa", "flash", "cudnn", "fa3", "fa4", "sage"]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _switch(value: object) -> object:
    """YAML reads the words `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _tuple(value: object) -> object:
    """YAML has lists; a configuration is hashed."""
    return tuple(value) if isinstance(value, list) else value


def _texts(value: object) -> object:
    """One text, or several."""
    return (value,) if isinstance(value, str) else () if value is None else _tuple(value)


def _steps(value: object) -> object:
    """A union that pydantic checks by itself would be refused twice."""
    if isinstance(value, list | tuple) and value and all(isinstance(each, int | float) for each in value):
        return tuple(float(each) for each in value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_STEPS):
        return value
    raise ValueError(f"must be a whole number from 1 to {MOST_STEPS}, or a list of timesteps")


MOST_STEPS = 50
Steps = Annotated[int | tuple[float, ...], BeforeValidator(_steps)]


class ModelConfig(_Section):
    """Which weights run, where, and how."""

    name: Annotated[str, Flag("--model", "NAME", MODEL)] = EMBEDDED
    """`tiny`, a name of `streamdiff models`, a hub id (OWNER/NAME), or a path."""
    weights: Annotated[str | None, Flag(metavar="FILE")] = None
    """The transformer's weights, in any published layout; without a name the model is given by the file's name."""
    container: Annotated[str | None, Flag()] = None
    """Which tensors of the weights' file: generator, generator_ema, ...; default: the model's own, else the only known
    one."""
    lora: Annotated[tuple[str, ...], BeforeValidator(_texts), Flag(metavar="FILE[:SCALE]")] = ()
    """A LoRA that is merged into the weights, beside the model's own; may be given several times, they add up. `none`:
    without the model's own."""
    lora_dir: Annotated[str | None, Flag(metavar="DIR")] = None
    """Folder of LoRAs (.safetensors) that sessions load by name while they play."""
    max_loras: Annotated[int, Flag()] = Field(0, ge=0, le=8)
    """How many of `lora_dir` may be loaded at once, by all sessions together; 0: none."""
    vae: Annotated[str | None, Flag(metavar="PATH")] = None
    """The autoencoder: a folder, a file or a name; taew2_1 is small; default: the model's own."""
    latent_space: Annotated[Literal["normalised", "raw"] | None, Flag()] = None
    """Latents that a small autoencoder's file (TAEHV) takes; default: by its published name."""
    text_encoder: Annotated[str | None, Flag(metavar="PATH")] = None
    """A folder in diffusers' or original Wan's layout with encoder and tokenizer, or Wan's .pth."""
    preset: Annotated[Literal["default", "plain", "fast"], Flag("--plain --fast", group=MODEL)] = "default"
    """What is left open otherwise. plain: no graphs, torch's own attention; fast: also what changes pictures a little,
    the small autoencoder and the fewest steps that the model has; default: neither."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Flag()] = "auto"
    """Of the transformer's numbers. auto: bfloat16 on cuda, float32 on cpu."""
    attention: Annotated[Attention, Flag(metavar="KERNEL")] = "auto"
    """Attention kernel, tried out at the start. auto: on cuda the fastest of a trial; else sdpa, torch's choice."""
    quantize: Annotated[Literal["none", "auto", "fp8", "int8"], Flag()] = "none"
    """The blocks' linear layers in 8 bits: fp8 on recent NVIDIA GPUs, int8 anywhere; auto: fp8 where it is faster."""
    offload: Annotated[Literal["none", "blocks"], Flag()] = "none"
    """blocks: the transformer's blocks lie in pinned host memory and are copied to the device one ahead; slow, for
    cards that are too small."""
    compile: Annotated[Literal["auto", "off", "on"], BeforeValidator(_switch), Flag()] = "auto"
    """Run compiled graphs of transformer and decoder; made at the first start, then kept on disk. auto: on cuda."""
    size: Annotated[str | None, Flag(metavar="WxH", group=MODEL)] = None
    """Of the picture in pixels; default: the model's own."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag(group=GPUS)] = "auto"
    """Where the model runs. auto: cuda where there is one, else cpu."""
    steps: Annotated[Steps | None, Flag("--steps", "N", MODEL)] = None
    """Denoise steps per chunk, of those the model has (`tiny`: 4, 2); default: what it was made for. Of a model that
    the catalogue does not know: the timestep of each, from 1000 to 0, as 1000,937.5,833.33,625."""
    chunk_latents: Annotated[int | None, Flag("--chunk-frames")] = Field(None, ge=1)
    """Latent frames of a chunk, of a model that the catalogue does not know."""
    kv_context: Annotated[KVContext, Flag(group=GPUS)] = "clean"
    """What a chunk sees of earlier ones; staircase lets one stream use several GPUs; default: what the model was made
    for."""
    untested: Annotated[bool, Flag()] = False
    """Also take KV contexts in which nobody has measured what becomes of a world's quality."""
    window: Annotated[int | None, Flag()] = Field(None, ge=1)
    """Latent frames that a chunk can see, sink and itself included; default: the model's own."""
    sink: Annotated[int | None, Flag()] = Field(None, ge=0)
    """First latent frames of a stream that stay in sight; default: the model's own."""
    rope: Annotated[Literal["absolute", "relative"] | None, Flag()] = None
    """Positions count from the stream's beginning, or the sink stands next to the window; default: the model's own."""
    stages: Annotated[int, Flag(group=GPUS)] = Field(1, ge=1, le=64)
    """Ranks, started here, over which the transformer's blocks are split."""
    parallel: Annotated[Parallel | None, Flag(metavar="PxC")] = None
    """P stages, each of which C ranks share, as 2x2; default: stages x 1."""
    decode_rank: Annotated[Literal["head", "last", "dedicated"], Flag()] = "head"
    """Which rank of a ring decodes; dedicated: one more, for that alone."""
    watchdog_s: float = Field(60.0, ge=1)
    """Seconds without a heartbeat of a rank, or with its device at one forward, after which it counts as hung."""
    trace: Annotated[str | None, Flag("--profile", "DIR")] = None
    """Folder for a trace of some chunks by PyTorch's profiler, for ui.perfetto.dev."""
    device_memory_gb: float | None = Field(None, gt=0)
    """Memory of its device that a rank may take, weights and all; default: what is free on cuda, no limit on cpu."""

    @property
    def threads(self) -> int:
        """CPU threads of the transformer: OMP_NUM_THREADS, as everywhere in torch, else one; decoding has its own."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        return max(1, int(given)) if given.isdecimal() else 1

    @property
    def step_count(self) -> int | None:
        """Denoise steps that are asked for as a number."""
        return self.steps if isinstance(self.steps, int) else None

    @property
    def timesteps(self) -> tuple[float, ...] | None:
        """Those that are asked for one by one."""
        return self.steps if isinstance(self.steps, tuple) else None

    @model_validator(mode="before")
    @classmethod
    def _stages_of_parallel(cls, values: object) -> object:
        """`stages` is the P of `parallel` where only this is given; `planner.partition` refuses two that differ."""
        parallel = values.get("parallel") if isinstance(values, dict) else None
        if isinstance(values, dict) and isinstance(parallel, str) and "stages" not in values:
            stages = parallel.split("x")[0]
            return {**values, "stages": int(stages)} if stages.isdecimal() else values
        return values

    @model_validator(mode="after")
    def _loras_have_a_folder(self) -> ModelConfig:
        if (self.lora_dir is None) != (self.max_loras == 0):
            raise ValueError("lora_dir says where LoRAs are, and max_loras how many may be loaded: give both, or none")
        return self

    @property
    def shares(self) -> int:
        """Ranks that share a stage."""
        return int(self.parallel.split("x")[1]) if self.parallel else 1

    @property
    def stage_ranks(self) -> int:
        """Ranks that run a stage, or share one."""
        return self.stages * self.shares

    @property
    def ranks(self) -> int:
        """Processes that it takes: those of all stages, and one more where decoding has its own."""
        return self.stage_ranks + (self.decode_rank == "dedicated")

    @property
    def decode_rank_number(self) -> int:
        """The rank that decodes."""
        return {"last": self.stage_ranks - self.shares, "dedicated": self.stage_ranks}.get(self.decode_rank, 0)


class BatchingRule(_Section):
    """Lowers what `BatchingConfig` says where all conditions that are given are met."""

    model: str | None = None
    """Its name; * stands for anything."""
    size: str | None = Field(None, pattern=r"^[1-9]\d*x[1-9]\d*$")
    """WIDTHxHEIGHT of the picture."""
    min_tokens: int | None = Field(None, ge=1)
    """A row has so many tokens, or more."""
    min_gflop: float | None = Field(None, gt=0)
    """A row costs so many 10^9 operations, or more."""
    max_rows: int | None = Field(None, ge=1, le=16)
    """Then no more rows."""


class BatchingConfig(_Section):
    """Rows of several sessions in one forward (docs/batching.md)."""

    max_rows: Annotated[int, Flag()] = Field(1, ge=1, le=16)
    """Most rows of a forward: so many sessions share one where the ring has more of them than places; 4 is usual."""
    rules: Annotated[tuple[BatchingRule, ...], BeforeValidator(_tuple)] = ()
    """The first that applies lowers `max_rows`: each has a max_rows, and any of model, size, min_tokens, min_gflop."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> BatchingConfig:
        if self.max_rows == 1 and self.rules:
            raise ValueError("rules lower max_rows, which is 1: no forward is shared; give it too, as max_rows: 4")
        return self


class ServedModel(ModelConfig):
    """The same for `serve`; see `Config.served_model`."""

    pictures: Literal["auto", "rgb", "yuv420"]
    """What its encoders are given; auto: yuv420 on cuda, else rgb."""
    batching: BatchingConfig = BatchingConfig()
    host_memory_gb: float | None = None
    state_dir: str | None = None
    keep_s: float | None = None
    warm_standby: bool = False


class SessionConfig(_Section):
    """How the default session starts."""

    prompt: Annotated[str, Flag(metavar="TEXT", group=STREAM)] = Field(
        "a red circle moving right over a meadow", min_length=1, max_length=2000
    )
    """What to show."""
    seed: Annotated[int, Flag()] = Field(0, ge=0, le=2**31 - 1)
    """The same seed and prompts give the same video."""
    image: Annotated[str | None, Flag(metavar="FILE", group=STREAM)] = None
    """A picture (JPEG, PNG, WebP or AVIF) that the stream begins with."""
    snapshot: Annotated[str | None, Flag("--from", "FILE")] = None
    """Resume a saved session's file; with its own prompt, unless one is set."""
    input: Annotated[str | None, Flag(metavar="FILE")] = None
    """Of `serve`: a video file that the default session follows, at its own pace."""


class PlaybackConfig(_Section):
    """Rate and buffering of the frames shown."""

    fps: Annotated[float, Flag(group=STREAM)] = Field(40.0, ge=1, le=120)
    """Frames shown per second; default: the model's own (`tiny`: 40)."""
    max_ahead_s: Annotated[float, Flag()] = Field(0.9, gt=0, le=10)
    """Seconds of video made ahead of what is shown, at most."""


class IceServer(_Section):
    """A STUN or TURN server, for viewers and for the server itself."""

    url: Annotated[str, _like(r'(stuns?|turns?):[^\s<>";,]+', "stun:HOST[:PORT] or turn:HOST[:PORT]")]
    """stun:HOST[:PORT] or turn:HOST[:PORT]."""
    username: str | None = Field(None, pattern=r'^[^\s"\\]+$')
    credential: str | None = Field(None, pattern=r'^[^\s"\\]+$')
    """Both of a TURN server."""
    credential_file: str | None = None
    """A file with the credential, instead of that."""
    secret_file: str | None = None
    """A file with a TURN server's secret (coturn's static-auth-secret): viewers get credentials for an hour each."""

    @model_validator(mode="after")
    def _turn_needs_a_name(self) -> IceServer:
        given = self.model_fields_set & {"username", "credential", "credential_file", "secret_file"}
        given = {name for name in given if getattr(self, name) is not None}
        wanted = [{"username", "credential"}, {"username", "credential_file"}, {"secret_file"}]
        if given not in (wanted if self.url.startswith("turn") else [set()]):
            raise ValueError(
                "a TURN server has username and credential (or credential_file), or secret_file, a STUN server none"
            )
        return self


class ServeConfig(_Section):
    """The web side."""

    host: Annotated[str, Flag(metavar="ADDRESS", group=SERVER)] = "127.0.0.1"
    """Address to listen on; with another than loopback others reach the server. 0.0.0.0 is all of IPv4, :: all of
    IPv6 and IPv4."""
    port: Annotated[int, Flag(group=SERVER)] = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    name: Annotated[str | None, Flag("--server-name")] = Field(None, pattern=r"^[a-z0-9]{1,32}$")
    """Of this server among several behind one balancer; ids of its sessions and videos begin with it."""
    agent_port: int | None = Field(None, ge=1, le=65535)
    """Port that tells a balancer how much room there is (HAProxy's agent check); null: none."""
    hosts: Annotated[list[HostName], Flag("--allowed-host", "NAME", ACCESS)] = []
    """A DNS name that users may call this server by, besides localhost and `host`."""
    codec: Annotated[Literal["auto", "h264", "vp8"], Flag()] = "auto"
    """Of the video. auto: H.264, and VP8 for viewers without it."""
    upscale: int = Field(1, ge=1, le=8)
    """The picture is enlarged by this before encoding."""
    bitrate: int | None = Field(None, ge=100_000, le=50_000_000)
    """bit/s of the video; default: by size and fps."""
    max_viewers: Annotated[int, Flag(group=SERVER)] = Field(32, ge=1, le=1000)
    """Viewers at the same time, at most."""
    snapshot_key_file: str | None = None
    """A file with the key that saved sessions are signed with, made where there is none; servers of a fleet share it.
    null: one in the user's state folder."""
    trust_snapshots: Annotated[bool, Flag()] = False
    """Open saved sessions that are sent without this server's signature."""
    address_share: float = Field(0.5, gt=0, le=1)
    """Of viewers' places, control WebSockets, connections and jobs, what one address may hold."""
    trusted_proxies: Annotated[list[Proxy], Flag("--trusted-proxy", "ADDRESS")] = []
    """Addresses and networks whose X-Forwarded-For, -Proto and -Prefix are believed; they pass on Host as it is."""
    root_path: PathPrefix = ""
    """Path below which a proxy shows the server, as /ai; X-Forwarded-Prefix of a trusted proxy comes first."""
    pause_after_s: float = Field(5.0, ge=0)
    """Seconds for which a stream continues when its last viewer has left."""
    idle_s: float | None = Field(300.0, gt=0)
    """Seconds after which a session that nobody watches ends; null: never."""
    host_memory_gb: Annotated[float | None, Flag()] = Field(None, ge=0)
    """GB of host memory for swapped-out sessions of all ranks of a machine; 0: none. null: a quarter of the free."""
    max_utilization: float = Field(0.9, gt=0, le=10)
    """Share of the engine's time that sessions may ask for together."""
    adaptive: Annotated[bool, Flag()] = False
    """Under load, sessions that do not say otherwise give up steps, then frame rate, before anybody is refused."""
    open_browser: Annotated[bool, Flag("--no-browser", group=SERVER)] = True
    """Open a browser where there is a display."""
    outputs: Annotated[list[str], Flag("--output", "FILE|URL", STREAM)] = []
    """Also send the default session to a .mp4 or .webm file, rtmp://, srt://, udp://, tcp://, whip+https://."""
    outputs_file: str | None = None
    """A file with more of them, one a line: addresses may hold stream keys."""
    udp_ports: Annotated[Ports | None, Flag(metavar="LOW-HIGH")] = None
    """UDP ports for viewers' media, as 50000-50100; a viewer takes one per local address. null: any."""
    tls_cert: Annotated[str | None, Flag(metavar="FILE")] = None
    """PEM file of the certificate, with its chain, for HTTPS. Read again when it changes."""
    tls_key: Annotated[str | None, Flag(metavar="FILE")] = None
    """PEM file of its key, without a password."""
    output_targets: list[str] = []
    """Folders, and beginnings of addresses, to which anyone who steers a session may send it over the API."""
    ice_servers: list[IceServer] = []
    """STUN and TURN servers, each with url (stun:HOST:PORT or turn:HOST:PORT), a TURN server also with username and
    credential; none are asked unless named here."""
    whep_url: str | None = Field(None, pattern=r'^https?://[^\s"<>;,]+$')
    """A media server's WHEP address, from which the page of who only watches plays the default session."""
    insecure: Annotated[bool, Flag(group=ACCESS)] = False
    """Non-loopback clients need no token."""
    view_token_file: Annotated[str | None, Flag(metavar="FILE", group=ACCESS)] = None
    """File with the token that is needed to watch."""
    control_token_file: Annotated[str | None, Flag(metavar="FILE", group=ACCESS)] = None
    """File with the token that is needed to steer."""
    view_links: Annotated[bool, Flag(group=ACCESS, rare=True)] = False
    """Signed links let watch, until they expire: ?token= in an address, for players and pages that set no headers."""
    log_format: Annotated[Literal["text", "json"], Flag()] = "text"
    """json: one object per line, viewers that connect and leave included."""
    drain_s: float = Field(0.0, ge=0)
    """Seconds for which viewers may stay after SIGTERM; no session is opened meanwhile."""
    session_per_visitor: Annotated[bool, Flag(group=ACCESS)] = False
    """Who opens the page without naming a session gets one of their own, while there is room."""
    wheel_idle_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds after which who has the wheel of a session, and does not steer, loses it."""
    rewind_mb: int = Field(256, ge=0, le=1_000_000)
    """MB of memory for snapshots to which sessions can be rewound; the oldest go first; 0: none are kept."""
    blocked_words: str | None = None
    """A file with words, one a line, that prompts of sessions and names of watchers must not have; null: none."""
    handover: Annotated[str | None, Flag(metavar="FOLDER")] = None
    """Folder in which sessions are left at SIGTERM for the next server that has it: same ids, tokens and pictures."""
    keep_s: Annotated[float | None, Flag()] = Field(None, ge=0.1)
    """Save each playing session every so many seconds; it resumes from there when the engine fails; null: never."""
    state_dir: Annotated[str | None, Flag(metavar="FOLDER")] = None
    """Folder for sessions that are swapped out or kept; null: both lie in memory, and end with the server."""
    max_restarts: int = Field(5, ge=0, le=1000)
    """How often an engine that fails is started again within a window; 0: the server ends."""
    warm_standby: bool = True
    """Keep a second engine process on standby, torch imported, to take over when the first one fails."""
    cors_origins: list[Origin] = []
    """Origins of pages that may use the API."""
    jobs_dir: Annotated[str | None, Flag(metavar="FOLDER")] = None
    """Folder for the videos of /v1/videos; null: that API is off."""
    jobs_disk_gb: float = Field(10.0, gt=0)
    """GB of kept videos above which no job is taken."""

    @model_validator(mode="after")
    def _ports_and_certificate(self) -> ServeConfig:
        ports = self.media_ports
        if ports is not None and not (ports and ports[0] >= 1 and ports[-1] <= 65535):
            raise ValueError(f"udp_ports is {self.udp_ports}; it must be LOW-HIGH, as 50000-50100, from 1 to 65535")
        if self.handover is not None and self.handover == self.state_dir:
            raise ValueError("handover and state_dir are one folder; give each one of its own")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: the certificate, and its key")
        return self

    @property
    def media_ports(self) -> range | None:
        """`udp_ports` as numbers."""
        low, _, high = (self.udp_ports or "").partition("-")
        return range(int(low), int(high) + 1) if low else None


class Config(_Section):
    """One deployment."""

    model: ModelConfig = ModelConfig()
    session: SessionConfig = SessionConfig()
    playback: PlaybackConfig = PlaybackConfig()
    batching: BatchingConfig = BatchingConfig()
    serve: ServeConfig = ServeConfig()

    def served_model(self) -> ServedModel:
        """What the engine of a server loads, on every rank. Pictures that are enlarged come as RGB."""
        pictures = "rgb" if self.serve.upscale > 1 else "auto"
        own = self.serve.model_dump(include={"host_memory_gb", "state_dir", "keep_s"}) | {"batching": self.batching}
        own |= {"pictures": pictures, "warm_standby": self.serve.warm_standby and self.serve.max_restarts > 0}
        return ServedModel.model_validate(self.model.model_dump() | own)
