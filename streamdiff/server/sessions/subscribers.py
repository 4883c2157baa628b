"""Who hears about one session: mailboxes of those connected, and callers that wait for an answer. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from streamdiff.server.sessions.receipts import Receipt
from streamdiff.server.sessions.stats import SessionMeter

Mailbox = Callable[[dict[str, Any]], None]
ANSWERS = ("accepted", "refused")


class Subscribers:
    """Hands messages to all, and receipts to who asked and to the figures."""

    def __init__(self, meter: SessionMeter) -> None:
        self._meter = meter
        self._mailboxes: dict[str, Mailbox] = {}
        self._controllers: set[str] = set()
        self._answers: dict[str, asyncio.Future[Receipt]] = {}

    def join(self, name: str, mailbox: Mailbox, may_control: bool) -> None:
        """Send messages to `name` from now on. Mutates: self."""
        self._mailboxes[name] = mailbox
        if may_control:
            self._controllers.add(name)

    def leave(self, name: str) -> None:
        """Send `name` nothing any more. Mutates: self."""
        self._mailboxes.pop(name, None)
        self._controllers.discard(name)

    def expect(self, owner: str) -> asyncio.Future[Receipt]:
        """The first answer to what `owner` asks; to be forgotten afterwards. Mutates: self."""
        answer: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._answers[owner] = answer
        return answer

    def forget(self, owner: str) -> None:
        """Nobody waits for `owner`'s answer any more. Mutates: self."""
        del self._answers[owner]

    def disappoint(self, why: Callable[[], Exception]) -> None:
        """Raise an error in all who wait for an answer, for none will come."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(why())

    def broadcast(self, message: dict[str, Any], to_viewers: dict[str, Any] | None = None) -> None:
        """A message to everybody; `to_viewers`: another one for those who may not steer."""
        for name, mailbox in list(self._mailboxes.items()):
            mailbox(message if to_viewers is None or name in self._controllers else to_viewers)

    def tell(self, receipts: Iterable[Receipt]) -> None:
        """Receipts to those who asked. Mutates: self."""
        for receipt in receipts:
            self._meter.receipt(receipt.kind, receipt.stage, receipt.lag_s)
            answer = self._answers.get(receipt.owner)
            if answer is not None and not answer.done() and receipt.stage in ANSWERS:
                answer.set_result(receipt)
            mailbox = self._mailboxes.get(receipt.owner)
            if mailbox is not None:
                mailbox(receipt.message())
