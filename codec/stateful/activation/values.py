"""Convert the tensors and sample ids that callers pass to arrays and lists."""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, cast

from codec._c.library import ITEMSIZE
from codec.arguments import shown, whole
from codec.errors import ArgumentError
from codec.stateful.activation.entries import BITS
from codec.stateful.activation.message import DTYPE_CODES
from codec.tensors.floats import Bits
from codec.tensors.view import TensorView, mark_written, on_host, view, view_output
from codec.tensors.wrapper import View

_MAX_ID = (1 << 63) - 1


class Values(NamedTuple):
    """Values of a tensor as a flat array."""

    bits: Bits  # flat: float32, float16, or uint16 with the bits of bfloat16
    dtype: str
    shape: tuple[int, ...]


def values_of(name: str, x: Any) -> Values:
    """Return the values of a tensor in host memory.

    Raises
    ------
    ArgumentError, EngineError
        x is not a float32, bfloat16 or float16 tensor, or is on a device.
    """
    v = view(x.tensor, x.dtype) if type(x) is View else view(x)
    on_host(name, v)
    if v.dtype not in DTYPE_CODES:
        raise ArgumentError(f"{name} must be one of {', '.join(DTYPE_CODES)}, got {v.dtype}")
    return Values(bits_of_view(v), v.dtype, v.shape)


def output_values(out: Any, dtype: str) -> Values:
    """Return a writable view of ``out=``; raise ArgumentError if it cannot store values of `dtype`."""
    v = view_output(out, dtype)
    on_host("out=", v)
    if v.dtype != dtype:
        raise ArgumentError(f"out= must be {dtype} for this message, got {v.dtype}")
    return Values(bits_of_view(v), v.dtype, v.shape)


def bits_of_view(v: TensorView) -> Bits:
    """Return the values of a view as a flat array."""
    return v.array(BITS[v.dtype])


def write_message(message: bytes, out: Any) -> memoryview:
    """Copy a message to the beginning of ``out=``, an array of bytes, and return a read-only view of the copy."""
    v = on_host("out=", view_output(out))
    if v.dtype not in ("uint8", "int8"):
        raise ArgumentError(f"out= must be a buffer of bytes, uint8 or int8, got {v.dtype}")
    if len(message) > v.nbytes:
        raise ArgumentError(
            f"out= has {v.nbytes} bytes, but the message has {len(message)}: allocate as many as bound() returns"
        )
    written = v.array().data[: len(message)]
    written[:] = message
    mark_written(out)
    return written.toreadonly()


def as_rows(x: Values, count: int) -> Bits:
    """Return values as an array of shape (count, number of values per sample).

    Raises
    ------
    ArgumentError
        The first dimension is not `count`, or samples have no values.
    """
    if not x.shape or x.shape[0] != count:
        raise ArgumentError(f"the activation must have one row for each of the {count} samples, got shape {x.shape}")
    n = prod(x.shape[1:])
    if n == 0:
        raise ArgumentError(f"the samples of the activation must have at least one value, got shape {x.shape}")
    return x.bits.reshape(count, n)


def limit_of(message_nbytes: int) -> int:
    """Return the maximum size in bytes of a tensor that a message may declare without ``out=``."""
    return max(1 << 30, 256 * message_nbytes)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes."""
    return ITEMSIZE[dtype] * prod(shape)


def ids_of(samples: Iterable[Any]) -> list[int]:
    """Return sample ids as a list of ints.

    Raises
    ------
    ArgumentError
        `samples` is not an iterable of integers in the range of int64; or it is bytes, or a set, which has no order.
    """
    if isinstance(samples, bytes | bytearray | set | frozenset):
        raise ArgumentError(f"samples must be a sequence of sample ids in the order of rows, got {shown(samples)}")
    try:
        to_list: Any = getattr(samples, "tolist", None)  # arrays and tensors have this method
        items: Any = list(samples) if to_list is None else to_list()
    except TypeError:
        raise ArgumentError(f"samples must be a sequence of sample ids, got {shown(samples)}") from None
    if not isinstance(items, list):  # tolist() of an array of rank 0 returns a scalar
        raise ArgumentError(f"samples must be a sequence of sample ids, got {shown(samples)}")
    return [
        i if type(i) is int and 0 <= i <= _MAX_ID else whole("a sample id", i, -_MAX_ID - 1, _MAX_ID)
        for i in cast(list[Any], items)
    ]


def shown_samples(samples: Iterable[int]) -> str:
    """Return up to ten of the sample ids as text, for error messages."""
    ids = list(dict.fromkeys(samples))
    return ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10} others" if len(ids) > 10 else "")
