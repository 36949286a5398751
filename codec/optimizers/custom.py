"""Optimizers whose steps are defined by a user's function: of numbers, for bind(), or of tensors, for hooks."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from codec.arguments import shown
from codec.errors import ArgumentError, EngineError
from codec.optimizers.wrappers import unwrapped

_by_address: "WeakValueDictionary[int, Custom]" = WeakValueDictionary()


def custom_at(address: int) -> "Custom":
    """Return the Custom whose compiled C function has this address."""
    return _by_address[address]


class Custom:
    """Optimizer whose step is not built in, defined by a function that computes A for one value.

    A is the term that the step adds to the gradient g: write the new parameter as c (A + g), where A and c do not
    depend on g. If c depends on g, use the smallest possible value of 1 / c. For SGD, theta - lr g gives A = theta /
    lr. The sign of A does not matter. optimizers.md derives A for RMSprop with momentum.

    Parameters
    ----------
    function : callable
        Function that returns A. Its parameters are named ``theta``, ``m`` or ``v``, and are float32. It is compiled by
        ``numba.njit``, even if it is a Numba function already, so that a division by 0 gives Inf or NaN. If it raises
        an exception, A is NaN and no bit of that value is dropped. With shared levels, sender and receiver must compute
        bit-identical results. Variables of the enclosing scope, such as a learning rate, are compiled as constants:
        create a new Custom when they change.

    Raises
    ------
    EngineError
        Numba is not installed.
    ArgumentError
        `function` is not a function, has a parameter of another name, or cannot be compiled to return a number.

    Examples
    --------
    SGD, and RMSprop with momentum; for the latter, ``m`` is the momentum_buffer and ``v`` the square_avg.

    >>> sgd = codec.optimizers.Custom(lambda theta: theta / 0.1)
    >>> spec = codec.Truncate().bind(sgd, theta=np.ones(1000, np.float32))
    >>> frame = codec.encode(np.full(1000, 1e-3, np.float32), spec)
    >>> lr, alpha, mu = 0.01, 0.99, 0.9
    >>> rmsprop = codec.optimizers.Custom(lambda theta, m, v: (theta / lr - mu * m) * np.sqrt(alpha * v))
    """

    def __init__(self, function: Callable[..., float]) -> None:
        try:
            numba: Any = importlib.import_module("numba")
        except ImportError:
            raise EngineError(
                "optimizers.Custom needs Numba, which is not installed: pip install 'tensor-codec[numba]'"
            ) from None
        options: dict[str, Any] = {**getattr(function, "targetoptions", {}), "nopython": True, "error_model": "numpy"}
        try:
            own: Any = numba.jit(**options)(getattr(function, "py_func", function))
            self.names = tuple(inspect.signature(own.py_func).parameters)
        except (TypeError, AttributeError):
            raise ArgumentError(
                f"Custom takes a Python function with parameters from theta, m and v, got {shown(function)}"
            ) from None
        if not self.names or set(self.names) - {"theta", "m", "v"}:
            raise ArgumentError(
                f"the parameters of the function must be from theta, m and v, got {', '.join(self.names) or 'none'}"
            )

        @numba.njit
        def compiled(*values: Any) -> Any:
            try:
                return np.float32(own(*values))
            except Exception:  # an exception of the user's function cannot propagate through C code
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
                f"Numba cannot compile the function, which must return one number for scalars {', '.join(self.names)}: "
                f"{e}"
            ) from None
        _by_address[self.address] = self

    @property
    def address(self) -> int:
        """Address of the compiled C function."""
        return self._callback.address


class Formula:
    """A torch optimizer whose step is not built in, with a function that computes A from its state.

    :func:`codec.torch.ddp_hook` and :func:`from_optimizer` accept a Formula in place of a torch optimizer. A is the
    term that the step adds to the gradient g: write the new parameter as c (A + g), where A and c do not depend on g.
    If c depends on g, use the smallest possible value of 1 / c. The sign of A does not matter.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The torch optimizer, or a wrapper of Accelerate or Lightning.
    function : callable
        function(theta, state, group) returns A as a tensor of the parameter's shape, or None: no bit is dropped.
        `theta` is the parameter before the step, converted to float32; `state` the optimizer's ``state`` of this
        parameter, a dict that is empty before the first step; `group` the parameter's item of ``param_groups``, with
        the current learning rate. The function is called without autograd, for each parameter in each step, in the
        thread of the group's collectives. It must change nothing. No bit is dropped where A is NaN. With shared levels,
        all ranks must compute bit-identical A.

    Raises
    ------
    ArgumentError
        `optimizer` is not a torch optimizer, or `function` cannot be called.

    Examples
    --------
    SGD with a weight decay that grows with the parameter:

    >>> w = torch.nn.Parameter(torch.ones(1000))
    >>> class Cubic(torch.optim.SGD):
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             for p in group["params"]:
    ...                 p.data.sub_(p.grad + 0.01 * p.data**3, alpha=group["lr"])
    >>> def a(theta, state, group):
    ...     return theta / group["lr"] - 0.01 * theta**3
    >>> formula = codec.optimizers.Formula(Cubic([w], lr=0.1), a)
    >>> step, state = codec.optimizers.from_optimizer(formula), codec.optimizers.state_of(formula, w)
    >>> frame = codec.encode(torch.full((1000,), 1e-3), codec.Truncate().bind(step, **state))

    In a DDP hook, ``ddp_hook("near", optimizer=formula)`` does the same in each step.
    """

    def __init__(self, optimizer: Any, function: Callable[[Any, Any, Any], Any]) -> None:
        self.torch_optimizer = unwrapped(optimizer)
        self.function = function
        if isinstance(optimizer, Formula) or not hasattr(self.torch_optimizer, "param_groups"):
            raise ArgumentError(f"Formula takes a torch optimizer and a function, got {shown(optimizer)}")
        if not callable(function):  # pyright: ignore[reportUnnecessaryComparison]
            raise ArgumentError(f"the function of a Formula must be callable, got {shown(function)}")

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"Formula({type(self.torch_optimizer).__name__}, {name})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the torch optimizer."""
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:
        """State of the torch optimizer."""
        return self.torch_optimizer.state

    def term(self, parameter: Any, group: dict[str, Any]) -> Any:
        """Return A of a parameter, in the parameter's dtype.

        A may lose magnitude in the conversion, but not gain any: fewer bits are dropped.

        Raises
        ------
        ArgumentError
            The function returned something else than a tensor of the parameter's shape, or None.
        """
        import torch

        with torch.no_grad():
            a = self.function(parameter.detach().float(), self.state.get(parameter, {}), group)
            if a is None:
                return torch.zeros_like(parameter)
            if not isinstance(a, torch.Tensor) or a.shape != parameter.shape or not a.is_floating_point():
                raise ArgumentError(
                    f"the function of {self!r} must return A, a tensor of floats in the shape of the parameter, "
                    f"{tuple(parameter.shape)}, or None; it returned {shown(a)}"
                )
            if a.dtype == parameter.dtype:
                return a
            dtype = torch.finfo(parameter.dtype)
            return (a * (1 - dtype.eps)).clamp(-dtype.max, dtype.max).to(parameter.dtype)
