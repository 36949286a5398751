"""Values as they are instead of frames: where a link is so fast that encoding would take longer than sending."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from codec.torch.channel import Array, Channel
from codec.torch.reduction import FLOATS, Reduction, floats, refused
from codec.torch.slices import cut


def two_shot(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Two-shot with the values themselves. Lossless frames would give the same bits."""
    size, me = channel.size, channel.rank
    # as for frames: what is owed to sums is owed to those of this rank's slice
    slices = cut(r.x.size, size, r.x.itemsize, r.segments)
    others = channel.others
    chunks = range(len(slices[me]))
    result = r.result(channel, r.x.size)
    channel.begin(Channel.room_for([piece.n * r.x.itemsize for piece in slices[me] for _ in range(size)]))

    def receive(place: Array, source: int) -> Callable[[], Array]:
        # no closure: an error's frame would keep it, and with it the connection, whose other end waits
        return partial(_there, channel, channel.post("recv", place.view(np.uint8), source), source, place)

    def room(n: int) -> Array:
        return channel.take(n * r.x.itemsize)[: n * r.x.itemsize].view(r.x.dtype)

    firsts = [{o: receive(room(piece.n), o) for o in others} for piece in slices[me]]
    seconds = [{o: receive(result[slices[o][c].begin : slices[o][c].end], o) for o in others} for c in chunks]
    x = r.x
    if r.residual is not None:
        x = np.empty_like(x)
        _settle(floats(r.x, r), r, r.residual, x)
    error = refused(r, x)
    for c in chunks:
        for o in others:
            channel.send_values(x[slices[o][c].begin : slices[o][c].end], o)
    for c, piece in enumerate(slices[me]):
        parts = {o: there() for o, there in firsts[c].items()} | {me: x[piece.begin : piece.end]}
        total = result[piece.begin : piece.end]
        residual = None if r.sums_residual is None else r.sums_residual(piece.begin, piece.end)
        _settle(_add_up([parts[rank] for rank in range(size)], r, total), r, residual, total)
        fault = refused(r, total)
        if fault is not None and not any(refused(r, part) for part in parts.values()):  # whose rank says so itself
            error = error or fault
        for o in others:
            channel.send_values(total, o)
    for there in [there for each in seconds for there in each.values()]:
        there()
    channel.finish()
    return result, error


def _there(channel: Channel, work: Any, source: int, place: Array) -> Array:
    channel.wait(work, source)
    return place


def _add_up(parts: Sequence[Array], r: Reduction, total: Array) -> Array:
    """Sum, mean or maximum as codec.reduce has it, in float32; in `total` if that is its dtype."""
    dtype = FLOATS[r.dtype]
    tensors = [torch.from_numpy(part).view(dtype) for part in parts]
    add = torch.maximum if r.op == "max" else torch.add
    if r.dtype == "float32":
        out = torch.from_numpy(total)
        add(tensors[0], tensors[1], out=out)
    else:
        out = add(tensors[0].float(), tensors[1].float())
    for t in tensors[2:]:
        add(out, t.float(), out=out)
    if r.op == "mean":
        out /= len(parts)
    return total if r.dtype == "float32" else out.numpy()


def _settle(values: Array, r: Reduction, residual: Array | None, place: Array) -> None:
    """Put float32 values into `place`, in the dtype of x, with what is owed to them; the residual gets what is lost.

    As encoders have it: what is finite stays so, at most the largest number; what is not is owed nothing.
    """
    rounded = r.rounded(values)
    if residual is None:
        if values is not place:
            place[:] = rounded
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if r.dtype == "float32":
            np.add(values, residual, out=place)
            residual[:] = 0
            return
        seen = floats(rounded, r)
        owed = np.where(np.isinf(seen), seen, values) + residual
        finite, most = np.isfinite(owed), torch.finfo(FLOATS[r.dtype]).max
        place[:] = r.rounded(np.where(finite, np.clip(owed, -most, most), owed))
        residual[:] = np.where(finite, owed - floats(place, r), 0)
