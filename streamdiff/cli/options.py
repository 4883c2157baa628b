"""Options of the command line that set a value of the configuration, and what the help of each command shows.

Kept apart from `cli`, which parses and calls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """An option that overrides one value of the configuration; `key` is the dotted key."""

    flag: str
    key: str
    type: type[str] | type[int] | type[float]
    metavar: str
    help: str
    repeat: bool = False


MODEL = (
    Option(
        "--model",
        "model.name",
        str,
        "NAME",
        "`tiny`, a name of `streamdiff models`, a hub id (OWNER/NAME), or a path",
    ),
    Option("--device", "model.device", str, "DEVICE", "auto, cpu or cuda (default auto: cuda where there is one)"),
    Option("--threads", "model.threads", int, "N", "CPU threads of the transformer"),
    Option(
        "--steps",
        "model.steps",
        int,
        "N",
        "denoise steps per chunk (default: what the model was made for; `tiny` has 4, and 2)",
    ),
    Option(
        "--kv-context",
        "model.kv_context",
        str,
        "POLICY",
        "what a chunk sees of earlier ones: clean, staircase, matched (default: what the model was made for)",
    ),
    Option("--seed", "session.seed", int, "N", "the same seed and prompts give the same video (default 0)"),
    Option("--fps", "playback.fps", float, "N", "frames shown per second (default: the model's own; `tiny` has 40)"),
)
QUANTIZE = Option(
    "--quantize",
    "model.quantize",
    str,
    "KIND",
    "none, fp8 or int8: the blocks' linear layers in 8 bits (needs torchao)",
)
PARTS = (
    Option("--weights", "model.weights", str, "FILE", "the transformer's weights, in any published layout"),
    Option("--lora", "model.lora", str, "FILE[:SCALE]", "merge a LoRA into the weights"),
    Option("--vae", "model.vae", str, "PATH", "the autoencoder, or a name: taew2_1 is small (default: its own)"),
    Option(
        "--text-encoder",
        "model.text_encoder",
        str,
        "PATH",
        "a folder with encoder and tokenizer, or Wan's .pth",
    ),
    Option(
        "--text-device", "model.text_device", str, "DEVICE", "of a large text encoder: cpu, cuda (default: by room)"
    ),
    Option("--dtype", "model.dtype", str, "TYPE", "float32 or bfloat16 (default: float32 on a CPU, bfloat16 on CUDA)"),
    Option(
        "--attention", "model.attention", str, "KERNEL", "auto, or one that `streamdiff doctor` lists; tried at start"
    ),
    QUANTIZE,
    Option(
        "--compile",
        "model.compile",
        str,
        "off|on",
        "run compiled graphs of transformer and decoder; made at the first start, then kept on disk (default off)",
    ),
    Option(
        "--clean-pass",
        "model.clean_pass",
        str,
        "alone|with-next",
        "with-next: one forward for a chunk's clean pass and the next one's first step (KV context clean)",
    ),
    Option("--size", "model.size", str, "WxH", "of the picture in pixels (default: the model's own)"),
)
TRACE = (
    Option("--profile", "model.trace", str, "DIR", "trace some chunks with PyTorch's profiler; say what costs most"),
    Option("--profile-chunks", "model.trace_chunks", int, "N", "chunks of that trace, 1 to 100 (default 4)"),
)
LOOKED_AT = tuple(
    option
    for option in PARTS
    if option.flag in ("--weights", "--vae", "--text-encoder", "--dtype", "--attention", "--quantize")
)
"""What `doctor` can say something about."""
WINDOW = (
    Option(
        "--window",
        "model.window",
        int,
        "N",
        "latent frames a chunk can see, sink and itself included (default: the model's own)",
    ),
    Option(
        "--sink", "model.sink", int, "N", "latent frames of the beginning that stay in sight (default: the model's)"
    ),
    Option("--rope", "model.rope", str, "KIND", "absolute or relative positions (default: the model's own)"),
)
"""What a chunk sees; of every session, as caches, memory and graphs are made for it at the start."""
PLAN_MODEL = (
    *(option for option in MODEL if option.flag in ("--model", "--steps", "--kv-context")),
    QUANTIZE,
    *WINDOW[:2],
)
PROMPT = Option("--prompt", "session.prompt", str, "TEXT", "what to show")
ADDRESS = (
    Option("--host", "serve.host", str, "ADDRESS", "address to listen on (default 127.0.0.1: this machine only)"),
    Option("--port", "serve.port", int, "N", "port to listen on (default 8000; 0 picks a free one)"),
)
STAGES = Option(
    "--stages", "model.stages", int, "N", "ranks, started here, over which the model's blocks are split (default 1)"
)
SERVE = (
    Option(
        "--chunk-frames",
        "model.chunk_latents",
        int,
        "N",
        "latent frames of a chunk, of a model that the catalogue does not know",
    ),
    *WINDOW,
    STAGES,
    Option("--decode", "model.decode", str, "PLACE", "rank of a ring that decodes: head (default), last or own-rank"),
    Option("--codec", "serve.codec", str, "CODEC", "auto, h264 or vp8 (default auto)"),
    Option("--encoder", "serve.encoder", str, "NAME", "of H.264: auto, x264 or nvenc (default auto: what opens)"),
    Option("--scale", "serve.scale", int, "N", "enlarge the picture before encoding (default: 2 for `tiny`, else 1)"),
    Option(
        "--pictures", "serve.pictures", str, "KIND", "from the decoder: rgb, yuv420 or auto (default auto: the cheaper)"
    ),
    Option("--bitrate", "serve.bitrate", int, "BITS", "bit/s of the video (default: fits size and fps)"),
    Option("--lead", "playback.lead_s", float, "SECONDS", "video made ahead of what is shown, at most"),
    Option(
        "--output",
        "serve.outputs",
        str,
        "FILE|URL",
        "also send it to a .mp4 or .webm file, rtmp://, srt://, udp://, tcp://, whip+https://; may be repeated",
        True,
    ),
    Option(
        "--allowed-host",
        "serve.hosts",
        str,
        "NAME",
        "a name that users call this machine by, besides localhost and --host; may be repeated",
        True,
    ),
    Option(
        "--trusted-proxy",
        "serve.trusted_proxies",
        str,
        "ADDRESS",
        "a proxy, or network of them, whose X-Forwarded-For is believed; may be repeated",
        True,
    ),
    Option("--control-token-file", "serve.control_token_file", str, "FILE", "its token is needed to steer"),
    Option("--view-token-file", "serve.view_token_file", str, "FILE", "its token is needed to watch"),
    Option("--log-format", "serve.log_format", str, "KIND", "text, or json: one object a line on standard error"),
    Option("--max-viewers", "serve.max_viewers", int, "N", "viewers at the same time, at most"),
    Option("--address-share", "serve.address_share", float, "SHARE", "of these, what one address may hold (0.5)"),
)

EXAMPLES = """examples:
  streamdiff serve                              live video in the browser
  streamdiff generate --prompt "a blue star moving up in the desert" --output star.mp4
  streamdiff plan --stages 4                    what several devices would make of it
  streamdiff decode --vae tiny --latents latents.safetensors --out video.mp4
  streamdiff doctor                             what was found here, and what will be used
  streamdiff models                             published models: files, licences, memory

