"""Write values of whole tensors, or of boxes of them, from the shards of which weights consist."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE, UNSIGNED
from codec.errors import FrameError
from codec.weight_sync.updates.kinds import PIECE_NBYTES, Bytes, TensorKind
from codec.weight_sync.updates.shards import Box, Layout, Name, blocks, check_layouts, layouts
from codec.weight_sync.updates.update import Update

Decode = Callable[[Name, int, Bytes], None]  # function of (key, piece, out): write the values of a piece to `out`


class BoxTarget(NamedTuple):
    """Tensor that gets the values of a box of a tensor of weights."""

    kind: TensorKind
    box: Box
    tensor: Any
    memory: Bytes | None  # bytes of the tensor in host memory; None: the tensor is one of torch on a device

    def put(self, box: Box, values: Any) -> None:
        """Overwrite a box of this tensor with `values`, an array of bits."""
        if self.memory is not None:
            self.memory.view(UNSIGNED[self.kind.dtype]).reshape(self.kind.shape)[box.slices] = values
            return
        torch: Any = sys.modules["torch"]
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.tensor.detach()[box.slices].copy_(torch.from_numpy(flat).view(self.tensor.dtype).reshape(box.shape))


def write_target(
    target: BoxTarget,
    layout: Layout,
    kinds: Mapping[Name, TensorKind],
    decode: Decode,
    wanted: Callable[[Name, int], bool] = lambda _, __: True,
) -> None:
    """Write values of shards to `target`, piece by piece.

    Parameters
    ----------
    target : BoxTarget
        Tensor to overwrite.
    layout : Layout
        Shards of the tensor.
    kinds : mapping of names to TensorKind
        Kinds of the shards.
    decode : callable
        Function that returns the values of a piece of a shard.
    wanted : callable
        Function of the key of a shard and the number of a piece that returns True if the piece is to be written.
    """
    scratch = np.empty(0, np.uint8)
    for key, box in layout.boxes.items():
        if not box.common(target.box).size:
            continue
        for k, (begin, end) in enumerate(kinds[key].spans):
            if not wanted(key, k):
                continue
            if box == target.box and target.memory is not None:
                decode(key, k, target.memory[begin:end])
                continue
            copies = _copies(box, begin // ITEMSIZE[target.kind.dtype], end // ITEMSIZE[target.kind.dtype], target.box)
            if copies:
                if len(scratch) < end - begin:
                    scratch = np.empty(min(kinds[key].nbytes, PIECE_NBYTES), np.uint8)
                decode(key, k, scratch[: end - begin])
                values = scratch[: end - begin].view(UNSIGNED[target.kind.dtype])
                for copy in copies:
                    block = values[copy.at : copy.at + copy.block.size].reshape(copy.block.shape)
                    source = copy.common.seen_from(copy.block.offsets)
                    target.put(copy.common.seen_from(target.box.offsets), block[source.slices])


class _Copy(NamedTuple):
    at: int  # index of the block's first value in the piece
    block: Box  # consecutive values of the piece, as a box of the tensor
    common: Box  # values of the block that the target has


def _copies(shard: Box, begin: int, end: int, target: Box) -> list[_Copy]:
    """Return the copies from the values `begin` to `end` of a shard to a target."""
    found: list[_Copy] = []
    at = 0
    for inner in blocks(shard.shape, begin, end):
        block = Box(tuple(a + b for a, b in zip(inner.offsets, shard.offsets, strict=True)), inner.shape)
        if (common := block.common(target)).size:
            found.append(_Copy(at, block, common))
        at += block.size
    return found


def check_cover(update: Update) -> None:
    """Raise FrameError if the shards of a snapshot have values in common, or do not cover a tensor."""
    try:
        check_layouts(layouts({key: kind.shape for key, kind in update.kinds.items()}))
    except ValueError as e:
        raise FrameError(f"the update is invalid: {e}") from None
