"""Exact sizes of frames whose codec has a fixed rate, computed from shapes alone."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from codec import _call
from codec._c.library import DTYPES, check, ffi, lib, new_bytes
from codec._c.spec_structs import spec_struct
from codec.encoding import bound, checked_shape
from codec.errors import SpecError
from codec.presets import resolve
from codec.specs import Float4, Float8, Lossless, Quantize, Sign, Spec, SpecLike, Ternary, Truncate
from codec.tensors.view import dtype_name
from codec.tensors.wrapper import view

_ALIGN = 8  # bytes: alignment of sections and regions (docs/format.md, section 8)
_BLOCK, _TRITS_BLOCK = 16_384, 81_920  # values of a block, if rows fit; the latter if 5 values are packed in a byte
_LARGEST = 8 * ((1 << 32) - 1)  # bytes of a frame


def frame_nbytes(shape: int | Iterable[int], dtype: Any, spec: SpecLike, *, segments: Any = None) -> int:
    """Return the exact size of a tensor's frame, for codecs of fixed rate.

    All ranks know the size of each other's frames then, so that collectives need no exchange of sizes.

    Parameters
    ----------
    shape : int or iterable of int
        Shape of the tensor.
    dtype : str, type or dtype
        Dtype of the tensor, as in :func:`bound`.
    spec : Spec or name of a preset
        :class:`Sign`, :class:`Quantize`, :class:`Float4`, :class:`Float8` without ``entropy``, or :class:`Ternary` with
        the packing "2bit" or "base3".
    segments : mapping, torch.nn.Module, or iterable of (int, tuple of int), optional
        Parameters inside a flat bucket, as in :func:`view`.

    Returns
    -------
    int
        Size in bytes of the frame that :func:`encode` makes of each such tensor.

    Raises
    ------
    SpecError
        The size of a frame of this spec depends on the values: use :func:`bound`.
    ArgumentError
        The tensor cannot be encoded with this spec, or `segments` do not lie inside it.
    LimitError
        The frame would be larger than 32 GiB.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    >>> codec.frame_nbytes((64, 1000), "float32", codec.Quantize(4))
    36096
    >>> len(codec.encode(x, codec.Quantize(4)))
    36096
    """
    plain = resolve(spec)[0]
    if not has_fixed_rate(plain):
        raise SpecError(f"the size of a frame by {plain} depends on the values: use bound(), its upper bound")
    sizes = checked_shape(shape)
    if bound(sizes, dtype, plain) > _LARGEST:
        check(lib.CODEC_LIMIT)
    records = view(None, segments=segments).segments
    outside, parts = _layout(sizes, dtype_name(dtype), plain, records)
    return outside + _side_nbytes(plain, parts, bool(records)) + sum(_regions_nbytes(plain, part) for part in parts)


def has_fixed_rate(spec: Spec) -> bool:
    """Return True if the size of a frame depends on the shape of the tensor alone."""
    match spec:
        case Sign() | Quantize() | Float4():
            return True
        case Float8(entropy=entropy):
            return not entropy
        case Ternary(packing=packing):
            return packing != "entropy"
        case Lossless() | Truncate():
            return False
        case _:
            raise SpecError(f"the size of a frame by {spec} is not known")


class _Part(NamedTuple):
    """Values of a frame whose blocks and groups do not extend into other values."""

    n: int
    group: int  # values that share a scale; 0: all


def _layout(shape: tuple[int, ...], dtype: str, spec: Spec, segments: bytes | None) -> tuple[int, list[_Part]]:
    """Return the bytes of header and directory of a frame, and its parts."""
    struct, like = spec_struct(spec), _call.new_tensor(DTYPES[dtype], shape)
    call = _call.take()
    if segments:
        call.set_segments(segments)
    size, seen = ffi.new("size_t[2]"), ffi.new("codec_view *")
    check(lib.codec_job_nbytes(struct, like, size, size + 1))
    job = new_bytes(size[0])
    check(lib.codec_encode_plan(struct, like, call.context, job, size[0], ffi.NULL))
    _call.give(call)
    seen.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(job, seen))
    parts = ffi.cast("codec_row_part *", job + seen.row_parts.at)
    used = seen.row_parts.count if seen.nblocks else 0
    return seen.regions_offset, [_Part(parts[i].count, parts[i].group_size) for i in range(used)]


def _side_nbytes(spec: Spec, parts: Sequence[_Part], segmented: bool) -> int:
    """Return the bytes of the side section: a record of each part if there are segments, and scales of parts."""
    if not parts:
        return 0
    scaled = not parts[0].group or (isinstance(spec, Float4) and spec.format == "nvfp4")
    return _aligned((4 + 16 * len(parts) if segmented else 0) + (8 * len(parts) if scaled else 0))


def _regions_nbytes(spec: Spec, part: _Part) -> int:
    """Return the bytes of the regions of a part: blocks of whole groups, each with its scales and codes."""
    bits = _bits_of(spec)
    scale = 1 if isinstance(spec, Float4) else 8 if isinstance(spec, Sign) and spec.scale == "two_mean" else 4
    return sum(
        times * _aligned(scale * (-(-n // part.group) if part.group else 0) + _codes_nbytes(bits, n))
        for times, n in _blocks(part, bits)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _blocks(part: _Part, bits: int) -> Iterator[tuple[int, int]]:
    """Yield how many blocks of a part have the same number of values, and that number."""
    most = _BLOCK if bits else _TRITS_BLOCK
    if part.group:
        most = _BLOCK // part.group * part.group or part.group
    yield part.n // most, most
    yield 1, part.n % most


def _codes_nbytes(bits: int, n: int) -> int:
    return -(-n * bits // 8) if bits else -(-n // 5)


def _bits_of(spec: Spec) -> int:
    """Return the bits of a code; 0 if five codes are packed in a byte."""
    match spec:
        case Ternary(packing=packing):
            return 2 if packing == "2bit" else 0
        case Quantize(bits=bits):
            return bits
        case Float8():
            return 8
        case Float4():
            return 4
        case _:
            return 1
