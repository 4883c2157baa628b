"""Decoding that the ranks of the first stage share by rows (`row_group`): the head's thread, and a loop on each other
rank. The head says what comes next, over a link to each; all then carry out the same exchanges in that order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.pipeline.decode.decode_worker import DecodeWorker, Deliver, LocalDecoding
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.local_link import NoSender
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.state_exchange import State
from streamdiff.pipeline.runner.worker import LEAVE_S
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.session_state.swap_store import SwapStore


class SplitDecoding(LocalDecoding):
    """On the head, whose decoder is a `RowDecoder`; the `others` lead to `SplitDecodeWorker`s."""

    def __init__(
        self,
        others: Sequence[Sender],
        decoder: PictureDecoder,
        deliver: Deliver,
        wake: Callable[[], None],
        device: torch.device,
        at_once: int = 1,
        timer: DeviceTimer | None = None,
        swaps: SwapStore | None = None,
    ) -> None:
        super().__init__(decoder, deliver, wake, device, at_once, timer, swaps)
        self._others = others

    def forget(self, stream: int) -> None:
        message = StageMessage(MessageKind.CLOSE, (), SessionUpdate(stream))
        self._pool.submit(self._tell, message).add_done_callback(self._ended)
        super().forget(stream)

    def save(self, stream: int) -> NoReturn:
        """Raises ConfigError: each rank remembers its own rows; nor do stages save what ranks share."""
        raise ConfigError("what is decoded by rows (--decode split) cannot be saved; run it with --decode head")

    def load(self, stream: int, state: State) -> NoReturn:
        """As `save`."""
        self.save(stream)

    def swap_out(self, stream: int) -> None:
        """What ranks remember of their rows stays: it is little, and the head hears of no other rank."""

    def swap_in(self, stream: int) -> Outcome:
        return Outcome.DONE

    def close(self, abandon: bool = False) -> None:
        super().close(abandon)
        if abandon:
            return
        with contextlib.suppress(LinkClosed):  # whoever is gone needs no end
            self._tell(StageMessage(MessageKind.STOP, (), SessionUpdate(0)))
            for other in self._others:
                other.close()
                other.flush(LEAVE_S)

    def _decode(self, stream: int, chunk: int, latents: Tensor, ready: torch.cuda.Event | None) -> None:
        self._lane.follow(ready, latents)
        row = MicroStep(stream, chunk, 0, latents.shape[1], 0)
        self._tell(StageMessage(MessageKind.ROWS, (row,), None, (latents[None],)))
        super()._decode(stream, chunk, latents, ready)

    def _tell(self, message: StageMessage) -> None:
        for other in self._others:
            other.send(message)


class SplitDecodeWorker(DecodeWorker):
    """On every other rank: decodes its rows, of which the head has the pictures afterwards. Its decoder is a
    `RowDecoder`, with the layout `one_pixel`."""

    awaits_others = True

    def __init__(
        self, decoder: PictureDecoder, receiver: Receiver, device: torch.device, at_once: int, timer: DeviceTimer | None
    ) -> None:
        super().__init__(decoder, receiver, NoSender(), device, at_once, timer)