streamdiff COMMAND --help tells more.
"""
SERVE_EXAMPLES = """examples:
  streamdiff serve
  streamdiff serve --prompt "a yellow star moving left at night" --port 9000
  streamdiff serve --host 0.0.0.0 --control-token-file token.txt    let others watch; steering takes the token
  streamdiff serve --host 0.0.0.0 --insecure    let others on the network watch, and steer
  streamdiff serve --stages 4 --kv-context staircase    four ranks, started here, work on one stream
  streamdiff serve --config configs/lan.yaml
  streamdiff serve --profile costs              costs/summary.txt says where the time goes, once somebody watches

An option given here wins over the file given with --config.
"""
GENERATE_EXAMPLES = """examples:
  streamdiff generate --prompt "a red circle moving left over a meadow" --output circle.mp4
  streamdiff generate --prompt "a red circle" --prompt-at "4:a blue circle" --prompt-at "8:a white star" \\
      --seconds 12 --output changes.webm
  streamdiff generate --prompt "a purple square" --seconds 1 --output frames/    one PNG per frame
  streamdiff generate --stages 2 --kv-context staircase --output ring.mp4        two ranks, started here, work on it

With options that say everything by numbers and files, stages take turns in one process.
"""
PLAN_EXAMPLES = """examples:
  streamdiff plan --stages 4 --kv-context staircase --trace ring.json
  streamdiff plan --stages 4 --kv-context matched --stage-times 0.1,0.1,0.1,0.1 --decode-time 0.02
  streamdiff plan --stages 2 --sessions 2 --profile measured.json --plot ring.png

Times come from --stage-times, else from --profile, else from an estimate at --tflops and --gbps. A profile is JSON:
  {"block_s": [0.01, 0.01, 0.01, 0.01], "embed_s": 0.001, "head_s": 0.001, "decode_s": 0.02, "link_s": 0.0005}
all in seconds: one entry per block, embedding, output layer, a chunk's decode, a message between stages. An entry of
block_s, embed_s and head_s may be a list: the time of a forward with 1 row, 2 rows, and so on.
Open a trace in ui.perfetto.dev.
"""
DOCTOR_EXAMPLES = """examples:
  streamdiff doctor
  streamdiff doctor --config configs/lan.yaml   judge this machine for that configuration
"""
MODELS_EXAMPLES = """examples:
  streamdiff models                     all of them, what is on disk, memory per stage
  streamdiff models longlive-1.3b       one, with what to download, licence and source
  streamdiff models --json
"""
