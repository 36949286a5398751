"""Weights of one version in host memory, with the digest of each piece."""

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from codec._c.library import ITEMSIZE
from codec.errors import ArgumentError, CodecError
from codec.tensors.view import TensorView, empty, fetch, view
from codec.tensors.wrapper import View
from codec.weight_sync.updates.coding import digest_of
from codec.weight_sync.updates.digests import sum_of, weights_digest
from codec.weight_sync.updates.kinds import PIECE_NBYTES, Bytes, TensorKind, WeightsSize
from codec.weight_sync.updates.shards import Layout, Name, check_name, layouts, tensor_of
from codec.weight_sync.updates.update import Update, whole_kind

_ALIGNMENT = 64
_ACCEPTED = "weights must be a mapping from names to tensors, or an iterable of such pairs"


class Module(Protocol):
    """Module of torch, or an object with the same methods; its weights are the tensors of its state dict."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Yield parameters with their names."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return parameters and buffers by name."""
        ...


Given = Mapping[str, Any] | Mapping[Name, Any] | Iterable[tuple[Name, Any]] | Module


@dataclass(slots=True)
class Slot:
    """Memory of a tensor, with the digest of each piece."""

    kind: TensorKind
    memory: Bytes
    digests: list[bytes] = field(default_factory=list[bytes])

    def piece(self, k: int) -> Bytes:
        """Return the memory of piece `k`."""
        return self.memory[k * PIECE_NBYTES : (k + 1) * PIECE_NBYTES]

    @property
    def view(self) -> TensorView:
        """View of the memory as a tensor with the dtype and shape of `kind`."""
        return view(self.memory)._replace(dtype=self.kind.dtype, shape=self.kind.shape)

    def measure(self) -> list[bytes]:
        """Return the digest of each piece, computed from its values."""
        return [digest_of(self.memory[begin:end]) for begin, end in self.kind.spans]


class Rest(NamedTuple):
    """Tensors of weights that a receiver does not keep: their part of the digest, and their size."""

    digest: int = 0
    tensors: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, update: Update, kept: Mapping[Name, tuple[TensorKind, Sequence[bytes]]]) -> "Rest":
        """Return what weights have after `update`, except the tensors `kept`."""
        own = WeightsSize.of([kind for kind, _ in kept.values()])
        digest = int.from_bytes(update.digest, "little") - int.from_bytes(weights_digest(kept), "little")
        return cls(digest, update.total.tensors - own.tensors, update.total.nbytes - own.nbytes)


