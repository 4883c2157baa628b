"""The configuration tree: frozen, validated once, loaded from YAML. Knows nothing about what its values do."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

EMBEDDED = "tiny"
"""The model that comes with the package."""


KVContext = Literal["clean", "staircase", "matched"]


# What a browser sends as Origin, or * for every page there is.
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^\s/?#@]+)$")]


# A DNS name, as in a Host header but without the port.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?$", max_length=253)]


def _network(value: str) -> str:
    ip_network(value)  # or its ValueError
    return value


Proxy = Annotated[str, AfterValidator(_network)]


# fmt: off
Attention = Literal[
    "auto", "math", "flash", "efficient", "cudnn",
    "flash_2", "flash_3", "flash_2_hub", "flash_3_hub", "flash_4_hub", "sage", "sage_fp16", "sage_hub", "xformers",
]


# fmt: on
class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _switch(value: object) -> object:
    """YAML reads the words `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _tuple(value: object) -> object:
    """YAML has lists; a configuration is hashed."""
    return tuple(value) if isinstance(value, list) else value


class ModelConfig(_Section):
    """Which weights run, where, and how."""

    name: str = Field(EMBEDDED, description="`tiny`, a name of `streamdiff models`, or a folder in the embedded layout")
    weights: str | None = Field(
        None, description="the transformer's checkpoint; without `name`, the model is the one whose it is"
    )
    lora: str | None = Field(
        None, description="FILE or FILE:SCALE, merged into the weights; instead of the published one"
    )
    vae: str | None = Field(None, description="the autoencoder: a folder, a file or a name such as taew2_1")
    text_encoder: str | None = Field(
        None, description="a folder in diffusers' or original Wan's layout with encoder and tokenizer, or Wan's .pth"
    )
    text_device: Literal["cpu", "cuda"] | None = Field(
        None,
        description="where a large text encoder runs; default: cuda where it takes a third of what is free, or less",
    )
    keep_text_encoder: bool = Field(True, description="keep its weights in memory, or read them again for every text")
    keep_embeddings: bool = Field(
        True, description="keep prompts' embeddings of a large text encoder on disk too, in the user's cache folder"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on cuda, float32 on cpu")
    attention: Attention = Field("auto", description="attention kernel, tried out at the start; auto: torch's choice")
    quantize: Literal["none", "fp8", "int8"] = Field(
        "none", description="the blocks' linear layers in 8 bits: fp8 on recent NVIDIA GPUs, int8 anywhere"
    )
    compile: Annotated[Literal["off", "on"], BeforeValidator(_switch)] = Field(
        "off", description="run compiled graphs of transformer and decoder; made at the first start, then kept on disk"
    )
    size: str | None = Field(None, description="WIDTHxHEIGHT of the picture; default: the model's own")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu")
    threads: int = Field(1, ge=1, le=64, description="CPU threads of the transformer; decoding has one of its own")
    steps: int | None = Field(
        None, ge=1, le=50, description="denoise steps per chunk, of those the model has; default: what it was made for"
    )
    timesteps: Annotated[tuple[float, ...] | None, BeforeValidator(_tuple)] = Field(
        None, description="what a model that the catalogue does not know is told at each of its steps, 1000 to 0"
    )
    chunk_latents: int | None = Field(
        None, ge=1, description="latent frames of a chunk, of a model that the catalogue does not know"
    )
    kv_context: KVContext = Field("clean", description="what a chunk sees of earlier chunks (docs/design.md)")
    clean_pass: Literal["alone", "with-next"] = Field(
        "alone", description="with-next: one forward for it and the next chunk's first step, where there is room for it"
    )
    window: int | None = Field(
        None, ge=1, description="latent frames a chunk can see, sink and itself included; default: the model's own"
    )
    sink: int | None = Field(None, ge=0, description="first latent frames that stay in sight; default: the model's own")
    rope: Literal["absolute", "relative"] | None = Field(
        None, description="positions from the stream's beginning, or the sink next to the window; default: the model's"
    )
    stages: int = Field(1, ge=1, le=64, description="ranks over which the transformer's blocks are split")
    decode: Literal["head", "last", "own-rank"] = Field("head", description="which rank of a ring decodes")
    decode_at_once: int | None = Field(
        None, ge=1, le=64, description="latent frames per call of the decoder; default: 1 on cpu, a chunk on cuda"
    )
    decode_layout: Literal["auto", "channels-last", "contiguous"] = Field(
        "auto", description="how pictures lie in the decoder; auto: channels-last, but for Wan's on a cpu"
    )
    link: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl between GPUs, else gloo")
    hang_s: float = Field(
        60.0, ge=1, description="a rank that is silent, or at one forward (or its GPU is), so long hangs"
    )
    profile: str | None = Field(None, description="measured times to split the blocks by; default: measure at start")
    trace: str | None = Field(None, description="a folder for a profiler's trace of some chunks, which are slower then")
    trace_chunks: int | None = Field(None, ge=1, le=100, description="chunks of that trace; default: 4")
    memory_gb: float | None = Field(None, gt=0, description="for sessions' caches, per rank; default: what is free")

    @property
    def clean_with_next(self) -> bool:
        """Whether the clean pass takes the next chunk's first step with it."""
        return self.clean_pass == "with-next"

    @property
    def ranks(self) -> int:
        """Processes that it takes: one per stage, and one more where decoding has its own."""
        return self.stages + (self.decode == "own-rank")

    @property
    def decode_rank(self) -> int:
        """The rank that decodes."""
        return {"head": 0, "last": self.stages - 1, "own-rank": self.stages}[self.decode]


class ServedModel(ModelConfig):
    """The same for `serve`, and what its encoders are given; see `Config.served_model`."""

    pictures: Literal["auto", "rgb", "yuv420"]


class SessionConfig(_Section):
    """How the default session starts."""

    prompt: str = Field("a red circle moving right over a meadow", min_length=1, max_length=2000)
    seed: int = Field(0, ge=0, le=2**31 - 1)


class PlaybackConfig(_Section):
    """How frames are shown."""

    fps: float = Field(40.0, ge=1, le=120, description="frames shown per second")
    lead_s: float = Field(0.6, gt=0, le=10, description="seconds of video made ahead of what is shown, at most")


class IceServer(_Section):
    """A STUN or TURN server, for viewers and for the server itself."""

    url: str = Field(pattern=r"^(stuns?|turns?):[^\s<>\";,]+$", description="stun:HOST[:PORT] or turn:HOST[:PORT]")
    username: str | None = Field(None, pattern=r'^[^\s"\\]+$', description="of a TURN server")
    credential: str | None = Field(None, pattern=r'^[^\s"\\]+$', description="of a TURN server")

    @model_validator(mode="after")
    def _turn_needs_a_name(self) -> IceServer:
        if self.url.startswith("turn") != (self.username is not None and self.credential is not None):
            raise ValueError("a TURN server has username and credential, a STUN server has neither")
        return self


class ServeConfig(_Section):
    """The web side."""

    host: str = Field("127.0.0.1", description="address to listen on; anything but loopback opens the server to others")
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free one")
    hosts: list[HostName] = Field(
        [], description="names, besides localhost and `host`, that users may call it by; addresses need not be named"
    )
    codec: Literal["auto", "h264", "vp8"] = Field("auto", description="auto: H.264 first, VP8 for who cannot")
    encoder: Literal["auto", "x264", "nvenc"] = Field(
        "auto", description="of H.264, tried out at the start; auto: NVENC where it can be opened, else x264"
    )
    scale: int | None = Field(
        None,
        ge=1,
        le=8,
        description="the picture is enlarged by this before encoding; default: 2 for the embedded model, else 1",
    )
    pictures: Literal["auto", "rgb", "yuv420"] = Field(
        "auto", description="what leaves the decoder's device; auto: yuv420 on cuda where scale is 1, else rgb"
    )
    bitrate: int | None = Field(None, ge=100_000, le=50_000_000, description="bit/s; default fits size and fps")
    max_viewers: int = Field(32, ge=1, le=1000)
    max_connections: int = Field(1000, ge=8, le=100_000, description="open HTTP connections, at most")
    address_share: float = Field(
        0.5, gt=0, le=1, description="of viewers' places, control WebSockets and connections, what one address may hold"
    )
    request_s: float = Field(
        10.0, gt=0, description="a request's head, and then its body, has to arrive within so long"
    )
    trusted_proxies: list[Proxy] = Field(
        [], description="addresses and networks whose X-Forwarded-For is believed; they have to pass on Host as it is"
    )
    grace_s: float = Field(5.0, ge=0, description="a stream that nobody watches any more plays on for so long")
    idle_s: float | None = Field(300.0, gt=0, description="a session that nobody watches ends after so long")
    lifetime_s: float | None = Field(3600.0, gt=0, description="a session ends after so long at the latest")
    load: float = Field(0.9, gt=0, le=10, description="share of the engine's time that sessions may ask for together")
    open_browser: bool = Field(True, description="open a browser where there is a display")
    outputs: list[str] = Field([], description="files and addresses that the default session is also sent to")
    ice_servers: list[IceServer] = Field([], description="STUN and TURN servers; none are asked unless named here")
    insecure: bool = Field(False, description="let others in without a token, where `host` is no loopback address")
    view_token_file: str | None = Field(None, description="a file with the token that lets one watch")
    control_token_file: str | None = Field(None, description="a file with the token that lets one watch and steer")
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line, also who comes and goes")
    log_prompts: bool = Field(False, description="write prompts into the log; else none is")
    drain_s: float = Field(0.0, ge=0, description="after SIGTERM viewers may stay for so long; no session is opened")
    restarts: int = Field(5, ge=0, le=1000, description="an engine that fails is started again; 0: the server ends")
    restart_window_s: float = Field(300.0, gt=0, description="more failures than `restarts` within so long are the end")
    restart_wait_s: float = Field(0.5, ge=0, description="before the second restart; then twice as long each time")
    spare: bool = Field(True, description="a second engine process waits, torch imported, for the first one to fail")
    cors_origins: list[Origin] = Field([], description="pages of other origins that may use it")


class Config(_Section):
    """One deployment."""

    model: ModelConfig = ModelConfig()
    session: SessionConfig = SessionConfig()
    playback: PlaybackConfig = PlaybackConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def scale(self) -> int:
        """What the picture is enlarged by: `serve.scale`, else 2 for the embedded model, whose pictures are small."""
        return self.serve.scale or (2 if self.model.name == EMBEDDED else 1)

    def served_model(self) -> ServedModel:
        """What the engine of a server loads, on every rank. Pictures that are enlarged come as RGB, unless
        `serve.pictures` says otherwise: YUV420 has a colour for 2 x 2 pixels only."""
        enlarged = self.serve.pictures == "auto" and self.scale > 1
        pictures = "rgb" if enlarged else self.serve.pictures
        return ServedModel.model_validate({**self.model.model_dump(), "pictures": pictures})
