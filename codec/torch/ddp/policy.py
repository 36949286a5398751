"""Choose, in every step, the spec and the error feedback of each parameter of a model."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from codec import ArgumentError
from codec._c.traits import is_lossless
from codec.advisor.advise import named
from codec.advisor.model_rules import UNEVEN, needs_even_rows, small_of, uneven_of
from codec.arguments import shown, whole
from codec.specs import Lossless, Sign, Spec, TopK, Truncate, require_feedback
from codec.stateful.ranges import NOBODY
from codec.torch.auto.gradients import GradientChoice
from codec.torch.ddp.buckets import BucketPart, n_values
from codec.torch.reduction.arguments import plain_spec

Chooser = Callable[[str, torch.nn.Parameter], Spec | str | None]  # function of a parameter's name and the parameter
logger = logging.getLogger("codec.torch")

Choice = tuple[Spec, bool]  # spec; True if error feedback is applied

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_MOSTLY = 0.5  # share of zeros above which a gradient counts as mostly zero
_MUCH = 0.3  # share of the gradients' bytes, sent lossless or uncompressed, above which a warning is logged
_PATIENCE = 8  # maximum steps by which logging the specs is delayed while some gradients are still zero everywhere

# Reasons why a gradient is not sent with the hook's spec. `Stats.contents` shows them.
START, MEASURED, UNKNOWN = "start_step", "first step", "gradient is zero so far"
CHOSEN, SMALL, EMBEDDING, ZEROS, DTYPE = "policy", "small", "embedding", "mostly zero", "dtype"
LIMITED = "error"  # the relative error of this parameter's gradient would exceed the limit of "auto"
_UNMEASURED = frozenset({START, MEASURED, UNKNOWN})


@dataclass(frozen=True)
class Policy:
    """Choice of the spec of each parameter: exceptions by name, rules for small and uneven parameters, and a warm-up.

    A parameter for which `choose` returns a spec is encoded with that spec. The rules apply to all other parameters.

    Parameters
    ----------
    choose : callable, optional
        choose(name, parameter) returns a spec, the name of a preset, or None to let the rules decide. It is called for
        each parameter in every step, and must return the same on all ranks. Names do not contain the components that
        wrappers such as torch.compile add. Default: the rules decide for all parameters.
    lossless_small : bool
        Send norms and biases lossless if together they hold at most 1/32 of the values that the model trains. Also send
        matrices of fewer than 4,096 values lossless, if together with the norms and biases they hold at most 1/32.
        Low-rank adapters exceed this share, and are encoded.
    uneven : Spec, str or None
        Spec, or name of a preset, for parameters whose rows have gradients of very different magnitudes. It applies if
        the hook's spec is :class:`codec.Sign` or :class:`codec.Ternary`, whose groups of values share one magnitude.
        Such parameters are the weights of ``nn.Embedding`` and ``nn.EmbeddingBag``; the output head over the same
        vocabulary, which is the last ``nn.Linear`` with as many outputs as an embedding has entries; and parameters
        whose first nonzero mean gradient had zeros in more than half of its values. To measure these zeros, the hook
        sends all gradients of the first step lossless. None: use the hook's spec. Default: ``Quantize(4)``.
    start_step : int
        Number of initial steps that send all gradients lossless, as a warm-up.

    Examples
    --------
    Send one layer lossless, and let the rules decide for the others:

    >>> policy = codec.torch.Policy(lambda name, p: codec.Lossless() if name == "head.weight" else None)
    >>> hook = codec.torch.ddp_hook("small", policy=policy)

    ``policy=`` also accepts the function itself, without a Policy. Encode all parameters with the hook's spec, biases
    and embeddings included:

    >>> hook = codec.torch.ddp_hook("smallest", policy=codec.torch.Policy(lossless_small=False, uneven=None))
    """

    choose: Chooser | None = None
    lossless_small: bool = True
    uneven: Spec | str | None = UNEVEN
    start_step: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_step", whole("start_step", self.start_step, 0, 1 << 40))
        if self.uneven is not None:
            object.__setattr__(self, "uneven", plain_spec(self.uneven))

    def __call__(self, name: str, parameter: torch.nn.Parameter) -> Spec | None:
        """Return the spec that `choose` returns for a parameter, or None if the rules decide.

        Raises
        ------
        SpecError, ArgumentError
            `choose` returned neither a spec nor a preset nor None.
        """
        chosen = None if self.choose is None else self.choose(name, parameter)
        return None if chosen is None else plain_spec(chosen)


default_policy = Policy()


def policy_of(given: Any, default: Policy = default_policy) -> Policy:
    """Return the policy that a caller passed: a Policy, or a function, which replaces `choose` of `default`.

    Raises
    ------
    ArgumentError
        `given` is neither a Policy nor callable.
    """
    if isinstance(given, Policy):
        return given
    if not callable(given):
        raise ArgumentError(
            f"policy must be a codec.torch.Policy or a function of name and parameter, got {shown(given)}"
        )
    return replace(default, choose=given)


def names_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.nn.Parameter, str]:
    """Return the names of parameters, without the components that torch.compile, checkpoint, FSDP and DDP add.

    If two names would become equal, all names are returned unchanged.
    """
    kept = {cast(torch.nn.Parameter, p): name for name, p in named}
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in kept.values()]
    return dict(zip(kept, plain, strict=True)) if len(set(plain)) == len(plain) else kept


def feeds_back(spec: Spec) -> bool:
    """Return True if error feedback is the default for a spec."""
    usual = isinstance(spec, Sign | TopK) or (isinstance(spec, Truncate) and spec.guard == "feedback")
    return usual and spec.contraction


class ParameterPlan:
    """Chooses the spec and the error feedback of each parameter in every step.

    Parameters
    ----------
    spec : Spec
        Spec of parameters for which the policy returns None.
    feedback : bool, float or None
        Error feedback on or off, or its decay; None: :func:`feeds_back` decides.
    policy : Policy
        Chooses the spec of each parameter.
    auto : GradientChoice, optional
        Automatic choice of the hook's spec, which then replaces `spec`, and of less lossy specs for single parameters.

    Attributes
    ----------
    zeros : dict of str to bool
        By parameter name: True if its gradient is mostly zero. Parameters whose gradients were zero everywhere in all
        steps so far have no entry.
    contents : dict of str to int
        Bytes of the gradients of a step, keyed by the spec and why it was chosen, such as ``"Lossless() (small)"``.
    """

    def __init__(
        self,
        spec: Spec,
        feedback: bool | float | None,
        policy: Policy,
        auto: GradientChoice | None = None,
    ) -> None:
        self._spec, self.policy, self.auto = spec, policy, auto
        self.feedback_argument = feedback
        self.names: dict[torch.nn.Parameter, str] = {}
        self.chosen: dict[torch.nn.Parameter, Choice] = {}
        self.zeros: dict[str, bool] = {}
        self.contents: dict[str, int] = {}
        # Inputs of the last choice of specs; while they are unchanged, the specs are not chosen again. None: choose in
        # every step, because the user's `choose` must be called.
        self._basis: object = None
        self._uneven: set[torch.Tensor] = set()  # parameters whose rows have gradients of very different magnitudes
        self._small: set[torch.Tensor] = set()  # parameters that are sent lossless because they are small
        self._other: set[torch.Tensor] = set()  # parameters whose gradients are sent uncompressed, see _other()
        self._reasons: dict[torch.nn.Parameter, str] = {}  # reason of each choice; "" for the hook's own spec
        self._reported = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the model's parameters."""
        none: dict[str, Any] = {"names": {}, "chosen": {}, "_reasons": {}, "_basis": None}
        return self.__dict__ | none | {name: set[Any]() for name in ("_uneven", "_small", "_other")}

    @property
    def spec(self) -> Spec:
        """Spec of the hook. Setting it turns the automatic choice off."""
        return self._spec if self.auto is None else self.auto.spec

    @spec.setter
    def spec(self, spec: Spec) -> None:
        self._spec, self.auto, self._basis = spec, None, None

    @property
    def lossiest(self) -> Spec:
        """Lossiest spec that the hook may use: the lossiest one of an automatic choice, or the hook's fixed spec."""
        return self._spec if self.auto is None else self.auto.quality.specs[-1]

    @property
    def feedback(self) -> bool:
        """True if parameters with a lossy spec have residuals."""
        if self.feedback_argument is not None:
            return bool(self.feedback_argument)
        return any(map(feeds_back, [self._spec] if self.auto is None else self.auto.quality.specs))

    @property
    def decay(self) -> float:
        """Factor by which residuals are multiplied each time before they are added to gradients."""
        return 1.0 if self.feedback_argument is None else float(self.feedback_argument or 1)

    def serve(self, model: torch.nn.Module, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Set the model and the names of its parameters, for which this plan chooses specs."""
        self._uneven, self._other = uneven_of(model), _other(model)
        self._small = small_of(names) if self.policy.lossless_small else set()
        self.names, self.chosen, self._basis = dict(names), {}, None
        if self.auto is not None:
            mine = {p: name for p, name in names.items() if p.requires_grad and p not in self._small | self._other}
            mine = {p: name for p, name in mine.items() if self.policy(name, p) is None}
            self.auto.serve({name: n_values(p) for p, name in mine.items()}, sum(p.nbytes for p in mine))

    def spec_of(self, name: str, parameter: torch.nn.Parameter) -> Spec:
        """Return the spec that the policy chooses for a parameter, else the hook's spec.

        Raises
        ------
        SpecError, ArgumentError
            The policy returned neither a spec nor a preset nor None; or its spec needs error feedback, which the hook
            does not have.
        """
        spec = self._spec_of_policy(name, parameter)
        return self.spec if spec is None else spec

    def _spec_of_policy(self, name: str, parameter: torch.nn.Parameter) -> Spec | None:
        """Return the policy's spec of a parameter, or None.

        Raises
        ------
        SpecError
            The spec needs error feedback, and the hook has none.
        """
        spec = self.policy(name, parameter)
        if spec is not None and self.feedback_argument is None and not self.feedback:
            require_feedback(spec, "pass feedback=True to the hook; feedback=False sends without")
        return spec

    @property
    def _protects_uneven(self) -> bool:
        """True if uneven parameters use `policy.uneven`, because rows would share scales with the hook's spec."""
        return self.policy.uneven is not None and needs_even_rows(self.spec)

    def is_exact(self, step: int) -> bool:
        """Return True if a step sends all gradients lossless: in the warm-up, or to measure zeros in gradients."""
        if step < self.policy.start_step:
            return True
        unknown = self._protects_uneven and not self.zeros
        return unknown and any(self.policy(name, p) is None for p, name in self.names.items() if p not in self._small)

    def choose(self, step: int) -> bool:
        """Choose the specs of a step; return True if a choice differs from that of the previous step."""
        exact, former, reasons = self.is_exact(step), self.chosen, self._reasons
        if self.auto is not None:
            self.auto.paused = exact
        version = None if self.auto is None else self.auto.version
        basis = self.spec, self.feedback_argument, exact, self.zeros, version
        basis = basis if self.policy.choose is None else None
        if basis is not None and basis == self._basis:
            return False
        self._basis = basis
        found = {p: self._choose(name, p, exact, step) for p, name in self.names.items()}
        lossy = {p for p, (spec, _) in found.items() if spec.contraction and not is_lossless(spec)}
        self.chosen = {p: (spec, self.feedback and p in lossy) for p, (spec, _) in found.items()}
        self._reasons = {p: reason for p, (_, reason) in found.items()}
        if self.chosen != former or self._reasons != reasons:
            self.contents = self._contents()
        return self.chosen != former

    def _choose(self, name: str, p: torch.nn.Parameter, exact: bool, step: int) -> tuple[Spec, str]:
        """Return the spec of a parameter in a step, and the reason, which is "" for the hook's own spec."""
        own, uneven = self._spec_of_policy(name, p), cast(Spec, self.policy.uneven)
        if exact:
            return Lossless(), START if step < self.policy.start_step else MEASURED
        if own is not None:
            return own, CHOSEN
        if p in self._small:
            return Lossless(), SMALL
        if self.auto is not None and (limited := self.auto.spec_of(name)) != self.spec:
            return limited, LIMITED
        if not self._protects_uneven:
            return self.spec, ""
        if p in self._uneven:
            return uneven, EMBEDDING
        if name not in self.zeros:
            return Lossless(), UNKNOWN
        return (uneven, ZEROS) if self.zeros[name] else (self.spec, "")

    def measure(self, mean: torch.Tensor, parts: Sequence[BucketPart], zeros: dict[str, bool]) -> None:
        """Count the zeros in the gradients of a bucket's `mean`; store in `zeros`, by name, True if mostly zero.

        Only lossless parts are measured, because their mean gradients are equal on all ranks. A gradient that is zero
        everywhere is skipped, and measured again in a later step.
        """
        for part in parts:
            if not self._protects_uneven or not is_lossless(part.spec):
                continue
            for p, (name, _, n), offset in zip(part.parameters, part.layout, part.offsets, strict=True):
                if name == NOBODY or name in self.zeros or self._reasons.get(p) not in _UNMEASURED:
                    continue
                if count := int(torch.count_nonzero(mean[offset : offset + n])):
                    zeros[name] = n - count > _MOSTLY * n

    def note(self, zeros: Mapping[str, bool]) -> None:
        """Store and log the results of :meth:`measure`."""
        if not zeros:
            return
        self.zeros = {**self.zeros, **zeros}
        if mostly := sorted(name for name, is_zero in zeros.items() if is_zero):
            how = "" if self.policy.uneven is None else named(cast(Spec, self.policy.uneven))
            logger.info(
                "the gradients of these parameters are mostly zero, and are sent by %s from now on: %s",
                how,
                ", ".join(mostly),
            )

    def _contents(self) -> dict[str, int]:
        """Return the bytes of the gradients of a step, keyed by spec and reason; see :attr:`contents`."""
        found: dict[str, int] = {}
        for p, (spec, _) in self.chosen.items():
            if p.requires_grad:
                key = f"uncompressed ({DTYPE})" if p in self._other else named(spec)
                reason = "" if p in self._other else self._reasons[p]
                key += f" ({reason})" if reason else ""
                found[key] = found.get(key, 0) + n_values(p) * p.element_size() // (2 if p.is_complex() else 1)
        return found

    def report(self, step: int) -> None:
        """Log once the specs of the gradients, after the first step in which no parameter awaits a measurement.

        Also log a warning if more than 30% of the gradients' bytes are sent lossless or uncompressed.
        """
        if self._reported or not self.contents or is_lossless(self.spec):
            return
        waiting = {START, MEASURED, *([UNKNOWN] if step < self.policy.start_step + _PATIENCE else [])}
        if waiting & set(self._reasons.values()):
            return
        self._reported = True
        total = sum(self.contents.values())
        shares = ", ".join(f"{n / total:.1%} {key}" for key, n in sorted(self.contents.items(), key=lambda kv: -kv[1]))
        logger.info("%s encodes %.3g MB of gradients a step: %s", named(self.spec), total / 1e6, shares)
        uncompressed = sum(n for key, n in self.contents.items() if key.startswith(("Lossless(", "uncompressed")))
        if uncompressed > _MUCH * total:
            logger.warning(
                "%.0f%% of the bytes of the gradients are not compressed by %s, but sent lossless or uncompressed: %s; "
                "policy= of ddp_hook changes that",
                100 * uncompressed / total,
                named(self.spec),
                shares,
            )


def _other(model: torch.nn.Module) -> set[torch.Tensor]:
    """Return the parameters whose gradients are sent uncompressed: float64, complex128 and sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    sparse: set[torch.Tensor] = {m.weight for m in model.modules() if isinstance(m, kinds) and m.sparse}
    return sparse | {p for p in model.parameters() if p.dtype in (torch.float64, torch.complex128)}
