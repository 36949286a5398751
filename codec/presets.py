"""Presets: names that stand for specs."""

from typing import Any

from codec._c.spec_structs import spec_hint
from codec.arguments import shown
from codec.errors import SpecError
from codec.specs import BoundSpec, Float8, Lossless, Preset, Quantize, Sign, Spec, Truncate

_PRESETS: dict[Preset, Spec] = {
    "lossless": Lossless(),
    "near": Truncate(),
    "balanced": Float8(group_size=128),
    "small": Quantize(4),
    "smallest": Sign(group_size=1024),
}


def preset(name: str) -> Spec:
    """Return the spec of a preset. Functions that accept a spec also accept a preset's name.

    ============  ============================  ============  ======  =================================================
    name          spec                          bits/value    error   effect on training
    ============  ============================  ============  ======  =================================================
    lossless      ``Lossless()``                26.7          0       none: every bit is restored
    near          ``Truncate()``                10.7          0.0051  within the noise of float32
    balanced      ``Float8(group_size=128)``    8.3           0.026   within the noise of float32 (``Float8()``)
    small         ``Quantize(4)``               4.5           0.15    within the noise of float32
    smallest      ``Sign(group_size=1024)``     1.05          0.68    higher loss by 0.03 with SGD, by 0.12 with AdamW
    ============  ============================  ============  ======  =================================================

    Bits per value and errors were measured on float32 gradients of a convolutional network (``python
    bench/codec/quality.py``); an error is the root mean square error divided by the root mean square of the gradient.
    Effects were measured on small transformers, see ``convergence.md``.

    * "near" needs the optimizer: ``codec.preset("near").bind(...)``, or ``ddp_hook("near", optimizer=optimizer)``.
    * "smallest" gives the smallest frames also for transformers. There the hooks of :mod:`codec.torch` encode
      embeddings and output heads with ``Quantize(4)``. Averaged over all parameters of a small GPT, "smallest" takes
      2.3 bits per value, and "small" takes 5.2.
    * "smallest" needs error feedback, ``encode(..., residual=, feedback=True)``, which the hooks of
      :mod:`codec.torch` enable.
    * "balanced", "small" and "smallest" refuse NaN and Inf.

    Parameters
    ----------
    name : {"lossless", "near", "balanced", "small", "smallest"}
        Name of the preset; names are listed from the largest to the smallest frames.

    Returns
    -------
    Spec

    Raises
    ------
    SpecError
        There is no preset of this name; the message lists all names.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    >>> codec.encode(grad, "small") == codec.encode(grad, codec.Quantize(4))
    True
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"name must be one of {', '.join(map(repr, _PRESETS))}, got {shown(name)}")
    if name not in _PRESETS:
        raise SpecError(f"there is no preset {shown(name)}: use one of {', '.join(map(repr, _PRESETS))}")
    return _PRESETS[name]


def resolve(spec: Any) -> tuple[Spec, BoundSpec | None]:
    """Return the unbound spec of an argument ``spec=``, and the argument itself if it is a bound spec (otherwise None).

    Raises
    ------
    SpecError
        The argument is neither a spec, nor a bound spec, nor the name of a preset.
    """
    if isinstance(spec, Spec):
        return spec, None
    if isinstance(spec, BoundSpec):
        return spec.spec, spec
    if isinstance(spec, str) and spec in _PRESETS:
        return _PRESETS[spec], None
    names = f"the presets are {', '.join(map(repr, _PRESETS))}; " if isinstance(spec, str) else ""
    raise SpecError(f"not a spec: {shown(spec)}; {names}{spec_hint(spec)}")
