"""Shards of tensors: boxes that ranks of a trainer hold, and their layout in whole tensors.

A tensor of weights has a name, which is a str, or is a shard of a tensor, whose key is a :class:`Shard`. Both occur in
the same tables; a table has a whole tensor or shards of it.
"""

import functools
import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from codec.arguments import shown
from codec.errors import ArgumentError

Shape = tuple[int, ...]


class Shard(NamedTuple):
    """Key of a shard: name and shape of its tensor, and the index of the shard's first value in each dimension."""

    name: str
    shape: Shape
    offsets: Shape

    @property
    def whole(self) -> "Box":
        """Box of all values of the tensor."""
        return Box((0,) * len(self.shape), self.shape)

    def __repr__(self) -> str:
        return f"{self.name!r} from {list(self.offsets)} of {list(self.shape)}"


Name = str | Shard  # key of a tensor or shard in a table of weights


class Box(NamedTuple):
    """Box of values in a tensor: index of its first value in each dimension, and its shape."""

    offsets: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the box in its tensor."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offsets, self.shape, strict=True))

    def common(self, other: "Box") -> "Box":
        """Return the values that are in both boxes; a box without values if there are none."""
        begin = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        return Box(begin, tuple(max(0, end - at) for end, at in zip(ends, begin, strict=True)))

    def seen_from(self, origin: Shape) -> "Box":
        """Return the box with offsets relative to `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.shape)

    def holds(self, other: "Box") -> bool:
        """Return True if all values of `other` are in this box."""
        return other.size == 0 or self.common(other) == other


class Layout(NamedTuple):
    """Shape of a tensor, and the boxes of its shards by key."""

    shape: Shape
    boxes: dict[Name, Box]

    def covers(self, box: Box) -> bool:
        """Return True if each value of `box` is in exactly one shard."""
        return _covers(tuple(self.boxes.values()), box)


def check_name(name: Any) -> Name:
    """Return `name` if it is a valid name of a tensor or key of a shard, otherwise raise ArgumentError."""
    text: Any = name.name if isinstance(name, Shard) else name
    try:
        if isinstance(text, str) and 0 < len(text.encode()) < 1 << 16:
            return cast(Name, name)
    except UnicodeEncodeError:
        pass
    raise ArgumentError(f"a tensor's name must be a str of 1 to 65535 bytes of UTF-8, got {name!r:.120}")


def tensor_of(key: Name) -> str:
    """Return the name of the tensor of a key."""
    return key if isinstance(key, str) else key.name


def box_of(key: Name, shape: Shape) -> Box:
    """Return the box of a tensor or shard of this shape."""
    return Box((0,) * len(shape) if isinstance(key, str) else key.offsets, shape)


def layouts(shapes: Mapping[Name, Shape]) -> dict[str, Layout]:
    """Return the layout of each tensor, from the shape of each whole tensor or shard.

    Raises
    ------
    ValueError
        Two shards name other shapes of the same tensor.
    """
    found: dict[str, Layout] = {}
    for key, shape in shapes.items():
        whole = shape if isinstance(key, str) else key.shape
        layout = found.setdefault(tensor_of(key), Layout(whole, {}))
        if layout.shape != whole:
            raise ValueError(f"shards of {tensor_of(key)!r} name the shapes {layout.shape} and {whole}")
        layout.boxes[key] = box_of(key, shape)
    return found


def check_layouts(found: Mapping[str, Layout]) -> None:
    """Check that each value of each tensor is in exactly one shard.

    Raises
    ------
    ValueError
        Shards of a tensor have values in common, or do not cover the tensor.
    """
    for name, layout in found.items():
        boxes = tuple(layout.boxes.values())
        if _tile(boxes, layout.shape):
            continue
        if sum(box.size for box in boxes) < math.prod(layout.shape):
            raise ValueError(f"the shards do not cover {name!r}, whose shape is {layout.shape}")
        raise ValueError(f"shards of {name!r} have values in common")


@functools.lru_cache(1 << 10)  # most layers of a model have the same layout
def _tile(boxes: tuple[Box, ...], shape: Shape) -> bool:
    """Return True if each value of a tensor of this shape is in exactly one box. The boxes lie in the tensor.

    The number of boxes that hold a value is the sum of the signs of all corners before the value: the sign of a corner
    is -1 if an odd number of its indices are ends of the box. So boxes tile the tensor if and only if the signs at each
    point add up to those of the tensor's own corners. This takes linear time, also for the shards of a hostile update.
    """
    signs = Counter[Shape]()
    for box, factor in [*((box, 1) for box in boxes), (Box((0,) * len(shape), shape), -1)]:
        for corner in itertools.product(*(((a, 1), (a + n, -1)) for a, n in zip(*box, strict=True))):
            signs[tuple(at for at, _ in corner)] += factor * math.prod(sign for _, sign in corner)
    return not any(signs.values())


@functools.lru_cache(1 << 12)
def _covers(boxes: tuple[Box, ...], box: Box) -> bool:
    return sum(box.common(each).size for each in boxes) == box.size  # no two boxes have values in common


def blocks(shape: Shape, begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes of consecutive values of a tensor in row-major order, from `begin` to `end`, in this order."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # all in one row
        for box in blocks(shape[1:], begin - last * row, end - last * row):
            yield Box((last, *box.offsets), (1, *box.shape))
        return
    for k, a, b in ((first - 1, begin, first * row), (last, last * row, end)):
        if k == last and first < last:
            yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
        for box in blocks(shape[1:], a - k * row, b - k * row):
            yield Box((k, *box.offsets), (1, *box.shape))


def local_shards(given: Mapping[Name, Any]) -> dict[Shard, Any]:
    """Return the shards that this process holds, by key.

    Parameters
    ----------
    given : mapping from names to tensors
        Whole tensors and DTensors by name, or shards by :class:`Shard`.

    Raises
    ------
    ArgumentError
        A DTensor is partial, or has no box of values on this rank.
    """
    found: dict[Shard, Any] = {}
    for name, x in given.items():
        box, local = local_box(name, x)
        if isinstance(name, Shard):
            if len(name.shape) != len(box.shape) or len(name.offsets) != len(box.shape) or not name.whole.holds(box):
                raise ArgumentError(f"shard {name!r} has the shape {box.shape}, which is no box of its tensor")
            found[name] = local
        elif box.size or not math.prod(_shape(x)):
            found[Shard(name, _shape(x), box.offsets)] = local
    return found


def local_box(name: Name, x: Any) -> tuple[Box, Any]:
    """Return the box of a tensor that this process holds, and its values; of a DTensor, the local shard.

    Raises
    ------
    ArgumentError
        A DTensor is partial, or has no single box of values on this rank.
    """
    chunks_of = getattr(x, "__create_chunk_list__", None)  # the interface of torch.distributed.checkpoint
    if chunks_of is None:
        return box_of(name, _shape(x)), x
    try:
        (chunk,) = chunks_of()
    except (RuntimeError, ValueError, NotImplementedError) as e:
        raise ArgumentError(
            f"{name!r} is a DTensor that is not one box of values on this rank: pass x.redistribute(...) with "
            f"placements of Shard and Replicate; {e}"
        ) from None
    return Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))), x.to_local()


def target_boxes(name: str, given: Any) -> list[tuple[Shape | None, Box, Any]]:
    """Return for each target in an entry of ``into=`` the shape of its tensor if known, its box, and its values.

    Parameters
    ----------
    name : str
        Name of the tensor.
    given : tensor, pair, or list of these
        Whole tensor or DTensor, or a pair of a tensor and the index of its first value in each dimension.

    Raises
    ------
    ArgumentError
        `given` is something else.
    """
    found: list[tuple[Shape | None, Box, Any]] = []
    for one in cast(list[object], given) if isinstance(given, list) else [cast(object, given)]:
        if not isinstance(one, tuple):
            found.append((_shape(one), *local_box(name, one)))
            continue
        try:
            tensor, offsets = cast(tuple[Any, ...], one)
            found.append((None, Box(tuple(map(operator.index, offsets)), _shape(tensor)), tensor))
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{name!r} must be a tensor, or a pair of a tensor and its offsets, got {shown(cast(object, one))}"
            ) from None
    return found


class Selection:
    """Tensors, or boxes of tensors, of which a receiver keeps the values.

    Parameters
    ----------
    boxes : mapping of str to list of Box, or None
        Boxes of each tensor; None: the whole tensor.
    """

    def __init__(self, boxes: Mapping[str, Sequence[Box] | None]) -> None:
        self.boxes = boxes

    @classmethod
    def of(cls, given: Mapping[str, Any] | Iterable[str]) -> "Selection":
        """Return the selection of the boxes in a mapping as for ``into=``, or of the tensors with the given names."""
        if isinstance(given, Mapping):
            pairs = cast(Mapping[str, Any], given).items()
            return cls({name: [box for _, box, _ in target_boxes(name, x)] for name, x in pairs})
        names = list(given)
        if isinstance(given, str) or not all(type(name) is str for name in names):
            raise ArgumentError(f"only= must be names, or a mapping as for into=, got {shown(given)}")
        return cls(dict.fromkeys(names))

    def keeps(self, key: Name, shape: Shape) -> bool:
        """Return True if a tensor or shard of this shape has selected values."""
        name = tensor_of(key)
        if name not in self.boxes:
            return False
        boxes, own = self.boxes[name], box_of(key, shape)
        return boxes is None or not own.size or any(len(b.shape) != len(shape) or own.common(b).size for b in boxes)

    @property
    def fingerprint(self) -> str:
        """Text that differs for other selections."""
        return hashlib.blake2b(repr(sorted(self.boxes.items())).encode(), digest_size=16).hexdigest()


def _shape(x: Any) -> Shape:
    shape = getattr(x, "shape", None)
    if shape is None:
        shape = np.shape(getattr(x, "tensor", x))
    return tuple(map(int, shape))
