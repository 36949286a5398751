"""Checks of arguments that many functions use, and the text with which messages show a wrong argument."""

import operator
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any

from codec.errors import ArgumentError

SHORTEST_TIMEOUT, LONGEST_TIMEOUT = timedelta(milliseconds=1), timedelta(days=3653)  # Gloo overflows above 10 years

Timeout = float | timedelta  # float: seconds

MAX_RANKS = 1 << 20  # maximum number of ranks of a group

_MAX_SHOWN = 120  # maximum number of characters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value for a message: one line, cut after 120 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to print integers of more than a few thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` as an int; raise ArgumentError unless it is an integer, of any type, within the limits."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or value is True or value is False or number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ArgumentError(f"{name} must be an int {bounds}, got {shown(value)}")
    return number


def truth(name: str, value: Any) -> bool:
    """Return the truth value of an argument; raise ArgumentError if it has none, such as an array of many values."""
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array or tensor of many values
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}") from None


def check_timeout(timeout: Any) -> timedelta | None:
    """Return a timeout as a timedelta; None is returned unchanged.

    Parameters
    ----------
    timeout : float, timedelta or None
        Seconds, or a timedelta: from 1 ms to 10 years.

    Raises
    ------
    ArgumentError
        `timeout` is something else.
    """
    if timeout is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if not isinstance(timeout, bool) and SHORTEST_TIMEOUT <= given <= LONGEST_TIMEOUT:
            return given
    raise ArgumentError(f"timeout must be seconds or a timedelta, from 1 ms to 10 years, got {shown(timeout)}")


def plain(value: Any) -> Any:
    """Convert scalars of numpy and tensors of rank 0 to int, float or bool; return anything else unchanged."""
    if value is None or type(value) in (int, float, bool, str):
        return value
    if isinstance(value, type) or getattr(value, "shape", ()):
        return value
    if any(name in str(getattr(value, "dtype", "")) for name in ("bool", "complex")):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if hasattr(value, "__float__") else value


def decay_of(value: object) -> float:
    """Return the decay of error feedback as a float; raise ArgumentError unless it is above 0 and at most 1."""
    decay = plain(value)
    if type(decay) not in (int, float) or not 0 < decay <= 1:
        raise ArgumentError(f"decay must be a number above 0 and at most 1, got {shown(value)}")
    return float(decay)


def float32(value: object) -> float | None:
    """Return a number rounded to float32 (Inf if it overflows), or None if `value` is not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except (OverflowError, struct.error):
        return float("inf")
