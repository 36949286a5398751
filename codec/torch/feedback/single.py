"""Error feedback of collectives that store one residual per value on each rank."""

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import torch

from codec import ArgumentError, StateError
from codec.specs import check_contraction
from codec.stateful.checkpoint import array_of
from codec.stateful.ranges import HOST, Memory
from codec.torch import _compat
from codec.torch.reduction.host import Reduction, Values, square


class JointResidual:
    """Adds a residual to the values of a reduction, and stores the errors of all frames of this rank in it.

    In a two-shot all-reduce a rank also encodes the sums of its slice. Errors of these sums are stored separately until
    :meth:`add_sum_errors` adds them to the residual, which then holds both kinds of errors.

    Parameters
    ----------
    r : Reduction
        Reduction whose frames are to be encoded with the residual.
    residual : array of float32, in the same memory (host or GPU) as the reduction
        Residual, one value per value of the reduction. The reduction overwrites it, even if it fails.

    Raises
    ------
    ArgumentError
        The codec is lossless or not a contraction, or the op of the reduction is "max".
    """

    def __init__(self, r: Reduction, residual: Values) -> None:
        check_contraction(r.spec)
        if r.op == "max":
            raise ArgumentError("error feedback needs op to be a sum or a mean, got a maximum: pass feedback=False")
        self._memory = r.memory
        self._sum_errors: dict[int, Values] = {}
        self._mean = r.op == "mean"
        self.residual = r.residual = residual
        r.sum_residual = self._of_sum

    def _of_sum(self, begin: int, end: int) -> Values:
        """Return the array for the errors of the encoded sums of the values [begin, end)."""
        return self._sum_errors.setdefault(begin, self._memory.zeros(end - begin))

    def add_sum_errors(self, size: int) -> None:
        """Add the errors of encoded sums to the residual, after a reduction over `size` ranks has succeeded.

        The error of a mean is multiplied by `size`, because the next mean divides this rank's values by `size`.
        """
        factor = np.float32(size if self._mean else 1)
        for begin, error in self._sum_errors.items():
            self.residual[begin : begin + len(error)] += error * factor
        self._sum_errors.clear()


class Residuals:
    """Float32 residuals by module name. :class:`codec.torch.fsdp.passes.Pass` updates copies, and then replaces them.

    Parameters
    ----------
    decay : float
        Factor by which a residual is multiplied each time before it is added.
    """

    def __init__(self, decay: float = 1.0) -> None:
        self._decay = decay
        self._kept: dict[str, Values] = {}
        self._spare: dict[str, Values] = {}  # replaced residuals, whose memory the next copies reuse

    def copy(self, key: str, n: int, memory: Memory) -> Values:
        """Return a copy, times the decay, of the residual of a module that reduces `n` values; zeros for a new module.

        Raises
        ------
        ArgumentError
            The residual of the module has another number of values.
        """
        kept, spare = self._kept.get(key), self._spare.pop(key, None)
        if kept is None:
            return memory.zeros(n)
        if len(kept) != n:
            raise ArgumentError(
                f"module {key!r} reduces {n} values, but its residual has {len(kept)}, because parameters have no "
                "gradients or the sharding has changed: call set_reduce_scatter_unused_params(True), and load only "
                "states that were saved with the same sharding"
            )
        copy = memory.copy(kept, spare)
        if self._decay != 1:
            copy *= np.float32(self._decay)
        return copy

    def replace(self, copies: Mapping[str, Values]) -> None:
        """Replace residuals by `copies` that :meth:`copy` returned, after a reduction has succeeded."""
        self._spare |= {key: self._kept[key] for key in copies if key in self._kept}
        self._kept |= copies

    def norm(self) -> float:
        """Return the Euclidean norm over the residuals of all modules."""
        return math.sqrt(sum(square(x) for x in self._kept.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the residuals as tensors in host memory, by module name."""
        return {key: _compat.from_numpy(HOST.copy(x)) for key, x in self._kept.items()}

    def load(self, tensors: Any, keys: Collection[str]) -> None:
        """Replace the residuals by copies of `tensors`, a dict from some of `keys` to flat float32 tensors.

        Raises
        ------
        StateError
            `tensors` is no such dict, or a residual holds NaN or Inf. The residuals are unchanged.
        """
        if not isinstance(tensors, Mapping):
            raise StateError(f"residuals must be a dict from module names to tensors, got {type(tensors).__name__}")
        given = cast(Mapping[Any, Any], tensors)
        if unknown := [key for key in given if key not in keys]:
            raise StateError(f"the state has a residual of {unknown[0]!r}, but the registered modules are {list(keys)}")
        loaded = {key: array_of(f"the residual of {key!r}", x, "float32") for key, x in given.items()}
        for key, x in loaded.items():
            if not np.isfinite(x).all():
                raise StateError(f"the residual of {key!r} holds NaN or Inf")
        self._kept, self._spare = dict[str, Values](loaded), {}
