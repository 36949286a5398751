"""How many bits of a gradient an optimizer's step can tell: what :class:`codec.Truncate` goes by.

A step is (something that does not depend on the gradient g) + (something) * g. A is the first over the second, element
by element. Where A is much larger than g, the last bits of g fall below those of the parameter and may go: E =
exponent(A) - exponent(g), from exponents alone, so that a receiver with the same state finds the same levels.

State arrays are those of the step before, as torch.optim has them: ``theta`` the parameters, ``m`` the momentum buffer
or ``exp_avg``, ``v`` the ``exp_avg_sq``, ``square_avg`` or ``sum``. Without ``m`` or ``v`` it is the first step. g is
the gradient that the optimizer sees: averaged, clipped, and divided by GradScaler's scale unless `grad_scale` says
what it is. Parameter groups with other numbers inside a bucket: ``metric=[(offset, metric), ...]``, each for the
values from its offset on. With ``amsgrad``, ``centered`` or ``maximize``, for which the formulas do not hold, no bit
is dropped.

References
----------
.. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024, table 1. It
   prints eta for AdaGrad's decayed rate and sqrt(v) for the bias-corrected one.
"""

import importlib
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from codec import core
from codec.core import DTYPES, ffi
from codec.errors import EngineError, SpecError, StateError
from codec.specs import shown, whole
from codec.view import TensorView, view

_BITS = {"float32": (23, 127), "bfloat16": (7, 127), "float16": (10, 15)}
_DROPS = {"float32": (6, 12, 18), "bfloat16": (2, 4, 6), "float16": (3, 5, 8)}
F32 = np.float32


