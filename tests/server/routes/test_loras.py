"""LoRAs over HTTP: loaded by name, at a scale, taken out; what cannot be is refused, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamdiff.pipeline.loras import LoraFolder
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.test_loras import MODEL, write_lora
from tests.server.conftest import open_site
from tests.small import CPU

SESSION = "/api/sessions/default"


async def test_a_lora_is_loaded_changed_and_taken_out(tmp_path: Path) -> None:
    for seed, name in enumerate(("oil", "ink")):
        write_lora(tmp_path / f"{name}.safetensors", seed)
    pipeline: Any = StreamingPipeline(MODEL, CPU)
    pipeline.loras = LoraFolder(pipeline, str(tmp_path), 1, [(0, MODEL.blocks)])
    async with open_site(painter=pipeline) as site:

        async def change(**lora: Any) -> tuple[int, dict[str, Any]]:
            response = await site.http.patch(SESSION, json={"lora": lora})
            return response.status_code, response.json()

        status, done = await change(name="oil", scale=0.5, over=2)
        assert status == 200 and done["receipts"][0]["kind"] == "lora", done
        assert (done["session"]["loras"], done["session"]["loras_known"]) == ({"oil": 0.5}, ["ink", "oil"])
        for lora, field, word in (
            ({"name": "../oil"}, "lora", "../oil"), ({"name": "ink"}, "lora", "oil"),
            ({"name": "oil", "scale": 3.0}, "lora.scale", "2"), ({"scale": 1.0}, "lora.name", ""),
        ):  # fmt: skip
            status, refused = await change(**lora)
            assert (status, refused["field"]) == (422, field) and word in str(refused), refused
        assert (await site.http.get(SESSION)).json()["loras"] == {"oil": 0.5}
        peer = await site.watch()
        await peer.message({"type": "hello"})
        peer.channel.send('{"type": "lora", "id": 7, "name": "oil", "scale": null}')
        applied = await peer.message({"type": "receipt", "id": 7, "stage": "applied"})
        assert applied["chunk"] >= 0 and applied["kind"] == "lora"
        await peer.message({"type": "state", "loras": {}})
        assert (await change(name="ink"))[0] == 200
