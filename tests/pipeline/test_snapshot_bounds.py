"""Numbers of a snapshot that nothing else looks at before the device or a later chunk does: each alone is refused."""

from __future__ import annotations

import pytest

from streamdiff.pipeline.kv_cache.geometry import cache_geometry
from tests.pipeline.test_hostile_snapshot import CASES, Place, changed, leaves, parts, taken, whole


@pytest.mark.slow
def test_an_adaptive_rings_queue_a_chunk_in_flight_and_the_first_visible_chunk_have_bounds() -> None:
    header, tensors = parts(taken("same_step"))
    place = Place(CASES["same_step"], 2)
    ring = cache_geometry(CASES["same_step"].spec, "same_step", steps=4)
    queues = [name for name in tensors if "queue" in name]
    assert queues
    for name in queues:
        # the next of the slots behind the sink, how many of the sink's wait, the first that waits
        for column, beyond in enumerate((ring.slots - ring.pinned, ring.slots + 1, ring.pinned)):
            for value in (-1, beyond):
                queue = tensors[name].clone()
                queue[..., column] = value
                assert "queue" in place.offer(whole(header, tensors | {name: queue})), (name, column, value)
    # A finished chunk in flight would stay there, and the stream stand still behind it.
    entered = next(path for path in leaves(header) if path[-1] == "entered")
    assert "chunks[0].entered is 3 in the snapshot" in place.offer(whole(changed(header, entered, 3), tensors))
    visible = [path for path in leaves(header) if path[-1] == "visible_from_chunk" and "sampler" in path]
    assert visible
    for path in visible:
        assert "visible_from_chunk" in place.offer(whole(changed(header, path, 10**6), tensors))
    place.engine.close()
