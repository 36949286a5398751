"""Integer sums of the codes of Ternary frames, by the native engine."""

from collections.abc import Callable
from typing import Any

import numpy as np

from codec import _call
from codec._c import pool
from codec._c.library import DTYPE_NAMES, ITEMSIZE, UNSIGNED, lib
from codec._c.spec_structs import spec_of
from codec._c.traits import sums_codes
from codec.engines.native.decoding import decode, read_whole
from codec.engines.native.reducing import ReduceInto, reduce_into
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, CodecError
from codec.inspection import check_frame
from codec.tensors.view import TensorView, empty

# By dtype of the sums: maximum number of frames for which no sum of codes overflows.
_MOST = {"int8": 127, "int16": 32_767, "int32": 2_147_483_647}
_ADVICE = ": encode with Ternary(scale=...), equal in all frames"


def sum_codes(r: DecodeRequest, make: ReduceInto | None = None) -> tuple[Any, float]:
    """Return the sums of the codes of Ternary frames, in a new tensor of the type of `like`, and their scale.

    `make` is another engine's function that adds the codes; None: use the C library. The attribute `item` of an error
    is the index of the frame.
    """
    read = [(_at(i, read_whole, frame), frame) for i, frame in enumerate(r.frames)]
    first = read[0][0]
    dtype = next(name for name, most in _MOST.items() if len(read) <= most)
    call = _call.take()
    try:
        for i, (info, _) in enumerate(read):
            _at(i, _check_codes_add_up, info, first)
        r.check_limit(ITEMSIZE[dtype] * first.n)
        result, v = empty(dtype, _shape(first), r.like)
        call.keep = r, v
        call.fill_tensor(v)
        threads = pool.choose_threads(r.threads, 4 * first.n * len(read))
        (make or reduce_into)(call, read, lib.CODEC_REDUCE_CODES, threads)
    except CodecError:
        for i, (info, frame) in enumerate(read):
            _at(i, _check_values, r, info, frame)
        raise
    _call.give(call)
    return result, max(float(first.scale), 0.0)


def _at(i: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args). If it raises a CodecError, add `i`, the index of the frame, to the error."""
    try:
        return function(*args)
    except CodecError as e:
        e.of(i)
        raise


def _shape(info: Any) -> tuple[int, ...]:
    return tuple(info.shape[0 : info.rank])


def _check_codes_add_up(info: Any, first: Any) -> None:
    """Raise ArgumentError if the codes of a frame cannot be added to those of the first frame."""
    if not sums_codes(info.spec):
        raise ArgumentError(f"a frame of {spec_of(info.spec)} has no codes to add: encode with Ternary(scale=...)")
    if info.n and info.scale < 0:
        raise ArgumentError(
            f"the segments of the frame have different scales, so that its codes cannot be added{_ADVICE}"
        )
    for name, own, other, advice in (
        ("shape", _shape(info), _shape(first), ""),
        ("dtype", DTYPE_NAMES[info.dtype], DTYPE_NAMES[first.dtype], ""),
        ("scale", info.scale, first.scale, _ADVICE),
    ):
        if own != other:
            raise ArgumentError(f"the {name} of the frame is {own}, but the first frame has {other}{advice}")


def _check_values(r: DecodeRequest, info: Any, frame: TensorView) -> None:
    """Raise an error if a frame is damaged. Codes are not checked if the frame's tensor exceeds the size limit."""
    check_frame(frame)
    if sums_codes(info.spec) and r.allows(info.tensor_nbytes):
        # nothing is written to this array, so the operating system does not allocate its pages
        bits = np.empty(_shape(info), UNSIGNED[DTYPE_NAMES[info.dtype]])
        decode(r._replace(frames=(frame,), out=bits, check_only=True))
