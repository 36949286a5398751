"""Replacement of functions in kernels by functions of the user; see docs/tutorials/new-kernel.md."""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from codec.engines.numba import loops
from codec.engines.numba.jit import jit, without_cache
from codec.errors import EngineError


@contextmanager
def trying(module: ModuleType, **functions: Callable[..., Any]) -> Generator[ModuleType]:
    """Replace functions of a module of engine="numba" until the context ends.

    All kernels of the module are compiled again on first use, in this process only. Use it for experiments: the
    replacement affects all threads.

    Parameters
    ----------
    module : module
        ``lossless``, ``rows`` or ``truncate`` of ``codec.engines.numba``.
    **functions : callable
        Python functions, by the names of the functions that they replace. A replacement has the same arguments as the
        original, and may call other functions of this engine. Calls of the original in other modules are not affected.

    Yields
    ------
    module
        The modified copy of the module.

    Raises
    ------
    EngineError
        The module is not one of these three, or has no function of a given name.
    """
    name = module.__name__.rpartition(".")[2]
    if getattr(loops, name, None) is not module:
        raise EngineError(
            f"trying() takes lossless, rows or truncate of codec.engines.numba, not the module {module.__name__}"
        )
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    with without_cache():
        spec.loader.exec_module(other)
    for function, mine in functions.items():
        if not hasattr(getattr(other, function, None), "py_func"):
            raise EngineError(
                f"{module.__name__} has no compiled function {function}: name one that is decorated with jit"
            )
        setattr(other, function, jit(mine))
    setattr(loops, name, other)
    try:
        yield other
    finally:
        setattr(loops, name, module)
