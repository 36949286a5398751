"""Preprocessing before encoding or decoding, in one launch of ``frame/preprocess.cu``: adds residuals, finds levels."""

from typing import Any

import numpy as np

from codec._c.library import DTYPES, ffi
from codec.engines.cuda.structs import GROUP, PREPROCESSING
from codec.engines.cuda.workspace import CallMemory
from codec.optimizers.arguments import LevelSource
from codec.optimizers.base import Optimizer, floats_of
from codec.optimizers.custom import Custom
from codec.tensors.view import TensorView

State = dict[str, tuple[int, TensorView]]


class Preprocessing:
    """Builder of a codec_preprocessing, the struct of one launch; its methods add the computations that a frame needs.

    Attributes
    ----------
    sums, rounded : int
        Device addresses of the sums of values and residuals, as float32 and rounded to the tensor's dtype; 0 before
        :meth:`add`.
    exponents : int
        Device address of the exponents of the optimizer's A (docs/spec/format.md, section 9); 0: no optimizer.
    levels : int
        Device address of the levels given by the caller; 0: none.
    """

    def __init__(self, work: CallMemory, n: int) -> None:
        self._work, self._n = work, n
        self._values = self._residual = self._dtype = self._groups = 0
        self.sums = self.rounded = self.exponents = self.levels = 0

    def add(self, x: TensorView, values: int, residual: int) -> None:
        """Request the sums of a tensor's values and a residual; `values` and `residual` are device addresses."""
        self._values, self._residual, self._dtype = values, residual, DTYPES[x.dtype]
        self.sums, self.rounded = self._work.temporary(4 * self._n), self._work.temporary(x.nbytes)

    def ask(self, source: LevelSource) -> None:
        """Request the exponents of the optimizer's A; if the caller has given levels, copy them to the device."""
        if source.levels is not None:
            self.levels = self._work.read(source.levels)
            return
        state = {name: (self._work.read(v), v) for name, v in source.state.items()}
        ends = [*(offset for offset, _ in source.groups[1:]), self._n]
        groups = b""
        for (first, optimizer), end in zip(source.groups, ends, strict=True):
            if first < self._n:
                groups += self._group(first, min(end, self._n), optimizer, state)
        self._groups, self.exponents = self._work.put(groups or bytes(GROUP.size)), self._work.temporary(self._n)

    def _group(self, first: int, end: int, optimizer: Optimizer | Custom, state: State) -> bytes:
        """Return the codec_group of an optimizer for values [first, end)."""
        if isinstance(optimizer, Custom):  # the user's function is compiled for the host, so A is computed on the host
            a = _values_of(optimizer, {name: self._work.fetch(v) for name, (_, v) in state.items()}, first, end)
            at = self._work.put(a.data.cast("B"))
            return GROUP.pack(first, end, at, *[0] * 11)
        t = optimizer.final({name: v for name, (_, v) in state.items()})
        used = {"theta": True, "v": bool(t.theta_v), "m": bool(t.m)}
        arrays = [state[name] if name in state and used[name] else (0, None) for name in used]
        addresses = (address for address, _ in arrays)
        dtypes = (DTYPES[v.dtype] if v else 0 for _, v in arrays)
        return GROUP.pack(first, end, 0, *addresses, *dtypes, t.theta, t.theta_v, t.v, t.eps, t.m)

    def struct(self, written: int = 0) -> bytes:
        """Return the codec_preprocessing; empty bytes if nothing is to be computed.

        Parameters
        ----------
        written : int, optional
            Device address of a codec_written, in which the kernel reports invalid levels.
        """
        if not (self._residual or self.exponents or self.levels):
            return b""
        addresses = self._values, self._residual, self.sums, self.rounded, self._groups, self.exponents, self.levels
        return PREPROCESSING.pack(self._n, *addresses, self._dtype, 0, written)


def _values_of(optimizer: Custom, state: dict[str, TensorView], first: int, end: int) -> np.ndarray[Any, Any]:
    """Return A for values [first, end), computed on the host by the user's function."""
    arrays = [floats_of(state[name]) for name in optimizer.names]
    pointers = ffi.new("float *[]", [ffi.cast("float *", x.ctypes.data) for x in arrays])
    a = np.empty(end - first, np.float32)
    call = ffi.cast("void (*)(void *, uint64_t, uint64_t, float *)", optimizer.address)
    call(pointers, first, end - first, ffi.cast("float *", a.ctypes.data))
    return a
