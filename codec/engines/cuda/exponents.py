"""What levels of values go by, on a device: exponents of a metric's A (docs/format.md, section 9)."""

from typing import Any

import numpy as np

from codec.core import DTYPES, ffi
from codec.engines.cuda.work import Work, grid_for, number, pointer, struct_of
from codec.metrics.asked import Asked
from codec.metrics.custom import Custom
from codec.metrics.formulas import Metric, floats_of
from codec.view import TensorView


def exponents(work: Work, asked: Asked, n: int) -> int:
    """The address of n of them."""
    found = work.new(n)
    ends = [offset for offset, _ in asked.groups[1:]] + [n]
    state = {name: (work.read(v), v) for name, v in asked.state.items()}
    for (first, metric), end in zip(asked.groups, ends, strict=True):
        last = min(end, n)
        if first >= last:
            break
        grid = grid_for(work.device, last - first)
        if isinstance(metric, Custom):
            [a] = work.put(_values(work, metric, asked.state, first, last).data.cast("B"))
            work.device.launch("value_exponents", grid, pointer(a), number(last - first), pointer(found + first))
        else:
            terms = _terms(metric, state)
            work.device.launch("metric_exponents", grid, terms, number(first), number(last), pointer(found))
    return found


def _terms(metric: Metric, state: dict[str, tuple[int, TensorView]]) -> Any:
    """A codec_terms of native/cuda/before.cu."""
    t = metric.final({name: v for name, (_, v) in state.items()})
    looked_at = {"theta": True, "v": bool(t.theta_v), "m": bool(t.m)}
    arrays = [state[name] if name in state and looked_at[name] else (0, None) for name in ("theta", "v", "m")]
    addresses = (address for address, _ in arrays)
    dtypes = (DTYPES[v.dtype] if v else 0 for _, v in arrays)
    return struct_of("<3Q3I5f", *addresses, *dtypes, t.theta, t.theta_v, t.v, t.eps, t.m)


def _values(work: Work, metric: Custom, state: Any, first: int, end: int) -> np.ndarray[Any, Any]:
    """A of a user's own metric: a function that was compiled for the host, where it is worked out."""
    arrays = [floats_of(_on_host(work, state[name])) for name in metric.names]
    pointers = ffi.new("float *[]", [ffi.cast("float *", x.ctypes.data) for x in arrays])
    a = np.empty(end - first, np.float32)
    call = ffi.cast("void (*)(void *, uint64_t, uint64_t, float *)", metric.address)
    call(pointers, first, end - first, ffi.cast("float *", a.ctypes.data))
    return a


def _on_host(work: Work, v: TensorView) -> TensorView:
    if v.device == "cpu":
        return v
    data = work.device.download(v.address, v.nbytes)
    return v._replace(data=ffi.from_buffer(data), owner=data, device="cpu")
