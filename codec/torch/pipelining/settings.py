"""Settings of compressed stages."""

from dataclasses import dataclass
from typing import Any

from codec import ArgumentError
from codec.advisor.cost_model import link_of
from codec.specs import Lossless, Quantize, Spec
from codec.stateful.activation.delta import EntryDtype
from codec.torch.auto.edges import EdgeChoice
from codec.torch.auto.quality import auto_of, bits_of
from codec.torch.reduction.arguments import plain_spec

FORWARD = Quantize(4, rounding="nearest")
BACKWARD = Quantize(8)
LOSSLESS = Lossless()
_FIRST = Quantize(8, rounding="nearest")


@dataclass(frozen=True, slots=True)
class Deltas:
    """How a :class:`CompressedStage` keeps the activations to which deltas refer.

    All stages of a pipeline need the same `first`, `budget` and `dtype`.

    Parameters
    ----------
    first : Spec or str
        Spec of samples that are sent raw, and of activations in evaluations.
    store : {"ram"} or path
        Memory of m: "ram", or a folder of this stage for files. Stages may share a folder: each side of an edge uses a
        folder inside it that has the number of the edge.
    budget : int, optional
        Largest size in bytes of all m of one side of an edge. Default: no limit.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype in which m is kept.

    See Also
    --------
    codec.ActivationDelta : These parameters in detail.

    Examples
    --------
    >>> from codec.torch.pipelining import Deltas
    >>> Deltas(codec.Lossless(), dtype="8bit").budget is None
    True
    """

    first: Spec | str = _FIRST
    store: Any = "ram"
    budget: int | None = None
    dtype: EntryDtype = "float32"


@dataclass(frozen=True, slots=True)
class Specs:
    """Specs of one stage.

    `deltas` is None if activations are encoded directly. With `auto`, `forward` and `backward` are the first specs.
    """

    forward: Spec
    backward: Spec
    deltas: Deltas | None
    auto: EdgeChoice | None = None

    def signature(self) -> list[str]:
        """Return what all stages must have in common, for comparison by bytes."""
        d = self.deltas
        shared = [] if d is None else [str(plain_spec(d.first)), str(d.budget), d.dtype]
        return [str(d is not None), *shared, *([] if self.auto is None else ["auto", self.auto.description])]


def specs_of(forward: Any, backward: Any, deltas: Deltas | None) -> Specs:
    """Return the specs that arguments of a stage mean.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value.
    """
    autos = auto_of(forward), auto_of(backward)
    given = set(filter(None, autos))
    if not given:
        return Specs(plain_spec(forward), plain_spec(backward), deltas)
    if len(given) > 1:
        raise ArgumentError(f"forward= and backward= must have one choice, got {autos[0]} and {autos[1]}")
    (chosen,) = given
    levels = bits_of("small" if chosen.quality is None else chosen.quality)
    forwards = [pair[0] if autos[0] else plain_spec(forward) for pair in levels]
    backwards = [pair[1] if autos[1] else plain_spec(backward) for pair in levels]
    link = None if chosen.link is None else link_of(chosen.link)
    auto = EdgeChoice(list(zip(forwards, backwards, strict=True)), link)
    return Specs(forwards[0], backwards[0], deltas, auto)
