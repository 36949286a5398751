# pyright: basic
"""Compilation of kernels by Numba, with a cache on disk that all processes share."""

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.types import ExternalFunction

# Numba invalidates a cached kernel only if the kernel's own file changes. But kernels also contain functions of other
# files, and NUMBA_BOUNDSCHECK changes their code. So this cache key covers all files, and that variable.
_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_KEY = hashlib.sha256(_SOURCES).hexdigest(), os.environ.get("NUMBA_BOUNDSCHECK", "0")


class _Cache(FunctionCache):
    """Cache on disk whose key includes all files of this engine and NUMBA_BOUNDSCHECK."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), _KEY


class _InlinedLibrary(JITCodeLibrary):
    """Code of a function that only kernels call. It is optimized and compiled only as a part of each kernel."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        pass


class _InlinedCompiler(Compiler):
    """Compiler that compiles a function into an :class:`_InlinedLibrary`."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, _InlinedLibrary(targetctx.codegen(), "part"), *rest)


def _compiled(function: Any, **options: Any) -> Any:
    # _nrt=False omits Numba's runtime: kernels neither allocate arrays nor count references to them
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
    return numba.njit(**options)(function)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("only kernels can call this function; call its .py_func from Python")


def jit(function: Any) -> Any:
    """Compile a function that only kernels call.

    Python code cannot call the result. Without a wrapper for Python, compilation takes less than half the time.
    """
    part = _compiled(function, no_cpython_wrapper=True, pipeline_class=_InlinedCompiler)
    part._compile_for_args, part._insert = _refuse, lambda *_, **__: None
    return part


def kernel(function: Any) -> Any:
    """Compile a function on its first call, and cache the code on disk; the kernel runs without the GIL."""
    dispatcher = _compiled(function)
    if _cache_enabled:
        dispatcher._cache = _Cache(function)
    return dispatcher


_cache_enabled = True


@contextmanager
def without_cache() -> Generator[None]:
    """Context in which new kernels are neither read from the cache on disk nor written to it."""
    global _cache_enabled
    _cache_enabled = False
    try:
        yield
    finally:
        _cache_enabled = True


_fegetenv: Any = ExternalFunction("fegetenv", numba.int32(numba.intp))
_fesetenv: Any = ExternalFunction("fesetenv", numba.int32(numba.intp))


@jit
def enter_floats(saved: Any) -> None:
    """Set this thread to round to nearest and to keep subnormals, until :func:`leave_floats`.

    The previous floating-point environment is stored in ``saved``, a buffer of 64 bytes.
    """
    _fegetenv(saved.ctypes.data)
    _fesetenv(-1)  # the constant FE_DFL_ENV: the default floating-point environment


@jit
def leave_floats(saved: Any) -> None:
    """Restore the thread's floating-point environment from ``saved``."""
    _fesetenv(saved.ctypes.data)
