"""Options of the command line, and what the help of each command shows.

Kept apart from `parser`, which puts them together, and `main`, which carries commands out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SWITCH = "store_true"


class Option(NamedTuple):
    """One option. `key` is the dotted key of the configuration that it overrides, or the field of the command's job
    that it sets; without one it sets the field with the flag's name. Not given, it is None: configuration and jobs have
    the defaults.

    `action` is one of argparse; with another than "store" and "append" the option takes no value.
    """

    flag: str
    metavar: str
    help: str
    parse: Callable[[str], object] = str
    key: str = ""
    action: str | type[argparse.Action] = "store"
    required: bool = False

    @property
    def name(self) -> str:
        """Of the attribute of the parsed arguments. With the key as the name an option of the configuration is kept
        apart from one that a command has for itself, as `plan` has its --stages."""
        return self.key or self.flag[2:].replace("-", "_")


def add(parser: argparse._ActionsContainer, options: Sequence[Option]) -> None:
    """Let `options` be typed. Mutates: parser."""
    for each in options:
        given = {"dest": each.name, "help": each.help, "action": each.action, "required": each.required}
        value = {"type": each.parse, "metavar": each.metavar} if each.action in ("store", "append") else {}
        parser.add_argument(each.flag, default=None, **given, **value)  # type: ignore[arg-type]


class Preset(argparse.Action):
    """An option without a value: it sets the preset of its own name, and excludes the others."""

    def __init__(self, option_strings: Sequence[str], dest: str, **given: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **given)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name, before = str(option_string).removeprefix("--"), getattr(namespace, self.dest)
        if before not in (None, name):
            parser.error(f"--{before} and --{name} exclude each other; give one of them")
        setattr(namespace, self.dest, name)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


def parse_steps(text: str) -> int | tuple[float, ...]:
    """A number of steps, or timesteps with commas between them. Raises argparse.ArgumentTypeError."""
    return int(text) if text.strip().isdigit() else parse_numbers(text)


def parse_list(path: str) -> list[object]:
    """The list in a JSON or YAML file. Raises argparse.ArgumentTypeError."""
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"{path} must hold a list of rules, as JSON or YAML; see docs/batching.md")
    return found


# fmt: off
# ---- of the configuration ----------------------------------------------------------------------------------------

NAME = Option("--model", "NAME", "`tiny`, a name of `streamdiff models`, a hub id (OWNER/NAME), or a path", str,
              "model.name")
STEPS = Option("--steps", "N", "denoise steps per chunk (default: what the model was made for; `tiny` has 4, and 2)",
               int, "model.steps")
STEPS_OR_LIST = STEPS._replace(parse=parse_steps, help=STEPS.help + "; or the timesteps themselves, "
                               "1000,937.5,833.33,625")
KV_CONTEXT = Option("--kv-context", "POLICY", "what a chunk sees of earlier ones: clean, staircase, same_step "
                    "(default: what the model was made for)", str, "model.kv_context")
MODEL = (
    NAME,
    Option("--device", "DEVICE", "auto, cpu or cuda (default auto: cuda where there is one)", str, "model.device"),
    Option("--threads", "N", "CPU threads of the transformer", int, "model.threads"),
    KV_CONTEXT,
    Option("--seed", "N", "the same seed and prompts give the same video (default 0)", int, "session.seed"),
    Option("--fps", "N", "frames shown per second (default: the model's own; `tiny` has 40)", float, "playback.fps"),
)
QUANTIZE = Option("--quantize", "KIND", "none, fp8 or int8: the blocks' linear layers in 8 bits (needs torchao); auto: "
                  "fp8 where it is faster", str, "model.quantize")
PRESETS = (
    Option("--plain", "", "none of the fast paths that CUDA has by default: no graphs, torch's own attention; what is "
           "asked for by itself stays", key="model.preset", action=Preset),
    Option("--fast", "", "also what changes pictures a little: the small autoencoder, the fewest steps that the model "
           "has", key="model.preset", action=Preset),
)
OFFLOAD = Option("--offload", "KIND", "none, or blocks: they lie in host memory and are copied one ahead; slow, for "
                 "small cards", str, "model.offload")
VAE = Option("--vae", "PATH", "the autoencoder, or a name: taew2_1 is small (default: its own)", str, "model.vae")
SIZE = Option("--size", "WxH", "of the picture in pixels (default: the model's own)", str, "model.size")
EXAMINED_PARTS = (
    Option("--weights", "FILE", "the transformer's weights, in any published layout", str, "model.weights"),
    VAE,
    Option("--text-encoder", "PATH", "a folder with encoder and tokenizer, or Wan's .pth", str, "model.text_encoder"),
    Option("--dtype", "TYPE", "float32 or bfloat16 (default: float32 on a CPU, bfloat16 on CUDA)", str, "model.dtype"),
    Option("--attention", "KERNEL", "one that `streamdiff doctor` lists, or auto: on CUDA the fastest, by trial", str,
           "model.attention"),
    QUANTIZE,
    *PRESETS,
)
"""What `doctor` can say something about."""
PARTS = (
    *EXAMINED_PARTS,
    OFFLOAD,
    Option("--lora", "FILE[:SCALE]", "merge a LoRA into the weights", str, "model.lora"),
    Option("--text-device", "DEVICE", "of a large text encoder: cpu, cuda (default: by room)", str,
           "model.text_device"),
    Option("--compile", "off|on", "run compiled graphs of transformer and decoder; made at the first start, then kept "
           "on disk (default: on with CUDA)", str, "model.compile"),
    SIZE,
)
TRACE = (
    Option("--profile", "DIR", "trace some chunks with PyTorch's profiler, for ui.perfetto.dev", str, "model.trace"),
    Option("--profile-chunks", "N", "chunks of that trace, 1 to 100 (default 4)", int, "model.trace_chunks"),
)
WINDOW = (
    Option("--window", "N", "latent frames a chunk can see, sink and itself included (default: the model's own)", int,
           "model.window"),
    Option("--sink", "N", "latent frames of the beginning that stay in sight (default: the model's)", int,
           "model.sink"),
    Option("--rope", "KIND", "absolute or relative positions (default: the model's own)", str, "model.rope"),
)
"""What a chunk sees; of every session, as caches, memory and graphs are made for it at the start."""
PROMPT = Option("--prompt", "TEXT", "what to show", str, "session.prompt")
IMAGE = (
    Option("--image", "FILE", "a picture that the stream begins with and goes on from", str, "session.image"),
    Option("--fit", "KIND", "of a picture of other proportions: cover (default) or contain", str, "session.fit"),
)
INPUT = (
    Option("--input", "FILE", "a video file that the stream follows, at its own pace", str, "session.input"),
    Option("--input-end", "WHAT", "at the file's end: text (on from the prompt alone, default), loop, or end (the "
           "session ends)", str, "session.input_end"),
    Option("--strength", "S", "noise mixed into the video, above 0 to 1 (default 0.4)", float, "session.strength"),
)
ADDRESS = (
    Option("--host", "ADDRESS", "address to listen on (default 127.0.0.1: this machine only)", str, "serve.host"),
    Option("--port", "N", "port to listen on (default 8000; 0 picks a free one)", int, "serve.port"),
)
STAGES = Option("--stages", "N", "ranks, started here, over which the model's blocks are split (default 1)", int,
                "model.stages")
BATCHING = (
    Option("--batching", "MODE", "off, or dynamic: sessions share forwards where there are more of them than places in "
           "the ring (default off)", str, "batching.mode"),
    Option("--max-rows", "N", "most rows of a forward with --batching dynamic, 1 to 16 (default 4)", int,
           "batching.max_rows"),
    Option("--batching-wait-ms", "MS", "how long a row may wait for others (default 0: never)", float,
           "batching.wait_ms"),
    Option("--batching-rules", "FILE", "a JSON or YAML list of rules that lower both, see docs/batching.md", parse_list,
           "batching.rules"),
)
PARALLEL = Option("--parallel", "PxC", "P stages, each shared by C ranks, as 1x2 (default: --stages x 1)", str,
                  "model.parallel")
DECODE = Option("--decode-rank", "PLACE", "rank of a ring that decodes: head (default), last, or dedicated (one more)",
                str, "model.decode_rank")
SERVE = (
    Option("--chunk-frames", "N", "latent frames of a chunk, of a model that the catalogue does not know", int,
           "model.chunk_latents"),
    *WINDOW,
    STAGES,
    PARALLEL,
    DECODE,
    *BATCHING,
    Option("--adaptive", "", "under load, sessions give up steps, then frame rate, before anybody is refused",
           key="serve.adaptive", action=SWITCH),
    Option("--codec", "CODEC", "auto, h264 or vp8 (default auto)", str, "serve.codec"),
    Option("--encoder", "NAME", "of H.264: auto, x264 or nvenc (default auto: what opens)", str, "serve.encoder"),
    Option("--upscale", "N", "enlarge before encoding (default 1: not)", int, "serve.upscale"),
    Option("--bitrate", "BITS", "bit/s of the video (default: fits size and fps)", int, "serve.bitrate"),
    Option("--jobs-dir", "FOLDER", "make videos for /v1/videos too, and keep them here", str, "serve.jobs_dir"),
    Option("--max-ahead-s", "SECONDS", "video made ahead of what is shown, at most", float, "playback.max_ahead_s"),
    Option("--output", "FILE|URL", "also send it to a .mp4 or .webm file, rtmp://, srt://, udp://, tcp://, "
           "whip+https://; may be repeated", str, "serve.outputs", "append"),
    Option("--allowed-host", "NAME", "a name that users call this machine by, besides localhost and --host; may be "
           "repeated", str, "serve.hosts", "append"),
    Option("--trusted-proxy", "ADDRESS", "a proxy, or network of them, whose X-Forwarded-For is believed; may be "
           "repeated", str, "serve.trusted_proxies", "append"),
    Option("--control-token-file", "FILE", "its token is needed to steer", str, "serve.control_token_file"),
    Option("--view-token-file", "FILE", "its token is needed to watch", str, "serve.view_token_file"),
    Option("--tls-cert", "FILE", "speak HTTPS with this certificate (PEM, with its chain)", str, "serve.tls_cert"),
    Option("--tls-key", "FILE", "and this key", str, "serve.tls_key"),
    Option("--from", "FILE", "go on from a saved session", str, "session.snapshot"),
    Option("--trust-snapshots", "", "open saved sessions that are sent without this server's signature",
           key="serve.trust_snapshots", action=SWITCH),
    Option("--handover", "DIR", "leave sessions here at SIGTERM, for the next server that has the same folder", str,
           "serve.handover"),
    Option("--keep-s", "N", "every N seconds keep what plays; it goes on from there when the engine fails", float,
           "serve.keep_s"),
    Option("--server-name", "NAME", "of this server among several behind one balancer", str, "serve.name"),
    Option("--udp-ports", "LOW-HIGH", "of viewers' media (default: any)", str, "serve.udp_ports"),
    Option("--log-format", "KIND", "text, or json: one object a line on standard error", str, "serve.log_format"),
    Option("--host-memory-gb", "GB", "host memory for sessions that nobody watches (default: a quarter of what is "
           "free; 0: they keep the device's)", float, "serve.host_memory_gb"),
    Option("--state-dir", "FOLDER", "for sessions beyond --host-memory-gb, and for what --keep-s saves, which a new "
           "server resumes", str, "serve.state_dir"),
    Option("--max-viewers", "N", "viewers at the same time, at most", int, "serve.max_viewers"),
    Option("--address-share", "SHARE", "what one address may hold of viewers, connections, jobs (0.5)", float,
           "serve.address_share"),
    Option("--insecure", "", "let other machines in without a token", key="serve.insecure", action=SWITCH),
    Option("--no-browser", "", "do not open a browser", key="serve.open_browser", action="store_false"),
)
GPUS = (
    Option("--gpus", "N", "use so many GPUs as the planner finds best: stages, and ranks that share them", int),
    Option("--for", "GOAL", "of --gpus: one stream (default), or many: as many as fit", key="goal"),
)
CONFIGURATION = (*ADDRESS, PROMPT, *IMAGE, *INPUT, STEPS_OR_LIST, *MODEL, *PARTS, *SERVE, *TRACE)
"""Every option that sets a value of the configuration."""

# ---- of the commands ----------------------------------------------------------------------------------------------

JSON = Option("--json", "", "print as JSON", key="as_json", action=SWITCH)
OVERWRITE = Option("--overwrite", "", "replace what exists (default: refuse)", action=SWITCH)
CONFIG = Option("--config", "FILE", "a YAML file with the same settings, see configs/", Path)
GENERATE = (
    CONFIG,
    PROMPT,
    *IMAGE,
    STEPS_OR_LIST,
    *MODEL,
    *PARTS,
    STAGES,
    PARALLEL,
    DECODE,
    *TRACE,
    Option("--output", "FILE", ".mp4, .webm, or a folder for PNG frames", Path),
    OVERWRITE,
    Option("--seconds", "S", "length (default 10)", float),
    Option("--prompt-at", "SECONDS:TEXT", "change the prompt at this time; may be given several times",
           action="append"),
    Option("--prompts", "FILE", "many videos by one engine, into the folder --output: a prompt a line, or .jsonl with "
           "prompt, seed, seconds, size, output (below the folder)", Path),
    Option("--resume", "", "with --prompts: skip the videos that are there", action=SWITCH),
)
PLAN = (
    CONFIG,
    NAME,
    STEPS,
    KV_CONTEXT,
    QUANTIZE,
    OFFLOAD,
    VAE,
    SIZE,
    *WINDOW[:2],
    Option("--gpu", "NAME", "h100, h200, b200, 4090 or 5090: what to expect of it, estimated"),
    Option("--gpus", "N", "so many of --gpu: every P stages x C ranks that share each, and which is best", int),
    Option("--link", "KIND", "what GPUs are linked by: nvlink or pcie (default: the fastest that --gpu has)"),
    Option("--fps", "N", "frames per second of each session that --gpu shall reach (default: the model's own)", float),
    Option("--stages", "N", "stages of the ring, one device each (default 4; 1 with --gpu)", int),
    Option("--sessions", "N", "sessions at the same time (default 1)", int),
    Option("--max-rows", "N", "micro-steps that may share a forward, at most (default 1)", int),
    Option("--chunks", "N", "chunks to simulate per session (default 100)", int),
    Option("--stage-times", "S,S,...", "seconds of each stage, for a forward of one row"),
    Option("--profile", "FILE", "measured times as JSON, see below", Path),
    Option("--tflops", "N", "10^12 operations per second that a device reaches (default 400)", float),
    Option("--gbps", "N", "GB/s of memory that a device reaches (default 2,500)", float),
    Option("--link-gbps", "N", "GB/s of a link between devices (default 25)", float),
    Option("--link-time", "SECONDS", "of a message between stages, in place of what the times' source says", float),
    Option("--decode-time", "SECONDS", "of a chunk's decode, in place of what the times' source says", float),
    Option("--decode-rank", "PLACE", "where chunks are decoded: head, last, dedicated, own-stream "
           "(default auto: head or last)", key="decode"),
    Option("--dtype", "TYPE", "float32 or bfloat16 (default float32; bfloat16 with --gpu)"),
    Option("--trace", "FILE", "write a Chrome/Perfetto trace", Path),
    Option("--plot", "FILE", "draw the first chunks as .png, .svg or .pdf", Path),
    JSON,
)
DOCTOR = (CONFIG, *ADDRESS, STEPS, *MODEL, *EXAMINED_PARTS)
# fmt: on

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
  streamdiff serve --model longlive-1.3b --gpus 4      one stream, four GPUs, used as the planner finds best
  streamdiff serve --config configs/lan.yaml
  streamdiff serve --profile costs              costs/trace.json.gz shows where the time goes, once somebody watches

An option given here wins over the file given with --config.
"""
GENERATE_EXAMPLES = """examples:
  streamdiff generate --prompt "a red circle moving left over a meadow" --output circle.mp4
  streamdiff generate --prompt "a red circle" --prompt-at "4:a blue circle" --prompt-at "8:a white star" \\
      --seconds 12 --output changes.webm
  streamdiff generate --prompt "a purple square" --seconds 1 --output frames/    one PNG per frame
  streamdiff generate --prompts prompts.txt --output videos/     a video for each line; --resume goes on where it ended
  streamdiff generate --stages 2 --kv-context staircase --output ring.mp4        two ranks, started here, work on it

With options that say everything by numbers and files, stages take turns in one process, or with --processes have one
each.
"""
PLAN_EXAMPLES = """examples:
  streamdiff plan --gpu 4090 --model self-forcing --vae taew2_1 --sessions 2    what to expect of a card, and what fits
  streamdiff plan --gpus 4 --gpu h100 --model longlive-1.3b --sessions 4    stages x ranks that share them: the best
  streamdiff plan --stages 4 --kv-context staircase --trace ring.json
  streamdiff plan --stages 4 --kv-context same_step --stage-times 0.1,0.1,0.1,0.1 --decode-time 0.02
  streamdiff plan --stages 2 --sessions 2 --profile measured.json --plot ring.png

Times come from --stage-times, else from --profile, else from an estimate for --gpu, or at --tflops and --gbps. A
profile is JSON:
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
