"""Engine whose loops are Python functions compiled by Numba, for experiments and as a reference for the C library.

The C library opens and closes jobs and makes all decisions that concern a whole tensor. This engine encodes and decodes
the blocks of values.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from codec.engines import native
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import EngineError

__all__ = ["accumulate", "decode", "decode_many", "encode", "encode_many", "reduce", "sum_codes", "why_not"]


def why_not() -> str | None:
    """Return why this engine is unavailable, or None if it can be used."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed: pip install 'tensor-codec[numba]'"
    return None if sys.byteorder == "little" else "the numba engine needs a little-endian CPU"


def _calls() -> Any:
    """Import and return ``calls`` on first use: importing Numba takes half a second."""
    try:
        return importlib.import_module("codec.engines.numba.calls")
    except ImportError as e:  # for example because Numba does not support the installed numpy
        raise EngineError(f"the numba engine cannot be used on this machine: {e}") from e


def encode(r: EncodeRequest) -> bytes | memoryview:
    """Encode the tensor of a request, and return the frame."""
    return native.encode(r, _calls().encode_filled)


def encode_many(requests: Sequence[EncodeRequest]) -> list[bytes]:
    """Encode the tensors of requests, and return the frames."""
    return native.encode_many(requests, _calls().encode_filled)


def decode(r: DecodeRequest) -> Any:
    """Decode the frame of a request, and return the tensor."""
    return native.decode(r, _calls().decode_prepared)


def decode_many(requests: Sequence[DecodeRequest]) -> list[Any]:
    """Decode the frames of requests, and return the tensors."""
    return native.decode_many(requests, _calls().decode_prepared)


def accumulate(r: DecodeRequest, weight: float) -> None:
    """Add ``weight`` times the values of a frame to a tensor."""
    native.accumulate(r, weight, _calls().decode_prepared)


def reduce(r: DecodeRequest, op: str) -> Any:
    """Return the sum, mean or maximum of the tensors in the request's frames."""
    return native.reduce(r, op, _calls().reduce_into)


def sum_codes(r: DecodeRequest) -> tuple[Any, float]:
    """Return the integer sums of the codes of Ternary frames, and their scale."""
    return native.sum_codes(r, _calls().sum_codes_into)
