"""What must be known of values before they are encoded or decoded: one launch of ``frame/preprocess.cu``."""

import struct
from typing import Any

import numpy as np

from codec._c.library import DTYPES, ffi
from codec.engines.cuda.workspace import Work
from codec.optimizers.arguments import LevelSource
from codec.optimizers.custom import Custom
from codec.optimizers.formulas import Optimizer, floats_of
from codec.tensors.view import TensorView

_BEFORE, _GROUP = struct.Struct("<8Q2IQ"), struct.Struct("<6Q3I5f")  # codec_preprocessing, codec_group
BEFORE_NBYTES = _BEFORE.size
State = dict[str, tuple[int, TensorView]]


class Before:
    """A codec_preprocessing, filled in by who wants what.

    Attributes
    ----------
    sums, rounded : int
        Addresses of values with what is owed added, as float32 and in their dtype.
    exponents : int
        Address of the exponents of a metric's A (docs/format.md, section 9); 0: of none.
    levels : int
        Address of levels that were given.
    """

    def __init__(self, work: Work, n: int) -> None:
        self._work, self._n = work, n
        self._values = self._owed = self._dtype = self._groups = 0
        self.sums = self.rounded = self.exponents = self.levels = 0

    def add(self, x: TensorView, values: int, owed: int) -> None:
        """Sums of a tensor's values and a residual."""
        self._values, self._owed, self._dtype = values, owed, DTYPES[x.dtype]
        self.sums, self.rounded = self._work.new(4 * self._n), self._work.new(x.nbytes)

    def ask(self, source: LevelSource) -> None:
        """Exponents of A of an optimizer, or levels."""
        if source.levels is not None:
            self.levels = self._work.read(source.levels)
            return
        state = {name: (self._work.read(v), v) for name, v in source.state.items()}
        ends = [*(offset for offset, _ in source.groups[1:]), self._n]
        groups = b""
        for (first, optimizer), end in zip(source.groups, ends, strict=True):
            if first < self._n:
                groups += self._group(first, min(end, self._n), optimizer, state)
        self._groups, self.exponents = self._work.put(groups or bytes(_GROUP.size))[0], self._work.new(self._n)

    def _group(self, first: int, end: int, optimizer: Optimizer | Custom, state: State) -> bytes:
        if isinstance(optimizer, Custom):  # a function that was compiled for the host
            a = _values_of(optimizer, {name: self._work.fetch(v) for name, (_, v) in state.items()}, first, end)
            [at] = self._work.put(a.data.cast("B"))
            return _GROUP.pack(first, end, at, *[0] * 11)
        t = optimizer.final({name: v for name, (_, v) in state.items()})
        looked_at = {"theta": True, "v": bool(t.theta_v), "m": bool(t.m)}
        arrays = [state[name] if name in state and looked_at[name] else (0, None) for name in looked_at]
        addresses = (address for address, _ in arrays)
        dtypes = (DTYPES[v.dtype] if v else 0 for _, v in arrays)
        return _GROUP.pack(first, end, 0, *addresses, *dtypes, t.theta, t.theta_v, t.v, t.eps, t.m)

    def struct(self, written: int = 0) -> bytes:
        """Return the codec_preprocessing; empty if nothing is to be computed.

        Parameters
        ----------
        written : int, optional
            Address of a codec_written, whose fault reports invalid levels.
        """
        if not (self._owed or self.exponents or self.levels):
            return b""
        addresses = self._values, self._owed, self.sums, self.rounded, self._groups, self.exponents, self.levels
        return _BEFORE.pack(self._n, *addresses, self._dtype, 0, written)


def _values_of(optimizer: Custom, state: dict[str, TensorView], first: int, end: int) -> np.ndarray[Any, Any]:
    """A of values [first, end)."""
    arrays = [floats_of(state[name]) for name in optimizer.names]
    pointers = ffi.new("float *[]", [ffi.cast("float *", x.ctypes.data) for x in arrays])
    a = np.empty(end - first, np.float32)
    call = ffi.cast("void (*)(void *, uint64_t, uint64_t, float *)", optimizer.address)
    call(pointers, first, end - first, ffi.cast("float *", a.ctypes.data))
    return a
