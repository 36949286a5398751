"""Ranges of parameter values, and stores, which map ranges to arrays of residuals.

A range is a tuple (key, start, stop): the values [start, stop) of the parameter `key`. A layout is a tuple of ranges,
the parts of a flat bucket in their order. A store is a dict from layouts to arrays; its layouts are disjoint. Padding
between parameters is a range with the key NOBODY. Arrays include padding, but functions that return ranges skip it.
"""

import itertools
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, cast

import numpy as np

from codec.arguments import shown as shown_value
from codec.arguments import whole
from codec.errors import ArgumentError
from codec.tensors.segments import Records, unpack
from codec.tensors.wrapper import View

Range = tuple[str, int, int]  # key, start, stop
Layout = tuple[Range, ...]
Array = np.ndarray[Any, np.dtype[np.float32]]
Store = Mapping[Layout, Array]


class Memory:
    """Allocator for the arrays of a store, here in host memory. Subclasses allocate elsewhere, such as on a GPU."""

    def empty(self, n: int) -> Array:
        """Return an uninitialized float32 array of `n` values in this memory."""
        return np.empty(n, np.float32)

    def zeros(self, n: int) -> Array:
        """Return a float32 array of `n` zeros in this memory."""
        return np.zeros(n, np.float32)

    def has(self, array: Any) -> bool:
        """Return True if an array is in this memory."""
        return isinstance(array, np.ndarray)

    def bring(self, array: Any) -> Array:
        """Return `array` if it is in this memory, otherwise a copy in this memory."""
        return array if self.has(array) else array.cpu().numpy()

    def copy(self, array: Any, to: Any = None) -> Array:
        """Copy an array to `to` if that is an array in this memory, otherwise to a new array; return the copy."""
        copy = to if self.has(to) else self.empty(len(array))
        copy[:] = self.bring(array)
        return copy


HOST = Memory()

NOBODY = "\0"  # key of padding; no parameter has this name
_MOST = (1 << 60) - 1  # maximum end of a range


def layout_of(given: Any) -> Layout:
    """Return a layout given as pairs (key, numel), triples (key, start, stop), or a view whose segments have names.

    Raises
    ------
    ArgumentError
        `given` is not a layout, or contains a parameter value twice.
    """
    if type(given) is View:
        return layout_of_view(given)
    try:
        return _checked_layout(tuple(tuple(item) for item in cast(Iterable[Iterable[Any]], given)))
    except TypeError:
        raise ArgumentError(
            "layout must be a list of (key, numel) or (key, start, stop) with string keys, or a view with "
            f"segments={{name: shape}}, got {shown_value(given)}"
        ) from None


def layout_of_view(given: View) -> Layout:
    """Return the layout of a view whose segments have names.

    Raises
    ------
    ArgumentError
        The segments have no names.
    """
    if given.names is None or given.segments is None:
        raise ArgumentError(
            "the segments of the view have no names, by which residuals are stored: pass view(x, segments={name: "
            "shape})"
        )
    return _layout_of_segments(given.names, given.segments)


@lru_cache(256)
def _layout_of_segments(names: tuple[str, ...], segments: Records) -> Layout:
    shapes = (shape for _, shape in unpack(segments))
    return _checked_layout(tuple((name, prod(shape)) for name, shape in zip(names, shapes, strict=True)))


@lru_cache(1024)  # a cache, because every step has the same buckets, with hundreds of parameters
def _checked_layout(given: tuple[Any, ...]) -> Layout:
    found: list[Range] = []
    for item in given:
        if len(item) not in (2, 3) or type(item[0]) is not str:
            raise ArgumentError(
                "an item of layout must be (key, numel) or (key, start, stop) with a string key, got "
                f"{shown_value(item)}"
            )
        start = whole("the start of a range", item[1], 0, _MOST) if len(item) == 3 else 0
        found.append((item[0], start, whole("the end of a range", item[-1], start, _MOST)))
    if (twice := shared(found)) is not None:
        raise ArgumentError(f"layout has the values {shown(twice)} twice")
    return tuple(found)


