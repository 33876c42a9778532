"""The sockets that a Gloo group opened: needed where a pending collective must end, which Gloo has no call for.

A group can't be taken apart while a collective waits for a peer: its destructor waits too. Shutting down the group's
own connections ends the collective with an error, here and at once also on the peers.
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


def shut_down(sockets: dict[int, str], address: str) -> int:
    """Shuts down those of the sockets that are still open and connected from our `address`; gives their number.

    The address keeps connections apart that another thread opened at the same time.
    """
    count = 0
    for fd in sorted(sockets.items() & open_sockets().items()):
        with suppress(OSError), socket.socket(fileno=os.dup(fd[0])) as sock:
            sock.getpeername()
            if sock.getsockname()[0].removeprefix("::ffff:") == address:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
