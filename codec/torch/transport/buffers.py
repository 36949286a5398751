"""Memory on the host that collectives take and give back, so that they need not touch new pages each time."""

from codec.torch.transport.messages import Array
from codec.torch.transport.streams import host_memory

_MOST = 128  # buffers that are kept
_WASTE = 4  # a buffer is used for at least this fraction of its bytes, as 1 / _WASTE, unless it is small
_SMALL = 1 << 16  # bytes


class Buffers:
    """Free buffers of a channel. Only the thread that runs the collectives uses them."""

    def __init__(self) -> None:
        self._free: list[tuple[Array, bool]] = []  # buffer, pinned; the last ones given back come last

    def take(self, nbytes: int, *, pinned: bool = False) -> Array:
        """Return an array of at least `nbytes` bytes; `pinned`: page-locked."""
        fits = [
            i
            for i, (each, kind) in enumerate(self._free)
            if kind == pinned and nbytes <= each.nbytes <= max(_SMALL, _WASTE * nbytes)
        ]
        if fits:
            return self._free.pop(min(fits, key=lambda i: self._free[i][0].nbytes))[0]
        return host_memory(max(nbytes, 1), pinned=pinned)

    def give(self, buffer: Array, *, pinned: bool = False) -> None:
        """Give back what :meth:`take` returned; nobody may use it any more."""
        self._free.append((buffer, pinned))
        if len(self._free) > _MOST:
            del self._free[0]
