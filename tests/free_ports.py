"""Ports for servers that a test starts and has to know the address of beforehand."""

from __future__ import annotations

import contextlib
import random
import socket

BELOW_EPHEMERAL = range(10_000, 32_000)
"""The kernel gives none of these to who asks for any port, as the tests beside this one do all the time."""


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port of loopback that nobody has."""
    return free_ports(1, kind)[0]


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """`count` different ones."""
    chance, ports = random.SystemRandom(), list[int]()  # tests seed the other one, and would all draw the same
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            probe = held.enter_context(socket.socket(socket.AF_INET, kind))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", chance.choice(BELOW_EPHEMERAL)))
                ports.append(probe.getsockname()[1])
    return ports
