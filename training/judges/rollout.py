"""Many streams at once, faster than real time: what quality benchmarks and tests generate with.

The same ring that plays live, with one row per stream in every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor

from streamdiff.models.model import Model
from streamdiff.pipeline.ring import Ring


def rollout(
    model: Model,
    prompts: Sequence[str],
    *,
    chunks: int,
    steps: int,
    kv_context: str,
    seed: int,
    switch: Mapping[int, Sequence[str]] | None = None,
    keep: Set[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[int, Tensor]:
    """Generate `chunks` chunks of one stream per prompt.

    Args:
        prompts: N texts as the model was trained on them.
        seed: stream i uses `seed + i`.
        switch: chunk number to N new prompts, in force from that chunk on.
        keep: chunk numbers to return; all when None.
        progress: called with the number of chunks finished since the last call.

    Returns:
        chunk number to normalised latents `[N, C, F, h, w]`.
    """
    assert model.text is not None
    device = next(model.denoiser.model.parameters()).device
    count = len(prompts)
    ring = Ring(model, device, max_rows=count)
    for i, text in enumerate(prompts):
        ring.open(i, model.text.encode(text), seed=seed + i, epoch=0, steps=steps, kv_context=kv_context)
    changes = sorted((switch or {}).items())
    pending = [list(changes) for _ in range(count)]
    done: dict[int, dict[int, Tensor]] = {}
    left = [chunks] * count
    while any(left):
        for i in (i for i in range(count) if left[i]):
            if pending[i] and ring.scheduler.next_chunk(i) == pending[i][0][0]:
                chunk, texts = pending[i].pop(0)
                ring.set_conditioning(i, model.text.encode(texts[i]), epoch=chunk)
            ring.scheduler.set_frame_credit(i, model.spec.admitted_frames(ring.scheduler.next_chunk(i)))
        for row, latents in ring.step_latents()[1]:
            left[row.session] = max(0, chunks - 1 - row.chunk)
            if row.chunk < chunks and (keep is None or row.chunk in keep):
                done.setdefault(row.chunk, {})[row.session] = latents
            if progress is not None and row.chunk < chunks:
                progress(1)
            if left[row.session] == 0:
                ring.close_session(row.session)
    return {chunk: torch.stack([rows[i] for i in range(count)]) for chunk, rows in sorted(done.items())}
