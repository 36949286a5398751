"""Overwrite the tensors of a serving program piece by piece, so that no tensor needs a second copy in memory."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE
from codec.errors import ArgumentError
from codec.tensors.view import is_torch, mark_written, view_output
from codec.weight_sync.base import Base
from codec.weight_sync.serving import Write
from codec.weight_sync.update import PIECE_NBYTES, Bytes, TensorKind, Update
from codec.weight_sync.weights import items

Load = Callable[[Iterator[tuple[str, Any]]], object]  # function of an iterator of (name, tensor)


def writer(base: Base, load: Load | None, into: Any, kinds: Mapping[str, TensorKind], like: Any) -> Write:
    """Return the function that passes tensors of these kinds to a program, by `load` or into the tensors `into`.

    Raises
    ------
    ArgumentError
        Not exactly one of `load` and `into` is given, or `into` lacks a tensor or has another kind for one.
    """
    if (load is None) == (into is None):
        raise ArgumentError(f"pass either load= or into=, got {'neither' if load is None else 'both'}")
    if load is None:
        served = Served(into, kinds)
        return lambda names, update, whole: list(served.write(base, names, update, whole))

    def write(names: Sequence[str], update: Update | None, whole: AbstractSet[str]) -> list[str]:
        passed: list[str] = []

        def tensors() -> Iterator[tuple[str, Any]]:
            for name, tensor in base.tensors(names, update, like):
                passed.append(name)
                yield name, tensor

        load(tensors())
        return passed

    return write


class _Target(NamedTuple):
    kind: TensorKind
    tensor: Any
    memory: Bytes | None  # bytes of the tensor in host memory; None: the tensor is on a device


class Served:
    """Tensors of a serving program that are to be overwritten.

    Parameters
    ----------
    given : mapping or torch.nn.Module
        Contiguous writable tensors in host memory, or torch tensors on any device. Other names are ignored.
    kinds : mapping of str to TensorKind
        Names of the tensors, with their dtypes and shapes.

    Raises
    ------
    ArgumentError
        A tensor is missing, has another dtype or shape, or is not writable.
    """

    def __init__(self, given: Any, kinds: Mapping[str, TensorKind]) -> None:
        tensors = dict(items(given))
        self._targets: dict[str, _Target] = {}
        for name, kind in kinds.items():
            if name not in tensors:
                raise ArgumentError(f"into= has no tensor {name!r}, which the update changes or the program lacks")
            self._targets[name] = _target(name, tensors[name], kind)

    def write(self, base: Base, names: Iterable[str], update: Update | None, whole: AbstractSet[str]) -> Iterator[str]:
        """Write the values after `update`, which `base` has checked; if it is None, the current values of `base`.

        Parameters
        ----------
        base : Base
            Weights.
        names : iterable of str
            Names of the tensors to write.
        update : Update or None
            Update of the weights.
        whole : set of str
            Names of the tensors of which all pieces are written; of others, those that the update changes.

        Yields
        ------
        str
            Name of each tensor that was written. A tensor of another kind than the current one is left out.
        """
        scratch = np.empty(0, np.uint8)
        for name in names:
            target = self._targets[name]
            if update is None and base.weights.kinds.get(name) != target.kind:
                continue
            for k, (begin, end) in enumerate(target.kind.spans):
                if update is not None and update.frame(name, k) is None and name not in whole:
                    continue
                if target.memory is not None:
                    base.decode(update, name, k, target.memory[begin:end])
                    continue
                if len(scratch) < end - begin:
                    scratch = np.empty(min(target.kind.nbytes, PIECE_NBYTES), np.uint8)
                base.decode(update, name, k, scratch[: end - begin])
                _copy(scratch[: end - begin], target, begin)
            mark_written(target.tensor)
            yield name


def _target(name: str, tensor: Any, kind: TensorKind) -> _Target:
    v = view_output(tensor, name=f"tensor {name!r} of into=")
    if (v.dtype, v.shape) != kind:
        raise ArgumentError(f"{name!r} of into= must be {kind}, as in the update, got {TensorKind(v.dtype, v.shape)}")
    if v.device == "cpu":
        return _Target(kind, tensor, v.array())
    if not is_torch(tensor) or v.device == "meta":
        raise ArgumentError(f"{name!r} of into= is on {v.device}, where only torch tensors can be written: use load=")
    return _Target(kind, tensor, None)


def _copy(values: Bytes, target: _Target, begin: int) -> None:
    """Copy a piece in host memory to a torch tensor on a device."""
    torch: Any = sys.modules["torch"]

    size = ITEMSIZE[target.kind.dtype]
    flat = target.tensor.detach().view(-1)[begin // size : (begin + len(values)) // size]
    flat.copy_(torch.from_numpy(values).view(target.tensor.dtype))
