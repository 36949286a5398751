"""Compilation of an engine's kernels before their first use."""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from codec._c.library import UNSIGNED
from codec._options import CallOptions, settings_of
from codec._ownership import writable_by_others
from codec.arguments import truth
from codec.decoding import decode
from codec.encoding import encode
from codec.engines import choose
from codec.errors import ArgumentError
from codec.optimizers import SGD, Custom
from codec.presets import resolve
from codec.specs import CODECS, BoundSpec, Delta, Spec, SpecLike, Truncate
from codec.tensors.view import dtype_name
from codec.tensors.wrapper import view

_N = 1024  # number of values in a test tensor, so that its frame has blocks


def warmup(
    specs: SpecLike | Iterable[SpecLike] | None = None,
    dtypes: Any = ("float32", "bfloat16"),
    *,
    progress: bool | None = None,
    options: CallOptions | None = None,
) -> None:
    """Compile the kernels of an engine before the first call needs them.

    The Numba engine takes about ten seconds to compile the encoder or the decoder of a family of codecs. It caches the
    result on disk for later processes, in the first usable folder of: ``NUMBA_CACHE_DIR``, the package's own folder,
    the user's cache folder. The CUDA engine compiles a kernel in one to three seconds, and caches it in
    ``CODEC_CACHE_DIR`` or the user's cache folder. The native engine needs no compilation.

    Parameters
    ----------
    specs : Spec, bound spec or name of a preset, or iterable of them; optional
        Specs that will be used. Default: one of each codec. If a spec is bound to a :class:`codec.optimizers.Custom`,
        its function is compiled as well, for this process only.
    dtypes : str, type or dtype, or iterable of them
        Dtypes of the tensors. Pairs of a spec and a dtype that the spec does not accept are skipped.
    progress : bool, optional
        Show a progress bar on stderr. Default: True if stderr is a terminal and `rich` is installed.
    options : CallOptions, optional
        Settings made by :func:`options`, of which the engine is used. Default engine: "numba".

    Raises
    ------
    EngineError
        The engine cannot be used on this machine.
    ArgumentError, SpecError
        An argument is not a spec or dtype, or no spec accepts any of the dtypes.

    Warns
    -----
    RuntimeWarning
        Other users can write to a cache folder. Numba loads code from ``NUMBA_CACHE_DIR`` nevertheless; the CUDA engine
        does not use such a ``CODEC_CACHE_DIR``.

    Examples
    --------
    >>> codec.warmup(codec.Sign(), "float32")
    """
    settings = settings_of(options)
    engine = settings.engine or "numba"
    settings = replace(settings, engine=engine, threads=1)
    choose(engine, "x", "cpu")
    progress = None if progress is None else truth("progress", progress)
    if engine == "numba":
        _warn_of_shared_cache()
    specs = [kind() for kind in CODECS] if specs is None else specs
    wanted = [resolve(spec) for spec in (specs if _are_many(specs) else (specs,))]
    names = [dtype_name(d) for d in (dtypes if _are_many(dtypes) else (dtypes,))]
    todo = [(spec, name) for spec in wanted for name in names]
    done = 0
    with _bar(len(todo), progress) as advance:
        for (spec, bound), name in todo:
            advance(f"{type(spec).__name__} {name}")
            done += _try(spec, bound, name, settings)
    if not done:
        raise ArgumentError(f"no spec of specs= accepts {', '.join(names)}: pass other dtypes= or specs=")


def _warn_of_shared_cache() -> None:
    """Warn if other users can write to Numba's cache folder: Numba unpickles the files in it."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder and os.path.isdir(folder) and writable_by_others(os.stat(folder)):
        warnings.warn(
            f"NUMBA_CACHE_DIR={folder} can be written by other users, whose code Numba would run when it unpickles "
            "a file: use a folder of your own that has mode 0700",
            RuntimeWarning,
            stacklevel=3,
        )


def _are_many(given: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(given, Iterable) and not isinstance(given, str | type)


def _try(spec: Spec, given: BoundSpec | None, dtype: str, settings: CallOptions) -> bool:
    """Encode and decode a tensor. Return False if the spec does not accept the dtype."""
    bound: BoundSpec | None = None
    if isinstance(spec, Truncate) and spec.fixed_level is None:
        custom = given.optimizer if given is not None and isinstance(given.optimizer, Custom) else None
        names = ("theta",) if custom is None else custom.names
        bound = spec.bind(custom or SGD(1.0), **{name: np.ones(_N, np.float32) for name in names})
    x = np.zeros(_N, UNSIGNED[dtype])
    base = x ^ x.dtype.type(1) if isinstance(spec, Delta) else None
    viewed = None if base is None else view(base, dtype)
    try:
        frame = encode(view(x, dtype), spec if bound is None else bound, options=settings, base=viewed)
    except ArgumentError:
        return False
    decode(frame, bound, out=x, options=settings, base=base)
    return True


@contextmanager
def _bar(total: int, asked: bool | None) -> Generator[Any]:
    """Show a progress bar. Yield a function that advances the bar and sets its description."""
    shown = asked if asked is not None else sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not shown:
        yield str  # any callable that takes an item's name and has no effect
        return
    console: Any = importlib.import_module("rich.console").Console(stderr=True)
    progress: Any = importlib.import_module("rich.progress").Progress(console=console)
    with progress:
        task = progress.add_task("", total=total)
        begun = 0

        def advance(what: str) -> None:
            nonlocal begun
            progress.update(task, description=f"compiling {what}", completed=begun)
            begun += 1

        yield advance
        progress.update(task, description="compiled", completed=total)
