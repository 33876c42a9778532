"""The sockets that a Gloo group or a store's client opened: needed where a pending call must end, for which they have none.

A group can't be taken apart while a collective waits for a peer: its destructor waits too. Shutting down the group's
own connections ends the collective with an error, here and at once also on the peers. A store's client waits for ever
for a host that is stopped.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_OWN = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Descriptor -> kernel identity of every socket of this process; empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_OWN):
            with suppress(OSError):
                link = os.readlink(f"{_OWN}/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    """The sockets that were not there when `open_sockets` gave `before`."""
    return {fd: link for fd, link in open_sockets().items() if before.get(fd) != link}


def shut_down(sockets: dict[int, str], *, own_address: str | None = None, peer_port: int | None = None) -> int:
    """Shuts down those of the sockets that are still open and connected as said; gives their number.

    `own_address` (of this end) or `peer_port` keep connections apart that another thread opened at the same time.
    """
    count = 0
    for fd in sorted(sockets.items() & open_sockets().items()):
        with suppress(OSError), socket.socket(fileno=os.dup(fd[0])) as sock:
            peer, own = sock.getpeername(), sock.getsockname()
            is_ours = own_address is None or own[0].removeprefix("::ffff:") == own_address
            if is_ours and (peer_port is None or peer[1] == peer_port):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
