"""Checks of arguments that servers and clients share."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from codec import ArgumentError
from codec._security import NONE, Security
from codec.arguments import shown, whole
from codec.torch import _compat
from codec.torch.group.levels import all_ranks
from codec.torch.network.endpoint import Endpoint, endpoint_of, use_security


def endpoint_for(group: Any, timeout: timedelta | None, security: Security = NONE) -> Endpoint:
    """Return the endpoint of this rank in a group, of which it must be a member.

    Parameters
    ----------
    group : ProcessGroup or None
        Group of all servers and workers; None: all ranks.
    timeout : timedelta or None
        Longest wait for the group's store; None: the timeout of the group.
    security : Security
        Secret and TLS setting, in the options of a call.

    Raises
    ------
    ArgumentError
        `group` is no process group, or has another secret or TLS setting; or this rank is not in it.
    """
    key = all_ranks(group)
    if _compat.rank_not_in_group(key):
        raise ArgumentError("this rank is not in the group: call this function only on ranks of the group")
    use_security(key, security)
    return endpoint_of(key, None if timeout is None else timeout.total_seconds())


def check_ranks(
    name: str, ranks: Any, endpoint: Endpoint, *, member: bool | None = None, other: Sequence[int] = ()
) -> list[int]:
    """Check an argument that is a sequence of ranks, and return it as a list.

    Parameters
    ----------
    name : str
        Name of the argument, for error messages.
    ranks : sequence of int
        The argument: one or more different ranks of the group of `endpoint`.
    member : bool, optional
        True: this rank must be one of `ranks`. False: it must not be one of them.
    other : sequence of int
        Ranks that `ranks` must not contain.

    Raises
    ------
    ArgumentError
        `ranks` violates one of these conditions.
    """
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise ArgumentError(f"{name} must be a sequence of ranks, got {shown(ranks)}")
    given = cast(Sequence[Any], ranks)
    found = [whole(f"a rank of {name}", r, 0, endpoint.size - 1) for r in given]
    if not found or len(set(found)) != len(found):
        raise ArgumentError(f"{name} must be one or more different ranks, got {shown(given)}")
    if both := set(found) & set(other):
        raise ArgumentError(f"a rank must be either a server or a worker, but rank {min(both)} is both")
    if member is not None and (endpoint.rank in found) != member:
        what = "must be" if member else "must not be"
        raise ArgumentError(f"this rank, {endpoint.rank}, {what} one of {name}, {shown(found)}")
    return found
