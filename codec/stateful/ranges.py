"""Ranges of parameters, and stores: arrays that hold values for some of them.

A layout is the ranges that make up a flat bucket, in its order. A store maps layouts, no two of which have a value in
common, to one array each. Any range can be put together from it. What lies between parameters is a range of NOBODY's:
it has room in the arrays, but what is there is not looked for.
"""

import itertools
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

import numpy as np

from codec.arguments import shown as told
from codec.arguments import whole
from codec.errors import ArgumentError

Range = tuple[str, int, int]  # key, start, stop
Layout = tuple[Range, ...]
Array = np.ndarray[Any, np.dtype[np.float32]]
Store = Mapping[Layout, Array]

NOBODY = "\0"  # no name of a parameter
_MOST = (1 << 60) - 1


def layout_of(given: Any) -> Layout:
    """What a caller says that a bucket is made of: pairs (key, numel) or triples (key, start, stop).

    Raises
    ------
    ArgumentError
        It is something else, or has a value twice.
    """
    try:
        return _looked_through(tuple(tuple(item) for item in cast(Iterable[Iterable[Any]], given)))
    except TypeError:
        raise ArgumentError("a layout is a list of (key, numel) or (key, start, stop), keys being strings") from None


@lru_cache(1024)  # buckets come back every step, with hundreds of parameters
def _looked_through(given: tuple[Any, ...]) -> Layout:
    found: list[Range] = []
    for item in given:
        if len(item) not in (2, 3) or type(item[0]) is not str:
            raise ArgumentError(
                f"a layout has (key, numel) or (key, start, stop), keys being strings, not {told(item)}"
            )
        start = whole("the start of a range", item[1], 0, _MOST) if len(item) == 3 else 0
        found.append((item[0], start, whole("the end of a range", item[-1], start, _MOST)))
    if (twice := shared(found)) is not None:
        raise ArgumentError(f"this layout has {shown(twice)} twice")
    return tuple(found)


def shown(r: Range) -> str:
    """A range as it stands in messages and state dicts."""
    return f"{r[0]}[{r[1]}:{r[2]}]"


def numel(layout: Layout) -> int:
    """Number of values."""
    return sum(stop - start for _, start, stop in layout)


def shared(ranges: Iterable[Range]) -> Range | None:
    """Values that two of these ranges have in common, if any do."""
    ordered = sorted(r for r in ranges if r[1] < r[2] and r[0] != NOBODY)
    for (key, _, end), (other, start, stop) in itertools.pairwise(ordered):
        if key == other and start < end:
            return key, start, min(end, stop)
    return None


def union(ranges: Iterable[Range]) -> list[Range]:
    """The same values as the fewest ranges, in order, without NOBODY's."""
    found: list[Range] = []
    for key, start, stop in sorted(r for r in ranges if r[1] < r[2] and r[0] != NOBODY):
        if found and found[-1][0] == key and start <= found[-1][2]:
            found[-1] = key, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((key, start, stop))
    return found


def pieces(store: Store) -> list[tuple[Range, Array]]:
    """Each range with its part of its array, but NOBODY's."""
    found: list[tuple[Range, Array]] = []
    for layout, array in store.items():
        at = 0
        for r in layout:
            if r[0] != NOBODY:
                found.append((r, array[at : at + r[2] - r[1]]))
            at += r[2] - r[1]
    return found


def gather(store: Store, layout: Layout) -> Array:
    """A new array of a layout's values, zeros where the store has none."""
    index: dict[str, list[tuple[Range, Array]]] = {}
    for piece in pieces(store):
        index.setdefault(piece[0][0], []).append(piece)
    found, at = np.zeros(numel(layout), np.float32), 0
    for key, start, stop in layout:
        for (_, first, last), values in index.get(key, ()):
            low, high = max(start, first), min(stop, last)
            if low < high:
                found[at + low - start : at + high - start] = values[low - first : high - first]
        at += stop - start
    return found


def forget_nobodys(values: Array, layout: Layout) -> None:
    """Set the values of NOBODY's ranges to zero: a state does not have them, and must give the same frames."""
    at = 0
    for key, start, stop in layout:
        if key == NOBODY:
            values[at : at + stop - start] = 0
        at += stop - start


def scaled(store: Store, factor: float) -> Store:
    """A store of the same values times a factor; the same store if that is 1."""
    if factor == 1:
        return store
    with np.errstate(over="ignore"):  # encoders refuse what is infinite then
        return {layout: array * np.float32(factor) for layout, array in store.items()}


def without(store: Store, layouts: Iterable[Layout]) -> dict[Layout, Array]:
    """A store of all other values. Arrays that none is taken from stay as they are; of others the rest is copied."""
    taken: dict[str, list[Range]] = {}
    for r in union(itertools.chain.from_iterable(layouts)):
        taken.setdefault(r[0], []).append(r)
    left: dict[Layout, Array] = {}
    for layout, array in store.items():
        if not any(_meet(r, t) for r in layout for t in taken.get(r[0], ())):
            left[layout] = array
            continue
        for (key, start, stop), values in pieces({layout: array}):
            edges = [start, *(e for t in taken.get(key, ()) if _meet((key, start, stop), t) for e in t[1:]), stop]
            for low, high in zip(edges[::2], edges[1::2], strict=True):  # between those that are taken
                if low < high:
                    left[((key, low, high),)] = values[low - start : high - start].copy()
    return left


def _meet(a: Range, b: Range) -> bool:
    return max(a[1], b[1]) < min(a[2], b[2])
