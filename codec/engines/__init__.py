"""Engines: what does the work, chosen by where a tensor lies. All make the same bytes.

An engine is a module of this package, imported when it is first asked for, with

* ``why_not() -> str | None``: why it cannot be used here, or None;
* ``encode(request) -> bytes | memoryview``, ``decode(request)`` and ``reduce(request, op)`` that return the tensor, and
  ``accumulate(request, weight)``, over the requests of :mod:`codec.engines.request`;
* ``encode_many(requests)``, ``decode_many(request)``: lists of what one call each would give;
* for tensors on a device ``encode_async(request)``, a :class:`codec.engines.cuda.pending.Pending`, and
  ``count(request)``: how often each symbol occurs in the sample that encoding takes; None: the tensor is too small.

What it cannot read it refuses by :class:`codec.EngineError`, in words that help.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from codec._options import ENGINES
from codec.codebook import count_elsewhere_by
from codec.engines import native
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import EngineError
from codec.optimizers.arguments import LevelSource
from codec.specs import Spec
from codec.tensors.view import TensorView, refusal


class Engine(Protocol):
    """What a module of this package has."""

    def why_not(self) -> str | None:
        """Why it cannot be used here, or None."""
        ...

    def encode(self, r: EncodeRequest) -> bytes | memoryview:
        """A frame."""
        ...

    def encode_many(self, requests: Sequence[EncodeRequest]) -> list[bytes]:
        """Frames."""
        ...

    def decode(self, r: DecodeRequest) -> Any:
        """The tensor of a frame."""
        ...

    def decode_many(self, requests: Sequence[DecodeRequest]) -> list[Any]:
        """The tensors of frames."""
        ...

    def accumulate(self, r: DecodeRequest, weight: float) -> None:
        """Add a frame's values to a tensor."""
        ...

    def reduce(self, r: DecodeRequest, op: str) -> Any:
        """The sum, mean or maximum of frames."""
        ...


_native: Engine = native
_OF_DEVICE = {"cuda": "cuda"}  # where the host cannot read


def _find(name: str) -> tuple[ModuleType | None, str | None]:
    """An engine's module, and why it cannot be used."""
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        return None, "this version of codec does not have it"
    found = importlib.import_module(module)
    return found, found.why_not()


def engines() -> dict[str, str | None]:
    """Engines by name: None for those that can be used here, and why the others cannot.

    Returns
    -------
    dict of str to (str or None)

    Examples
    --------
    >>> [name for name, why_not in codec.engines().items() if why_not is None]
    ['native', 'numba']
    """
    return {name: _find(name)[1] for name in ENGINES}


def _count(v: TensorView, spec: Spec, segments: bytes | None, levels: LevelSource | None) -> Any:
    """Count the symbols of a tensor on a device."""
    engine: Any = choose(None, "a tensor", v.device)
    return engine.count(EncodeRequest(v, spec, segments=segments, levels=levels))


count_elsewhere_by(_count)


def choose(name: str | None, argument: str, device: str) -> Engine:
    """The engine of that name or, if it is None, the one for a device, on which an argument lies.

    Raises
    ------
    EngineError
        There is none, or it cannot be used here.
    """
    if name is None:
        if device == "cpu":
            return _native
        if (name := _OF_DEVICE.get(device.partition(":")[0])) is None:
            raise EngineError(refusal(argument, device, "the native engine"))
        engine, why_not = _find(name)
        if why_not is not None:
            raise EngineError(
                f"{refusal(argument, device, 'the native engine')} (the {name} engine cannot be used here: {why_not})"
            )
        return cast(Engine, engine)
    if name == "native":
        return _native
    engine, why_not = _find(name)
    if why_not is not None:
        raise EngineError(f"the {name} engine cannot be used here: {why_not}")
    return cast(Engine, engine)
