"""Compression of tensors on the wire.

>>> import codec, numpy as np
>>> x = np.linspace(0, 1, 100_000, dtype=np.float32)
>>> frame = codec.encode(x)
>>> bool((codec.decode(frame) == x).all())
True
"""

from codec import metrics
from codec.codebook import Codebook
from codec.core import isas, use_isa
from codec.decoding import accumulate, decode, reduce
from codec.encoding import bound, encode
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
from codec.frame import Info, engines, inspect, verify
from codec.specs import Float4, Float8, Lossless, Quantize, Sign, Spec, Ternary, Truncate

__version__ = "0.1.0"

__all__ = [
    "ChecksumError",
    "Codebook",
    "CodecError",
    "EngineError",
    "Float4",
    "Float8",
    "FrameError",
    "Info",
    "LimitError",
    "Lossless",
    "PeerError",
    "Quantize",
    "Sign",
    "Spec",
    "SpecError",
    "StateError",
    "Ternary",
    "Truncate",
    "UnsupportedError",
    "accumulate",
    "bound",
    "decode",
    "encode",
    "engines",
    "inspect",
    "isas",
    "metrics",
    "reduce",
    "use_isa",
    "verify",
]
