"""The engine whose loops are Python, compiled by Numba: to be read, to be changed, and to check the first one by.

Jobs are opened and closed by the C library, which decides everything; blocks are done here.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from codec.engines import native
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import EngineError

__all__ = ["accumulate", "decode", "decode_many", "encode", "encode_many", "reduce", "why_not"]


def why_not() -> str | None:
    """Why it cannot be used here, or None."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed: pip install 'tensor-codec[numba]'"
    return None if sys.byteorder == "little" else "it is for little-endian CPUs"


def _calls() -> Any:
    """Imported when it is used: Numba takes half a second."""
    try:
        return importlib.import_module("codec.engines.numba.calls")
    except ImportError as e:  # which does not go with this numpy, say
        raise EngineError(f"the numba engine cannot be used here: {e}") from e


def encode(r: EncodeRequest) -> bytes | memoryview:
    """A frame."""
    return native.encode(r, _calls().encode_filled)


def encode_many(requests: Sequence[EncodeRequest]) -> list[bytes]:
    """Frames."""
    return native.encode_many(requests, _calls().encode_filled)


def decode(r: DecodeRequest) -> Any:
    """The tensor of a frame."""
    return native.decode(r, _calls().decode_prepared)


def decode_many(requests: Sequence[DecodeRequest]) -> list[Any]:
    """The tensors of frames."""
    return native.decode_many(requests, _calls().decode_prepared)


def accumulate(r: DecodeRequest, weight: float) -> None:
    """Add a frame's values to a tensor."""
    native.accumulate(r, weight, _calls().decode_prepared)


def reduce(r: DecodeRequest, op: str) -> Any:
    """The sum, mean or maximum of frames."""
    return native.reduce(r, op, _calls().reduce_into)
