"""Redistribution of residuals when the number of ranks changes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast, get_args

import numpy as np

from codec.arguments import MAX_RANKS, whole
from codec.arguments import shown as shown_value
from codec.errors import ArgumentError, StateError
from codec.stateful.checkpoint import load, save
from codec.stateful.ranges import Layout, Range, Store, gather, layout_of, pieces, shared, shown, union, without
from codec.tensors.view import kind_of

Reduction = Literal["mean", "sum"]


def reshard(
    state_dicts: Iterable[Any],
    world_size: int,
    *,
    op: Reduction = "mean",
    owned: Callable[[int], Any] | None = None,
) -> list[dict[str, Any]]:
    r"""Convert the state dicts of all old ranks to a new number of ranks, so that total residuals are preserved.

    *Workers.* Each of N ranks sends Q(g + e) and stores the residual. Parameters receive the mean (or the sum) over
    ranks, so that their total residual is

    .. math:: c = \frac{1}{N} \sum_{r=0}^{N-1} e_r \quad (\text{mean}), \qquad c = \sum_{r=0}^{N-1} e_r \quad
       (\text{sum}).

    M new ranks with equal residuals e' have the total residual e' under a mean and M e' under a sum. So each new rank
    gets

    .. math:: e' = \frac{1}{N} \sum_r e_r \quad (\text{mean}), \qquad e' = \frac{1}{M} \sum_r e_r \quad (\text{sum}),

    which leaves c unchanged. Missing residuals count as 0. Sums are computed in float64 and rounded once.

    *Servers.* The owner of a range reduces it, sends Q(reduced + e) to all ranks, and stores the residual. Each value
    has one owner, so that c = e under a mean and under a sum. So residuals move to other ranks unscaled. (If owners
    send sums, which the workers divide by the number of ranks, then c = e / N, and the caller must multiply these
    residuals by M / N.)

    Parameters
    ----------
    state_dicts : iterable of dict
        State dicts of all old ranks, in the order of ranks, all of one role.
    world_size : int
        M, the number of new ranks, at most 2^20.
    op : {"mean", "sum"}
        Reduction of the all-reduce. Ignored for servers.
    owned : callable, optional
        For servers only. Function that returns, for a new rank, the layout of the ranges that the rank owns. The
        layouts of all new ranks must be disjoint and cover all old ranges; they may split and merge old ranges.
        Default: the ranges of an old rank move unchanged to the new rank floor(old rank * M / N).

    Returns
    -------
    list of dict
        State dict of each new rank. For workers, all ranks have the same dict object;
        :meth:`ErrorFeedback.load_state_dict` copies its arrays.

    Raises
    ------
    StateError
        An item is not a state dict, roles differ, two old servers have a residual of the same value, or a value of an
        old server is owned by no new server.
    ArgumentError
        An argument has an invalid type or value, `owned` is given for workers, or two new ranks own the same value.

    Examples
    --------
    >>> ranks = []
    >>> for rank in range(4):
    ...     feedback = codec.ErrorFeedback(codec.Sign())
    ...     frame = feedback.encode("w", np.array([1, 2, 6], np.float32) * rank)
    ...     ranks.append(feedback.state_dict())
    >>> mean = np.mean([r["w[0:3]"] for r in ranks], axis=0)
    >>> [bool((r["w[0:3]"] == mean).all()) for r in codec.ErrorFeedback.reshard(ranks, 2)]
    [True, True]
    """
    world_size = whole("world_size", world_size, 1, MAX_RANKS)
    if not isinstance(op, str) or op not in get_args(Reduction):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"op must be one of {', '.join(map(repr, get_args(Reduction)))}, got {shown_value(op)}")
    loaded = [load(saved) for saved in _sequence_of(state_dicts)]
    if not loaded:
        raise ArgumentError("state_dicts must have the state dicts of all old ranks, got none")
    if len(roles := sorted({role for role, _ in loaded})) > 1:
        raise StateError(f"the state dicts must have the same role, got {' and '.join(roles)}")
    stores = [store for _, store in loaded]
    if roles == ["worker"]:
        if owned is not None:
            raise ArgumentError("owned= is for servers, but these state dicts are of workers: leave it out")
        return [_evenly(stores, len(stores) if op == "mean" else world_size)] * world_size
    return [save("server", store) for store in _among_servers(stores, world_size, owned)]


def _sequence_of(state_dicts: Any) -> Iterable[Any]:
    """Return the argument if it is an iterable other than a mapping, str or bytes; otherwise raise ArgumentError."""
    if isinstance(state_dicts, Iterable) and not isinstance(state_dicts, Mapping | str | bytes):
        return cast(Iterable[Any], state_dicts)
    kind = kind_of(cast(object, state_dicts))
    raise ArgumentError(f"state_dicts must be a sequence of state dicts, one for each old rank, got {kind}")


def _evenly(stores: list[Store], share: int) -> dict[str, Any]:
    """Return the state dict that every new worker gets: the sum of all residuals, divided by `share`."""
    layout = tuple(union(_ranges(stores)))
    total = np.zeros(sum(stop - start for _, start, stop in layout))
    for store in stores:
        total += gather(store, layout)
    return save("worker", {layout: (total / share).astype(np.float32)})


def _among_servers(stores: list[Store], world_size: int, owned: Callable[[int], Any] | None) -> list[Store]:
    """Distribute the residuals of old servers; return the store of each new server."""
    if (twice := shared(_ranges(stores))) is not None:
        raise StateError(
            f"two of the old servers have residuals of {shown(twice)}: pass the state dict of each server once"
        )
    if owned is None:
        moved: list[Store] = [{} for _ in range(world_size)]
        for rank, store in enumerate(stores):
            new = rank * world_size // len(stores)
            moved[new] = {**moved[new], **store}
        return moved
    everything = {layout: array for store in stores for layout, array in store.items()}
    layouts: list[Layout] = [layout_of(owned(rank)) for rank in range(world_size)]
    if (twice := shared(r for layout in layouts for r in layout)) is not None:
        raise ArgumentError(f"owned() must give each value to one server, but gives {shown(twice)} to two")
    for r, _ in pieces(without(everything, layouts)):
        raise StateError(
            f"owned() gives {shown(r)} to no server, so that its residual would be lost: it must give each value to "
            "one server"
        )
    return [{layout: gather(everything, layout)} for layout in layouts]


def _ranges(stores: list[Store]) -> list[Range]:
    return [r for store in stores for r, _ in pieces(store)]
