"""The spec and the error feedback of each parameter of a model, step by step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from codec._c.spec_structs import spec_struct
from codec.specs import Lossless, Sign, Spec, Ternary, Truncate
from codec.torch.buckets import Part

Policy = Callable[[str, torch.nn.Parameter], Spec | None]
Choice = tuple[Spec, bool]  # spec, and whether error feedback is applied

_SMALL = 4096  # values
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
_MOSTLY = 0.5  # share of zeros above which a gradient counts as mostly zero


def default_policy(name: str, parameter: torch.nn.Parameter) -> Spec | None:
    """Encode norms, biases and tensors of fewer than 4,096 values lossless, all others with the hook's spec.

    With this policy, :class:`codec.Sign` and :class:`codec.Ternary` leave more parameters lossless, whose rows have
    gradients of very different magnitudes or none: weights of ``nn.Embedding`` and ``nn.EmbeddingBag``; the output head
    over the same vocabulary, that is the last ``nn.Linear`` with as many outputs as an embedding has entries; and
    parameters of which more than half of the mean gradient was zero in the first step, in which all gradients are sent
    lossless.
    """
    del name
    return Lossless() if parameter.dim() < 2 or parameter.numel() < _SMALL else None


def plain_names(names: Iterable[str]) -> list[str]:
    """Return parameter names without what torch.compile, checkpoint, FSDP and DistributedDataParallel wrappers add.

    If two names would become equal, all names are returned unchanged.
    """
    given = list(names)
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in given]
    return plain if len(set(plain)) == len(plain) else given


def _uneven(model: torch.nn.Module) -> set[torch.Tensor]:
    """Return the weights of embeddings and of output heads over the same vocabulary."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = {m.weight for m in model.modules() if isinstance(m, kinds)}
    vocabularies = {w.shape[0] for w in embeddings if w.shape[0] > w.shape[1]}  # not those of positions
    heads = {m.out_features: m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    return embeddings | {heads[n] for n in vocabularies & heads.keys()}


def feeds_back(spec: Spec) -> bool:
    """Return True if error feedback is on unless the caller says otherwise."""
    return spec.contraction and (isinstance(spec, Sign) or (isinstance(spec, Truncate) and spec.guard == "feedback"))


class Plan:
    """Chooses the spec and the error feedback of each parameter, anew in every step.

    Parameters
    ----------
    spec : Spec
        For parameters of which the policy says nothing.
    feedback : bool or None
        Whether error feedback is applied; None: by :func:`feeds_back`.
    policy : Policy
        Returns the spec of a parameter, or None.
    start_step : int
        All gradients are sent lossless in so many steps first.
    """

    def __init__(self, spec: Spec, feedback: bool | None, policy: Policy, start_step: int) -> None:
        self.spec, self.policy, self.start_step = spec, policy, start_step
        self.feedback_argument = feedback
        self.names: dict[torch.nn.Parameter, str] = {}
        self.chosen: dict[torch.nn.Parameter, Choice] = {}
        self.sparse: frozenset[str] | None = None  # parameters whose gradients are mostly zero; None: not known yet
        self._basis: object = None  # what the choices of the step before depend on, if they cannot change otherwise
        self._uneven: set[torch.Tensor] = set()  # parameters whose rows have gradients of very different magnitudes

    def __getstate__(self) -> dict[str, Any]:
        """Return the plan without the model's parameters."""
        return self.__dict__ | {"names": {}, "chosen": {}, "_uneven": set[Any](), "_basis": None}

    @property
    def feedback(self) -> bool:
        """True if lossy parameters have residuals."""
        return feeds_back(self.spec) if self.feedback_argument is None else self.feedback_argument

    def serve(self, model: torch.nn.Module, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Choose for the parameters of this model from now on."""
        self._uneven = _uneven(model)
        self.names, self.chosen, self._basis = dict(names), {}, None

    def asked(self, name: str, parameter: torch.nn.Parameter) -> Spec:
        """Return the spec that the policy or the hook has for a parameter.

        Raises
        ------
        ArgumentError
            The policy returned something else.
        """
        spec = self.policy(name, parameter) or self.spec
        if not isinstance(spec, Spec):
            spec_struct(spec)  # raises
        return spec

    @property
    def _needs_even(self) -> bool:
        """True if parameters are left lossless whose rows differ much: they would get each other's scale."""
        return self.policy is default_policy and isinstance(self.spec, Sign | Ternary)

    def is_exact(self, step: int) -> bool:
        """Return True if a step sends all gradients lossless: before `start_step`, and to find those mostly zero."""
        return step < self.start_step or (self._needs_even and self.sparse is None)

    def choose(self, step: int) -> bool:
        """Choose for the step after so many; return True if a choice differs from that of the step before."""
        exact, even, former = self.is_exact(step), self._needs_even, self.chosen
        basis = (self.spec, self.feedback_argument, exact, self.sparse) if self.policy is default_policy else None
        if basis is not None and basis == self._basis:
            return False
        self._basis = basis
        chosen: dict[torch.nn.Parameter, Choice] = {}
        for p, name in self.names.items():
            spec = self.asked(name, p)
            if exact or (even and (p in self._uneven or name in (self.sparse or ()))):
                spec = Lossless()
            chosen[p] = spec, self.feedback and spec.contraction and not isinstance(spec, Lossless)
        self.chosen = chosen
        return chosen != former


def note_zeros(mean: torch.Tensor, parts: Sequence[Part], sparse: set[str]) -> None:
    """Add the parameters of a bucket whose mean gradients, the same on all ranks, are mostly zero."""
    for part in parts:
        for (name, n), offset in zip(part.layout, part.offsets, strict=True):
            if n - int(torch.count_nonzero(mean[offset : offset + n])) > _MOSTLY * n:
                sparse.add(name)
