"""Engines: implementations of encoding and decoding. The device of a tensor selects the engine.

All engines produce bit-identical frames. An engine is a module of this package, imported on first use, with these
functions, which take the requests of :mod:`codec.engines.request`:

* ``why_not() -> str | None``: return why the engine cannot be used on this machine, or None if it can;
* ``encode(request) -> bytes | memoryview``: return the frame;
* ``decode(request)`` and ``reduce(request, op)``: return the tensor;
* ``accumulate(request, weight)``: add decoded values to a tensor;
* ``sum_codes(request)``: return the integer sums of the codes of Ternary frames, and their scale;
* ``encode_many(requests)`` and ``decode_many(requests)``: return a list with a result for each request.

An engine for tensors on a device, :class:`DeviceEngine`, also has

* ``encode_async(request)``: return a :class:`codec.engines.cuda.pending.PendingFrame`;
* ``count(request)``: return the count of each symbol in the sample from which encoding builds a codebook, or None if
  the tensor is too small.

An engine raises :class:`codec.EngineError` for memory that it cannot read.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

from codec._options import ENGINES
from codec.engines import native
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import EngineError
from codec.tensors.view import refusal


class Engine(Protocol):
    """Interface of engines: functions that every engine module has."""

    def why_not(self) -> str | None:
        """Return the reason why the engine cannot be used on this machine; None if it can."""
        ...

    def encode(self, r: EncodeRequest) -> bytes | memoryview:
        """Encode the tensor of a request, and return the frame."""
        ...

    def encode_many(self, requests: Sequence[EncodeRequest]) -> list[bytes]:
        """Return one frame for each request."""
        ...

    def decode(self, r: DecodeRequest) -> Any:
        """Decode the frame of a request, and return the tensor."""
        ...

    def decode_many(self, requests: Sequence[DecodeRequest]) -> list[Any]:
        """Return one tensor for each request."""
        ...

    def accumulate(self, r: DecodeRequest, weight: float) -> None:
        """Add `weight` times the values of a frame to the request's `out`."""
        ...

    def reduce(self, r: DecodeRequest, op: str) -> Any:
        """Return the sum, mean or maximum of the tensors in the request's frames."""
        ...

    def sum_codes(self, r: DecodeRequest) -> tuple[Any, float]:
        """Return the integer sums of the codes of Ternary frames, and their scale."""
        ...


class DeviceEngine(Engine, Protocol):
    """Interface of engines for tensors on a device, with additional functions."""

    def encode_async(self, r: EncodeRequest) -> Any:
        """Enqueue the encoding on the tensor's stream, and return a handle with which to wait for the frame."""
        ...

    def count(self, r: EncodeRequest) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the counts of 256 symbols in the sample of a tensor; None if the tensor is too small to be sampled."""
        ...


_native: Engine = native
_OF_DEVICE = {"cuda": "cuda"}  # engine by device type, for devices whose memory the host cannot read


@functools.cache
def _module(name: str) -> Engine | None:
    """Return the module of an engine, imported on first use, or None if this version lacks it."""
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        return None
    return cast(Engine, importlib.import_module(module))  # tests/api/typed_calls.py checks that it is one


def _usable(name: str) -> Engine | str:
    """Return the engine of this name, or the reason why it cannot be used."""
    found = _module(name)
    if found is None:
        return "this version of codec lacks the engine"
    return found.why_not() or found


def engines() -> dict[str, str | None]:
    """Return the names of all engines, each with the reason why it cannot be used on this machine.

    Returns
    -------
    dict of str to (str or None)
        By name of the engine: the reason, or None if the engine can be used.

    Examples
    --------
    >>> [name for name, why_not in codec.engines().items() if why_not is None]
    ['native', 'numba']
    """
    return {name: found if isinstance(found := _usable(name), str) else None for name in ENGINES}


def choose(name: str | None, argument: str, device: str) -> Engine:
    """Return an engine by name or by device.

    Parameters
    ----------
    name : str or None
        Name of the engine. None: the engine for `device`.
    argument : str
        Name of the argument whose memory is on `device`, for messages.
    device : str
        Device of the argument, such as ``"cpu"`` or ``"cuda:0"``.

    Raises
    ------
    EngineError
        No engine reads memory of `device`, or the engine cannot be used on this machine.
    """
    if name is None:
        return _native if device == "cpu" else device_engine(argument, device)
    if name == "native":
        return _native
    found = _usable(name)
    if isinstance(found, str):
        raise EngineError(f"the {name} engine cannot be used on this machine: {found}")
    return found


def device_engine(argument: str, device: str) -> DeviceEngine:
    """Return the engine for tensors on a device that the host cannot read.

    Parameters
    ----------
    argument, device : str
        As for :func:`choose`; `device` is not "cpu".

    Raises
    ------
    EngineError
        No engine reads memory of `device`, or the engine cannot be used on this machine.
    """
    if (name := _OF_DEVICE.get(device.partition(":")[0])) is None:
        raise EngineError(refusal(argument, device, "the native engine"))
    found = _usable(name)
    if isinstance(found, str):
        raise EngineError(
            f"{refusal(argument, device, 'the native engine')} (the {name} engine cannot be used on this machine: "
            f"{found})"
        )
    return cast(DeviceEngine, found)