class Weights(dict[Name, Slot]):
    """Tensors of one version by name, or their shards by key. Once they are complete, tensors are not added.

    Attributes
    ----------
    rest : Rest
        Tensors that the weights also have, but whose values are not kept.
    """

    rest: Rest = Rest()

    @property
    def kinds(self) -> dict[Name, TensorKind]:
        """Dtype and shape of all tensors or shards."""
        return {name: slot.kind for name, slot in self.items()}

    @functools.cached_property
    def tensors(self) -> dict[str, TensorKind]:
        """Dtype and shape of all whole tensors."""
        return {tensor_of(key): whole_kind(key, slot.kind) for key, slot in self.items()}

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each tensor."""
        return layouts({key: slot.kind.shape for key, slot in self.items()})

    def digest(self) -> bytes:
        """Return the digest of all tensors, 16 bytes, computed from the digests of their pieces."""
        return sum_of([int.from_bytes(weights_digest(self.pieces), "little"), self.rest.digest])

    @property
    def pieces(self) -> dict[Name, tuple[TensorKind, list[bytes]]]:
        """Kind, and digests of the pieces, of all tensors or shards."""
        return {key: (slot.kind, slot.digests) for key, slot in self.items()}

    def damaged(self) -> list[Name]:
        """Recompute all digests, and return the names of the tensors whose stored digests differ from the result."""
        return [name for name, slot in self.items() if slot.measure() != slot.digests]


def copied(given: Given) -> Weights:
    """Copy tensors to new memory one by one, and compute their digests."""
    weights = Weights()
    for name, x in items(given):
        if check_name(name) in weights:
            raise ArgumentError(f"tensor {name!r} was given twice")
        v = view_of(name, x)
        slot = weights[name] = Slot(kind_of(name, v), np.empty(v.nbytes, np.uint8))
        for k, piece in enumerate(pieces_of(v)):
            slot.piece(k)[:] = piece
            del piece
        slot.digests = slot.measure()
        del x, v  # free this tensor before a generator gathers the next one
    return weights


def allocated(kinds: Mapping[Name, TensorKind], memory: Bytes | None = None) -> Weights:
    """Return weights whose digests are not set. Tensors are views of `memory`, one after the other.

    If `memory` is None, each tensor gets new memory.
    """
    weights, at = Weights(), 0
    for name, kind in kinds.items():
        values = np.empty(kind.nbytes, np.uint8) if memory is None else memory[at : at + kind.nbytes]
        weights[name] = Slot(kind, values, [b""] * len(kind.spans))
        at += _aligned(kind)
    return weights


def memory_nbytes(kinds: Iterable[TensorKind]) -> int:
    """Return the number of bytes that :func:`allocated` needs for these tensors in one block of memory."""
    return sum(map(_aligned, kinds))


def _aligned(kind: TensorKind) -> int:
    return -(-kind.nbytes // _ALIGNMENT) * _ALIGNMENT


def is_streamed(given: Given) -> bool:
    """Return False for a dict or module, whose tensors all exist; True for what may compute each tensor when read."""
    return not isinstance(given, dict) and not hasattr(given, "state_dict")


def items(given: Given) -> Iterable[tuple[Name, Any]]:
    """Return (name, tensor) pairs of a mapping, of a torch module's state_dict, or of an iterable of pairs.

    Extra states of modules that are None are left out.
    """
    if hasattr(given, "state_dict"):
        given = cast(Module, given).state_dict()
    if isinstance(given, dict):
        return dict(_pairs(cast(dict[str, Any], given).items())).items()
    if isinstance(given, Mapping):
        return _pairs(cast(Mapping[str, Any], given).items())
    if hasattr(given, "dtype") or isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise ArgumentError(f"{_ACCEPTED}, got {type(given).__name__}")
    return _read_once(_pairs(cast(Iterable[tuple[Name, Any]], given)))


def _pairs(given: Iterable[tuple[Name, Any]]) -> Iterator[tuple[Name, Any]]:
    for pair in given:
        try:
            name, x = pair
        except (TypeError, ValueError):
            raise ArgumentError(f"{_ACCEPTED}, got an item of type {type(pair).__name__}") from None
        if x is not None or not _is_extra(name):
            yield name, x
        del pair, x  # free this tensor before a generator gathers the next one


def _read_once(pairs: Iterable[tuple[Name, Any]]) -> Iterator[tuple[Name, Any]]:
    """Yield pairs; raise ArgumentError if there are none, as of an iterator that was read before."""
    empty = True
    for pair in pairs:
        empty = False
        yield pair
        del pair  # free this tensor before a generator gathers the next one
    if empty:
        raise ArgumentError("no tensors were given: an iterator is read once, pass a new one for each call")


def _is_extra(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def as_view(x: Any) -> TensorView:
    """Return a TensorView of a tensor or of a :func:`codec.view`; return a TensorView unchanged."""
    if isinstance(x, TensorView):
        return x
    return view(x.tensor, x.dtype) if isinstance(x, View) else view(x)


def view_of(name: Name, x: Any) -> TensorView:
    """Return a TensorView of the tensor `name`, as :func:`as_view` does.

    Raises
    ------
    ArgumentError
        x is not a tensor, or has a dtype that cannot be encoded; the message begins with `name`.
    """
    try:
        return as_view(x)
    except CodecError as e:
        extra = ArgumentError(
            "the extra state of a module must be a tensor or None: leave it out, such as by dict(module."
            f"named_parameters()), and send it by other means; got {type(x).__name__}"
        )
        error = extra if _is_extra(name) else e
        error.of(name)
        raise error from None


def kind_of(name: Name, v: TensorView) -> TensorKind:
    """Return dtype and shape of a tensor; raise ArgumentError if it is on the device "meta", where it has no values."""
    if v.device == "meta":
        raise ArgumentError(f"{name!r} is on meta, where tensors have no values")
    return TensorKind(v.dtype, v.shape)


def kinds_of(given: Given) -> dict[Name, TensorKind]:
    """Return dtype and shape of all tensors of a dict or module.

    Raises
    ------
    ArgumentError
        `given` computes its tensors when they are read, which would be read again.
    """
    if is_streamed(given):
        raise ArgumentError(
            f"full=None reads the weights several times: pass a dict or module, not {type(given).__name__}"
        )
    return {check_name(name): kind_of(name, view_of(name, x)) for name, x in items(given)}


def pieces_of(v: TensorView) -> Iterator[Bytes]:
    """Yield the bytes of each piece of a tensor. Pieces on a device are copied to host memory one by one."""
    size = ITEMSIZE[v.dtype]
    if v.device == "cpu":
        whole = v.array()
        for begin, end in TensorKind(v.dtype, v.shape).spans:
            yield whole[begin:end]
        return
    flat: Any = cast(Any, v.owner).reshape(-1)
    for begin, end in TensorKind(v.dtype, v.shape).spans:
        yield fetch("a tensor", view(flat[begin // size : end // size])).array()


def new_tensor(kind: TensorKind, like: Any) -> tuple[Any, Bytes]:
    """Allocate a tensor of the library of `like`, such as torch; return the tensor and a view of its bytes."""
    tensor, v = empty(kind.dtype, kind.shape, like)
    return tensor, v.array()


def known_names(names: Iterable[str], table: Container[str]) -> list[str]:
    """Return `names` as a list; raise ArgumentError for a name that `table` does not contain."""
    given = list(names)
    for name in given:
        if name not in table:
            raise ArgumentError(f"there is no tensor {name!r}")
    return given
