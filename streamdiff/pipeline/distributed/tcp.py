"""The link between processes on any machine: a TCP connection per edge. CUDA tensors are staged through host memory.

A message is one packed buffer, the record first. The receiving end listens, and invites the other by a message of gloo
that says where, and what to say there; a peer that says something else is refused. It has a thread that takes in what
comes as long as a slot is free. The sending end hands a message to the kernel at once; a thread sends only what the
kernel does not take. So between a stage and the next stands one wake-up of a thread on each side of the queue, and
neither side waits for the other (docs/decisions/0010-links.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import cache
from queue import Empty, SimpleQueue

import psutil
import torch
import torch.distributed as dist

from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed, Sender, check_order
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage

_INVITATION_BYTES = 512
_TOKEN_BYTES = 16
_STRANGER_S = 5.0  # how long someone may take to say the token
_MOST_BUFFERED = 4 << 20
_ALL_TAKEN = b"\1"


class _Slots:
    """Packed buffers `[record | tensors]` of one end of an edge to rank `peer`."""

    def __init__(self, layout: MessageLayout, peer: int) -> None:
        self.layout, self.peer = layout, peer
        head = 8 * layout.record_length
        buffers = [torch.zeros(head + layout.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        tensors = [buffer[head:] for buffer in buffers]
        self.views = cache(lambda slot, kind, rows: layout.views(tensors[slot], kind, rows))
        """A slot's `MessageLayout.views`, made once: on the way from stage to stage every operation counts."""
        self.records = [buffer[:head].view(torch.int64).numpy() for buffer in buffers]
        self.bytes = [buffer.numpy().data for buffer in buffers]
        self.error: BaseException | None = None

    def fit(self, connection: socket.socket, option: int) -> None:
        """Let the kernel hold a message and the next one, if it may hold that much. Mutates: connection."""
        connection.setsockopt(socket.SOL_SOCKET, option, min(2 * len(self.bytes[0]), _MOST_BUFFERED))

    def closed(self) -> LinkClosed:
        """The error to raise, with what ended the link."""
        message = f"the link with rank {self.peer} is closed"
        return LinkClosed(f"{message}: {self.error}" if self.error else message, self.peer)


