"""Base class of optimizers. It computes the coefficients of A, the term that a step adds to the gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import numpy as np

from codec._c.library import ITEMSIZE, LEVEL_BITS, MANTISSA_BITS, UNSIGNED
from codec.arguments import plain, shown
from codec.errors import ArgumentError
from codec.specs import Guard, Truncate
from codec.tensors.floats import widen
from codec.tensors.view import TensorView, on_host, view

F32 = np.float32


def _is_float64(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of A, the term that a step adds to the gradient. All values of a tensor share them.

    A = theta * ((sqrt(v_term * v) + eps) * theta_v_term + theta_term) + m_term * m, where each operation is rounded to
    float32. The fields have the names of these coefficients without "_term". For an optimizer without v, A = theta *
    theta_term + m_term * m.
    """

    theta: float
    theta_v: float = 0
    v: float = 0
    eps: float = 0
    m: float = 0


@dataclass(frozen=True, slots=True)
class Optimizer(ABC):
    """Base class of optimizers; an instance describes one step of an optimizer.

    Parameters
    ----------
    lr : float
        Learning rate of the step. At 0, as at the start of a warm-up, as many bits as possible are dropped. The levels
        of Lion and Muon do not depend on it.
    weight_decay : float
        As in torch.optim.
    maximize : bool
        As in torch.optim. If True, no bit is dropped.
    grad_scale : float
        Factor by which the gradient is multiplied: the GradScaler's scale if the gradient is not yet unscaled.

    Raises
    ------
    ArgumentError
        A number is negative or not finite, a beta is 1 or more, or `step` is not an integer.
    """

    lr: float
    _: KW_ONLY
    weight_decay: float = 0
    maximize: bool = False
    grad_scale: float = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            given: object = getattr(self, name)
            value = _betas(given) if name == "betas" else _number(name, given)
            object.__setattr__(self, name, value)

    @abstractmethod
    def terms(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A. `state`: the bound state arrays, by name ("theta", "m" and "v")."""

    def _known(self) -> bool:
        """Return True if A is known for this instance's options; if it is not, no bit may be dropped."""
        return not self.maximize

    def final(self, state: Mapping[str, Any]) -> Terms:
        """Return the coefficients of A times `grad_scale`; a missing v counts as 0. After NaN, no bit is dropped."""
        with np.errstate(all="ignore"):
            t = self.terms(state)
            s = np.float64(self.grad_scale)
            theta, theta_v = F32(s * t.theta), F32(s * t.theta_v)
            if "v" not in state and t.theta_v:
                theta, theta_v = F32(t.eps) * theta_v + theta, F32(0)
            if not self._known():
                theta = theta_v = F32("nan")
            m = float(F32(s * t.m)) if "m" in state else 0.0
            return Terms(float(theta), float(theta_v), float(F32(t.v)), float(F32(t.eps)), m)

    def levels(
        self, g: Any, theta: Any, *, m: Any = None, v: Any = None, guard: int | Guard = -8
    ) -> np.ndarray[Any, Any]:
        """Return the level of each value of g, 0 to 3, as :class:`codec.Truncate` computes it.

        Parameters
        ----------
        g, theta, m, v : arrays or tensors
            Gradient, and state before the step: float32, bfloat16 or float16, all with the same number of values.
        guard : int or str
            As in :class:`codec.Truncate`.

        Returns
        -------
        numpy.ndarray of uint8, shape of g
            Levels 0 to 3.

        Raises
        ------
        ArgumentError
            An array has another dtype or size.
        SpecError
            `guard` is out of range.

        Examples
        --------
        >>> g, theta = np.full(4, 1e-6, np.float32), np.array([0, 1e-5, 1e-2, 10], np.float32)
        >>> codec.optimizers.SGD(lr=0.1).levels(g, theta)
        array([0, 2, 3, 3], dtype=uint8)
        """
        spec = Truncate(guard=guard)
        arrays = {name: x for name, x in (("theta", theta), ("m", m), ("v", v)) if x is not None}
        t = self.final(arrays)
        p, a = {name: _floats(name, x).reshape(-1) for name, x in arrays.items()}, F32(0)
        x = on_host("g", view(g))
        if x.dtype not in MANTISSA_BITS:
            raise ArgumentError(f"g must be float32, bfloat16 or float16, got {x.dtype}")
        n = x.nbytes // ITEMSIZE[x.dtype]
        for name, values in p.items():
            if values.size != n:
                raise ArgumentError(f"{name} must have as many values as g, {n}, got {values.size}")
        if (level := spec.fixed_level) is not None:
            return np.full(x.shape, level, np.uint8)
        with np.errstate(all="ignore"):
            if "v" in p and t.theta_v != 0:
                factor = (np.sqrt(F32(t.v) * p["v"]) + F32(t.eps)) * F32(t.theta_v) + F32(t.theta)
            else:
                factor = F32(t.theta)
            a = p["theta"] * factor
            if "m" in p:
                a = a + F32(t.m) * p["m"]
        ea = np.where(np.isnan(a), 0, a.view(np.uint32) >> 23 & 255).astype(int)
        mbits = MANTISSA_BITS[x.dtype]
        last = (1 << 8 * ITEMSIZE[x.dtype] - 1 - mbits) - 1  # biased exponent of NaN and Inf
        bits = x.array(UNSIGNED[x.dtype]).astype(np.int64)
        e = bits >> mbits & last
        slack = ea - 127 - (e - last // 2) - spec.guard_bits - (MANTISSA_BITS[view(theta).dtype] - mbits)
        slack = np.where(ea == 255, 1000, slack)
        slack = np.where((ea == 0) | (e == last), -1000, slack)
        levels = sum((slack >= k for k in LEVEL_BITS[x.dtype][1:]), np.zeros(n, np.uint8))
        return levels.astype(np.uint8).reshape(x.shape)


_FLAGS = ("maximize", "amsgrad", "centered", "nesterov", "decoupled_weight_decay")


def _number(name: str, given: object) -> Any:
    """Return a field's value as a Python number; raise ArgumentError if it is not allowed for this field."""
    if name in _FLAGS:
        flag: object = cast(Any, given).item() if getattr(given, "shape", None) == () else given
        if not isinstance(flag, bool | int):
            raise ArgumentError(f"{name} must be True or False, got {shown(given)}")
        return bool(flag)
    number = plain(given)
    if name == "beta2_decay":
        if isinstance(number, bool) or not isinstance(number, int | float) or not (number <= 0 and _is_float64(number)):
            raise ArgumentError(f"beta2_decay must be a finite number that is not positive, got {shown(given)}")
        return number
    if isinstance(number, bool) or not isinstance(number, int | float) or not (number >= 0 and _is_float64(number)):
        raise ArgumentError(f"{name} must be a finite number that is not negative, got {shown(given)}")
    if name == "step" and number != (number := int(number)):
        raise ArgumentError(f"step must be a whole number, got {shown(given)}")
    return number


def _betas(value: object) -> tuple[float, ...]:
    """Return Adam's betas as floats. Raise ArgumentError unless they are two numbers from 0 to below 1."""
    betas = tuple(cast(Sequence[object], value)) if isinstance(value, tuple | list) else ()
    if len(betas) != 2:
        raise ArgumentError(f"betas must be a tuple or list of two numbers, got {shown(cast(object, value))}")
    numbers = tuple(_number("betas", beta) for beta in betas)
    if max(numbers) >= 1:
        raise ArgumentError(f"betas must be below 1, got {shown(max(numbers))}")
    return numbers


def _floats(name: str, x: Any) -> np.ndarray[Any, Any]:
    v = on_host(name, view(x))
    if v.dtype not in MANTISSA_BITS:
        raise ArgumentError(f"{name} must be float32, bfloat16 or float16, got {v.dtype}")
    return floats_of(v)


def floats_of(v: TensorView) -> np.ndarray[Any, Any]:
    """Return a copy of a state array, of float32, bfloat16 or float16, as float32."""
    return widen(v.array(UNSIGNED[v.dtype]), v.dtype, np.empty(v.shape, F32).reshape(-1)).reshape(v.shape)
