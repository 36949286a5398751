"""Optimizer, state and levels to which a spec is bound: checks of the arguments, and their C structs."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from codec._c.library import DTYPES, ITEMSIZE, MANTISSA_BITS, ffi
from codec._call import Call, new_tensor
from codec.arguments import shown, whole
from codec.errors import ArgumentError, SpecError, StateError
from codec.optimizers.base import Optimizer, floats_of
from codec.optimizers.custom import Custom
from codec.optimizers.formulas import Adam, NAdam
from codec.specs import BoundSpec, Spec, Truncate
from codec.tensors.view import TensorView, view

_CHECKED_NBYTES = 256  # bytes of v, of each optimizer with step=0, that are compared with zero
_OPTIMIZER = "an optimizer of codec.optimizers, or a list of (offset, optimizer)"


class LevelSource(NamedTuple):
    """Source of a tensor's levels: either (offset, optimizer) groups and state arrays, or an array of levels."""

    groups: Sequence[tuple[int, Optimizer | Custom]]
    state: Mapping[str, TensorView]
    levels: TensorView | None = None

    @property
    def read(self) -> list[tuple[str, TensorView]]:
        """Return views of the levels or the state arrays, each with its name for error messages."""
        levels = [("levels=", self.levels)] if self.levels is not None else []
        return [*levels, *((f"state's {name}", v) for name, v in self.state.items())]


def level_source(bound: BoundSpec, n: int) -> LevelSource:
    """Check a bound spec for a tensor of `n` values, and return its source of levels.

    Raises
    ------
    ArgumentError
        The optimizer is not one of :mod:`codec.optimizers`, the offsets of groups do not start at 0 or do not ascend,
        or an array has another dtype or size.
    """
    if bound.levels is not None:
        v = view(bound.levels)
        if v.dtype != "uint8" or v.nbytes != n:
            raise ArgumentError(f"levels= of bind() must be {n} values of uint8, got {v.dtype} of shape {v.shape}")
        return LevelSource((), {}, v)
    optimizer = bound.optimizer
    groups = [(0, optimizer)] if isinstance(optimizer, Optimizer | Custom) else _groups(optimizer)
    views = {name: view(x) for name, x in bound.state.items()}
    for name, v in views.items():
        if v.dtype not in MANTISSA_BITS or v.nbytes // ITEMSIZE[v.dtype] != n:
            raise ArgumentError(
                f"{name} must be {n} values of float32, bfloat16 or float16, got {v.dtype} of shape {v.shape}"
            )
    if (v := views.get("v")) is not None:
        ends = [*(at for at, _ in groups[1:]), n]
        for (begin, o), end in zip(groups, ends, strict=True):
            if isinstance(o, Adam | NAdam) and not o.step:
                _warn_if_not_first(v, begin, min(end, n))
    return LevelSource(groups, views)