class TcpSender(Sender):
    """The sending end of an edge to rank `peer`; `tag` tells edges between the same two ranks apart. Its construction
    waits for that of the other end: of two ends in a process the receiving one is made first."""

    def __init__(self, layout: MessageLayout, peer: int, tag: int) -> None:
        self._slots = _Slots(layout, peer)
        self._connection = _accept_invitation(self._slots, tag)
        self._free: SimpleQueue[int | None] = SimpleQueue()
        self._leaving: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        for slot in range(SLOTS):
            self._free.put(slot)
        self._sent = 0
        self._left_over = self._made_up = 0  # messages for the thread, and those it is done with
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._closed or not self._free.empty()

    @property
    def broken(self) -> bool:
        """Whether the other end is known to be gone."""
        return self._slots.error is not None

    def send(self, message: StageMessage) -> None:
        slot = None if self._closed else self._free.get()
        if slot is None:
            self._closed = True
            raise self._slots.closed()
        slots = self._slots
        slots.records[slot][:] = slots.layout.record(message, self._sent)
        for view, tensor in zip(slots.views(slot, message.kind, len(message.rows)), message.tensors, strict=False):
            view.copy_(tensor)  # to the end: from a device into such memory it may be under way otherwise
        self._sent += 1
        self._start(slot)

    def close(self, limit_s: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            self._leaving.put(None)

    def flush(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def _start(self, slot: int) -> None:
        """Send a slot, which is free once the kernel has all of it. Mutates: self."""
        data = self._slots.bytes[slot]
        taken = self._push(data) if self._left_over == self._made_up else 0
        if taken == len(data):
            self._free.put(slot)
        else:
            self._left_over += 1
            self._leaving.put((slot, data[taken:]))

    def _push(self, data: memoryview) -> int:
        """How many bytes the kernel takes without waiting."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._slots.error = error
            self.close()
            raise self._slots.closed() from error

    def _run(self) -> None:
        """Send what was left over; at the end, wait until the other end has taken everything."""
        try:
            with self._connection:
                while (leaving := self._leaving.get()) is not None:
                    slot, rest = leaving
                    self._connection.sendall(rest)
                    self._made_up += 1
                    self._free.put(slot)
                self._connection.shutdown(socket.SHUT_WR)
                if self._connection.recv(1) != _ALL_TAKEN:
                    raise ConnectionError("its other end left before it had taken everything")
        except OSError as error:  # the peer is gone: the next sender gets it
            self._slots.error = error
            self._free.put(None)


class TcpReceiver:
    """The receiving end of an edge from rank `peer`. Takes in up to two messages before anybody asks for them."""

    def __init__(self, layout: MessageLayout, peer: int, tag: int, device: torch.device) -> None:
        self._slots = _Slots(layout, peer)
        self._device = device
        self._free: SimpleQueue[int] = SimpleQueue()
        self._arrived: SimpleQueue[int | None] = SimpleQueue()
        self._reading: int | None = None
        self._received = 0
        self._closed = False
        self._call: Callable[[], None] | None = None
        self._listener, self._token = _listen(self._slots), secrets.token_bytes(_TOKEN_BYTES)
        self._invitation = _invite(self._listener, self._token, peer, tag)
        for slot in range(SLOTS):
            self._free.put(slot)
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        if self._closed:
            raise self._slots.closed()
        self._release()
        try:
            slot = self._arrived.get_nowait() if wait_s == 0.0 else self._arrived.get(timeout=wait_s)
        except Empty:
            return None
        if slot is None:
            self._closed = True
            raise self._slots.closed()
        self._reading = slot
        sequence, kind, rows, update = self._slots.layout.parse(self._slots.records[slot].tolist())
        check_order(sequence, self._received)
        self._received += 1
        tensors = self._slots.views(slot, kind, len(rows))
        if self._device.type != "cpu":
            tensors = tuple(tensor.to(self._device) for tensor in tensors)
        return StageMessage(kind, rows, update, tensors)

    @property
    def ended(self) -> bool:
        """Whether the other end has closed, or is gone; what it sent before may not have been received yet."""
        return not self._thread.is_alive()

    def notify(self, call: Callable[[], None]) -> None:
        self._call = call

    def close(self, limit_s: float = 0.0) -> None:
        self._closed = True
        for slot in range(SLOTS):  # what still comes is read over: nobody will look at it
            self._free.put(slot)
        self._thread.join(limit_s)

    def _release(self) -> None:
        """Give back the slot that was read. Mutates: self."""
        if self._reading is not None:
            slot, self._reading = self._reading, None
            self._free.put(slot)

    def _run(self) -> None:
        """Take in what comes, until the other end closes."""
        try:
            with self._accept() as connection:
                while _fill(connection, self._slots.bytes[slot := self._free.get()]):
                    self._hand_on(slot)
                with contextlib.suppress(OSError):  # it may be gone by now
                    connection.sendall(_ALL_TAKEN)
        except OSError as error:  # the peer is gone: the next receiver gets it
            self._slots.error = error
        self._hand_on(None)

    def _accept(self) -> socket.socket:
        """The connection of who was invited; others are turned away."""
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                if _says(connection, self._token):
                    self._invitation.wait()
                    return connection
                connection.close()

    def _hand_on(self, slot: int | None) -> None:
        self._arrived.put(slot)
        if self._call is not None:
            self._call()


def own_address() -> str:
    """The address that this process listens on: that of gloo's interface if one is named, else this machine's on the
    way to `MASTER_ADDR`, where the ranks meet. Loopback where all are on one machine."""
    interface, master = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("MASTER_ADDR", "127.0.0.1")
    if interface is not None:
        return next(each.address for each in psutil.net_if_addrs()[interface] if each.family == socket.AF_INET)
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])


def _listen(slots: _Slots) -> socket.socket:
    address = own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    slots.fit(listener, socket.SO_RCVBUF)  # connections inherit it
    return listener


def _invite(listener: socket.socket, token: bytes, peer: int, tag: int) -> dist.Work:
    """Tell `peer` where to connect and what to say."""
    text = json.dumps([*listener.getsockname()[:2], token.hex()]).encode().ljust(_INVITATION_BYTES)
    sending = dist.isend(torch.frombuffer(bytearray(text), dtype=torch.uint8), peer, tag=tag)
    assert sending is not None
    return sending


def _accept_invitation(slots: _Slots, tag: int) -> socket.socket:
    """Wait for the peer's invitation, and connect."""
    text = torch.zeros(_INVITATION_BYTES, dtype=torch.uint8)
    dist.recv(text, slots.peer, tag=tag)
    host, port, token = json.loads(text.numpy().tobytes())
    connection = socket.create_connection((host, port))
    slots.fit(connection, socket.SO_SNDBUF)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes.fromhex(token))
    return connection


def _says(connection: socket.socket, token: bytes) -> bool:
    """Whether the other side of a new connection says `token`, and soon."""
    said = bytearray(len(token))
    connection.settimeout(_STRANGER_S)
    try:
        _fill(connection, memoryview(said))
    except OSError:
        return False
    connection.settimeout(None)
    return hmac.compare_digest(said, token)


def _fill(connection: socket.socket, data: memoryview) -> bool:
    """Receive as many bytes as `data` holds; False if the other side closed before the first.

    Raises:
        OSError: the connection broke, or was closed in the midst.
    """
    count = 0
    while count < len(data):
        more = connection.recv_into(data[count:], 0, socket.MSG_WAITALL)
        if more == 0 and count == 0:
            return False
        if more == 0:
            raise ConnectionError("it ended in the midst of a message")
        count += more
    return True
