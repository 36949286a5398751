"""Access to the store of a group, in which ranks publish their addresses, with a timeout for each wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Run a call that uses a store in a new thread, and return its result; abandon the thread after `seconds`.

    torch's stores have no timeout for answers of their host, so a frozen host would block this rank forever.

    Raises
    ------
    PeerError
        The call has not returned in time. Its thread ends when the host answers, or breaks the connection.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, name="codec, store", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise PeerError(
            f"the host of the process group's key-value store does not answer within {seconds:g} s"
        ) from None


def own_store(group: Any, prefix: str, seconds: float) -> PrefixStore:
    """Return the store of a group with a separate connection.

    On a shared connection, a thread that waits for a key would block all other threads that use the store. This could
    deadlock if one of these threads must first write the key for which a peer waits.

    Raises
    ------
    PeerError
        The host of the store does not answer within `seconds`.
    """
    return within(seconds, lambda: PrefixStore(prefix, group.get_group_store().clone()))
