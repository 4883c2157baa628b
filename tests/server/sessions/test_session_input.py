"""What feeds a session, without a server: one source at a time, told to every engine, and how it ends."""

from __future__ import annotations

import asyncio

import av
import numpy as np
import pytest

from streamdiff.engine.messages import Command, InputFrames, InputUsed, SetInput
from streamdiff.server.media.video_input import fit_frame
from streamdiff.server.sessions.control import ControlError
from streamdiff.server.sessions.video_source import VideoSource
from tests.engine.painted import INFO, SIZE


class Told:
    """A session's input, what the engine was sent, and how often the state was."""

    def __init__(self, wanted: bool = True) -> None:
        self.sent: list[Command] = []
        self.changes = 0
        self.came = asyncio.Event()
        self.input = VideoSource("a", INFO, self._send, lambda: 100.0, lambda: wanted, self._changed)  # type: ignore[arg-type]

    async def _send(self, command: Command) -> None:
        self.sent.append(command)
        self.came.set()

    def _changed(self) -> None:
        self.changes += 1


def frame(width: int, height: int, value: int = 90) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.full((height, width, 3), value, np.uint8), "rgb24")


def test_a_new_engine_is_told_of_the_source_there_is_and_of_none() -> None:
    async def main() -> None:
        told = Told()
        await told.input.announce()
        assert told.sent == []
        video_input = told.input.take("camera")
        await told.input.announce()
        assert told.sent == [], "nobody has taken it yet"
        told.input.strength = 0.4
        told.input.begin()
        await told.input.announce()
        assert told.sent == [SetInput("a", 0.4)]
        with pytest.raises(ControlError) as refused:
            told.input.take("file")
        assert refused.value.code == "fed"
        await told.input.give_back(video_input)
        assert told.sent[-1] == SetInput("a", None) and told.input.state(True) is None
        other = told.input.take("file")
        await told.input.give_back(video_input)
        assert told.input.video_input is other, "one of before says nothing of it"
        await told.input.close()

    asyncio.run(main())


@pytest.mark.slow
def test_the_newest_frame_goes_on_in_pieces_and_what_cannot_be_used_is_counted() -> None:
    async def main() -> None:
        told = Told()
        video_input = told.input.take("camera")
        told.input.begin()
        video_input.push(frame(8000, 4000))
        assert video_input.left_out == 1 and told.input.figures()["left_out"] == 1  # type: ignore[index]
        for value in (10, 200, 90):
            video_input.push(frame(50, 30, value))
        await asyncio.wait_for(told.came.wait(), 30)
        [handed] = [each for each in told.sent[:1] if isinstance(each, InputFrames)]
        assert handed.pictures.shape == (4, SIZE, SIZE, 3)
        assert np.abs(handed.pictures.astype(int) - 90).max() <= 2
        await told.input.close()

    asyncio.run(main())


def test_nothing_is_handed_on_that_nobody_wants() -> None:
    async def main() -> None:
        told = Told(wanted=False)
        video_input = told.input.take("camera")
        told.input.begin()
        for _ in range(20):
            video_input.push(frame(32, 32))
            await asyncio.sleep(0)
        assert told.sent == []
        await told.input.close()

    asyncio.run(main())


def test_viewers_are_told_that_it_failed_and_who_steers_why() -> None:
    async def main() -> None:
        told, ended = Told(), []
        video_input = told.input.take("camera")
        video_input.on_fault = lambda: ended.append(True)
        told.input.begin()
        for _ in range(2):
            told.input.used(InputUsed("a", None, 0, 0, "no memory for /home/x"))
        assert ended == [True], "once"
        assert told.input.state(True)["fault"] == "no memory for /home/x"  # type: ignore[index]
        assert told.input.state(False)["fault"] == "failed"  # type: ignore[index]
        await told.input.close()

    asyncio.run(main())


@pytest.mark.parametrize("size", [(1, 1), (2001, 1), (17, 4000)])
def test_odd_sizes_are_fitted(size: tuple[int, int]) -> None:
    made = fit_frame(frame(*size), 48, 32)
    assert made.shape == (32, 48, 3) and np.abs(made.astype(int) - 90).max() <= 2


def test_a_frame_so_narrow_that_it_would_be_huge_is_refused() -> None:
    with pytest.raises(ValueError):
        fit_frame(frame(2, 5400), 256, 160)


def test_a_size_that_changes_on_the_way_changes_nothing_of_what_is_handed_on() -> None:
    async def main() -> None:
        told = Told()
        video_input = told.input.take("camera")
        told.input.begin()
        for size in ((640, 480), (33, 71), (1920, 1080)):
            told.came.clear()
            video_input.push(frame(*size))
            await asyncio.wait_for(told.came.wait(), 30)
            video_input.push(frame(*size))
        handed = [each for each in told.sent if isinstance(each, InputFrames)]
        assert {each.pictures.shape[1:] for each in handed} == {(SIZE, SIZE, 3)}
        await told.input.close()

    asyncio.run(main())
