"""Encode and decode deltas a - m, and update m in the same pass over memory."""

from typing import Any

import numpy as np

from codec._options import CallOptions, settings_of
from codec.encoding import encode, encode_request
from codec.engines import native
from codec.reducing import accumulate
from codec.specs import Spec
from codec.stateful.activation.entries import Floats

_UNVERIFIED = CallOptions(verify_first=False)  # m is a copy, which an error may leave undefined


def encode_delta(a: Floats, m: Floats, spec: Spec, stream: int, options: CallOptions | None) -> Any:
    """Encode a - m, rounded to float32, and add the decoded values to m.

    Parameters
    ----------
    a, m : numpy.ndarray of float32
        Contiguous arrays of one shape, the shape of the frame. m is undefined after an error.
    spec : Spec
        Spec of any lossy codec except Truncate.
    stream : int
        Number of the stream of random bits.
    options : CallOptions, optional
        As in :func:`codec.encode`. All engines give the same frame and the same m, but only the native engine reads and
        writes the arrays in a single pass.

    Returns
    -------
    bytes
        Frame of a - m.

    Raises
    ------
    ArgumentError
        The spec refuses NaN and Inf, and a - m contains NaN or Inf; `code` is then ``Status.NONFINITE``.
    """
    settings = _UNVERIFIED.over(settings_of(options))
    if settings.engine in (None, "native"):
        r = encode_request(a, spec, settings, residual=m, stream=stream)
        return native.encode(r._replace(delta=True))
    frame = encode(difference(a, m), spec, stream=stream, options=settings)
    accumulate(frame, m, options=settings)
    return frame


def add_delta(frame: Any, m: Floats, options: CallOptions | None) -> None:
    """Add the decoded values of a frame to m, as :func:`encode_delta` does. m is undefined after an error."""
    accumulate(frame, m, options=_UNVERIFIED.over(settings_of(options)))


def difference(a: Floats, m: Floats) -> Floats:
    """Return a - m, rounded to float32, which may be NaN or Inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.subtract(a, m)
