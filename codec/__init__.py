"""Compression of tensors on the wire.

>>> import codec, numpy as np
>>> x = np.linspace(0, 1, 100_000, dtype=np.float32)
>>> frame = codec.encode(x)
>>> bool((codec.decode(frame) == x).all())
True
"""

from codec.api import Info, bound, decode, encode, engines, inspect, verify
from codec.codebook import Codebook
from codec.core import isas, use_isa
from codec.errors import (
    ChecksumError,
    CodecError,
    EngineError,
    FrameError,
    LimitError,
    PeerError,
    SpecError,
    StateError,
    UnsupportedError,
)
from codec.specs import Lossless

__version__ = "0.1.0"

__all__ = [
    "ChecksumError",
    "Codebook",
    "CodecError",
    "EngineError",
    "FrameError",
    "Info",
    "LimitError",
    "Lossless",
    "PeerError",
    "SpecError",
    "StateError",
    "UnsupportedError",
    "bound",
    "decode",
    "encode",
    "engines",
    "inspect",
    "isas",
    "use_isa",
    "verify",
]
