"""Layout of the flat tensors that FSDP2 passes to collectives.

FSDP2 cuts each parameter of a module into equal shards, one for each rank, filled up with zeros. The part of a rank is
its shards of all parameters, one behind another. The interface of FSDP2's collectives passes flat tensors without
shapes, so the shapes are read from the module.
"""

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

from codec.tensors.segments import Records, pack, segments
from codec.torch._compat import fsdp_shards

Shapes = tuple[tuple[int, ...], ...]


def gradient_segments(module: Any, n: int, size: int) -> Records | None:
    """Return the shards of a module's parameters as segments of a flat tensor with `size` gradients of shards.

    Parameters
    ----------
    module : FSDPModule or None
        The module; None: not known.
    n : int
        Number of values of the flat tensor.
    size : int
        Number of ranks whose parts the tensor has.

    Returns
    -------
    Records or None
        None if the shards do not fill the tensor: a parameter got no gradient in this pass, or this torch does not tell
        the shapes.
    """
    return _segments([shape for shape, trained in fsdp_shards(module) if trained], n, size)


def parameter_segments(module: Any, n: int) -> Records | None:
    """Return the shards of a module's parameters, also of frozen ones, as segments of a rank's part of `n` values."""
    return _segments([shape for shape, _ in fsdp_shards(module)], n, 1)


def _segments(shapes: Sequence[tuple[int, ...]], n: int, size: int) -> Records | None:
    return _repeated(tuple(shapes), size) if shapes and size * sum(map(prod, shapes)) == n else None


@functools.lru_cache(256)  # a training has few modules
def _repeated(shapes: Shapes, size: int) -> Records:
    """Return the segments of the parts of `size` ranks, one part behind another."""
    part, n = segments(shapes), sum(map(prod, shapes))
    return pack([(rank * n + offset, shape) for rank in range(size) for offset, shape in part])
