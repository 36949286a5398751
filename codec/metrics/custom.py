"""Metrics of the user's own."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from codec.errors import EngineError, SpecError

_by_address: "WeakValueDictionary[int, Custom]" = WeakValueDictionary()


def custom_at(address: int) -> "Custom":
    """The metric whose C function this is."""
    return _by_address[address]


class Custom:
    """A metric of your own: a function of one element's state that returns A, compiled by Numba.

    Parameters
    ----------
    function : callable
        Of some of ``theta``, ``m`` and ``v``, by name; float32 each. Compiled by ``numba.njit`` unless it is already; a
        division by 0 is Inf or NaN then.
        Sender and receiver need results that are equal to the bit for shared levels.

    Raises
    ------
    EngineError
        Numba is not installed.
    SpecError
        An argument of another name.
    """

    def __init__(self, function: Callable[..., float]) -> None:
        try:
            numba: Any = importlib.import_module("numba")
        except ImportError:
            raise EngineError("a metric of your own needs numba") from None
        compiled: Any = function if hasattr(function, "py_func") else numba.njit(error_model="numpy")(function)
        self.names = tuple(inspect.signature(compiled.py_func).parameters)
        if not self.names or set(self.names) - {"theta", "m", "v"}:
            raise SpecError(f"a metric is a function of theta, m and v, not of {', '.join(self.names)}")
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
        self._callback = numba.cfunc(signature)((one, two, three)[count - 1])
        _by_address[self.address] = self

    @property
    def address(self) -> int:
        """Of the C function."""
        return self._callback.address
