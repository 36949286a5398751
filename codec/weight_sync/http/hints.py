"""Hints of a server, by which receivers read the file of an update from a mirror. Server and receivers agree on them.

A receiver sends the header ``Codec-Mirror`` with its request of an update, to allow a hint. If the receiver is a mirror
itself, the value is the address and the port at which the receiver will serve the file, such as ``10.0.0.5:4321``;
otherwise it is ``-``. A server with load may then reply 307, with the URL of the file on a mirror as ``Location``, and
the number of mirrors between this server and the receiver as ``Codec-Depth``.

A receiver leaves a mirror that sends no data for a while, or less than 256 KiB/s, and continues with the server at the
byte where the mirror has stopped. It waits longer the more mirrors lie between the server and itself: if a mirror
stalls, its own readers leave it first, and go on to serve those who read from them.
"""

import ipaddress
import re
from contextlib import suppress
from email.message import Message
from typing import NamedTuple, Self

from codec.errors import ArgumentError

HEADER, DEPTH = "Codec-Mirror", "Codec-Depth"
NO_MIRROR = "-"  # value of the header of a receiver that serves nothing
SECONDS = 120.0  # time from a mirror's request for a file in which it gets readers
_PATIENCE = 2.0  # maximum seconds without data, for each mirror between server and receiver
_RATE = 1 << 18  # minimum bytes per second
MAX_DEPTH = 64  # maximum number of mirrors between server and receiver
_ADDRESS = re.compile(r"([0-9.]{7,15}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


class Address(NamedTuple):
    """Address of a mirror: an IP address and a port."""

    ip: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address | None":
        """Return the address in `text`, such as ``10.0.0.5:4321`` or ``[fd00::5]:4321``; None if there is none."""
        found = _ADDRESS.fullmatch(text)
        with suppress(ValueError):
            if found is not None and 0 < int(found[2]) < 1 << 16:
                return cls(plain_ip(found[1].strip("[]")), int(found[2]))
        return None

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def plain_ip(text: str) -> str:
    """Return an IP address in its shortest form; an IPv4 address of a socket that serves IPv6, too, as IPv4.

    Raises
    ------
    ValueError
        `text` is something else, or an address with a zone, which has a meaning on one machine only.
    """
    found = ipaddress.ip_address(text)
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            raise ValueError("the address has a zone")
        found = found.ipv4_mapped or found
    return str(found)


class Hint(NamedTuple):
    """Mirror that has, or will soon have, the file of an update."""

    address: Address
    depth: int  # number of mirrors between the server and the receiver
    scheme: str

    @classmethod
    def read(cls, headers: Message, scheme: str, name: str) -> Self:
        """Return the hint in the headers of a reply.

        Parameters
        ----------
        headers : Message
            Headers of the reply.
        scheme : str
            Scheme of the server's URL, which that of the mirror must equal.
        name : str
            Name of the requested file, such as ``00000000000000000001.update``.

        Raises
        ------
        ArgumentError
            The reply redirects to something else.
        """
        location, depth = headers.get("Location") or "", headers.get(DEPTH) or ""
        found = re.fullmatch(f"{scheme.lower()}://(.*)/{re.escape(name)}", location)
        address = Address.parse(found[1]) if found else None
        if address is None or not re.fullmatch("[0-9]{1,2}", depth):
            where = location.partition("?")[0]  # a query may hold a secret
            raise ArgumentError(f"the server redirects to {where!r:.120}, which is not the address of a mirror")
        return cls(address, min(max(int(depth), 1), MAX_DEPTH), scheme.lower())

    @property
    def url(self) -> str:
        """URL of the mirror."""
        return f"{self.scheme}://{self.address}"

    @property
    def seconds(self) -> float:
        """Maximum seconds without data."""
        return _PATIENCE * (1 + self.depth)

    @property
    def rate(self) -> float:
        """Minimum bytes per second, after the first :attr:`seconds`."""
        return _RATE
