"""Overwrite the tensors of a serving program piece by piece, so that no tensor needs a second copy in memory."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from codec.errors import ArgumentError
from codec.tensors.view import is_torch, mark_written, view_output
from codec.weight_sync.bases.base import Base
from codec.weight_sync.serving import Write
from codec.weight_sync.updates.assembly import BoxTarget, write_target
from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.shards import Box, Name, Shape, target_boxes
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import items

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


class Served:
    """Tensors of a serving program that are to be overwritten.

    Parameters
    ----------
    given : mapping or torch.nn.Module
        Contiguous writable tensors in host memory, or torch tensors on any device; for a box of a tensor, a DTensor, or
        a pair of a tensor and the index of its first value; for several boxes, a list. Other names are ignored.
    kinds : mapping of str to TensorKind
        Names of the tensors, with their dtypes and shapes.

    Raises
    ------
    ArgumentError
        A tensor is missing, has another dtype or shape, or is not writable.
    """

    def __init__(self, given: Any, kinds: Mapping[str, TensorKind]) -> None:
        tensors = dict(items(given))
        self._kinds, self._targets = kinds, dict[str, list[BoxTarget]]()
        for name, kind in kinds.items():
            if name not in tensors:
                raise ArgumentError(f"into= has no tensor {name!r}, which the update changes or the program lacks")
            self._targets[name] = [_target(name, kind, *each) for each in target_boxes(name, tensors[name])]

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
        layouts, kinds = base.layouts_after(update), base.kinds_after(update)
        tensors, decode = base.tensors_after(update), functools.partial(base.decode, update)
        chosen = list(names)
        for name in chosen:
            for target in self._targets[name]:
                if name in layouts and not layouts[name].covers(target.box):
                    raise ArgumentError(f"into= has values of {name!r} that only= of the receiver excludes")
        for name in chosen:
            if update is None and tensors.get(name) != self._kinds[name]:
                continue
            for target in self._targets[name]:
                if update is None or name in whole:
                    write_target(target, layouts[name], kinds, decode)
                else:
                    changed = functools.partial(_is_changed, update)
                    write_target(target, layouts[name], kinds, decode, changed)
                mark_written(target.tensor)
            yield name


def _is_changed(update: Update, key: Name, k: int) -> bool:
    return update.frame(key, k) is not None


def _target(name: str, kind: TensorKind, shape: Shape | None, box: Box, tensor: Any) -> BoxTarget:
    v = view_output(tensor, name=f"tensor {name!r} of into=")
    found, whole = TensorKind(v.dtype, v.shape), Box((0,) * len(kind.shape), kind.shape)
    if (v.dtype, kind.shape if shape is None else shape) != kind:
        raise ArgumentError(f"{name!r} of into= must be {kind}, as in the update, got {v.dtype} of shape {shape}")
    if v.shape != box.shape or len(box.shape) != len(kind.shape) or not whole.holds(box):
        raise ArgumentError(f"{name!r} of into= must be a box of {kind}, got {found} at {list(box.offsets)}")
    if v.device == "cpu":
        return BoxTarget(found, box, tensor, v.array())
    if not is_torch(tensor) or v.device == "meta":
        raise ArgumentError(f"{name!r} of into= is on {v.device}, where only torch tensors can be written: use load=")
    return BoxTarget(found, box, tensor, None)
