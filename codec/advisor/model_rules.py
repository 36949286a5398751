"""Rules for small and uneven model parameters, which a hook does not encode with the spec that it was given.

This module imports no torch: it finds torch in sys.modules if the caller has imported it.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from codec.advisor.sampling import GivenTensor
from codec.specs import Lossless, Quantize, Sign, Spec, Ternary

Kind = Literal["small", "uneven"] | None  # rule that applies to a tensor; None: no rule

UNEVEN = Quantize(4)  # spec for uneven parameters: each group of 64 values has its own scale

_SMALL = 4096  # values; a matrix with fewer is small
_FEW = 1 / 32  # small parameters are sent lossless if together they have at most this fraction of all values


def small_of(parameters: Iterable[Any]) -> set[Any]:
    """Return the trained parameters that are sent lossless because they are small.

    Small parameters are those with fewer than two dimensions, and matrices of fewer than 4,096 values. If together they
    have more than 1/32 of all values, only parameters with fewer than two dimensions are returned; if these exceed
    1/32, too, none are.
    """
    trained = [p for p in parameters if p.requires_grad]
    vectors = {p for p in trained if p.dim() < 2}
    matrices = {p for p in trained if p.dim() >= 2 and p.numel() < _SMALL}
    most = sum(p.numel() for p in trained) * _FEW
    return next((few for few in (vectors | matrices, vectors) if sum(p.numel() for p in few) <= most), set[Any]())


def uneven_of(model: Any) -> set[Any]:
    """Return the weights of embeddings, and of output heads with as many outputs as an embedding has rows."""
    nn: Any = sys.modules["torch"].nn
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    vocabularies = {w.shape[0] for w in embeddings if w.shape[0] > w.shape[1]}  # not position embeddings
    heads = {m.out_features: m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return embeddings | {heads[n] for n in vocabularies & heads.keys()}


def needs_even_rows(spec: Spec) -> bool:
    """Return True if all nonzero values of a group decode to one magnitude: uneven rows then have a large error."""
    return isinstance(spec, Sign | Ternary)


def kinds_of(tensors: Sequence[GivenTensor], model: Any) -> list[Kind]:
    """Return, for each tensor of a model, the rule that applies to it."""
    small, uneven = small_of(model.parameters()), uneven_of(model)
    return ["small" if t.parameter in small else "uneven" if t.parameter in uneven else None for t in tensors]


def kinds_by_spec(kinds: Sequence[Kind], spec: Spec) -> dict[Spec, frozenset[Kind]]:
    """Map each spec that a hook with `spec` uses to the kinds of tensors that the hook encodes with that spec."""
    specs: dict[Kind, Spec] = {None: spec, "small": Lossless(), "uneven": UNEVEN if needs_even_rows(spec) else spec}
    there = set(kinds)
    return {its: frozenset(k for k in there if specs[k] == its) for its in {specs[k]: None for k in kinds}}
