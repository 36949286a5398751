"""Rules for parameters of a model that hooks send by another spec than their own: small ones, and uneven ones.

This module imports no torch: it finds torch in sys.modules if the caller has imported it.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from codec.advisor.sampling import Tensor
from codec.specs import Lossless, Quantize, Sign, Spec, Ternary

Kind = Literal["small", "uneven"] | None  # rule that applies to a tensor

UNEVEN = Quantize(4)  # spec for uneven parameters: groups of 64 values have scales of their own

_SMALL = 4096  # values of a matrix; smaller matrices are sent lossless if they hold a small share of all values
_FEW = 1 / 32  # largest share of a model's values that small parameters may have together to be sent lossless


def small_of(parameters: Iterable[Any]) -> set[Any]:
    """Return the parameters, of those that a model trains, that are lossless because they are small and few.

    Small parameters are those with fewer than two dimensions, and matrices of fewer than 4,096 values. If they have
    together more than 1/32 of the values, only those with fewer than two dimensions count; if these have, none.
    """
    trained = [p for p in parameters if p.requires_grad]
    vectors = {p for p in trained if p.dim() < 2}
    matrices = {p for p in trained if p.dim() >= 2 and p.numel() < _SMALL}
    most = sum(p.numel() for p in trained) * _FEW
    return next((few for few in (vectors | matrices, vectors) if sum(p.numel() for p in few) <= most), set[Any]())


def uneven_of(model: Any) -> set[Any]:
    """Return the weights of embeddings and of output heads over the same vocabulary."""
    nn: Any = sys.modules["torch"].nn
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    vocabularies = {w.shape[0] for w in embeddings if w.shape[0] > w.shape[1]}  # without embeddings of positions
    heads = {m.out_features: m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return embeddings | {heads[n] for n in vocabularies & heads.keys()}


def needs_even_rows(spec: Spec) -> bool:
    """Return True if groups of values share one magnitude, so that rows of very different ones lose much."""
    return isinstance(spec, Sign | Ternary)


def kinds_of(tensors: Sequence[Tensor], model: Any) -> list[Kind]:
    """Return the rule that applies to each of the tensors of a model."""
    small, uneven = small_of(model.parameters()), uneven_of(model)
    return ["small" if t.parameter in small else "uneven" if t.parameter in uneven else None for t in tensors]


def kinds_by_spec(kinds: Sequence[Kind], spec: Spec) -> dict[Spec, frozenset[Kind]]:
    """Return the kinds of tensors by the spec that they have under a hook with `spec`."""
    specs: dict[Kind, Spec] = {None: spec, "small": Lossless(), "uneven": UNEVEN if needs_even_rows(spec) else spec}
    there = set(kinds)
    return {its: frozenset(k for k in there if specs[k] == its) for its in {specs[k]: None for k in kinds}}
