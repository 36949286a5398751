"""Choice of the spec and the error feedback of each parameter of a model, in every step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from codec.specs import Lossless, Sign, Spec, Ternary, Truncate
from codec.torch.ddp.buckets import Part
from codec.torch.reduction.arguments import plain_spec

Policy = Callable[[str, torch.nn.Parameter], Spec | str | None]
Choice = tuple[Spec, bool]  # spec, and whether error feedback is applied

_SMALL = 4096  # values of a parameter; smaller ones are sent lossless
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_MOSTLY = 0.5  # share of zeros above which a gradient counts as mostly zero


def default_policy(name: str, parameter: torch.nn.Parameter) -> Spec | None:
    """Send norms, biases and parameters of fewer than 4,096 values lossless, and all others with the hook's spec.

    With this policy, :class:`codec.Sign` and :class:`codec.Ternary` leave more parameters lossless, because their rows
    have gradients of very different magnitudes or none, but share scales: weights of ``nn.Embedding`` and
    ``nn.EmbeddingBag``; the output head over the same vocabulary, that is the last ``nn.Linear`` with as many outputs
    as an embedding has entries; and parameters of which more than half of the mean gradient was zero in the first step.
    All gradients of the first step are sent lossless to find the latter.

    Parameters
    ----------
    name : str
        Name of the parameter.
    parameter : torch.nn.Parameter
        Parameter of the model.

    Returns
    -------
    Spec or None
        ``Lossless()``; None for the spec of the hook.

    Examples
    --------
    >>> codec.torch.default_policy("bias", torch.nn.Parameter(torch.zeros(100)))
    Lossless(...)
    >>> codec.torch.default_policy("weight", torch.nn.Parameter(torch.zeros(100, 100))) is None
    True
    """
    del name
    return Lossless() if parameter.dim() < 2 or parameter.numel() < _SMALL else None


def plain_names(names: Iterable[str]) -> list[str]:
    """Return parameter names without the parts that wrappers add: torch.compile, checkpoint, FSDP, DDP.

    If two names would become equal, all names are returned unchanged.
    """
    given = list(names)
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in given]
    return plain if len(set(plain)) == len(plain) else given


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
        Returns the spec of a parameter, or None.
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
        SpecError
            The policy returned neither a spec nor None.
        """
        spec = self.policy(name, parameter)
        return self.spec if spec is None else plain_spec(spec)

    @property
    def _needs_even(self) -> bool:
        """True if parameters stay lossless whose rows have very different magnitudes, but would share scales."""
        return self.policy is default_policy and isinstance(self.spec, Sign | Ternary)

    def is_exact(self, step: int) -> bool:
        """Return True if a step sends all gradients lossless: before `start_step`, or to find mostly zero ones."""
        return step < self.start_step or (self._needs_even and self.sparse is None)

    def choose(self, step: int) -> bool:
        """Choose for a step; return True if a choice differs from that of the step before."""
        exact, even, former = self.is_exact(step), self._needs_even, self.chosen
        basis = (self.spec, self.feedback_argument, exact, self.sparse) if self.policy is default_policy else None
        if basis is not None and basis == self._basis:
            return False
        self._basis = basis
        chosen: dict[torch.nn.Parameter, Choice] = {}
        for p, name in self.names.items():
            spec = self.spec_of(name, p)
            if exact or (even and (p in self._uneven or name in (self.sparse or ()))):
                spec = Lossless()
            chosen[p] = spec, self.feedback and spec.contraction and not isinstance(spec, Lossless)
        self.chosen = chosen
        return chosen != former


def note_zeros(mean: torch.Tensor, parts: Sequence[Part], sparse: set[str]) -> None:
    """Add to `sparse` the parameters of a bucket whose mean gradients, equal on all ranks, are mostly zero."""
    for part in parts:
        for (name, _, n), offset in zip(part.layout, part.offsets, strict=True):
            if n - int(torch.count_nonzero(mean[offset : offset + n])) > _MOSTLY * n:
                sparse.add(name)
