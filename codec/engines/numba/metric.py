"""Exponents of A, from which Truncate computes levels (encoder.md, section 8.1), by a formula or a user's function."""

from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np

from codec._c.library import ffi
from codec.engines.numba.floats import to_floats
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.memory import NOTHING, Array, memory_of
from codec.engines.numba.words import ABS, F32, INF, U8, U32, bits_of
from codec.optimizers.custom import Custom, custom_at

TILE = 512


@jit
def exponent(a: Any) -> Any:
    """Return the biased exponent of a float32; 0 for NaN."""
    u = U32(bits_of(a) & ABS)
    return U8(0) if u > INF else U8(u >> U32(23))


@kernel
def _by_formula(
    terms: Any, theta: Any, v: Any, m: Any, dtypes: Any, first: Any, tiles: Any, saved: Any, ea: Any
) -> None:
    """Fill ``ea`` with the exponents of A, with each operation rounded to float32.

    A = theta ((sqrt(v_term v) + eps) theta_v_term + theta_term) + m_term m.
    """
    enter_floats(saved)
    theta_term, theta_v_term, v_term, eps, m_term = terms[0], terms[1], terms[2], terms[3], terms[4]
    for at in range(0, len(ea), TILE):
        n = min(TILE, len(ea) - at)
        a, b, c = tiles[0][:n], tiles[1][:n], tiles[2][:n]
        to_floats(dtypes[0], theta, first + at, a)
        if len(v):
            to_floats(dtypes[1], v, first + at, b)
            for i in range(n):
                root = F32(np.sqrt(F32(v_term * b[i])) + eps)
                a[i] = F32(a[i] * F32(F32(root * theta_v_term) + theta_term))
        else:
            for i in range(n):
                a[i] = F32(a[i] * theta_term)
        if len(m):
            to_floats(dtypes[2], m, first + at, c)
            for i in range(n):
                a[i] = F32(a[i] + F32(m_term * c[i]))
        here = ea[at : at + n]
        for i in range(n):
            here[i] = exponent(a[i])
    leave_floats(saved)


@kernel
def _restore(saved: Any) -> None:
    """Restore the thread's floating-point environment after a user's function has raised."""
    leave_floats(saved)


_kernels: "WeakKeyDictionary[Custom, Any]" = WeakKeyDictionary()


def _kernel_of(custom: Custom) -> Any:
    """Return a kernel that fills ``ea`` by calling the user's function; it is compiled once per function."""
    kernel = _kernels.get(custom)
    if kernel is None:
        function = custom.compiled

        def one(x: Any, first: Any, saved: Any, ea: Any) -> None:
            enter_floats(saved)
            for i in range(len(ea)):
                ea[i] = exponent(F32(function(x[0][first + i])))
            leave_floats(saved)

        def two(x: Any, first: Any, saved: Any, ea: Any) -> None:
            enter_floats(saved)
            for i in range(len(ea)):
                ea[i] = exponent(F32(function(x[0][first + i], x[1][first + i])))
            leave_floats(saved)

        def three(x: Any, first: Any, saved: Any, ea: Any) -> None:
            enter_floats(saved)
            for i in range(len(ea)):
                ea[i] = exponent(F32(function(x[0][first + i], x[1][first + i], x[2][first + i])))
            leave_floats(saved)

        _kernels[custom] = kernel = numba.njit(nogil=True)((one, two, three)[len(custom.names) - 1])
    return kernel


def fill_exponents(context: Any, n: int, first: int, ea: Array) -> None:
    """Fill ``ea`` with exponents of A from value ``first`` on. The context's list of codec_metric defines A.

    ``n`` is the number of values of the tensor.
    """
    t, at, saved = context.metric, 0, np.empty(64, np.uint8)
    while at < len(ea):
        if t.until and t.until <= first + at:
            t = t.next
            continue
        end = min(len(ea), t.until - first) if t.until else len(ea)
        if t.user:
            custom = custom_at(int(ffi.cast("uintptr_t", t.user)))
            pointers = ffi.cast("float **", t.data)
            arrays = tuple(memory_of(pointers[i], 4 * n).view(np.float32) for i in range(len(custom.names)))
            try:
                _kernel_of(custom)(arrays, first + at, saved, ea[at:end])
            except BaseException:
                _restore(saved)
                raise
        else:
            terms = np.array([t.theta_term, t.theta_v_term, t.v_term, t.eps, t.m_term], np.float32)
            state = [t.theta, t.v, t.m]
            arrays = tuple(memory_of(s.data, s.nbytes) if s else NOTHING for s in state)
            dtypes = np.array([s.dtype if s else 0 for s in state], np.int64)
            _by_formula(terms, *arrays, dtypes, first + at, np.empty((3, TILE), np.float32), saved, ea[at:end])
        at = end
