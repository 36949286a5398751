"""Specs as JSON objects, such as ``{"spec": "Quantize", "bits": 4}``, for the configuration of other libraries."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from codec._c.traits import needs_base
from codec.arguments import shown
from codec.errors import SpecError
from codec.presets import resolve
from codec.specs import CODECS, BoundSpec, Spec, Truncate

Config = dict[str, str | int | float | bool | None]

_CLASSES = {kind.__name__: kind for kind in CODECS}


def config_of(spec: Spec) -> Config:
    """Return a spec as a JSON object: the name of its class, and the fields that differ from their defaults."""
    values = ((f.name, getattr(spec, f.name), f.default) for f in fields(spec))
    return {"spec": type(spec).__name__, **{name: value for name, value, default in values if value != default}}


def spec_of_config(config: object) -> Spec:
    """Return the spec of a JSON object that :func:`config_of` returned, or that was written by hand.

    Parameters
    ----------
    config : dict
        The key ``"spec"`` has the name of a preset or of a spec's class; the other keys are fields of that class.
        Missing fields have their defaults.

    Returns
    -------
    Spec

    Raises
    ------
    SpecError
        The configuration is not an object, names no spec, or has an unknown key or a wrong value.
    """
    if not isinstance(config, Mapping):
        raise SpecError(
            f'the configuration of a spec must be an object, such as {{"spec": "Lossless"}}, got {shown(config)}'
        )
    given = dict(cast(Mapping[Any, Any], config))
    name = given.pop("spec", "lossless")
    if not isinstance(name, str):
        raise SpecError(f'"spec" must be the name of a preset, or one of {", ".join(_CLASSES)}, got {shown(name)}')
    if (kind := _CLASSES.get(name)) is None:
        start = resolve(name)[0]
        kind, given = type(start), {**{f.name: getattr(start, f.name) for f in fields(start)}, **given}
    names = [f.name for f in fields(kind)]
    if unknown := [key for key in given if key not in names]:
        raise SpecError(f"{kind.__name__} has no field {shown(unknown[0])}: its fields are {', '.join(names)}")
    return kind(**given)


def self_contained(spec: object) -> Spec:
    """Return an argument's spec; raise SpecError if decoding its frames needs other tensors, such as a base.

    Raises
    ------
    SpecError
        The argument is not a spec; or its frames need a base, or an optimizer and its state.
    """
    plain, bound = resolve(spec)
    if needs_base(plain):
        raise SpecError("Delta() needs a base tensor, which this call does not take: use another spec")
    if isinstance(bound, BoundSpec) or (isinstance(plain, Truncate) and plain.fixed_level is None):
        raise SpecError(
            f"{plain} needs the state of an optimizer, which this call does not take: use Truncate(2) or another spec"
        )
    return plain
