"""Statistics of Rounds."""

from dataclasses import dataclass

from codec.readable import Rounded, count, duration, size


@dataclass(repr=False)
class RoundStats(Rounded):
    """Statistics of :class:`Rounds` on this site, since the object was created.

    Attributes
    ----------
    steps : int
        Number of optimizer steps.
    merged_steps : int
        Number of these steps whose changes were merged.
    rounds : int
        Number of rounds that were merged, those of the run before this site joined included.
    sites : int
        Number of sites whose changes the last round has merged.
    late_changes : int
        Number of changes of this site that a later round than their own has merged.
    dropped_changes : int
        Number of changes of this site that came too late for any round, and that its next change contained.
    sent_nbytes, received_nbytes : int
        Bytes of objects that were written to the store, and read.
    wait_s : float
        Seconds in which this site has waited for other sites, including the time of the store.
    grace_s : float
        Seconds for which a round with a quorum waits for other sites now.
    agreement : float
        Norm of the mean change in the last round, divided by the mean of the norms of the sites' changes: 1 if all
        sites have the same changes, and 1 / sqrt(N) if those of N sites are unrelated. NaN before the first round.
    """

    steps: int = 0
    merged_steps: int = 0
    rounds: int = 0
    sites: int = 0
    late_changes: int = 0
    dropped_changes: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    wait_s: float = 0.0
    grace_s: float = 0.0
    agreement: float = float("nan")

    def __str__(self) -> str:
        """Return one line: steps, rounds, sites, bytes and the time of waiting."""
        merged = f"{count(self.steps, 'step')}, {self.merged_steps} of them merged; {count(self.rounds, 'round')}"
        traffic = f"{size(self.sent_nbytes)} sent, {size(self.received_nbytes)} received"
        return f"{merged}, {count(self.sites, 'site')} in the last one: {traffic}, {duration(self.wait_s)} waited"
