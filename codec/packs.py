"""Packs: one message for many tensors, in which tensors of few values share frames.

docs/spec/packs.md specifies the bytes. :func:`codec.encode_many` writes packs, :func:`codec.decode_many` reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE, UNSIGNED, ffi, lib
from codec.arguments import shown
from codec.errors import ArgumentError, ChecksumError, CodecError, EngineError, FrameError, Status, UnsupportedError
from codec.inspection import Info, digest, inspect
from codec.presets import resolve
from codec.specs import Delta, Spec, TopK
from codec.tensors.overlap import check_all_apart
from codec.tensors.view import Array, TensorView, device_like, empty, view, view_output
from codec.tensors.wrapper import View
from codec.tensors.wrapper import view as make_view

MAGIC = b"CODP"
_VERSION = 1
_NAMED = 1  # flag: tensors have names
_HEAD = Struct("<4sBBHIIII")
_DIGEST = Struct("<Q")
_TABLE = _HEAD.size + _DIGEST.size  # offset of the table
_SMALL = 4096  # tensors of fewer values share frames

Shape = tuple[int, ...]


class PackedTensor(NamedTuple):
    """Place of a tensor in a pack."""

    name: str | None
    shape: Shape
    frame: int  # index of the frame
    offset: int  # index of the tensor's first value in the frame

    @property
    def n(self) -> int:
        """Number of values."""
        return prod(self.shape)


def encode_pack(
    names: Sequence[Any] | None,
    encode: Callable[..., list[bytes]],
    xs: Sequence[Any],
    specs: Sequence[Any],
    bases: Sequence[Any],
    how: Mapping[str, Any],
) -> bytes:
    """Return the pack of tensors.

    Parameters
    ----------
    names : sequence of str or None
        Names of the tensors.
    encode : callable
        :func:`codec.encode_many`, which this module must not import.
    xs, specs, bases : sequence
        For each tensor: the tensor, its spec, and its base or None.
    how : mapping
        Further arguments of `encode`.

    Raises
    ------
    ArgumentError, SpecError, EngineError, StateError
        As in :func:`codec.encode_many`.
    """
    specs = [resolve(spec)[0] if isinstance(spec, str) else spec for spec in specs]
    tensors, members = _plan(names, xs, specs)
    first = [indices[0] for indices in members]
    try:
        buckets = [_bucket([xs[i] for i in indices]) for indices in members]
        frames = encode(buckets, [specs[i] for i in first], base=[bases[i] for i in first], **how)
    except CodecError as e:
        for i in members[e.item] if isinstance(e.item, int) else ():  # raise the error with the key of the tensor
            key: Any = i if names is None else names[i]
            encode({key: xs[i]}, {key: specs[i]}, base={key: bases[i]}, **how)
        raise
    return _compose(tensors, frames, names is not None)


def _plan(
    names: Sequence[Any] | None, xs: Sequence[Any], specs: Sequence[Any]
) -> tuple[list[PackedTensor], list[list[int]]]:
    """Choose the frames of a pack: one for all small tensors of a dtype and a spec, and one for each other tensor.

    Tensors that need a base, a bound optimizer or their own segments have a frame of their own, and so have tensors of
    TopK, because values of several tensors would compete. Returns the places of the tensors, and for each frame the
    indices of its tensors.

    Raises
    ------
    ArgumentError
        A name is not a str, or an item is not a tensor.
    EngineError
        A tensor is on a device.
    """
    for name in names or ():
        if type(name) is not str:
            raise ArgumentError(f"the keys of tensors must be str with pack=True, got {shown(name)}")
    tensors, members = list[PackedTensor](), list[list[int]]()
    shared: dict[tuple[str, Spec], int] = {}
    ends: dict[int, int] = {}
    for i, (x, spec) in enumerate(zip(xs, specs, strict=True)):
        v = _view_of(x)
        if v.device != "cpu":
            raise EngineError(
                f"pack=True takes tensors in host memory, got one on {v.device}: copy it, such as by .cpu()"
            )
        n = v.nbytes // ITEMSIZE[v.dtype]
        joins = 0 < n < _SMALL and isinstance(spec, Spec) and not isinstance(spec, Delta | TopK)
        joins = joins and not (type(x) is View and x.segments is not None)
        frame = shared.setdefault((v.dtype, spec), len(members)) if joins else len(members)
        if frame == len(members):
            members.append([])
        members[frame].append(i)
        offset = ends.get(frame, 0)
        ends[frame] = offset + n
        tensors.append(PackedTensor(None if names is None else names[i], v.shape, frame, offset))
    return tensors, members


def _view_of(x: Any) -> TensorView:
    return view(x.tensor, x.dtype) if type(x) is View else view(x)


def _bucket(xs: Sequence[Any]) -> Any:
    """Return the tensors of a frame as one: a single tensor unchanged, several concatenated, with segments."""
    if len(xs) == 1:
        return xs[0]
    views = [_view_of(x) for x in xs]
    dtype = views[0].dtype
    values: Array = np.empty(sum(v.nbytes for v in views), np.uint8)
    start, at, segments = ffi.from_buffer(values), 0, list[tuple[int, Shape]]()
    for v in views:
        ffi.memmove(start + at, v.data, v.nbytes)
        segments.append((at // ITEMSIZE[dtype], v.shape))
        at += v.nbytes
    return make_view(values.view(UNSIGNED[dtype]), dtype, segments)


def _compose(tensors: Sequence[PackedTensor], frames: Sequence[bytes], named: bool) -> bytes:
    """Return the bytes of a pack. `named`: True if its tensors have names."""
    table = bytearray()
    for t in tensors:
        if named:
            name = str(t.name).encode()
            _append(table, len(name))
            table += name
        for number in (t.frame, len(t.shape), *t.shape):
            _append(table, number)
    head = _HEAD.pack(MAGIC, _VERSION, _NAMED if named else 0, 0, len(tensors), len(frames), len(table), 0)
    return b"".join([head, _DIGEST.pack(digest(head + table)), table, *frames])


def _append(table: bytearray, number: int) -> None:
    """Append a number in 7-bit groups, the lowest first; the highest bit of a byte says that another byte follows."""
    while number > 127:
        table.append(number & 127 | 128)
        number >>= 7
    table.append(number)


def is_pack(data: Any) -> bool:
    """Return True if `data`, an argument of any type, is a buffer that begins as a pack does."""
    if type(data) not in (bytes, bytearray, memoryview, np.ndarray) or len(data) < len(MAGIC):
        return False
    return bytes(memoryview(data)[: len(MAGIC)]) == MAGIC if memoryview(data).format == "B" else False


class Pack:
    """Parsed pack. Its frames are checked when they are decoded.

    Parameters
    ----------
    data : buffer
        Bytes of a pack, for which :func:`is_pack` is true.

    Raises
    ------
    FrameError
        The bytes are not a pack; ChecksumError: they are damaged; UnsupportedError: they have a later version.
    """

    def __init__(self, data: Any) -> None:
        memory: Array = np.frombuffer(data, np.uint8)
        self.size = len(memory)  # bytes of the pack
        count, number, flags, table = _read_head(memory)
        self.infos: list[Info] = []  # header of each frame
        self.frames: list[Array] = []
        at = _TABLE + len(table)
        for _ in range(number):
            info = inspect(memory[at:])
            if info.nbytes > len(memory) - at:
                raise FrameError("the pack is truncated: it ends inside a frame", Status.TRUNCATED)
            self.infos.append(info)
            self.frames.append(memory[at : at + info.nbytes])
            at += info.nbytes
        if at != len(memory):
            raise FrameError(f"{len(memory) - at} bytes follow the last frame of the pack", Status.TRAILING)
        self.tensors = _read_table(table, count, number, bool(flags & _NAMED))
        self.named = bool(flags & _NAMED)
        self.members: list[list[int]] = [[] for _ in range(number)]
        for i, t in enumerate(self.tensors):
            self.members[t.frame].append(i)
        for info, members in zip(self.infos, self.members, strict=True):
            self._check_sizes(info, [self.tensors[i] for i in members])

    @property
    def keys(self) -> list[Any]:
        """Names of the tensors; their indices if they have no names."""
        return [t.name for t in self.tensors] if self.named else list(range(len(self.tensors)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.tensor_nbytes for info in self.infos)

    def _check_sizes(self, info: Info, members: list[PackedTensor]) -> None:
        """Raise FrameError unless the tensors of a frame have exactly its values."""
        if len(members) == 1:
            right = members[0].shape == info.shape
        else:
            right = len(info.shape) == 1 and sum(t.n for t in members) == info.n and all(t.n for t in members)
        if not right:
            raise FrameError(
                f"a frame of the pack has the shape {info.shape}, but the table names {[t.shape for t in members][:8]}",
                Status.BAD_HEADER,
            )


def _read_head(memory: Array) -> tuple[int, int, int, bytes]:
    """Return the numbers of tensors and frames, the flags and the table of a pack, once its digest is checked."""
    if len(memory) < _TABLE:
        raise FrameError(f"the pack is truncated: {len(memory)} bytes, {_TABLE} are needed", Status.TRUNCATED)
    head = memory[: _HEAD.size].tobytes()
    magic, version, flags, zero, count, number, nbytes, zeros = _HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameError("the bytes are not a pack", Status.BAD_MAGIC)
    if version != _VERSION:
        raise UnsupportedError(f"the pack has version {version}, but this library reads {_VERSION}", Status.UNSUPPORTED)
    if len(memory) - _TABLE < nbytes:
        raise FrameError("the pack is truncated: it ends inside its table", Status.TRUNCATED)
    table = memory[_TABLE : _TABLE + nbytes].tobytes()
    if _DIGEST.unpack(memory[_HEAD.size : _TABLE].tobytes())[0] != digest(head + table):
        raise ChecksumError("the table of the pack does not have the digest that its header declares", Status.CHECKSUM)
    if zero or zeros or flags > _NAMED:
        raise FrameError("a reserved field of the pack's header is not 0", Status.BAD_HEADER)
    return count, number, flags, table


def _read_table(table: bytes, count: int, number: int, named: bool) -> list[PackedTensor]:
    """Return the tensors of a table; raise FrameError if it violates the format."""
    found, at, ends = list[PackedTensor](), 0, [0] * number
    try:
        for _ in range(count):
            name = None
            if named:
                size, at = _number(table, at)
                if size > len(table) - at:
                    raise IndexError
                name, at = table[at : at + size].decode(), at + size
            frame, at = _number(table, at)
            rank, at = _number(table, at)
            if rank > lib.CODEC_MAX_RANK:
                raise ValueError
            shape = list[int]()
            for _ in range(rank):
                size, at = _number(table, at)
                shape.append(size)
            t = PackedTensor(name, tuple(shape), frame, ends[frame])
            ends[frame] += t.n
            found.append(t)
    except (IndexError, ValueError):
        raise FrameError(f"entry {len(found)} of the pack's table is invalid", Status.BAD_HEADER) from None
    if at != len(table) or len({t.frame for t in found}) != number:
        raise FrameError("the pack's table has other bytes or frames than its header declares", Status.BAD_HEADER)
    if named and len({t.name for t in found}) != count:
        raise FrameError("two tensors of the pack have the same name", Status.BAD_HEADER)
    return found


def _number(table: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset of the table, and the offset of the byte after it; IndexError at the end."""
    value = shift = 0
    while (byte := table[at]) > 127:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if shift > 56:
            raise ValueError
    return value | byte << shift, at + 1


