"""The engine of kernels on an NVIDIA GPU, written in CUDA C++ and compiled where they are used.

Tensors and frames are read and written where they lie, in the order of their stream. What lies in host memory is copied
there and back.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from codec.engines.request import DecodeRequest, EncodeRequest

__all__ = ["accumulate", "count", "decode", "decode_many", "encode", "encode_async", "encode_many", "reduce", "why_not"]


def why_not() -> str | None:
    """Why it cannot be used here, or None."""
    return importlib.import_module("codec.engines.cuda.devices").backend.why_not()


def _calls() -> Any:
    """Imported when it is used."""
    return importlib.import_module("codec.engines.cuda.engine")


def encode(r: EncodeRequest) -> Any:
    """A frame."""
    return _calls().encode(r)


def count(r: EncodeRequest) -> Any:
    """How often each symbol occurs in the sample of a tensor."""
    return _calls().count(r)


def encode_async(r: EncodeRequest) -> Any:
    """A frame in the request's `out`, in time."""
    return _calls().encode_async(r)


def encode_many(requests: Sequence[EncodeRequest]) -> list[Any]:
    """Frames."""
    return _calls().encode_many(requests)


def decode(r: DecodeRequest) -> Any:
    """The tensor of a frame."""
    return _calls().decode(r)


def decode_many(requests: Sequence[DecodeRequest]) -> list[Any]:
    """The tensors of frames."""
    return _calls().decode_many(requests)


def accumulate(r: DecodeRequest, weight: float) -> None:
    """Add a frame's values to a tensor."""
    _calls().accumulate(r, weight)


def reduce(r: DecodeRequest, op: str) -> Any:
    """The sum, mean or maximum of frames."""
    return _calls().reduce(r, op)
