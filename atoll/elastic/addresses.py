"""Which address of this machine others should use, and how far it reaches.

No packet leaves: a UDP socket that is "connected" only asks the kernel which of our addresses it would send from.

>>> [reach(address) for address in ("127.0.0.1", "10.1.2.3", "100.64.0.7", "fd00::1", "8.8.8.8", "0.0.0.0")]
['loopback', 'private', 'private', 'private', 'public', 'any']
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError, TransportError

LOOPBACK = "127.0.0.1"
# Addresses for documentation (RFC 5737): nobody is there, and they are routed as any far-away host is.
FAR_AWAY = "192.0.2.1"
SHARED = ipaddress.ip_network("100.64.0.0/10")  # carriers' NAT and many VPNs; neither private nor global by name
SIOCGIFADDR = 0x8915  # Linux


@dataclass(frozen=True)
class Place:
    """An address of this machine. interface: its name, "" where it is not known. why: this one, in words."""

    address: str
    interface: str
    why: str


def reach(address: str) -> str:
    """How far an address reaches: "loopback", "private" (also link-local and VPN ranges), "public" or "any".

    Raises ConfigError for what is not an address.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise ConfigError(f"{address!r} is not an IP address. Give one like 10.0.0.5 or fd00::5.") from None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_unspecified:
        return "any"
    if ip.is_loopback:
        return "loopback"
    private = ip.is_private or ip.is_link_local or (ip.version == 4 and ip in SHARED)
    return "private" if private else "public"


def plain(address: str) -> str:
    """An address in its one shortest form; an IPv4 address mapped into IPv6 as what it is.

    >>> plain("::ffff:10.0.0.5"), plain("fe80::1%eth0")
    ('10.0.0.5', 'fe80::1')
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else str(ip)


def dials(address: str, other: str) -> bool:
    """Whether gloo opens the connection of this pair from `address`: the greater one does.

    >>> dials("192.168.0.2", "10.77.0.1"), dials("10.1.0.2", "10.77.0.1")
    (True, False)
    """
    return ipaddress.ip_address(plain(address)).packed > ipaddress.ip_address(plain(other)).packed


def local_address_towards(host: str, port: int = 9) -> str:
    """The address of this machine that a connection to `host` would come from. Raises TransportError."""
    family, address = resolve(host, port)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"no route to {host}: {error.strerror}. Check the network and the address.") from None


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    """Family and socket address of a host's first address. Raises TransportError for a name nobody knows."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{host!r} has no address: {error}. Check the name.") from None
    return family, address


def interfaces() -> dict[str, str]:
    """The addresses of this machine, each with the name of its interface."""
    found = {LOOPBACK: "lo"} | _ipv4_interfaces() | _ipv6_interfaces()
    return found


def choose_place(host: str, *, allow_public: bool) -> Place:
    """Where to listen. host: an address or a name of this machine, "auto" for the one that faces other machines.

    A public address, or all addresses with a public one among them, is refused unless `allow_public`: the averaging
    itself is not encrypted, and whoever reaches these ports may try them. Raises ConfigError.
    """
    place = _automatic() if host == "auto" else _named(host)
    exposed = _public_part(place.address)
    if exposed and not allow_public:
        raise ConfigError(
            f"{exposed} can be reached from the whole internet, and what islands average is not encrypted. Use a\n"
            "private or VPN address (--host ADDRESS), or take the risk with --allow-public-network."
        )
    return place


def host_and_port(text: str) -> tuple[str, int]:
    """
    >>> host_and_port("10.0.0.5:4321"), host_and_port("[fd00::5]:4321")
    (('10.0.0.5', 4321), ('fd00::5', 4321))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """
    >>> join_host_port("10.0.0.5", 4321), join_host_port("fd00::5", 4321)
    ('10.0.0.5:4321', '[fd00::5]:4321')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- inside ---


def _automatic() -> Place:
    try:
        address = local_address_towards(FAR_AWAY)
    except TransportError:
        return Place(LOOPBACK, "lo", "there is no route to other machines: loopback, for this machine alone")
    return Place(address, interfaces().get(address, ""), "the way to other machines leads through it")


def _named(host: str) -> Place:
    family, socket_address = _resolve_own(host)
    address = str(socket_address[0])
    if reach(address) == "any":
        return Place(address, "", "every interface, as asked")
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0, *socket_address[2:]))
    except OSError as error:
        own = ", ".join(sorted(interfaces()))
        raise ConfigError(f"host={host!r} is no address of this machine ({error.strerror}). It has {own}.") from None
    return Place(address, interfaces().get(address, ""), "as asked")


def _resolve_own(host: str) -> tuple[socket.AddressFamily, tuple]:
    try:
        return resolve(host, 0)
    except TransportError as error:
        raise ConfigError(f"host={host!r} cannot be used: {error}") from None


def _public_part(address: str) -> str:
    """A public address that listening on `address` would open; "" for none."""
    candidates = interfaces() if reach(address) == "any" else [address]
    return next((candidate for candidate in candidates if reach(candidate) == "public"), "")


def _ipv4_interfaces() -> dict[str, str]:
    """The first IPv4 address of each interface, by ioctl on Linux; by the host's own name elsewhere."""
    if sys.platform != "linux":
        return _addresses_of_own_name()
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _addresses_of_own_name() -> dict[str, str]:
    try:
        return {str(address): "" for address in socket.gethostbyname_ex(socket.gethostname())[2]}
    except OSError:
        return {}


def _ipv6_interfaces() -> dict[str, str]:
    """From the kernel's table on Linux; link-local addresses, which need an interface with them, are left out."""
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    found = {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows if len(row) == 6}
    return {address: name for address, name in found.items() if not ipaddress.ip_address(address).is_link_local}
