# pyright: basic
"""How kernels are compiled: once, for all processes to come."""

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

# Numba looks at a kernel's own file to see whether what it has kept is still right: it would miss a changed word of
# another file, and that bounds are to be checked.
_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_KEY = hashlib.sha256(_SOURCES).hexdigest(), os.environ.get("NUMBA_BOUNDSCHECK", "0")


class _Cache(FunctionCache):
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), _KEY


class _Part(JITCodeLibrary):
    """Code that is linked into a kernel's, and optimized and made machine code there: not by itself before."""

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


class _PartCompiler(Compiler):
    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, _Part(targetctx.codegen(), "part"), *rest)


def _compiled(function: Any, **options: Any) -> Any:
    # without `_nrt` arrays are plain memory: not counted, and not made
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
    return numba.njit(**options)(function)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("only kernels can call this function; its .py_func is the one that Python can")


def jit(function: Any) -> Any:
    """What kernels call. Python cannot, which more than halves the time to compile."""
    part = _compiled(function, no_cpython_wrapper=True, pipeline_class=_PartCompiler)
    part._compile_for_args, part._insert = _refuse, lambda *_, **__: None
    return part


def kernel(function: Any) -> Any:
    """Compiled when it is first called, kept on disk, run without the interpreter's lock."""
    dispatcher = _compiled(function)
    if _keeping:
        dispatcher._cache = _Cache(function)
    return dispatcher


_keeping = True


@contextmanager
def without_cache() -> Generator[None]:
    """Kernels that are defined meanwhile are not kept on disk, nor looked for there."""
    global _keeping
    _keeping = False
    try:
        yield
    finally:
        _keeping = True


_save: Any = ExternalFunction("fegetenv", numba.int32(numba.intp))
_set: Any = ExternalFunction("fesetenv", numba.int32(numba.intp))


@jit
def enter_floats(saved: Any) -> None:
    """Round to nearest and keep subnormals, whatever the thread does otherwise, until :func:`leave_floats`."""
    _save(saved.ctypes.data)
    _set(-1)  # FE_DFL_ENV


@jit
def leave_floats(saved: Any) -> None:
    """As before."""
    _set(saved.ctypes.data)
