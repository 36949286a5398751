"""Figures of what hooks and groups have sent, and how long it took."""

from dataclasses import dataclass, field

from codec.specs import Spec
from codec.torch.counters import Counters


@dataclass(frozen=True)
class ParameterStats:
    """A parameter of a model whose gradients go through a hook.

    Attributes
    ----------
    spec : Spec
        How its gradient was encoded in the last step.
    n : int
        Number of values.
    residual_norm : float
        Norm of this rank's residual.
    residual_ratio : float
        That norm over the norm of the gradient, as last measured; 0 without error feedback.
    """

    spec: Spec
    n: int
    residual_norm: float
    residual_ratio: float


@dataclass
class Stats:
    """Figures of a hook on this rank.

    Attributes
    ----------
    steps : int
        Steps that succeeded on all ranks.
    refused : int
        Steps that failed.
    buckets : int
        Buckets that were reduced.
    raw_buckets : int
        Those of which some values were sent uncompressed, since that was faster.
    raw_nbytes : int
        Size of the gradients in bytes.
    sent_nbytes, received_nbytes : int
        Bytes of frames and of uncompressed values, to and from all other ranks together.
    encode_s, wire_s, decode_s : float
        Seconds spent encoding; sending and waiting for other ranks; decoding, summing and storing_results results.
    residual_ratio : float
        Largest norm of a parameter's residual over that of its gradient, measured every 8 steps. Trainings that
        converge stay below 15.
    world_size : int
        Number of ranks.
    parameters : dict of str to ParameterStats
        By name; only from ``stats(by_parameter=True)``.
    """

    steps: int = 0
    refused: int = 0
    buckets: int = 0
    raw_buckets: int = 0
    raw_nbytes: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    residual_ratio: float = 0.0
    world_size: int = 1
    parameters: dict[str, ParameterStats] = field(default_factory=dict[str, ParameterStats])

    @property
    def ratio(self) -> float:
        """Bytes sent over those of an uncompressed all-reduce, which sends 2 (N - 1) / N of a tensor; nan if none."""
        plain = self.raw_nbytes * 2 * (self.world_size - 1) / self.world_size
        return self.sent_nbytes / plain if plain else float("nan")

    def add(self, counters: Counters) -> None:
        """Add the traffic of a bucket."""
        for name in ("raw_nbytes", "sent_nbytes", "received_nbytes", "encode_s", "wire_s", "decode_s"):
            setattr(self, name, getattr(self, name) + getattr(counters, name))
        self.buckets += 1
        self.raw_buckets += bool(counters.raw_collectives)
