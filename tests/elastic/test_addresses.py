"""Which address is picked, and how far it reaches."""

from __future__ import annotations

import pytest

from atoll.elastic import addresses
from atoll.elastic.addresses import choose_place, host_and_port, interfaces, local_address_towards, reach
from atoll.errors import ConfigError, TransportError


def test_mapped_and_scoped_addresses_reach_as_far_as_what_they_stand_for() -> None:
    assert reach("::ffff:8.8.8.8") == "public"
    assert reach("::ffff:127.0.0.1") == "loopback"
    assert reach("fe80::1%eth0") == "private"
    assert reach("::") == "any"


def test_what_is_no_address_is_told() -> None:
    with pytest.raises(ConfigError, match="not an IP address"):
        reach("island")


def test_the_way_to_this_machine_leads_through_loopback() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces()["127.0.0.1"] == "lo"


def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(TransportError, match="has no address"):
        local_address_towards("no-such-host.invalid")


def test_loopback_is_used_as_asked() -> None:
    place = choose_place("127.0.0.1", allow_public=False)
    assert (place.address, place.interface, place.why) == ("127.0.0.1", "lo", "as asked")


def test_without_a_way_to_others_it_is_loopback_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(host: str) -> str:
        raise TransportError("no route")

    monkeypatch.setattr(addresses, "local_address_towards", no_route)
    place = choose_place("auto", allow_public=False)
    assert place.address == "127.0.0.1"
    assert "no route to other machines" in place.why


def test_an_address_of_another_machine_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no address of this machine.*127\.0\.0\.1"):
        choose_place("192.0.2.77", allow_public=False)


@pytest.mark.parametrize("host", ["auto", "0.0.0.0"])
def test_a_public_address_needs_the_flag_that_names_the_risk(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: {"127.0.0.1": "lo", "8.8.4.4": "eth0"})
    monkeypatch.setattr(addresses, "local_address_towards", lambda host: "8.8.4.4")
    with pytest.raises(
        ConfigError, match=r"8\.8\.4\.4 can be reached from the whole internet(?s:.*)--allow-public-network"
    ):
        choose_place(host, allow_public=False)
    assert choose_place(host, allow_public=True).address == ("8.8.4.4" if host == "auto" else "0.0.0.0")


@pytest.mark.parametrize(
    "text", ["", "10.0.0.5", "10.0.0.5:", ":5", "10.0.0.5:0", "10.0.0.5:65536", "10.0.0.5:x", "a:²"]
)
def test_what_is_not_a_host_with_a_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not HOST:PORT"):
        host_and_port(text)
