"""Statistics of DDP hooks: steps, traffic and residuals."""

from dataclasses import dataclass, field

from codec.advisor.cost_model import LinkModel
from codec.readable import Rounded, count, duration, share
from codec.specs import Spec
from codec.torch.transport.counters import Counters


@dataclass(frozen=True, repr=False)
class ParameterStats(Rounded):
    """Statistics of one parameter of a hook's model.

    Attributes
    ----------
    spec : Spec
        Codec of the parameter's gradient in the last step.
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
class HookStats(Counters):
    """Statistics of a hook on this rank: the attributes of :class:`Counters`, and those below.

    Attributes
    ----------
    steps : int
        Steps that succeeded on all ranks.
    failed_steps : int
        Steps that failed.
    buckets : int
        Number of buckets that were reduced, including small ones that were reduced together. `frame_collectives` and
        `raw_collectives` count buckets, too; the latter those that were sent uncompressed, at least in part.
    residual_ratio : float
        Largest ratio, over all parameters, of the norm of the residual to the norm of the gradient, measured every 8
        steps. Runs that converge stay below 15.
    uncompressed_nbytes : int
        Bytes of `raw_nbytes` in buckets that were sent uncompressed, at least in part, because that was faster or
        because their dtype is float64.
    contents : dict of str to int
        Bytes of the gradients of the last step, keyed by the spec and why it was chosen, such as ``"Quantize()"`` or
        ``"Lossless() (small)"``. Reasons are: policy, small, embedding, mostly zero, dtype, start_step and first step.
        For ``ddp_hook("auto")`` there is also the reason error: with the hook's spec, the relative error of the
        gradient would exceed the limit.
    choices : dict of str to int
        Number of steps with each spec that ``ddp_hook("auto")`` has chosen, such as ``{"raw": 10, "Quantize()": 90}``;
        "raw" is uncompressed. Empty for hooks without "auto".
    link : LinkModel or None
        Slowest link of any rank, as ``ddp_hook("auto")`` last measured it, or the link that the user stated. Its rate
        is infinite if it is too high to be measured. None for hooks without "auto".
    world_size : int
        Number of ranks.
    levels : str
        Ranks over which gradients are averaged, such as ``"8 ranks"``, or ``"2 x 4 ranks"`` for two machines of four.
        In two levels, `local_nbytes` are the bytes that this rank has sent within its machine.
    advice : str
        Line to write if torchrun has started several ranks on each machine, but the hook has no two levels; else "".
    buffer_nbytes : int
        Bytes of host memory that the group keeps for messages, results and sums: at most twice the peak use of its
        collectives in flight. The memory is page-locked for tensors on GPUs.
    scratch_nbytes : int
        Peak bytes of GPU memory that the CUDA engine has allocated to encode and decode for the group, in addition to
        tensors and frames. A call allocates at most 300 MB for its running warps, 8 bytes per value of a bucket with
        error feedback, and 1 byte per value for the levels that :class:`codec.Truncate` computes from the optimizer. It
        releases all of this when its kernels are launched. Each piece of a bucket (a chunk of one rank) also keeps less
        than 1 MB until the host has read the error flags of its kernels, at the end of the step. 0 for tensors in host
        memory.
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
    levels: str = "1 rank"
    advice: str = ""
    buffer_nbytes: int = 0
    scratch_nbytes: int = 0
    parameters: dict[str, ParameterStats] = field(default_factory=dict[str, ParameterStats])
    choices: dict[str, int] = field(default_factory=dict[str, int])
    link: LinkModel | None = None

    @property
    def ratio(self) -> float:
        """Bytes sent, divided by those of uncompressed all-reduces, 2 (N - 1) / N of all tensors; NaN if none."""
        plain = self._uncompressed_nbytes
        return self.sent_nbytes / plain if plain else float("nan")

    @property
    def _uncompressed_nbytes(self) -> float:
        return self.raw_nbytes * 2 * (self.world_size - 1) / self.world_size

    def __str__(self) -> str:
        """Return one line with the number of steps, the bytes sent, and the time on the wire per step."""
        wire = f", {duration(self.wire_s / self.steps)} a step on the wire" if self.steps else ""
        failed = f", {self.failed_steps} failed" if self.failed_steps else ""
        residual = f", residual {self.residual_ratio:.3g} times the gradient" if self.residual_ratio else ""
        sent = share(self.sent_nbytes, self._uncompressed_nbytes)
        return f"{count(self.steps, 'step')}: {sent}{wire}{residual}{failed}"

    def add_step(self, traffic: Counters, buckets: int) -> None:
        """Add the traffic of a step that has reduced `buckets` buckets."""
        self.add(traffic)
        self.buckets += buckets
        self.uncompressed_nbytes += traffic.raw_nbytes if traffic.raw_collectives else 0
