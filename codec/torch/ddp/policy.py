"""Choice of the spec and the error feedback of each parameter of a model, in every step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from codec import ArgumentError
from codec.arguments import shown
from codec.specs import Lossless, Sign, Spec, Ternary, Truncate
from codec.torch.ddp.buckets import Part
from codec.torch.reduction.arguments import plain_spec

Chooser = Callable[[str, torch.nn.Parameter], Spec | str | None]  # of a parameter's name and the parameter
Choice = tuple[Spec, bool]  # spec, and whether error feedback is applied

_SMALL = 4096  # values of a parameter; smaller ones are sent lossless
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_MOSTLY = 0.5  # share of zeros above which a gradient counts as mostly zero


@dataclass(frozen=True)
class Policy:
    """Choice of the spec of each parameter: exceptions by name, and rules that leave some parameters lossless.

    A parameter for which `choose` returns a spec is encoded with that spec. The rules apply to all others.

    Parameters
    ----------
    choose : callable, optional
        choose(name, parameter) returns the spec of a parameter, a preset, or None: the rules decide. It is called in
        every step, and must return the same on all ranks. Names are without the parts that wrappers such as
        torch.compile add. Default: the rules decide for all parameters.
    lossless_small : bool
        Send norms, biases and parameters of fewer than 4,096 values lossless.
    lossless_uneven : bool
        Leave parameters lossless whose rows have gradients of very different magnitudes or none, if the hook's spec is
        :class:`codec.Sign` or :class:`codec.Ternary`, whose rows share scales. Such parameters are weights of
        ``nn.Embedding`` and ``nn.EmbeddingBag``; the output head over the same vocabulary, that is the last
        ``nn.Linear`` with as many outputs as an embedding has entries; and parameters of which more than half of the
        mean gradient was zero in the first step. All gradients of the first step are sent lossless to find the latter.

    Examples
    --------
    Send one layer lossless, and let the rules decide for the others:

    >>> policy = codec.torch.Policy(lambda name, p: codec.Lossless() if name == "head.weight" else None)
    >>> hook = codec.torch.ddp_hook("small", policy=policy)

    A function without a Policy around it has the same effect. Encode everything, also biases and embeddings:

    >>> hook = codec.torch.ddp_hook("smallest", policy=codec.torch.Policy(lossless_small=False, lossless_uneven=False))
    """

    choose: Chooser | None = None
    lossless_small: bool = True
    lossless_uneven: bool = True

    def __call__(self, name: str, parameter: torch.nn.Parameter) -> Spec | None:
        """Return the spec of a parameter; None for the spec of the hook, unless the parameter is uneven.

        Raises
        ------
        SpecError, ArgumentError
            `choose` returned neither a spec nor a preset nor None.
        """
        chosen = None if self.choose is None else self.choose(name, parameter)
        if chosen is not None:
            return plain_spec(chosen)
        small = parameter.dim() < 2 or parameter.numel() < _SMALL
        return Lossless() if self.lossless_small and small else None


default_policy = Policy()


def policy_of(given: Any, default: Policy = default_policy) -> Policy:
    """Return the policy that a caller gave as a Policy or as a function, which then replaces `choose` of `default`.

    Raises
    ------
    ArgumentError
        `given` is neither.
    """
    if isinstance(given, Policy):
        return given
    if not callable(given):
        raise ArgumentError(
            f"policy must be a codec.torch.Policy or a function of name and parameter, got {shown(given)}"
        )
    return replace(default, choose=given)


def names_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.nn.Parameter, str]:
    """Return the names of the parameters that require gradients, without the parts that wrappers add.

    Wrappers are torch.compile, checkpoint, FSDP and DDP. If two names would become equal, all names are unchanged.
    """
    kept = {cast(torch.nn.Parameter, p): name for name, p in named if p.requires_grad}
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in kept.values()]
    return dict(zip(kept, plain, strict=True)) if len(set(plain)) == len(plain) else kept


def _uneven(model: torch.nn.Module) -> set[torch.Tensor]:
    """Return the weights of embeddings and of output heads over the same vocabulary."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = {m.weight for m in model.modules() if isinstance(m, kinds)}
    vocabularies = {w.shape[0] for w in embeddings if w.shape[0] > w.shape[1]}  # without embeddings of positions
    heads = {m.out_features: m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    return embeddings | {heads[n] for n in vocabularies & heads.keys()}


def feeds_back(spec: Spec) -> bool:
    """Return True if error feedback is the default for a spec."""
    return spec.contraction and (isinstance(spec, Sign) or (isinstance(spec, Truncate) and spec.guard == "feedback"))


class Plan:
    """Chooses the spec and the error feedback of each parameter in every step.

    Parameters
    ----------
    spec : Spec
        Spec of parameters for which the policy returns None.
    feedback : bool or None
        Error feedback on or off; None: by :func:`feeds_back`.
    policy : Policy
        Chooses the spec of each parameter.
    start_step : int
        Number of first steps in which all gradients are sent lossless.
    """

    def __init__(self, spec: Spec, feedback: bool | None, policy: Policy, start_step: int) -> None:
        self.spec, self.policy, self.start_step = spec, policy, start_step
        self.feedback_argument = feedback
        self.names: dict[torch.nn.Parameter, str] = {}
        self.chosen: dict[torch.nn.Parameter, Choice] = {}
        self.sparse: frozenset[str] | None = None  # parameters whose gradients are mostly zero; None: not known yet
        self._basis: object = None  # inputs of the last choices; None if a policy of the user may choose otherwise
        self._uneven: set[torch.Tensor] = set()  # parameters whose rows have gradients of very different magnitudes

    def __getstate__(self) -> dict[str, Any]:
        """Return the plan without the model's parameters."""
        return self.__dict__ | {"names": {}, "chosen": {}, "_uneven": set[Any](), "_basis": None}

    @property
    def feedback(self) -> bool:
        """True if lossy parameters have residuals."""
        return feeds_back(self.spec) if self.feedback_argument is None else self.feedback_argument

    def serve(self, model: torch.nn.Module, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Choose for the parameters of a model from now on."""
        self._uneven = _uneven(model)
        self.names, self.chosen, self._basis = dict(names), {}, None

    def spec_of(self, name: str, parameter: torch.nn.Parameter) -> Spec:
        """Return the spec of a parameter: the policy's, else the hook's.

        Raises
        ------
        SpecError, ArgumentError
            The policy returned neither a spec nor a preset nor None.
        """
        spec = self.policy(name, parameter)
        return self.spec if spec is None else spec

    @property
    def _protects_uneven(self) -> bool:
        """True if parameters stay lossless whose rows have very different magnitudes, but would share scales."""
        return self.policy.lossless_uneven and isinstance(self.spec, Sign | Ternary)

    def is_exact(self, step: int) -> bool:
        """Return True if a step sends all gradients lossless: before `start_step`, or to find mostly zero ones."""
        if step < self.start_step:
            return True
        unknown = self._protects_uneven and self.sparse is None
        return unknown and any(self.policy(name, p) is None for p, name in self.names.items())

    def choose(self, step: int) -> bool:
        """Choose for a step; return True if a choice differs from that of the step before."""
        exact, protects, former = self.is_exact(step), self._protects_uneven, self.chosen
        basis = (self.spec, self.feedback_argument, exact, self.sparse) if self.policy.choose is None else None
        if basis is not None and basis == self._basis:
            return False
        self._basis = basis
        chosen: dict[torch.nn.Parameter, Choice] = {}
        for p, name in self.names.items():
            spec = self.policy(name, p)
            if exact or (spec is None and protects and (p in self._uneven or name in (self.sparse or ()))):
                spec = Lossless()
            elif spec is None:
                spec = self.spec
            chosen[p] = spec, self.feedback and spec.contraction and not isinstance(spec, Lossless)
        self.chosen = chosen
        return chosen != former


def note_zeros(mean: torch.Tensor, parts: Sequence[Part], sparse: set[str]) -> None:
    """Add to `sparse` the parameters of a bucket whose mean gradients, equal on all ranks, are mostly zero."""
    for part in parts:
        for (name, _, n), offset in zip(part.layout, part.offsets, strict=True):
            if n - int(torch.count_nonzero(mean[offset : offset + n])) > _MOSTLY * n:
                sparse.add(name)
