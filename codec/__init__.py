"""Compression of tensors that training jobs send over a network.

Public are the names that ``codec``, :mod:`codec.kv`, :mod:`codec.optimizers`, :mod:`codec.torch`,
:mod:`codec.torch.ops`, :mod:`codec.torch.pipelining`, :mod:`codec.weight_sync` and the modules of
:mod:`codec.integrations` export. All other modules are internal, and may change in any version, as may names whose
documentation says "Provisional".

>>> import codec, numpy as np
>>> x = np.linspace(0, 1, 100_000, dtype=np.float32)
>>> frame = codec.encode(x)
>>> bool((codec.decode(frame) == x).all())
True
"""

import importlib
from typing import TYPE_CHECKING

from codec import optimizers as optimizers
from codec._options import CallOptions, options
from codec._warmup import warmup
from codec.advisor.advise import advise
from codec.batch import decode_many, encode_many
from codec.code_sums import sum_codes
from codec.codebook import Codebook
from codec.decoding import decode
from codec.delta import apply_delta_blocks, compose_deltas
from codec.encoding import bound, encode, encode_async
from codec.engines import engines
from codec.errors import (
    ArgumentError,
    ChecksumError,
    CodecError,
    EngineError,
    FrameError,
    LimitError,
    PeerError,
    SpecError,
    StateError,
    Status,
    UnsupportedError,
)
from codec.inspection import digest, inspect, verify
from codec.presets import preset
from codec.reducing import accumulate, reduce
from codec.specs import BoundSpec, Delta, Float4, Float8, Lossless, Quantize, Sign, Spec, Ternary, TopK, Truncate
from codec.stateful import ActivationDelta, CodebookRefresher, ErrorFeedback
from codec.tensors.segments import segments
from codec.tensors.wrapper import View, view

if TYPE_CHECKING:  # imported on first use, see __getattr__
    from codec import kv as kv
    from codec import torch as torch
    from codec import weight_sync as weight_sync
    from codec.weight_sync.receiver import WeightReceiver
    from codec.weight_sync.sender import WeightSender
    from codec.weight_sync.updates.update import Update

__version__ = "0.1.0"

__all__ = [
    "ActivationDelta",
    "ArgumentError",
    "BoundSpec",
    "CallOptions",
    "ChecksumError",
    "Codebook",
    "CodebookRefresher",
    "CodecError",
    "Delta",
    "EngineError",
    "ErrorFeedback",
    "Float4",
    "Float8",
    "FrameError",
    "LimitError",
    "Lossless",
    "PeerError",
    "Quantize",
    "Sign",
    "Spec",
    "SpecError",
    "StateError",
    "Status",
    "Ternary",
    "TopK",
    "Truncate",
    "UnsupportedError",
    "Update",
    "View",
    "WeightReceiver",
    "WeightSender",
    "accumulate",
    "advise",
    "apply_delta_blocks",
    "bound",
    "compose_deltas",
    "decode",
    "decode_many",
    "digest",
    "encode",
    "encode_async",
    "encode_many",
    "engines",
    "inspect",
    "options",
    "preset",
    "reduce",
    "segments",
    "sum_codes",
    "verify",
    "view",
    "warmup",
]


def __dir__() -> list[str]:
    """Return the public names of the package, including lazily imported ones."""
    return sorted(
        [
            *__all__,
            "kv",
            "optimizers",
            "torch",
            "weight_sync",
            "__all__",
            "__doc__",
            "__file__",
            "__name__",
            "__path__",
            "__version__",
        ]
    )


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any attribute
    _OF_WEIGHT_SYNC = {"Update": "updates.update", "WeightReceiver": "receiver", "WeightSender": "sender"}

    def __getattr__(name: str) -> object:
        """Import :mod:`codec.kv`, :mod:`codec.torch`, :mod:`codec.weight_sync` or one of its classes on first use."""
        if name in ("kv", "weight_sync"):
            return importlib.import_module(f"codec.{name}")
        if name in _OF_WEIGHT_SYNC:
            return getattr(importlib.import_module(f"codec.weight_sync.{_OF_WEIGHT_SYNC[name]}"), name)
        if name != "torch":
            raise AttributeError(f"module 'codec' has no attribute {name!r}")
        try:
            return importlib.import_module("codec.torch")
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            raise AttributeError("codec.torch needs PyTorch, which is not installed: pip install torch") from e
