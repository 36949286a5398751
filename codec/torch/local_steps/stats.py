"""Statistics of LocalSteps: steps, synchronizations and traffic."""

from dataclasses import dataclass

from codec.readable import count, duration, share
from codec.torch.transport.counters import Counters


@dataclass(repr=False)
class LocalStats(Counters):
    """Statistics of :class:`LocalSteps` on this rank: the attributes of :class:`Counters`, and those below.

    Attributes
    ----------
    steps : int
        Number of optimizer steps, including those of the warm-up.
    synchronizations : int
        Number of synchronizations, of a fragment or of all parameters, that succeeded.
    failed_synchronizations : int
        Number of synchronizations that failed.
    blocked_s : float
        Seconds in which calls of the program have waited for synchronizations: all of them without `delay`, else those
        that did not fit into the steps of the delay.
    values : int
        Number of values of all synchronized parameters, divided by the number of ranks of this site that hold them.
    residual_norm : float
        Euclidean norm of this rank's residuals; 0 without error feedback.
    agreement : float
        Norm of the mean change in the last synchronization, divided by the mean of the norms of the ranks' changes: 1
        if all ranks have the same changes, and 1 / sqrt(N) if those of N ranks are unrelated. NaN before the first
        synchronization.
    world_size : int
        Number of ranks; of sites, if a site has several ranks.

    Examples
    --------
    >>> model = torch.nn.Linear(100, 100)
    >>> local = codec.torch.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> local.stats().values
    10100
    """

    steps: int = 0
    synchronizations: int = 0
    failed_synchronizations: int = 0
    blocked_s: float = 0.0
    values: int = 0
    residual_norm: float = 0.0
    agreement: float = float("nan")
    world_size: int = 1

    @property
    def ratio(self) -> float:
        """Bytes sent, divided by those of float32 all-reduces in all steps, 2 (N - 1) / N per value; NaN for none."""
        plain = self._uncompressed_nbytes
        return self.sent_nbytes / plain if plain else float("nan")

    @property
    def _uncompressed_nbytes(self) -> float:
        return 8 * self.values * self.steps * (self.world_size - 1) / self.world_size

    def __str__(self) -> str:
        """Return one line: steps, synchronizations, and bytes sent of those of float32 all-reduces in all steps."""
        failed = f", {self.failed_synchronizations} failed" if self.failed_synchronizations else ""
        done = f"{count(self.steps, 'step')}, {count(self.synchronizations, 'synchronization')}{failed}"
        sent = share(self.sent_nbytes, self._uncompressed_nbytes)
        wire = f", {duration(self.wire_s / self.synchronizations)} a synchronization on the wire"
        return f"{done}: {sent}{wire if self.synchronizations else ''}"
