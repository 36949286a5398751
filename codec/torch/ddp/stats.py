"""Statistics of hooks: steps, traffic, residuals."""

from dataclasses import dataclass, field

from codec.advisor.cost_model import Link
from codec.readable import Rounded, count, duration, share
from codec.specs import Spec
from codec.torch.transport.counters import Counters


@dataclass(frozen=True, repr=False)
class ParameterStats(Rounded):
    """Statistics of one parameter of a hook's model.

    Attributes
    ----------
    spec : Spec
        Codec of its gradient in the last step.
    n : int
        Number of values.
    residual_norm : float
        Euclidean norm of this rank's residual; 0 without error feedback.
    residual_ratio : float
        Norm of the residual divided by the norm of the gradient, as last measured; 0 without error feedback.
    """

    spec: Spec
    n: int
    residual_norm: float
    residual_ratio: float

    def __str__(self) -> str:
        residual = f", residual {self.residual_ratio:.3g} times the gradient" if self.residual_ratio else ""
        return f"{count(self.n, 'value')} by {self.spec}{residual}"


@dataclass(repr=False)
class Stats(Counters):
    """Statistics of a hook on this rank: the attributes of :class:`Counters`, and these.

    Attributes
    ----------
    steps : int
        Steps that succeeded on all ranks.
    failed_steps : int
        Steps that failed.
    buckets : int
        Buckets that were reduced. `raw_collectives` of them were sent uncompressed, at least in part.
    residual_ratio : float
        Largest norm of a parameter's residual divided by the norm of its gradient, measured every 8 steps. Runs that
        converge stay below 15.
    uncompressed_nbytes : int
        Part of `raw_nbytes` in buckets that were sent uncompressed, at least in part: because that was faster, or
        because frames cannot carry them.
    contents : dict of str to int
        Bytes of the gradients of the last step by spec and reason, such as ``"Quantize()"`` or
        ``"Lossless() (small)"``. Reasons are: policy, small, embedding, mostly zero, dtype, start_step, first step,
        and for ``ddp_hook("auto")`` error: the spec of the hook would lose too much of the gradient.
    choices : dict of str to int
        Steps by spec that ``ddp_hook("auto")`` has chosen, such as ``{"raw": 10, "Quantize()": 90}``; "raw" is
        uncompressed. Empty for other hooks.
    link : Link or None
        Slowest link of a rank that ``ddp_hook("auto")`` has measured last, or was told; None for other hooks. Its rate
        is infinite if it is too high to be measured.
    world_size : int
        Number of ranks.
    buffer_nbytes : int
        Host memory that the group keeps for messages, results and sums: at most twice what its collectives in flight
        have used at once. Page-locked for tensors on GPUs.
    scratch_nbytes : int
        Most memory of the GPU, in bytes, that the CUDA engine has taken at once to encode and decode for the group,
        beside tensors and frames. A call takes at most 300 MB for the warps that run, 8 bytes for each value of a
        bucket with error feedback, and 1 for each value whose level an optimizer determines; all are released when its
        kernels are launched. Each piece of a bucket (a chunk of one rank) keeps less than 1 MB until the host has read
        its verdict, at the end of the step. 0 for tensors in host memory.
    parameters : dict of str to ParameterStats
        Statistics by parameter name; empty without ``stats(by_parameter=True)``.

    Examples
    --------
    >>> hook = codec.torch.ddp_hook(codec.Float8())
    >>> hook.stats().steps
    0
    """

    steps: int = 0
    failed_steps: int = 0
    buckets: int = 0
    residual_ratio: float = 0.0
    uncompressed_nbytes: int = 0
    contents: dict[str, int] = field(default_factory=dict[str, int])
    world_size: int = 1
    buffer_nbytes: int = 0
    scratch_nbytes: int = 0
    parameters: dict[str, ParameterStats] = field(default_factory=dict[str, ParameterStats])
    choices: dict[str, int] = field(default_factory=dict[str, int])
    link: Link | None = None

    @property
    def ratio(self) -> float:
        """Bytes sent divided by those of an uncompressed all-reduce, 2 (N - 1) / N of each tensor; nan if none."""
        plain = self._uncompressed_nbytes
        return self.sent_nbytes / plain if plain else float("nan")

    @property
    def _uncompressed_nbytes(self) -> float:
        return self.raw_nbytes * 2 * (self.world_size - 1) / self.world_size

    def __str__(self) -> str:
        """Return the steps, the bytes of all of them, and the time of one step on the wire, in a line."""
        wire = f", {duration(self.wire_s / self.steps)} a step on the wire" if self.steps else ""
        failed = f", {self.failed_steps} failed" if self.failed_steps else ""
        residual = f", residual {self.residual_ratio:.3g} times the gradient" if self.residual_ratio else ""
        sent = share(self.sent_nbytes, self._uncompressed_nbytes)
        return f"{count(self.steps, 'step')}: {sent}{wire}{residual}{failed}"

    def add_step(self, traffic: Counters, buckets: int) -> None:
        """Add the traffic of a step."""
        self.add(traffic)
        self.buckets += buckets
        self.uncompressed_nbytes += traffic.raw_nbytes if traffic.raw_collectives else 0
