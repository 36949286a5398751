"""Dtypes and shapes of tensors, and the pieces of their bytes that are encoded separately."""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE

PIECE_NBYTES = 1 << 25  # size of a piece in bytes; the last piece of a tensor may be smaller

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Span = tuple[int, int]  # begin and end in bytes


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.nbytes // PIECE_NBYTES)

    @property
    def spans(self) -> list[Span]:
        """Begin and end of each piece, as byte offsets in the tensor. Each piece is encoded as a separate frame."""
        n = self.nbytes
        return [(begin, min(begin + PIECE_NBYTES, n)) for begin in range(0, n, PIECE_NBYTES)]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class WeightsSize(NamedTuple):
    """Number of tensors of weights, and bytes of their values."""

    tensors: int
    nbytes: int

    @classmethod
    def of(cls, kinds: Collection[TensorKind]) -> "WeightsSize":
        """Return the size of weights whose tensors are of these kinds."""
        return cls(len(kinds), sum(kind.nbytes for kind in kinds))
