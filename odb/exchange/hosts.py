"""Under which address this host is reached, and whether the ranks' addresses reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from odb.errors import ConfigError
from odb.exchange.watch import name_ranks

IFNAME = "GLOO_SOCKET_IFNAME"

#: Never contacted (reserved for documentation, RFC 5737): connecting a datagram socket to it sends nothing and tells
#: which of our addresses the default route uses.
_ANYWHERE = "192.0.2.1"

_SIOCGIFADDR = 0x8915  # linux/sockios.h: IPv4 address of an interface


def identity() -> str:
    """Equal for two processes exactly when they share a loopback interface: host, boot and network namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:  # not Linux
        parts.append(f"{uuid.getnode():x}")
    return "/".join(parts)


def chosen_interfaces() -> tuple[str, ...]:
    """The interfaces that `GLOO_SOCKET_IFNAME` names; none where it is unset or empty.

    Raises:
        ConfigError: it names an interface that this host doesn't have. (Gloo knows neither prefixes nor exclusions.)
    """
    value = os.environ.get(IFNAME, "")
    names = tuple(name for name in value.split(",") if name)
    present = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in names if name not in present]
    if unknown:
        raise ConfigError(
            f"{IFNAME}={value!r} names {', '.join(map(repr, unknown))}, which host {socket.gethostname()!r} doesn't "
            f"have; its interfaces are: {', '.join(present)}. Give exact names, separated by commas: Gloo takes no "
            f"prefixes and no exclusions such as '^lo'"
        )
    return names


def interface_address(name: str) -> str:
    """The address of a network interface of this host.

    Raises:
        ConfigError: it has none.
    """
    for found in (_ipv4_of(name), _ipv6_of(name)):
        if found is not None:
            return found
    raise ConfigError(
        f"{IFNAME} names the interface {name!r}, which has no IP address on host {socket.gethostname()!r}"
    )


def _ipv4_of(name: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return None


def _ipv6_of(name: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            raw, _, _, scope, _, device = line.split()
            if device == name and scope != "20":  # 0x20: link-local, of no use without a scope
                return str(ipaddress.IPv6Address(bytes.fromhex(raw)))
    return None


def address_towards(host: str) -> str | None:
    """The address of ours from which packets to `host` would leave; None where there is no way. Sends nothing."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, proto, _, target in candidates:
        with suppress(OSError), socket.socket(family, kind, proto) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    return None


def is_ours(host: str) -> bool:
    """Whether `host` resolves to an address of this host."""
    with suppress(OSError):
        for family, kind, proto, _, target in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, proto) as sock:
                sock.bind(target)
                return True
    return False


def is_loopback(host: str) -> bool:
    """Whether an address or a name means the own host wherever it is read. An unknown name doesn't."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def own_addresses(interfaces: Sequence[str], store_host: str | None) -> list[str]:
    """Addresses under which other ranks may reach this one, the best first; never empty.

    Where `GLOO_SOCKET_IFNAME` rules there is no choice. Else: the one from which this host reaches the default store
    (rank 0 is there, and every rank reached it), the one that our host name means, the one of the default route.
    """
    if interfaces:
        return [interface_address(interfaces[0])]
    tried = (address_towards(store_host) if store_host else None, _resolved_hostname(), address_towards(_ANYWHERE))
    return [*dict.fromkeys(address for address in tried if address is not None), "127.0.0.1"]


def _resolved_hostname() -> str | None:
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if is_ours(address):
            return address
    return None


def pick_address(candidates: Sequence[str], hosts: Iterable[str]) -> str:
    """The address that a rank uses: its best, or with ranks on several hosts its best that isn't loopback."""
    if len(set(hosts)) > 1:
        for address in candidates:
            if not is_loopback(address):
                return address
    return candidates[0]


def check_reachable(hosts: Sequence[str], addresses: Sequence[str], store_host: str) -> None:
    """Refuses loopback addresses where ranks run on several hosts. One entry per rank; `hosts` as by `identity`.

    Raises:
        ConfigError: names the ranks and what to set.
    """
    if len(set(hosts)) < 2:
        return
    bad = [rank for rank, address in enumerate(addresses) if is_loopback(address)]
    if not bad and not is_loopback(store_host):
        return
    if bad:
        what = f"{name_ranks(bad)} would be reached under {', '.join(sorted({addresses[r] for r in bad}))}"
    else:
        what = f"rank 0 would be reached under {store_host}"
    names = sorted({host.split("/")[0] for host in hosts})
    raise ConfigError(
        f"the ranks run on {len(set(hosts))} hosts ({', '.join(names[:8])}), but {what}, a loopback address that "
        f"other hosts can't reach. Set {IFNAME} to the name of the network interface between the hosts on every node, "
        f"or make MASTER_ADDR and the hosts' names resolve to addresses that the other hosts can reach"
    )
