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
    """Settings with which a :class:`CompressedStage` stores m, the activations to which deltas refer.

    Provisional: may change in any version.

    All stages of a pipeline need the same `first`, `budget` and `dtype`.

    Parameters
    ----------
    first : Spec or str
        Codec for samples that are sent raw, and for activations in evaluations.
    store : {"ram"} or path
        Storage of m: "ram", or the path of a folder for files. Stages may share a folder, in which each side of an
        edge uses a subfolder named after the edge.
    budget : int, optional
        Maximum size of all m on one side of an edge, in bytes. Default: no limit.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype in which m is stored.

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

    `deltas` is None if activations are encoded without deltas. With `auto`, `forward` and `backward` are the specs of
    the first steps.
    """

    forward: Spec
    backward: Spec
    deltas: Deltas | None
    auto: EdgeChoice | None = None

    def shared(self) -> dict[str, str]:
        """Return the settings that must be equal on all stages, by name."""
        d = self.deltas
        kinds = {} if d is None else {"first": str(plain_spec(d.first)), "budget": str(d.budget), "dtype": d.dtype}
        auto = "none" if self.auto is None else self.auto.description
        return {"activations": "direct" if d is None else "deltas", **kinds, "auto": auto}


def specs_of(forward: Any, backward: Any, deltas: Deltas | None) -> Specs:
    """Convert the arguments of a stage to specs.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value.
    """
    autos = auto_of(forward), auto_of(backward)
    given = set(filter(None, autos))
    if not given:
        return Specs(plain_spec(forward), plain_spec(backward), deltas)
    if len(given) > 1:
        raise ArgumentError(f"forward= and backward= must have the same Auto, got {autos[0]} and {autos[1]}")
    (chosen,) = given
    levels = bits_of("small" if chosen.quality is None else chosen.quality)
    forwards = [pair[0] if autos[0] else plain_spec(forward) for pair in levels]
    backwards = [pair[1] if autos[1] else plain_spec(backward) for pair in levels]
    link = None if chosen.link is None else link_of(chosen.link)
    auto = EdgeChoice(list(zip(forwards, backwards, strict=True)), link)
    return Specs(forwards[0], backwards[0], deltas, auto)
