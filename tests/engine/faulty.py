"""An engine process of which one rank fails: `FAULT` says how, after some chunks of a stream, `FAULT_RANK` which one.

Everything but the fault itself is the product.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from streamdiff.engine.process import main as engine
from streamdiff.pipeline import device_timer
from streamdiff.pipeline.decode import decoder_memories
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.distributed.tcp import TcpSender
from streamdiff.pipeline.runner.model_runner import ModelRunner

AT_CHUNK = 6  # behind what is made at the start, to be warm


def _strike() -> None:
    match os.environ["FAULT"]:
        case "raise":
            raise ArithmeticError("the test's own fault")
        case "hang":
            threading.Event().wait()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "device":
            Device.stuck = True
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


class Device:
    """What the host cannot see: once it is `stuck`, it comes to no event any more, and sends nothing."""

    stuck = False


class DeviceEvent(device_timer.HostEvent):
    _never = False

    def record(self) -> None:
        super().record()
        self._never = Device.stuck

    def query(self) -> bool:
        return not self._never


class DeviceSender(TcpSender):
    def send(self, work: StageMessage) -> None:
        if not Device.stuck:
            super().send(work)


class FaultyStage(ModelRunner):
    """Outside of what may be a session's own fault."""

    def carry_out(self, message: StageMessage) -> StageMessage:
        if message.rows and message.rows[0].chunk == AT_CHUNK and message.rows[0].session == 0:
            _strike()
        return super().carry_out(message)


_decode_chunk = decoder_memories.decode_chunk


def decode_chunk(*arguments: Any) -> Iterator[Tensor]:
    """The host waits for what the decoder makes."""
    if Device.stuck:
        threading.Event().wait()
    return _decode_chunk(*arguments)


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == os.environ["FAULT_RANK"]:
        from streamdiff.pipeline import topology

        topology.ModelRunner = FaultyStage  # type: ignore[misc]
        topology.TcpSender = DeviceSender  # type: ignore[misc]
        decoder_memories.decode_chunk = decode_chunk
        device_timer.HostEvent = DeviceEvent  # type: ignore[misc]
    engine.main_and_end()
