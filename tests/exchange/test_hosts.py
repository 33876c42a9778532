"""Under which address a host is reached, and what is refused."""

from __future__ import annotations

import socket

import pytest

from odb.errors import ConfigError
from odb.exchange import hosts

HERE, THERE = "a/boot1/net1", "b/boot2/net1"


@pytest.mark.parametrize("value", ["^lo", "nope0", "lo,nope0"])
def test_wrong_interface_names_variable_value_and_what_there_is(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(ConfigError) as caught:
        hosts.chosen_interfaces()
    text = str(caught.value)
    assert f"GLOO_SOCKET_IFNAME={value!r}" in text
    for _, name in socket.if_nameindex():
        assert name in text


def test_interface_gives_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert hosts.own_addresses(hosts.chosen_interfaces(), None) == ["127.0.0.1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert hosts.chosen_interfaces() == ()


def test_interface_without_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no IP address"):
        hosts.interface_address("nope0")


def test_unresolvable_hostname_leaves_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "does-not-resolve.invalid")
    assert hosts.own_addresses((), "127.0.0.1")[0] == "127.0.0.1"
    assert hosts.own_addresses((), None)[-1] == "127.0.0.1"


def test_what_is_ours_and_what_is_loopback() -> None:
    assert hosts.is_ours("127.0.0.1")
    assert not hosts.is_ours("192.0.2.1")
    assert not hosts.is_ours("does-not-resolve.invalid")
    assert [hosts.is_loopback(h) for h in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "node7")] == [True] * 3 + [
        False
    ] * 2


def test_loopback_serves_one_host() -> None:
    assert hosts.pick_address(["127.0.0.1", "10.0.0.1"], [HERE, HERE]) == "127.0.0.1"
    hosts.check_reachable([HERE, HERE], ["127.0.0.1", "127.0.0.1"], "localhost")


def test_loopback_between_hosts_is_avoided_else_refused() -> None:
    assert hosts.pick_address(["127.0.1.1", "10.0.0.1"], [HERE, THERE]) == "10.0.0.1"
    hosts.check_reachable([HERE, THERE], ["10.0.0.1", "10.0.0.2"], "node-a")
    with pytest.raises(
        ConfigError, match=r"2 hosts \(a, b\).*rank 1 would be reached under 127.0.1.1.*GLOO_SOCKET_IFNAME"
    ):
        hosts.check_reachable([HERE, THERE], ["10.0.0.1", "127.0.1.1"], "node-a")
    with pytest.raises(ConfigError, match="rank 0 would be reached under localhost"):
        hosts.check_reachable([HERE, THERE], ["10.0.0.1", "10.0.0.2"], "localhost")


def test_two_network_namespaces_of_one_machine_are_two_hosts() -> None:
    with pytest.raises(ConfigError):
        hosts.check_reachable(["a/boot1/net1", "a/boot1/net2"], ["127.0.0.1", "127.0.0.1"], "127.0.0.1")


def test_identity_is_stable_within_a_process() -> None:
    assert hosts.identity() == hosts.identity()
    assert hosts.identity().startswith(socket.gethostname())
