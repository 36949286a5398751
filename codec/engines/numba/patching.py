"""Kernels with a function of your own in them: see docs/new-kernel.md."""

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
    """Meanwhile engine="numba" goes by a module in which these functions stand in place of its own.

    All kernels of the module are compiled anew, for this process, when they are first used. For experiments: other
    threads see the change, too.

    Parameters
    ----------
    module : module
        ``lossless``, ``rows`` or ``truncate`` of ``codec.engines.numba``.
    **functions : callable
        Python functions, by the names of those that they replace where the module calls them, with the same arguments.
        They may call others of this engine.

    Yields
    ------
    module
        The other one.

    Raises
    ------
    EngineError
        The module has no function of such a name, or is not one of those three.
    """
    name = module.__name__.rpartition(".")[2]
    if getattr(loops, name, None) is not module:
        raise EngineError(f"{module.__name__} is not one of this engine's families")
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    with without_cache():
        spec.loader.exec_module(other)
    for function, mine in functions.items():
        if not hasattr(getattr(other, function, None), "py_func"):
            raise EngineError(f"{module.__name__} has no function {function}")
        setattr(other, function, jit(mine))
    setattr(loops, name, other)
    try:
        yield other
    finally:
        setattr(loops, name, module)