def _is_float64(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int
        return False


@dataclass(frozen=True, slots=True)
class Terms:
    """A = theta * ((sqrt(v_term * v) + eps) * theta_v_term + theta_term) + m_term * m, rounded to float32 each time.

    Without v, A = theta * theta_term + m_term * m.
    """

    theta: float
    theta_v: float = 0
    v: float = 0
    eps: float = 0
    m: float = 0


@dataclass(frozen=True, slots=True)
class Metric(ABC):
    """Base of all metrics.

    Parameters
    ----------
    lr : float
        Learning rate of this step. Where it is 0, as in a warm-up, nothing of the gradient matters.
    weight_decay : float
    grad_scale : float
        How many times the gradient g is: GradScaler's scale, if it was not yet divided by it.
    maximize : bool

    Raises
    ------
    SpecError
        A number that is negative or not finite, a beta of 1 or more, or a step below 1.
    """

    lr: float
    weight_decay: float = 0
    grad_scale: float = 1
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (value >= 0 and _is_float64(value)):
                raise SpecError(f"{name} must be a finite number that is not negative, got {shown(value)}")
            if name == "step" and value < 1:
                raise SpecError(
                    f"step is the number of the step about to be taken, from 1 on, got {value!r}: "
                    'torch\'s state["step"], which counts those that were taken, and 1'
                )
            if name in ("beta1", "beta2") and value >= 1:
                raise SpecError(f"{name} must be below 1, got {shown(value)}")

    @abstractmethod
    def terms(self, state: Mapping[str, Any]) -> Terms:
        """The numbers that stay the same for all elements; `state` says which arrays there are."""

    def _known(self) -> bool:
        return not self.maximize

    def _final(self, state: Mapping[str, Any]) -> Terms:
        """Scaled, with a v that is missing counted as 0; NaN where no bit may be dropped."""
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

    def levels(self, g: Any, theta: Any, *, m: Any = None, v: Any = None, guard: int = -8) -> np.ndarray[Any, Any]:
        """The level of each value of g, 0 to 3, as :class:`codec.Truncate` chooses them.

        Parameters
        ----------
        g, theta, m, v : arrays or tensors of one shape
            float32, bfloat16 or float16.
        guard : int
            As in :class:`codec.Truncate`.

        Returns
        -------
        numpy.ndarray of uint8, shape of g
        """
        arrays = {name: x for name, x in (("theta", theta), ("m", m), ("v", v)) if x is not None}
        t = self._final(arrays)
        p, a = {name: _floats(x) for name, x in arrays.items()}, F32(0)
        with np.errstate(all="ignore"):
            if "v" in p and t.theta_v != 0:
                factor = (np.sqrt(F32(t.v) * p["v"]) + F32(t.eps)) * F32(t.theta_v) + F32(t.theta)
            else:
                factor = F32(t.theta)
            a = p["theta"] * factor
            if "m" in p:
                a = a + F32(t.m) * p["m"]
        ea = np.where(np.isnan(a), 0, a.view(np.uint32) >> 23 & 255).astype(int)
        x = view(g)
        if x.dtype not in _BITS:
            raise SpecError(f"g must be float32, bfloat16 or float16, not {x.dtype}")
        mbits, bias = _BITS[x.dtype]
        bits = np.frombuffer(ffi.buffer(x.data, x.nbytes), f"u{x.nbytes // max(1, a.size)}").astype(np.int64)
        last = 2 * bias + 1
        e = (bits >> mbits & last).reshape(a.shape)
        slack = ea - 127 - (e - bias) - guard - (_BITS[view(theta).dtype][0] - mbits)
        slack = np.where(ea == 255, 1000, slack)
        slack = np.where((ea == 0) | (e == last), -1000, slack)
        return sum((slack >= k for k in _DROPS[x.dtype]), np.zeros(a.shape, np.uint8)).astype(np.uint8)


def _floats(x: Any) -> np.ndarray[Any, Any]:
    return _floats_of(view(x))


def _floats_of(v: TensorView) -> np.ndarray[Any, Any]:
    if v.dtype not in _BITS:
        raise SpecError(f"state must be float32, bfloat16 or float16, not {v.dtype}")
    raw = ffi.buffer(v.data, v.nbytes)
    if v.dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(F32).reshape(v.shape)
    return np.frombuffer(raw, v.dtype).astype(F32).reshape(v.shape)


@dataclass(frozen=True, slots=True)
class SGD(Metric):
    """theta - lr * (g + weight_decay * theta)."""

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = theta / lr - weight_decay * theta."""
        return Terms(np.float64(1) / self.lr - self.weight_decay)


@dataclass(frozen=True, slots=True)
class Momentum(Metric):
    """SGD with momentum; ``m`` is the momentum buffer, which torch starts with g itself, whatever `dampening`."""

    momentum: float = 0.9
    dampening: float = 0

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = (theta - lr mu m) / (lr (1 - tau)) - weight_decay * theta."""
        own = np.float64(1 - self.dampening if "m" in state else 1)
        return Terms(1 / (self.lr * own) - self.weight_decay, m=-self.momentum / own)


@dataclass(frozen=True, slots=True)
class Nesterov(Metric):
    """SGD with Nesterov's momentum; ``m`` is the momentum buffer."""

    momentum: float = 0.9

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = ((1 - lr lambda (1 + mu)) theta - lr mu^2 m) / (lr (1 + mu))."""
        mu = self.momentum
        own = np.float64(self.lr) * (1 + mu)
        return Terms((1 - own * self.weight_decay) / own, m=-mu * mu / (1 + mu))


@dataclass(frozen=True, slots=True)
class AdaGrad(Metric):
    """``v`` is the sum of squares; its value before the step is a lower bound of what the step divides by.

    Parameters
    ----------
    step : int
        Number of this step, from 1 on.
    """

    step: int = 1
    lr_decay: float = 0
    eps: float = 1e-10

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = theta (sqrt(v) + eps) / decayed lr - weight_decay * theta."""
        lr = np.float64(self.lr) / (1 + (self.step - 1) * self.lr_decay)
        return Terms(-self.weight_decay, 1 / lr, 1, self.eps)


@dataclass(frozen=True, slots=True)
class RMSProp(Metric):
    """``v`` is the mean square; alpha times its value before the step is a lower bound."""

    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0
    centered: bool = False

    def _known(self) -> bool:
        return not (self.maximize or self.centered or self.momentum)

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = theta (sqrt(alpha v) + eps) / lr - weight_decay * theta."""
        return Terms(-self.weight_decay, np.float64(1) / self.lr, self.alpha, self.eps)


@dataclass(frozen=True, slots=True)
class Adam(Metric):
    """``m`` and ``v`` are exp_avg and exp_avg_sq before the step; beta2 v / (1 - beta2^step) is a lower bound.

    Parameters
    ----------
    step : int
        Number of this step, from 1 on.
    """

    step: int = 1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    amsgrad: bool = False

    def _known(self) -> bool:
        return not (self.maximize or self.amsgrad)

    def _theta_v(self) -> Any:
        return (1 - self.beta1**self.step) / (np.float64(self.lr) * (1 - self.beta1))

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = (theta (sqrt(v^) + eps) (1 - beta1^step) - lr beta1 m) / (lr (1 - beta1)) - weight_decay * theta."""
        v = self.beta2 / (1 - self.beta2**self.step)
        return Terms(-self.weight_decay, self._theta_v(), v, self.eps, -self.beta1 / (1 - self.beta1))


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    def terms(self, state: Mapping[str, Any]) -> Terms:
        """A = (theta (sqrt(v^) + eps) (1 - beta1^step) (1 - lr lambda) - lr beta1 m) / (lr (1 - beta1))."""
        t = Adam.terms(self, state)
        return Terms(0, t.theta_v * (1 - self.lr * self.weight_decay), t.v, t.eps, t.m)


class Custom:
    """A metric of your own: a function of one element's state that returns A, compiled by Numba.

    Parameters
    ----------
    function : callable
        Of some of ``theta``, ``m`` and ``v``, by name; float32 each. Compiled by ``numba.njit`` unless it is already.
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
        compiled: Any = function if hasattr(function, "py_func") else numba.njit(function)
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

        self._callback = numba.cfunc(signature)((one, two, three)[count - 1])

    @property
    def address(self) -> int:
        """Of the C function."""
        return self._callback.address


class MetricStructs(NamedTuple):
    """A metric, or levels, as C takes them."""

    metric: Any
    levels: Any
    views: Mapping[str, TensorView]  # what of the caller's memory they point to
    keep: object


def metric_structs(metric: Any, state: Mapping[str, Any] | None, n: int) -> MetricStructs | None:
    """A metric and its state, or levels, for n values; None if there is none."""
    if metric is None:
        if state:
            raise SpecError("state= needs metric=")
        return None
    if isinstance(metric, Metric | Custom):
        groups: list[tuple[int, Metric | Custom]] = [(0, metric)]
    elif isinstance(metric, list | tuple):
        groups = _groups(metric)
    else:
        v = view(metric)
        if v.dtype != "uint8" or v.nbytes != n:
            raise SpecError("metric= must be a metric, a list of (offset, metric), or a uint8 level for each value")
        return MetricStructs(ffi.NULL, ffi.cast("uint8_t *", v.data), {"metric=": v}, v)
    if state is not None and not hasattr(state, "items"):
        raise SpecError(f"state= must be a mapping, not {type(state).__name__}")
    arrays = {name: x for name, x in (state or {}).items() if x is not None}
    if others := set(arrays) - {"theta", "m", "v"}:
        raise SpecError(f"state has theta, m and v, not {', '.join(sorted(map(str, others)))}")
    views = {name: view(x) for name, x in arrays.items()}
    for name, v in views.items():
        if v.dtype not in _BITS or v.nbytes // core.ITEMSIZE[v.dtype] != n:
            raise SpecError(f"{name} must be {n} values of float32, bfloat16 or float16, not {v.dtype} of {v.shape}")
    keep: list[Any] = [views]
    following: Any = ffi.NULL
    until = 0
    for offset, m in reversed(groups):
        struct = ffi.new("codec_metric *")
        struct.struct_nbytes = ffi.sizeof("codec_metric")
        struct.until, struct.next = until, following
        keep += [struct, _set_custom(struct, m, views) if isinstance(m, Custom) else _set_terms(struct, m, views)]
        following, until = struct, offset
    return MetricStructs(following, ffi.NULL, {f"state's {name}": v for name, v in views.items()}, keep)


def _groups(metric: Any) -> list[tuple[int, Metric | Custom]]:
    """Parameter groups, looked through."""
    try:
        groups = [(whole("a group's offset", offset, 0, (1 << 64) - 1), m) for offset, m in metric]
    except (TypeError, ValueError) as e:
        if isinstance(e, SpecError):
            raise
        raise SpecError("metric= must be a metric, or pairs (offset, metric)") from None
    if not all(isinstance(m, Metric | Custom) for _, m in groups):
        raise SpecError("metric= must be a metric, or pairs (offset, metric)")
    if not groups or groups[0][0] != 0 or any(a[0] >= b[0] for a, b in itertools.pairwise(groups)):
        raise SpecError("metric= must begin at offset 0, and offsets must ascend")
    return groups


def set_metric(context: Any, structs: MetricStructs) -> None:
    """Give a metric, or levels, to a call; the structs must stay alive until it returns."""
    context.metric, context.levels = structs.metric, structs.levels


def _set_custom(struct: Any, metric: Custom, views: Mapping[str, TensorView]) -> list[Any]:
    missing = [name for name in metric.names if name not in views]
    if missing:
        raise StateError(f"the metric needs {', '.join(missing)} in state=")
    floats = [np.ascontiguousarray(_floats_of(views[name])) for name in metric.names]
    pointers = ffi.new("float *[]", [ffi.cast("float *", x.ctypes.data) for x in floats])
    struct.user = ffi.cast("void (*)(void *, uint64_t, uint64_t, float *)", metric.address)
    struct.data = pointers
    struct.theta_dtype = DTYPES[views["theta"].dtype] if "theta" in views else 0
    return [floats, pointers, metric]


def _set_terms(struct: Any, metric: Metric, views: Mapping[str, TensorView]) -> list[Any]:
    if "theta" not in views:
        raise StateError("the metric needs theta in state=")
    keep: list[Any] = []
    terms = metric._final(views)
    for name, v in views.items():
        if (name == "v" and not terms.theta_v) or (name == "m" and not terms.m):
            continue  # the metric does not look at it
        t = ffi.new("codec_tensor *")
        t.struct_nbytes = ffi.sizeof("codec_tensor")
        t.dtype, t.data, t.nbytes = DTYPES[v.dtype], v.data, v.nbytes
        setattr(struct, name, t)
        keep.append(t)
    struct.theta_term, struct.theta_v_term = terms.theta, terms.theta_v
    struct.v_term, struct.eps, struct.m_term = terms.v, terms.eps, terms.m
    return keep
