"""The hot path never waits for the device: no value of a tensor is read back in a micro-step (docs/design.md, section
8)."""

from __future__ import annotations

import ast

import pytest

from tests.rules.source import Module, modules, parse

pytestmark = pytest.mark.xdist_group("source rules")

HOT = ("streamdiff.models", "streamdiff.pipeline.kv_cache", "streamdiff.pipeline")
SYNC_METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
SYNC_FUNCTIONS = {"torch.cuda.synchronize", "torch.nonzero", "torch.masked_select", "torch.equal", "torch.allclose"}
# Of values that the host holds in pageable memory: the host waits until they are on the device.
UPLOADS = {"torch.tensor", "torch.as_tensor", "torch.from_numpy"}

# Modules that are not part of a micro-step, by prefix, and functions that are where the device is meant to be left.
COLD = {
    "streamdiff.models.text_encoder": "writes files, on the thread that encodes texts",
    "streamdiff.models.tiny.weights": "files",
    "streamdiff.models.tensor_file": "files",
    "streamdiff.models.checkpoint": "files",
    "streamdiff.pipeline.snapshot": "files, and sessions that are held meanwhile",
}
ALLOWED = {
    "streamdiff.pipeline.build:_run_s": "measures before the first chunk",
    "streamdiff.models.transformer.weights:weights_digest": "for snapshots, once",
    "streamdiff.models.transformer.attention_backend:_off": "tries a kernel out before the first chunk",
    "streamdiff.models.transformer.attention_backend:_formula": "what it is compared with",
    "streamdiff.models.tiny.model:tokens": "a prompt's, on the CPU",
    "streamdiff.models.autoencoder.autoencoder:encode": "on the thread that encodes text, as a stream opens",
    "streamdiff.pipeline.video_input.feeding:_encode": "on the thread that encodes video, on a stream of its own",
    "streamdiff.pipeline.streaming_pipeline:features_of": "as a stream opens, of values on the CPU",
    "streamdiff.pipeline.distributed.cuda_streams:drain": "for the start and the end",
    "streamdiff.pipeline.distributed.cuda_streams:run": "on a thread that does nothing else",
    "streamdiff.models.autoencoder.picture_decoder:__init__": "a decoder's constants",
    "streamdiff.pipeline.runner.sampler:_times": "a session's noise levels",
    "streamdiff.pipeline.distributed.tcp:__init__": "slots in host memory",
    "streamdiff.pipeline.distributed.tcp:_accept_invitation": "once, in host memory",
    "streamdiff.pipeline.distributed.tcp:receive": "a record in host memory, where the kernel put it",
    "streamdiff.pipeline.row_faults:finite_rows": "of a ring in host memory: on a device nobody looks",
    "streamdiff.pipeline.decode.decoder_memories:fetch": "on a decoding thread: here alone pictures leave the device",
    "streamdiff.pipeline.decode.decode_worker:take_answer": "pictures in host memory",
}


def faults(module: Module) -> list[str]:
    """Calls that make the host wait for the device, as `place:line in function`."""
    found = []
    for function, node in _calls(module.tree, ""):
        name = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        bad = (method in SYNC_METHODS and not name.startswith("np.")) or name in SYNC_FUNCTIONS
        bad |= name in UPLOADS and any(keyword.arg == "device" for keyword in node.keywords)
        if bad and f"{module.name}:{function}" not in ALLOWED:
            found.append(f"{module.place}:{node.lineno} {name}() in {function or 'the module'}")
    return found


def _calls(tree: ast.AST, function: str) -> list[tuple[str, ast.Call]]:
    found = []
    for child in ast.iter_child_nodes(tree):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            found.append((function, child))
        found += _calls(child, inner)
    return found


def hot() -> list[Module]:
    return [
        module for module in modules() if module.name.startswith(HOT) and not any(map(module.name.startswith, COLD))
    ]


def test_no_host_sync_in_the_hot_modules() -> None:
    found = [fault for module in hot() for fault in faults(module)]
    assert not found, "\n".join(found)


def test_every_exception_exists() -> None:
    names = {
        f"{module.name}:{node.name}"
        for module in hot()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert set(ALLOWED) <= names, f"remove from ALLOWED: {sorted(set(ALLOWED) - names)}"


@pytest.mark.parametrize(
    "call",
    [
        *("x.item()", "x.max().tolist()", "x.cpu()", "torch.nonzero(x)", "x.detach().numpy()"),
        *("torch.tensor([1, 2], device=x.device)", "x.event.synchronize()"),
    ],
)
def test_the_rule_sees_a_fault(call: str) -> None:
    assert faults(parse(f"def step(x):\n    return {call}", "streamdiff.pipeline.example"))
