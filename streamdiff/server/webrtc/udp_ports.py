"""An event loop whose UDP sockets have ports of a range that a firewall can open.

aioice binds a socket per viewer and address of the machine, to port 0: any. It has no option, so the choice is made
where the socket is bound. Of asyncio only public names are used.
"""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any


class UdpPortLoop(asyncio.SelectorEventLoop):
    """Binds a UDP socket that asks for any port to one of `ports`. Sockets with a peer, as a TURN client's, are left
    alone: they only call out."""

    def __init__(self, ports: range) -> None:
        super().__init__()
        self._ports = ports
        self.in_use = False
        """Whether the last attempt found all of `ports` taken."""

    async def create_datagram_endpoint(
        self,
        protocol_factory: Any,
        local_addr: tuple[str, int] | str | None = None,
        remote_addr: tuple[str, int] | str | None = None,
        **options: Any,
    ) -> tuple[asyncio.DatagramTransport, Any]:
        """As asyncio's.

        Raises:
            OSError: EADDRINUSE where all ports of the range are taken at that address.
        """
        create = super().create_datagram_endpoint
        if not isinstance(local_addr, tuple) or local_addr[1] != 0 or remote_addr is not None:
            return await create(protocol_factory, local_addr, remote_addr, **options)
        # Not the lowest free one: what still comes for a viewer that has just left is not for the next.
        for port in random.sample(self._ports, len(self._ports)):
            try:
                made = await create(protocol_factory, (local_addr[0], port), None, **options)
                self.in_use = False
                return made
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
        self.in_use = True
        raise OSError(errno.EADDRINUSE, f"all UDP ports from {self._ports[0]} to {self._ports[-1]} are in use")


def are_in_use() -> bool:
    """Whether the running loop has ports of a range, and found all of them taken."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, UdpPortLoop) and loop.in_use
