"""Specs by the names of their purpose."""

from typing import Any

from codec._c.spec_structs import spec_hint
from codec.arguments import shown
from codec.errors import SpecError
from codec.specs import BoundSpec, Float8, Lossless, Quantize, Sign, Spec, Truncate

_PRESETS: dict[str, Spec] = {
    "lossless": Lossless(),
    "near": Truncate(),
    "balanced": Float8(group_size=128),
    "small": Quantize(4),
    "smallest": Sign(group_size=1024),
}


def preset(name: str) -> Spec:
    """Return the spec of a preset."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"a preset is a name, one of {', '.join(map(repr, _PRESETS))}; got {shown(name)}")
    if name not in _PRESETS:
        raise SpecError(f"no preset {shown(name)}: use one of {', '.join(map(repr, _PRESETS))}")
    return _PRESETS[name]


def resolve(spec: Any) -> tuple[Spec, BoundSpec | None]:
    """Return the spec that an argument means, and the argument itself if it is bound to an optimizer.

    Raises
    ------
    SpecError
        The argument is no spec, no bound spec and no name of a preset.
    """
    if isinstance(spec, Spec):
        return spec, None
    if isinstance(spec, BoundSpec):
        return spec.spec, spec
    if isinstance(spec, str) and spec in _PRESETS:
        return _PRESETS[spec], None
    names = f"the presets are {', '.join(map(repr, _PRESETS))}; " if isinstance(spec, str) else ""
    raise SpecError(f"not a spec: {shown(spec)}; {names}{spec_hint(spec)}")
