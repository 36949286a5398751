"""Distribution of an update's file from a server with load to many receivers, by those that are mirrors.

For each file, the server knows the mirrors that have requested it in the last two minutes. It sends the file itself to
two receivers at a time. Meanwhile, the server names further receivers a mirror, each mirror to two of them: the
receivers form a tree, in which each mirror forwards the file while it arrives. A mirror that asks for a file again gets
it from the server, so that no mirror waits for itself.
"""

import threading
import time
from collections.abc import Generator, Hashable
from contextlib import contextmanager, suppress

from codec.weight_sync.http.hints import MAX_DEPTH, SECONDS, Address, plain_ip

MIN_NBYTES = 1 << 18  # size below which the server sends a file itself
READERS = 2  # number of receivers that the server sends a file at a time, and that read a file from a mirror
_FILES = 8  # maximum number of files whose mirrors are known
_MIRRORS = 1024  # maximum number of mirrors of a file
_AT_ADDRESS = 16  # maximum number of mirrors of a file at an address


class TreeNode:
    """Node of a mirror in the tree of a file."""

    __slots__ = ("address", "depth", "readers", "since")

    def __init__(self, address: Address, depth: int, since: float) -> None:
        self.address, self.depth, self.since = address, depth, since
        self.readers = 0


class _Tree:
    """Mirrors of a file."""

    def __init__(self) -> None:
        self.nodes: dict[Address, TreeNode] = {}
        self.sends = 0  # number of receivers that the server sends the file now


class FanOut:
    """Mirrors of the files of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: dict[Hashable, _Tree] = {}

    @contextmanager
    def sending(self, file: Hashable, peer: str, mirror: str | None) -> Generator[TreeNode | None]:
        """Context in which the server sends a file to a receiver, or names the receiver a mirror.

        Parameters
        ----------
        file : hashable
            Identity of the file.
        peer : str
            IP address from which the receiver is connected.
        mirror : str, optional
            Value of the receiver's header (``hints.py``). An address other than `peer` is ignored: the receiver is
            behind an address translation, or lies. None: the receiver must get the file from the server.

        Yields
        ------
        TreeNode or None
            Mirror from which the receiver is to read the file; None: the server must send the file.
        """
        with suppress(ValueError):
            peer = plain_ip(peer)
        with self._lock:
            tree = self._tree(file)
            parent = None if mirror is None else self._parent(tree, peer, mirror, time.monotonic())
            if parent is None:
                tree.sends += 1
        try:
            yield parent
        finally:
            if parent is None:
                with self._lock:
                    tree.sends -= 1

    def _tree(self, file: Hashable) -> _Tree:
        tree = self._trees.pop(file, None) or _Tree()
        self._trees[file] = tree  # as the last one
        if len(self._trees) > _FILES:
            del self._trees[next(iter(self._trees))]
        return tree

    def _parent(self, tree: _Tree, peer: str, mirror: str, now: float) -> TreeNode | None:
        """Return a mirror for a receiver, if the server has enough to send; add the receiver if it is a mirror."""
        nodes = tree.nodes
        for address in [one.address for one in nodes.values() if now - one.since > SECONDS]:
            del nodes[address]
        own = Address.parse(mirror)
        if own is not None and own.ip != peer:
            own = None
        if own in nodes:
            return None
        found = None
        if tree.sends >= READERS and nodes:
            # the first mirror that has room, at the same address if possible; if none has, that with the fewest readers
            found = min(nodes.values(), key=lambda one: (max(one.readers, READERS - 1), one.address.ip != peer))
            found.readers += 1
        if own is not None and len(nodes) < _MIRRORS and sum(one.ip == peer for one in nodes) < _AT_ADDRESS:
            nodes[own] = TreeNode(own, 1 if found is None else min(found.depth + 1, MAX_DEPTH), now)
        return found
