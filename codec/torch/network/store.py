"""Stores of groups, by which ranks find each other, with a limit for each wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that uses a store, in a thread that is given up after `seconds`.

    Stores of torch wait for the answers of their host without a limit. A frozen host would keep this rank waiting for
    ever.

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
        raise PeerError(f"the host of the group's store does not answer within {seconds:g} s") from None


def own_store(group: Any, prefix: str, seconds: float) -> PrefixStore:
    """Return the store of a group, with a connection of its own.

    Over a shared connection, a thread that waits for a key would block all others from the store, also a thread whose
    group a peer of this rank must make first.

    Raises
    ------
    PeerError
        The host of the store does not answer within `seconds`.
    """
    return within(seconds, lambda: PrefixStore(prefix, group.get_group_store().clone()))
