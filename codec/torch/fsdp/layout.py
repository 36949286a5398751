"""Layout of the flat tensors that FSDP2 passes to collectives.

FSDP2 splits each parameter of a module into shards of equal size, one per rank, padded with zeros. It concatenates a
rank's shards of all parameters to a flat tensor, which has no shapes. So this module reads the shapes from the FSDP2
module.
"""

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

from codec.tensors.segments import Records, pack, segments
from codec.torch._compat import fsdp_shards

Shapes = tuple[tuple[int, ...], ...]


def gradient_segments(module: Any, n: int, size: int) -> Records | None:
    """Return the shards in a flat tensor of gradients as segments, each with its offset and shape.

    Parameters
    ----------
    module : FSDPModule or None
        Module of the gradients; None if it is not known.
    n : int
        Number of values in the flat tensor.
    size : int
        Number of ranks whose shards are in the tensor, one rank after another.

    Returns
    -------
    Records or None
        None if the shapes do not add up to `n`: a parameter got no gradient in this pass, or the shapes are not known.
    """
    return _segments([shape for shape, trained in fsdp_shards(module) if trained], n, size)


def parameter_segments(module: Any, n: int) -> Records | None:
    """Return a rank's shards of all parameters, including frozen ones, as segments of a flat tensor of `n` values.

    Return None if the shapes do not add up to `n`.
    """
    return _segments([shape for shape, _ in fsdp_shards(module)], n, 1)


def _segments(shapes: Sequence[tuple[int, ...]], n: int, size: int) -> Records | None:
    return _repeated(tuple(shapes), size) if shapes and size * sum(map(prod, shapes)) == n else None


@functools.lru_cache(256)  # one entry per module and group size
def _repeated(shapes: Shapes, size: int) -> Records:
    """Return the segments of a tensor that contains shards of these shapes for each of `size` ranks."""
    part, n = segments(shapes), sum(map(prod, shapes))
    return pack([(rank * n + offset, shape) for rank in range(size) for offset, shape in part])
