"""Engine for NVIDIA GPUs, with kernels in CUDA C++ that are compiled for the GPU on first use.

Kernels read and write tensors and frames in device memory directly, in stream order. Tensors and frames in host memory
are copied to the device and back.
"""

from codec.engines.cuda import devices
from codec.engines.cuda.deferred import DeferredCalls, FrameSum
from codec.engines.cuda.engine import (
    accumulate,
    count,
    decode,
    decode_many,
    encode,
    encode_async,
    encode_many,
    reduce,
    sum_codes,
)

__all__ = [
    "DeferredCalls",
    "FrameSum",
    "accumulate",
    "count",
    "decode",
    "decode_many",
    "encode",
    "encode_async",
    "encode_many",
    "reduce",
    "sum_codes",
    "why_not",
]


def why_not() -> str | None:
    """Return why this engine is unavailable, or None if it can be used."""
    return devices.backend.why_not()
