"""Numbers of a snapshot that nothing else looks at before the device or a later chunk does: each alone is refused."""

from __future__ import annotations

import pytest

from tests.pipeline.test_hostile_snapshot import CASES, Place, changed, leaves, parts, taken, whole


@pytest.mark.slow
def test_each_column_of_an_adaptive_rings_queue_and_the_first_visible_chunk_have_bounds() -> None:
    header, tensors = parts(taken("same_step"))
    place = Place(CASES["same_step"], 2)
    queues = [name for name in tensors if "queue" in name]
    assert queues
    for name in queues:
        for column in range(3):  # the next slot, how many wait, the first that waits
            for value in (-1, 99):
                queue = tensors[name].clone()
                queue[..., column] = value
                assert "queue" in place.offer(whole(header, tensors | {name: queue})), (name, column, value)
    visible = [path for path in leaves(header) if path[-1] == "visible_from_chunk" and "sampler" in path]
    assert visible
    for path in visible:
        assert "visible_from_chunk" in place.offer(whole(changed(header, path, 10**6), tensors))
    place.engine.close()
