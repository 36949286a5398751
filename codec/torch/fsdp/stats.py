"""Statistics of the FSDP2 collectives."""

import math
from dataclasses import dataclass

from codec.readable import count, duration, share
from codec.torch.transport.counters import Counters


@dataclass(repr=False)
class FsdpStats(Counters):
    """Totals of a :class:`ReduceScatter`, :class:`AllGather` or :class:`AllReduce`, over all modules that use it.

    It has the attributes of :class:`Counters` and the attributes below. Collectives of dtypes that codecs do not
    support count as `raw_collectives`; their bytes and seconds are not measured.

    Attributes
    ----------
    uncompressed_nbytes : int
        Bytes that this rank would have sent in the same collectives without compression.
    residual_norm : float
        Euclidean norm of this rank's residuals; 0.0 without error feedback.

    Examples
    --------
    >>> codec.torch.FsdpAllGather().stats().sent_nbytes
    0
    """

    uncompressed_nbytes: int = 0
    residual_norm: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes sent, divided by the bytes without compression; nan before the first collective."""
        return self.sent_nbytes / self.uncompressed_nbytes if self.uncompressed_nbytes else math.nan

    def __str__(self) -> str:
        """Return one line: number of collectives, total bytes sent, and mean time on the wire per collective."""
        n = self.frame_collectives + self.raw_collectives
        wire = f", {duration(self.wire_s / n)} each on the wire" if n else ""
        return f"{count(n, 'collective')}: {share(self.sent_nbytes, self.uncompressed_nbytes)}{wire}"
