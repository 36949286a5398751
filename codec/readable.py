"""Text of statistics for people: sizes, times, and the repr of dataclasses with rounded floats."""

from dataclasses import fields
from typing import Any, cast

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
_TIMES = ((1, "s"), (1e-3, "ms"), (1e-6, "us"))


class Rounded:
    """Base class of dataclasses declared with ``repr=False``; its repr shows floats with 4 significant digits."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = ", ".join(f"{f.name}={rounded(getattr(self, f.name))}" for f in fields(cast(Any, self)) if f.repr)
        return f"{type(self).__qualname__}({values})"


def rounded(value: Any) -> str:
    """Return the repr of a value, in which floats, also those in tuples and dicts, have 4 significant digits."""
    if type(value) is float:
        return f"{value:.4g}"
    if type(value) is tuple:
        items = [rounded(v) for v in cast(tuple[Any, ...], value)]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if type(value) is dict:
        pairs = cast(dict[Any, Any], value).items()
        return f"{{{', '.join(f'{key!r}: {rounded(v)}' for key, v in pairs)}}}"
    return repr(value)


def size(nbytes: float) -> str:
    """Return a number of bytes as text with 3 significant digits, such as "1.5 MB"."""
    return _with_unit(nbytes, _SIZES)


def duration(seconds: float) -> str:
    """Return a time in seconds as text with 3 significant digits, such as "25 ms"."""
    return _with_unit(seconds, _TIMES)


def share(part: float, whole: float) -> str:
    """Return the text for `part` of `whole` bytes, such as "0.34 of 1.5 MB sent (23%)"."""
    if not whole:
        return f"{size(part)} sent"
    scale, unit = _scale(whole, _SIZES)
    sent = _digits(part / scale) if part >= scale / 100 else size(part)
    return f"{sent} of {_digits(whole / scale)} {unit} sent ({_digits(100 * part / whole, 2)}%)"


def count(n: int, noun: str) -> str:
    """Return a number and a noun, such as "2 tensors"; the noun gets an "s" unless the number is 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = _scale(value, units)
    return f"{_digits(value / scale)} {unit}"


def _scale(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    return next((u for u in units if value >= 0.9995 * u[0]), units[-1])


def _digits(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and without an exponent."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
