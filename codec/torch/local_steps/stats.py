"""Statistics of LocalSteps: steps, synchronizations and traffic."""

from dataclasses import dataclass

from codec.torch.transport.counters import Counters


@dataclass
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
    values : int
        Number of values of all synchronized parameters.
    residual_norm : float
        Euclidean norm of this rank's residuals; 0 without error feedback.
    world_size : int
        Number of ranks.

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
    values: int = 0
    residual_norm: float = 0.0
    world_size: int = 1

    @property
    def ratio(self) -> float:
        """Bytes sent, divided by those of float32 all-reduces in all steps, 2 (N - 1) / N per value; NaN for none."""
        plain = 8 * self.values * self.steps * (self.world_size - 1) / self.world_size
        return self.sent_nbytes / plain if plain else float("nan")
