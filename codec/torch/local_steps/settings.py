"""Arguments of LocalSteps: checks and defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from codec import ArgumentError, CallOptions, SpecError
from codec._c.traits import is_lossless
from codec.arguments import shown, whole
from codec.specs import Lossless, Spec, TopK, Truncate, require_feedback
from codec.torch.feedback.feedback import Feedback
from codec.torch.reduction.arguments import plain_spec

MOST_STEPS = 1 << 40

Every = int | Callable[[int], int]


@dataclass(frozen=True)
class LocalSettings:
    """Checked arguments of :class:`LocalSteps`, which documents them."""

    every: Every
    spec: Spec  # codec of parameter changes
    decay: float  # factor by which residuals are multiplied each time before they are added
    # Algorithm for the changes, as in :class:`MeanTerm`: "senders" for TopK, unless the options name an algorithm. A
    # mean over all ranks would divide a change that one rank has sent by the number of ranks, and two-shot would encode
    # the sums of sparse frames, which are less sparse.
    algorithm: str
    warmup: int
    warmup_spec: Spec  # codec of the gradients in the warm-up
    fragments: int
    delay: int

    @classmethod
    def of(
        cls, every: Any, spec: Any, warmup: Any, fragments: Any, delay: Any, options: CallOptions
    ) -> "LocalSettings":
        """Check the arguments of :class:`LocalSteps`; `options` are the settings of its collectives.

        Raises
        ------
        ArgumentError, SpecError
            An argument has a wrong type or value.
        """
        if not callable(every):
            every = whole("every", every, 1, MOST_STEPS)
        most = MOST_STEPS if callable(every) else every
        fragments = whole("fragments", fragments, 1, most)
        steps, warmup_spec = _parsed_warmup(warmup)
        # The upper bound ensures that only one synchronization is in flight at a time.
        delay = whole("delay", delay, 0, most // fragments)
        decay = spec.decay if isinstance(spec, Feedback) else 1.0
        plain = _checked(plain_spec(spec.spec if isinstance(spec, Feedback) else spec), "spec")
        if not plain.contraction:
            require_feedback(plain, 'use rounding="nearest"')
        require_feedback(warmup_spec, "use another codec in the warm-up")
        algorithm = "senders" if isinstance(plain, TopK) and options.algorithm in (None, "auto") else ""
        return cls(cast(Every, every), plain, decay, algorithm, steps, warmup_spec, fragments, delay)

    @property
    def has_feedback(self) -> bool:
        """True if error feedback is applied: the codec is lossy, and a contraction."""
        return not is_lossless(self.spec) and self.spec.contraction

    @property
    def is_joint(self) -> bool:
        """True if each scheduled synchronization covers all parameters, and ends in the step in which it starts."""
        return self.fragments == 1 and self.delay == 0


def _parsed_warmup(warmup: Any) -> tuple[int, Spec]:
    """Return the number of steps and the codec that the argument ``warmup=`` stands for."""
    if not isinstance(warmup, tuple):
        return whole("warmup", warmup, 0, MOST_STEPS), Lossless()
    pair = cast(tuple[Any, ...], warmup)
    if len(pair) != 2:
        raise ArgumentError(f"warmup must be a number of steps, or a pair (steps, spec), got {shown(pair)}")
    return whole("steps of warmup", pair[0], 0, MOST_STEPS), _checked(plain_spec(pair[1]), "warmup")


def _checked(spec: Spec, name: str) -> Spec:
    """Return a spec; raise SpecError if its frames need the state of an optimizer."""
    if isinstance(spec, Truncate) and spec.fixed_level is None:
        raise SpecError(f"{name}={spec} needs the state of an optimizer in every step: use Quantize(4) or Lossless()")
    return spec
