"""Metrics of the user's own."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from codec.arguments import shown
from codec.errors import ArgumentError, EngineError

_by_address: "WeakValueDictionary[int, Custom]" = WeakValueDictionary()


def custom_at(address: int) -> "Custom":
    """Return the object whose C function has an address."""
    return _by_address[address]


class Custom:
    """A metric of your own: a function of one element's state that returns A, compiled by Numba.

    Parameters
    ----------
    function : callable
        Of some of ``theta``, ``m`` and ``v``, by name; float32 each. Compiled by ``numba.njit``, anew if it is already,
        so that a division by 0 is Inf or NaN. A value for which it raises counts as NaN: no bit of it is dropped.
        Sender and receiver need results that are equal to the bit for shared levels.

    Raises
    ------
    EngineError
        Numba is not installed.
    ArgumentError
        An argument of another name, not a function, or one that Numba cannot compile to a number.
    """

    def __init__(self, function: Callable[..., float]) -> None:
        try:
            numba: Any = importlib.import_module("numba")
        except ImportError:
            raise EngineError("optimizers.Custom needs numba: pip install 'tensor-codec[numba]'") from None
        options: dict[str, Any] = {**getattr(function, "targetoptions", {}), "nopython": True, "error_model": "numpy"}
        try:
            own: Any = numba.jit(**options)(getattr(function, "py_func", function))
            self.names = tuple(inspect.signature(own.py_func).parameters)
        except (TypeError, AttributeError):
            raise ArgumentError(f"Custom takes a function of theta, m and v, not {shown(function)}") from None
        if not self.names or set(self.names) - {"theta", "m", "v"}:
            raise ArgumentError(f"Custom takes a function of theta, m and v, not of {', '.join(self.names)}")

        @numba.njit
        def compiled(*values: Any) -> Any:
            try:
                return np.float32(own(*values))
            except Exception:  # which could not get through C
                return np.float32(np.nan)

        t = numba.types
        signature = t.void(t.CPointer(t.CPointer(t.float32)), t.uint64, t.uint64, t.CPointer(t.float32))
        count = len(self.names)

        def one(data: Any, first: Any, n: Any, a: Any) -> None:
            for i in range(n):
                a[i] = compiled(data[0][first + i])

        def two(data: Any, first: Any, n: Any, a: Any) -> None:
            for i in range(n):
                a[i] = compiled(data[0][first + i], data[1][first + i])

        def three(data: Any, first: Any, n: Any, a: Any) -> None:
            for i in range(n):
                a[i] = compiled(data[0][first + i], data[1][first + i], data[2][first + i])

        self.compiled = compiled
        try:
            self._callback = numba.cfunc(signature)((one, two, three)[count - 1])
        except numba.core.errors.NumbaError as e:
            raise ArgumentError(
                f"Numba cannot compile this function of {', '.join(self.names)} to a number: {e}"
            ) from None
        _by_address[self.address] = self

    @property
    def address(self) -> int:
        """Of the C function."""
        return self._callback.address
