"""Qualities of ``"auto"``: the specs that may be chosen, and the largest relative error of a tensor."""

from dataclasses import dataclass
from typing import Any, Literal

from codec import ArgumentError
from codec.arguments import shown
from codec.presets import preset
from codec.specs import Lossless, Quantize, Spec

QualityName = Literal["lossless", "balanced", "small", "smallest"]

# By quality: largest relative error of a tensor. It is twice the usual error of the preset (codec.preset), at most 0.9.
_LIMITS: dict[str, float] = {"lossless": 0.0, "balanced": 0.06, "small": 0.3, "smallest": 0.9}
_NAMES: tuple[QualityName, ...] = ("lossless", "balanced", "small", "smallest")
# Bit widths (activations, gradients) that are allowed on a pipeline edge, least lossy first.
_BITS: dict[str, tuple[tuple[int, int], ...]] = {
    "balanced": ((8, 8),),
    "small": ((8, 8), (4, 8)),
    "smallest": ((8, 8), (4, 8), (3, 6), (2, 4)),
}
# Specs that may be chosen if the quality is a number, from the smallest to the largest error.
_LADDER: tuple[Spec, ...] = (Lossless(), Quantize(8), Quantize(6), Quantize(5), Quantize(4), Quantize(3))


@dataclass(frozen=True)
class Auto:
    """Choose codecs by measurements. Pass this in place of a spec; ``"auto"`` is short for ``Auto()``.

    Provisional: may change in any version.

    Parameters
    ----------
    quality : {"lossless", "balanced", "small", "smallest"} or float, optional
        Lowest quality that may be chosen.

        In :func:`ddp_hook`, a name: no spec is lossier than the preset of this name. A parameter is sent with a less
        lossy spec if the relative error of its gradient would exceed twice the usual error of that preset. A number,
        such as 0.05: the largest relative error of a parameter's gradient, which is the norm of the error divided by
        the norm of the gradient. Errors are measured on samples in steps 0 and 16, and every 256 steps. Default:
        "lossless", which chooses between lossless frames and uncompressed gradients. The averages are then
        bit-identical with either choice.

        In pipelines: lowest bit widths of activations and gradients. "balanced": 8 and 8; "small", the default: 4 and
        8; "smallest": 2 and 4.
    link : str, number or tuple, optional
        Link of each rank, or in two levels of each machine, as for :func:`codec.advise`: ``"100mbit"``, or ``("1gbit",
        "20ms")``. Default: the link is measured in every step.

    Examples
    --------
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> hook = codec.torch.ddp_hook(codec.torch.Auto("small", link="100mbit")).register(model)
    """

    quality: QualityName | float | None = None
    link: Any = None


def auto_of(given: Any) -> Auto | None:
    """Return the Auto that an argument ``spec=`` stands for; None if it is a spec or a preset."""
    if isinstance(given, Auto):
        return given
    return Auto() if isinstance(given, str) and given == "auto" else None


@dataclass(frozen=True)
class Quality:
    """Specs that may be chosen, least lossy first, and the largest relative error of a tensor.

    The relative error is the norm of the encoding error divided by the norm of the tensor.
    """

    name: str
    specs: tuple[Spec, ...]
    limit: float


def quality_of(given: Any) -> Quality:
    """Return the Quality that an argument ``quality=`` stands for; None stands for "lossless".

    Raises
    ------
    ArgumentError
        The argument is neither the name of a quality nor a number above 0 and below 1.
    """
    if given is None:
        given = "lossless"
    if isinstance(given, str) and given in _LIMITS:
        specs = tuple(preset(name) for name in _NAMES[: _NAMES.index(given) + 1])
        return Quality(repr(given), specs, _LIMITS[given])
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < 1:
        return Quality(repr(float(given)), _LADDER, float(given))
    names = ", ".join(map(repr, _NAMES))
    raise ArgumentError(f"quality must be one of {names}, or a relative error above 0 and below 1, got {shown(given)}")


def bits_of(given: Any) -> tuple[tuple[Spec, Spec], ...]:
    """Return the pairs (spec of activations, spec of gradients) allowed on a pipeline edge, least lossy first.

    Raises
    ------
    ArgumentError
        The argument is not the name of a quality for pipelines.
    """
    found = _BITS.get(given) if isinstance(given, str) else None
    if found is None:
        names = ", ".join(map(repr, _BITS))
        raise ArgumentError(f"quality of a pipeline must be one of {names}, got {shown(given)}")
    return tuple((Quantize(forward, rounding="nearest"), Quantize(backward)) for forward, backward in found)
