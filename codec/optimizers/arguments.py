"""What was asked for by ``metric=`` and ``state=``, looked through."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from codec._c.library import ITEMSIZE, MANTISSA_BITS, ffi
from codec.arguments import whole
from codec.errors import ArgumentError
from codec.optimizers.custom import Custom
from codec.optimizers.formulas import Adam, Metric
from codec.tensors.view import TensorView, view


class Asked(NamedTuple):
    """What levels go by: metrics and where they begin, with their state; or the levels themselves."""

    groups: Sequence[tuple[int, Metric | Custom]]
    state: Mapping[str, TensorView]
    levels: TensorView | None = None

    @property
    def read(self) -> list[tuple[str, TensorView]]:
        """What of the caller's memory is read, by the names it has for the caller."""
        levels = [("metric=", self.levels)] if self.levels is not None else []
        return [*levels, *((f"state's {name}", v) for name, v in self.state.items())]


def asked(metric: Any, state: Mapping[str, Any] | None, n: int) -> Asked | None:
    """A metric and its state, or levels, for n values, looked through; None if there is none."""
    if state is not None and not hasattr(state, "items"):
        raise ArgumentError(f"state= must be a mapping, not {type(state).__name__}")
    if metric is None:
        if state:
            raise ArgumentError("state= needs metric=")
        return None
    if isinstance(metric, Metric | Custom):
        groups: list[tuple[int, Metric | Custom]] = [(0, metric)]
    elif isinstance(metric, list | tuple):
        groups = _groups(metric)
    else:
        v = view(metric)
        if v.dtype != "uint8" or v.nbytes != n:
            raise ArgumentError("metric= must be a metric, a list of (offset, metric), or a uint8 level for each value")
        return Asked((), {}, v)
    arrays = {name: x for name, x in (state or {}).items() if x is not None}
    if others := set(arrays) - {"theta", "m", "v"}:
        raise ArgumentError(f"state has theta, m and v, not {', '.join(sorted(map(str, others)))}")
    views = {name: view(x) for name, x in arrays.items()}
    for name, v in views.items():
        if v.dtype not in MANTISSA_BITS or v.nbytes // ITEMSIZE[v.dtype] != n:
            raise ArgumentError(
                f"{name} must be {n} values of float32, bfloat16 or float16, not {v.dtype} of {v.shape}"
            )
    if (v := views.get("v")) is not None and any(isinstance(m, Adam) and not m.step for _, m in groups):
        _doubt(v)
    return Asked(groups, views)


def _doubt(v: TensorView) -> None:
    """Warn of a mean square, by its first values, that counts as many times as large, for lack of a step."""
    if v.device == "cpu" and any(bytes(ffi.buffer(v.data, min(v.nbytes, 256)))):
        warnings.warn(
            "state's v is not zero, yet the metric's step is 0, as before the first one: pass step=, of torch's state",
            stacklevel=5,
        )


def _groups(metric: Any) -> list[tuple[int, Metric | Custom]]:
    """Parameter groups, looked through."""
    try:
        groups = [(whole("a group's offset", offset, 0, (1 << 64) - 1), m) for offset, m in metric]
    except (TypeError, ValueError) as e:
        if isinstance(e, ArgumentError):
            raise
        raise ArgumentError("metric= must be a metric, or pairs (offset, metric)") from None
    if not all(isinstance(m, Metric | Custom) for _, m in groups):
        raise ArgumentError("metric= must be a metric, or pairs (offset, metric)")
    if not groups or groups[0][0] != 0 or any(a[0] >= b[0] for a, b in itertools.pairwise(groups)):
        raise ArgumentError("metric= must begin at offset 0, and offsets must ascend")
    return groups
