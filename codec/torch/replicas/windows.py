"""Windows: the parts of a tensor that each rank of a site sends to other sites, if several ranks have equal values."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from codec.stateful.ranges import Layout, cut
from codec.tensors.segments import Segments, pack, unpack
from codec.torch.network.inbox import Receive
from codec.torch.network.version import hash64
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.partition import Piece, windows
from codec.torch.transport.collective import Collective, CollectivePart
from codec.torch.transport.levels import Members


class Region(NamedTuple):
    """Values [begin, end) of a flat tensor that are equal on some ranks of a site."""

    begin: int
    end: int
    holders: Members
    checksum: int = 0  # of the values that must be equal


def windows_of(regions: Sequence[Region], segments: Segments) -> list[list[Piece]]:
    """Return, by region, the window of each holder, for float32 values with segments at some offsets."""
    found: list[list[Piece]] = []
    for begin, end, holders, _ in regions:
        inside = [(offset - begin, shape) for offset, shape in segments if begin <= offset < end]
        some = windows(end - begin, holders.size, 4, pack(inside) if inside else None)
        found.append([Piece(begin + a, begin + b, records) for a, b, records in some])
    return found


class Windows:
    """Windows of a tensor, one of each region for each rank that holds it. Windows of a region never change.

    Parameters
    ----------
    collective : Collective
        Collective that reduces the tensor between sites.
    whole : Reduction
        The tensor, without residuals.
    regions : sequence of Region
        Regions that cover the tensor, in this order.
    """

    def __init__(self, collective: Collective, whole: Reduction, regions: Sequence[Region]) -> None:
        self._collective, self._whole, self._regions = collective, whole, regions
        self._flat = collective.levels.flat
        if self._flat:
            return
        self._on_host = r = whole.on_host()
        self._out = collective.arena.result_buffer(r.n, r.x.dtype)
        self._windows = windows_of(regions, unpack(r.segments) if r.segments else [])
        self._mine = [each[region.holders.rank] for each, region in zip(self._windows, regions, strict=True)]

    def layout(self, layout: Layout) -> Layout:
        """Return the ranges of parameters in this rank's windows, from those of the tensor."""
        return layout if self._flat else tuple(r for piece in self._mine for r in cut(layout, piece.begin, piece.end))

    def narrowed(self) -> Reduction:
        """Return the reduction of this rank's windows between sites."""
        if self._flat:
            return self._whole
        r, n = self._on_host, 0
        inside: Segments = []
        for piece in self._mine:
            inside += [(n + offset, shape) for offset, shape in (unpack(piece.segments) if piece.segments else [])]
            n += piece.n
        if len(self._mine) == 1:
            [(begin, end, _)] = self._mine
            x, out = r.x[begin:end], self._out[begin:end]
        else:
            x, out = np.concatenate([r.x[begin:end] for begin, end, _ in self._mine]), np.empty(n, r.x.dtype)
        return r.narrowed(Piece(0, n, pack(inside) if inside else None), x, out, 1)

    async def gather(self, result: Values) -> Values:
        """Return the whole tensor, of which `result` has this rank's windows.

        Ranks whose values of a region differ raise PeerError.
        """
        if self._flat:
            return result
        out, at, incoming = self._out, 0, list[tuple[CollectivePart, int, Values, Receive]]()
        parts = [self._part(region) for region in self._regions]
        for part, found, mine in zip(parts, self._windows, self._mine, strict=True):
            place = out[mine.begin : mine.end]
            if len(parts) > 1:
                place[:] = result[at : at + mine.n]
            elif place.ctypes.data != result.ctypes.data:
                place[:] = result
            at += mine.n
            for o in part.others:
                if found[o].n:
                    theirs = out[found[o].begin : found[o].end]
                    incoming.append((part, o, theirs, part.receive_values(theirs, o)))
                if mine.n:
                    part.send_values(place, o)
        for part, o, place, receive in incoming:
            await part.frame(receive)
            self._whole.check_values(part, o, place)
        for part in parts:
            await part.sent()
        return self._whole.from_host(out)

    def _part(self, region: Region) -> CollectivePart:
        fields = {
            "collective": "gather of windows within a site",
            "values": str(region.end - region.begin),
            "checksum of values that must be equal on all ranks of a site": f"{region.checksum & (1 << 64) - 1:x}",
        }
        return self._collective.part(hash64(*fields.items()), fields, region.holders)
