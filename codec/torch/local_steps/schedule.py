"""Schedule of synchronizations: rounds of some steps, in each of which each fragment is synchronized once."""

from codec import ArgumentError
from codec.arguments import shown, whole
from codec.torch.local_steps.settings import MOST_STEPS, LocalSettings


class Schedule:
    """Current round of LocalSteps, equal on all ranks.

    Parameters
    ----------
    settings : LocalSettings
        Arguments of LocalSteps.

    Attributes
    ----------
    start : int
        Step after which the round began.
    length : int
        Number of steps of the round; 0: not known yet, because the warm-up has not ended.
    """

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self.start = settings.warmup
        self.length = 0 if settings.warmup and callable(settings.every) else self.following(settings.warmup)

    def begin(self) -> None:
        """Begin the first round, after the warm-up."""
        self.length = self.following(self.start)

    def due(self, step: int) -> list[int]:
        """Return the indices of the fragments whose synchronization starts after step `step`; the first step is 1.

        If an error has prevented the last synchronization of a round, the next round is as long.
        """
        self._catch_up(step - 1)
        count = self._settings.fragments
        return [f for f in range(count) if step == self.start + self.length * (f + 1) // count]

    def ends(self, step: int) -> bool:
        """Return True if the round ends after step `step`."""
        return step == self.start + self.length

    def following(self, step: int) -> int:
        """Return the number of steps of a round that begins after step `step`.

        Raises
        ------
        ArgumentError
            The function ``every=`` has raised an error or returned an invalid number.
        """
        every, fragments, delay = self._settings.every, self._settings.fragments, self._settings.delay
        if not callable(every):
            return every
        try:
            found = every(step)
        except Exception as e:
            raise ArgumentError(f"every({step}) raised {type(e).__name__}: {shown(e)}") from e
        return whole(f"every({step})", found, max(fragments * delay, fragments), MOST_STEPS)

    def advance(self, length: int) -> None:
        """Begin the next round, of `length` steps."""
        self.start, self.length = self.start + self.length, length

    def load(self, start: int, length: int, steps: int) -> None:
        """Continue a round of a state that was saved after `steps` steps. A number ``every=`` replaces its length."""
        every = self._settings.every
        self.start, self.length = start, length if callable(every) else every
        self._catch_up(steps)

    def _catch_up(self, steps: int) -> None:
        while self.length and self.start + self.length <= steps:
            self.start += self.length
