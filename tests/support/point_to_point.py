"""Helpers for tests of send and recv: messages, and access to their connections."""

import codec
from codec.torch.network import tcp
from codec.torch.network.version import checksum, with_crc

SOON = 60  # seconds: a wait that must succeed; generous, since test machines are busy


def within(seconds):
    return codec.options(timeout=seconds)


def connection(peer, tag):
    """Return the connection to rank `peer` that send and recv use for `tag`."""
    from codec.torch.point_to_point.send_recv import _route

    return _route("recv", "src", peer, None, tag, None).pair._connected(SOON)


def raw(magic=tcp.MAGIC, number=0, nbytes=0, body=b""):
    return with_crc(tcp.FIELDS.pack(magic, number, nbytes, checksum([body]))) + body
