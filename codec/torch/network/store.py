"""Access to the store of a group, in which ranks publish their addresses, with a timeout for each wait."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError
from codec.stores.calls import within

T = TypeVar("T")

PREFIX = "codec/point-to-point"  # prefix of the keys of addresses
_ANSWER_SECONDS = 1.0  # seconds after the deadline in which the store may still answer
_BUSY_SECONDS = 5.0  # seconds after which another thread is assumed to wait on the connection to the store
_LONGEST_PAUSE = 0.05  # seconds between two requests while addresses are missing


def own_store(store: Any, prefix: str, seconds: float) -> PrefixStore:
    """Return the store of a group with a separate connection.

    On a shared connection, a thread that waits for a key would block all other threads that use the store. This could
    deadlock if one of these threads must first write the key for which a peer waits.

    Raises
    ------
    PeerError
        The host of the store does not answer within `seconds`.
    """
    return within(seconds, lambda: PrefixStore(prefix, store.clone()))


class AddressBook:
    """Addresses of a group's ranks, by rank, in the store of the group.

    Requests use the connection of the group's store. They never wait for a key, which would block other threads on
    this connection. If another thread waits on it for 5 s, the address book opens a separate connection.

    Parameters
    ----------
    store : Store
        Store of the group.
    """

    def __init__(self, store: Any) -> None:
        self._group_store = store
        self._store: Any = PrefixStore(PREFIX, store)
        self._shared = True

    def publish(self, rank: int, address: bytes, seconds: float) -> None:
        """Store the address of this rank.

        Raises
        ------
        PeerError
            The host of the store does not answer within `seconds`.
        """
        self._request(seconds, lambda store: store.set(str(rank), address))

    def read(self, ranks: Sequence[int], deadline: float) -> list[bytes]:
        """Wait until ranks have published their addresses, and return these.

        The number of requests does not depend on the number of ranks.

        Raises
        ------
        PeerError
            At `deadline`, on the monotonic clock, an address is missing, or the host of the store has not answered.
        """
        keys, pause = [str(rank) for rank in ranks], 0.001

        def request(call: Callable[[Any], T]) -> T:
            return self._request(max(0.0, deadline - time.monotonic()) + _ANSWER_SECONDS, call)

        while not request(lambda store: store.check(keys)):
            if time.monotonic() > deadline:
                rank = request(lambda store: _missing(store, keys))
                raise PeerError(f"rank {rank} has not begun to communicate within the timeout")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return request(lambda store: store.multi_get(keys))

    def _request(self, seconds: float, call: Callable[[Any], T]) -> T:
        try:
            if self._shared and seconds > _BUSY_SECONDS:
                try:
                    return within(_BUSY_SECONDS, lambda: call(self._store))
                except PeerError:
                    seconds -= _BUSY_SECONDS
                    self._store, self._shared = own_store(self._group_store, PREFIX, seconds), False
            return within(seconds, lambda: call(self._store))
        except PeerError:
            raise
        except RuntimeError as e:
            raise PeerError(f"the key-value store of the process group does not answer: {e}") from e


def _missing(store: Any, keys: Sequence[str]) -> str:
    """Return a key that is not in a store; one of `keys` must be missing."""
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        keys = keys[len(half) :] if store.check(half) else half
    return keys[0]
