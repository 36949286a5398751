"""What can be asked of :func:`codec.encode`: one frozen dataclass a codec."""

from dataclasses import dataclass
from typing import Literal

from codec.errors import SpecError

MODELS = ("auto", "flat", "separable")


@dataclass(frozen=True, slots=True)
class Spec:
    """Base of all specs."""


@dataclass(frozen=True, slots=True)
class Lossless(Spec):
    """Every bit returns: NaN payloads, signed zeros and subnormals included.

    Exponents go through a length-capped Huffman coder, after offsets that a sample of the tensor suggests have been
    taken away; sign and mantissa stay as they are. Integers and float8 are coded byte by byte.

    Parameters
    ----------
    cap : int
        Longest code in bits, 2 to 8.
    model : {"auto", "flat", "separable"}
        Offsets of exponents by row and column: where a sample says that they pay, nowhere, or wherever the shape
        allows.

    Raises
    ------
    SpecError
        For any other value.

    References
    ----------
    .. [1] L. Larmore, D. Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 37(3), 1990.
    .. [2] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024.
    """

    cap: int = 8
    model: Literal["auto", "flat", "separable"] = "auto"

    def __post_init__(self) -> None:
        if type(self.cap) is not int or not 2 <= self.cap <= 8:
            raise SpecError(f"cap must be an int from 2 to 8, got {self.cap!r}")
        if self.model not in MODELS:
            raise SpecError(f"model must be one of {MODELS}, got {self.model!r}")