def decode_pack(
    pack: Pack,
    memory: TensorView,
    decode: Callable[..., list[Any]],
    specs: Sequence[Any],
    bases: Sequence[Any],
    outs: Sequence[Any],
    how: Mapping[str, Any],
) -> list[Any]:
    """Return the tensors of a pack; each is the item of `outs`, or a new tensor of the type of `like`.

    Parameters
    ----------
    pack : Pack
        Pack to decode.
    memory : TensorView
        All bytes of the pack.
    decode : callable
        :func:`codec.decode_many`, which this module must not import.
    specs, bases, outs : sequence
        For each tensor: bound spec, base and destination, or None.
    how : mapping
        Further arguments of `decode`, with ``like``.

    Raises
    ------
    FrameError, StateError, ArgumentError, SpecError, EngineError
        As in :func:`codec.decode_many`. All of `outs` are unchanged then.
    """
    if (device := device_like(how["like"])) != "cpu":
        raise EngineError(f"like= is on {device}, but a pack is decoded in host memory: move its tensors afterwards")
    results: list[Any] = [None] * len(pack.tensors)
    targets, copies, written = list[Any](), list[tuple[Any, Any, int]](), list[tuple[int, TensorView]]()
    for info, members in zip(pack.infos, pack.members, strict=True):
        if len(members) == 1:
            targets.append(outs[members[0]])
        else:
            targets.append(np.empty(info.n, UNSIGNED[info.dtype]))
        start = ffi.cast("char *", view_output(targets[-1]).data) if len(members) > 1 else None
        for i in members:
            t = pack.tensors[i]
            try:
                if start is not None:
                    results[i], v = _target(info.dtype, t.shape, outs[i], how["like"])
                    copies.append((v.data, start + t.offset * ITEMSIZE[info.dtype], v.nbytes))
                elif outs[i] is not None:
                    v = view_output(outs[i], info.dtype)
                else:
                    continue
            except CodecError as e:
                e.of(pack.keys[i])
                raise
            if outs[i] is not None:
                written.append((i, v))
    check_all_apart("out=", written, [(-1, memory)])
    firsts = [members[0] for members in pack.members]
    try:
        decoded = decode(pack.frames, [specs[i] for i in firsts], base=[bases[i] for i in firsts], out=targets, **how)
    except CodecError as e:
        if isinstance(e.item, int):
            e.args = (e.args[0].removeprefix(f"{e.item!r}: "), *e.args[1:])
            e.of(pack.keys[firsts[e.item]])
        raise
    for destination, source, nbytes in copies:
        ffi.memmove(destination, source, nbytes)
    for members, x in zip(pack.members, decoded, strict=True):
        if len(members) == 1:
            results[members[0]] = x
    return results


def _target(dtype: str, shape: Shape, out: Any, like: Any) -> tuple[Any, TensorView]:
    """Return a tensor to write, and its view: `out`, which must fit, or a new tensor of the type of `like`."""
    if out is None:
        return empty(dtype, shape, like)
    v = view_output(out, dtype)
    if v[:2] != (dtype, shape) or v.device != "cpu":
        raise ArgumentError(
            f"out= must be {dtype} of shape {shape} in host memory for this tensor, got {v.dtype} of shape {v.shape} "
            f"on {v.device}"
        )
    return out, v