def shown(r: Range) -> str:
    """Return a range as text "key[start:stop]", for messages and state dicts."""
    return f"{r[0]}[{r[1]}:{r[2]}]"


def numel(layout: Layout) -> int:
    """Return the number of values of a layout."""
    return sum(stop - start for _, start, stop in layout)


def cut(layout: Layout, begin: int, end: int) -> list[Range]:
    """Return the ranges of parameters that make up the values [begin, end) of a bucket with this layout."""
    found: list[Range] = []
    at = 0
    for key, start, stop in layout:
        a, b = max(begin, at), min(end, at + stop - start)
        if a < b:
            found.append((key, start + a - at, start + b - at))
        at += stop - start
    return found


def shared(ranges: Iterable[Range]) -> Range | None:
    """Return the overlap of some two of the ranges; None if all ranges are disjoint."""
    ordered = sorted(r for r in ranges if r[1] < r[2] and r[0] != NOBODY)
    for (key, _, end), (other, start, stop) in itertools.pairwise(ordered):
        if key == other and start < end:
            return key, start, min(end, stop)
    return None


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges as a sorted, minimal list of disjoint ranges, without padding."""
    found: list[Range] = []
    for key, start, stop in sorted(r for r in ranges if r[1] < r[2] and r[0] != NOBODY):
        if found and found[-1][0] == key and start <= found[-1][2]:
            found[-1] = key, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((key, start, stop))
    return found


def pieces(store: Store) -> list[tuple[Range, Array]]:
    """Return each range of a store with a view of its values, without padding."""
    found: list[tuple[Range, Array]] = []
    for layout, array in store.items():
        at = 0
        for r in layout:
            if r[0] != NOBODY:
                found.append((r, array[at : at + r[2] - r[1]]))
            at += r[2] - r[1]
    return found


def gather(store: Store, layout: Layout, memory: Memory = HOST) -> Array:
    """Return a new array in `memory` with the stored values of a layout; 0 where the store has no value."""
    index: dict[str, list[tuple[Range, Array]]] = {}
    for piece in pieces(store):
        index.setdefault(piece[0][0], []).append(piece)
    found, at = memory.zeros(numel(layout)), 0
    for key, start, stop in layout:
        for (_, first, last), values in index.get(key, ()):
            low, high = max(start, first), min(stop, last)
            if low < high:
                found[at + low - start : at + high - start] = memory.bring(values[low - first : high - first])
        at += stop - start
    return found


def forget_nobodys(values: Array, layout: Layout) -> None:
    """Set padding to 0: state dicts omit padding, but frames after loading a state dict must be bit-identical."""
    at = 0
    for key, start, stop in layout:
        if key == NOBODY:
            values[at : at + stop - start] = 0
        at += stop - start


def scaled(store: Store, factor: float) -> Store:
    """Return a store with all values multiplied by `factor`; return `store` itself if the factor is 1."""
    if factor == 1:
        return store
    with np.errstate(over="ignore"):  # encoders reject values that become infinite
        return {layout: array * np.float32(factor) for layout, array in store.items()}


def without(store: Store, layouts: Iterable[Layout]) -> dict[Layout, Array]:
    """Return a store without the values of some layouts.

    Arrays that contain none of these values are shared with `store`; remaining parts of other arrays are copied.
    """
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
            for low, high in zip(edges[::2], edges[1::2], strict=True):  # parts between removed ranges
                if low < high:
                    left[((key, low, high),)] = _copied(values[low - start : high - start])
    return left


def _copied(values: Any) -> Array:
    """Return a copy of an array in the same memory (host or device)."""
    return values.copy() if HOST.has(values) else values.clone()


def _meet(a: Range, b: Range) -> bool:
    """Return True if two ranges of one key have values in common."""
    return max(a[1], b[1]) < min(a[2], b[2])