def level_source_for(spec: Spec, bound: BoundSpec | None, v: TensorView) -> LevelSource | None:
    """Return the source of the levels with which a tensor is encoded; None if the spec needs no levels."""
    if bound is not None:
        return level_source(bound, v.nbytes // ITEMSIZE[v.dtype])
    if isinstance(spec, Truncate) and spec.fixed_level is None:
        raise SpecError(
            f"{spec} needs an optimizer: pass spec.bind(codec.optimizers.AdamW(...), theta=..., m=..., v=...), or set "
            "a level for all values, level=0 to 3"
        )
    return None


def set_levels(call: Call, source: LevelSource, *, read: bool = True) -> None:
    """Set the levels of Truncate of a call, or their optimizer and state.

    Parameters
    ----------
    call : Call
        Structs of the call.
    source : LevelSource
        Levels, or optimizer and state.
    read : bool, default True
        True if the host can read the state.

    Raises
    ------
    StateError
        An array that the optimizer needs is missing.
    """
    if source.levels is not None:
        call.context.levels = ffi.cast("uint8_t *", source.levels.data)
        return
    keep: list[Any] = []
    following: Any = ffi.NULL
    until = 0
    for offset, optimizer in reversed(source.groups):
        struct = ffi.new("codec_metric *")
        struct.struct_nbytes = ffi.sizeof("codec_metric")
        struct.until, struct.next = until, following
        if isinstance(optimizer, Custom):
            keep += [struct, _fill_custom(struct, optimizer, source.state, read)]
        else:
            keep += [struct, _fill_terms(struct, optimizer, source.state)]
        following, until = struct, offset
    call.context.metric = following
    call.keep = call.keep, source, keep


def _fill_custom(struct: Any, optimizer: Custom, state: Mapping[str, TensorView], read: bool) -> list[Any]:
    missing = [name for name in optimizer.names if name not in state]
    if missing:
        raise StateError(
            f"the optimizer needs {', '.join(missing)}: pass bind(optimizer, {', '.join(f'{n}=...' for n in missing)})"
        )
    floats = [floats_of(state[name]) for name in optimizer.names] if read else []
    pointers = ffi.new("float *[]", [ffi.cast("float *", x.ctypes.data) for x in floats])
    struct.user = ffi.cast("void (*)(void *, uint64_t, uint64_t, float *)", optimizer.address)
    struct.data = pointers
    struct.theta_dtype = DTYPES[state["theta"].dtype] if "theta" in state else 0
    return [floats, pointers, optimizer]


def _fill_terms(struct: Any, optimizer: Optimizer, state: Mapping[str, TensorView]) -> list[Any]:
    if "theta" not in state:
        raise StateError("the optimizer needs theta, the parameters: pass bind(optimizer, theta=...)")
    keep: list[Any] = []
    terms = optimizer.final(state)
    for name, v in state.items():
        if (name == "v" and not terms.theta_v) or (name == "m" and not terms.m):
            continue  # GComp's A, from which levels are computed, does not depend on this array
        t = new_tensor(DTYPES[v.dtype], (), v.data, v.nbytes)
        setattr(struct, name, t)
        keep.append(t)
    struct.theta_term, struct.theta_v_term = terms.theta, terms.theta_v
    struct.v_term, struct.eps, struct.m_term = terms.v, terms.eps, terms.m
    return keep


def _warn_if_not_first(v: TensorView, begin: int, end: int) -> None:
    """Warn, for an optimizer with step=0, if its values of `v` are not zero at first: `step` is probably wrong."""
    size = ITEMSIZE[v.dtype]
    first = slice(begin * size, min(end * size, begin * size + _CHECKED_NBYTES))
    if v.device == "cpu" and v.array()[first].any():
        warnings.warn(
            'v is not zero, but step=0 says that the optimizer has taken no step: pass step=, state["step"] in torch',
            stacklevel=6,
        )


def _groups(given: Any) -> list[tuple[int, Optimizer | Custom]]:
    """Return the argument `optimizer` of bind() as (offset, optimizer) pairs; raise ArgumentError for another type."""
    if not isinstance(given, list | tuple):
        raise ArgumentError(f"bind() takes {_OPTIMIZER}, or levels=, got {shown(given)}")
    pairs = cast(Sequence[Any], given)
    try:
        groups: list[tuple[int, Any]] = [(whole("a group's offset", at, 0, (1 << 64) - 1), o) for at, o in pairs]
    except (TypeError, ValueError) as e:
        if isinstance(e, ArgumentError):
            raise
        raise ArgumentError(f"bind() takes {_OPTIMIZER}, got {shown(pairs)}") from None
    if not all(isinstance(o, Optimizer | Custom) for _, o in groups):
        raise ArgumentError(f"bind() takes {_OPTIMIZER}, got {shown(pairs)}")
    if not groups or groups[0][0] != 0 or any(a[0] >= b[0] for a, b in itertools.pairwise(groups)):
        raise ArgumentError(
            f"the offsets of the groups of bind() must begin with 0 and ascend, got {[at for at, _ in groups][:8]}"
        )
    return groups
