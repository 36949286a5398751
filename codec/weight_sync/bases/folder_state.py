"""File ``state`` of a folder of weights: run, version, kinds, digests, and the name of the file of values."""

import hashlib
import json
import operator
from pathlib import Path
from typing import Any, NamedTuple

from codec._c.library import DTYPES
from codec.errors import StateError
from codec.files.replacing import replaced
from codec.weight_sync.updates.digests import sum_of, weights_digest
from codec.weight_sync.updates.identity import MAX_VERSION, Identity
from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.shards import Name, Selection, Shard
from codec.weight_sync.updates.update import MAX_RANK
from codec.weight_sync.updates.weights import Rest, Weights

_FORMAT = 3


class FolderState(NamedTuple):
    """Contents of the file."""

    run: bytes | None
    version: int
    tensors: list[
        tuple[Name, TensorKind, list[bytes]]
    ]  # name, kind and digests of the pieces, in the order of the values
    file: str
    only: str | None = None  # fingerprint of the selection of tensors; None: all are kept
    rest: Rest = Rest()

    @property
    def kinds(self) -> dict[Name, TensorKind]:
        """Dtype and shape of all tensors by name."""
        return {name: kind for name, kind, _ in self.tensors}

    @property
    def identity(self) -> Identity:
        """Run, version and digest of the weights."""
        own = weights_digest({key: (kind, digests) for key, kind, digests in self.tensors})
        return Identity(self.run, self.version, sum_of([int.from_bytes(own, "little"), self.rest.digest]))


def state_of(
    weights: Weights, run: bytes | None, version: int, file: str, only: Selection | None = None
) -> FolderState:
    """Return the state of weights."""
    tensors = [(name, slot.kind, list(slot.digests)) for name, slot in weights.items()]
    return FolderState(run, version, tensors, file, None if only is None else only.fingerprint, weights.rest)


def write_state(path: Path, state: FolderState) -> None:
    """Write a state to a file, which appears once it is complete."""
    tensors = [[name, kind.dtype, kind.shape, [d.hex() for d in digests]] for name, kind, digests in state.tensors]
    run = None if state.run is None else state.run.hex()
    head = {"format": _FORMAT, "run": run, "version": state.version, "file": state.file, "only": state.only}
    body = json.dumps({**head, "rest": state.rest, "tensors": tensors}).encode()
    with replaced(path) as f:
        f.write(hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b"\n" + body)


def read_state(path: Path) -> FolderState:
    """Read a state from a file.

    Raises
    ------
    StateError
        The file cannot be read, or is damaged.
    """
    try:
        check, _, body = path.read_bytes().partition(b"\n")
        if check.decode() != hashlib.blake2b(body, digest_size=16).hexdigest():
            raise ValueError("its digest does not match its contents")
        return _parsed(json.loads(body))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise StateError(f"{path} cannot be read: {e}; start from an empty folder") from None


def _parsed(state: Any) -> FolderState:
    if state["format"] != _FORMAT:
        raise ValueError(f"it has format {state['format']}, but this library reads format {_FORMAT}")
    version, file = state["version"], state["file"]
    run = None if state["run"] is None else bytes.fromhex(state["run"])
    if type(version) is not int or not 0 <= version <= MAX_VERSION or not str(file).startswith("values-"):
        raise ValueError("it has no version or file")
    tensors: list[tuple[Name, TensorKind, list[bytes]]] = []
    for name, dtype, shape, found in state["tensors"]:
        if dtype not in DTYPES or len(shape) > MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name!r} has no dtype or shape")
        key = name if isinstance(name, str) else Shard(name[0], tuple(name[1]), tuple(name[2]))
        kind, digests = TensorKind(dtype, tuple(shape)), [bytes.fromhex(d) for d in found]
        if len(digests) != len(kind.spans):
            raise ValueError(f"{name!r} lacks digests")
        tensors.append((key, kind, digests))
    rest = Rest(*map(operator.index, state["rest"]))
    return FolderState(run, version, tensors, Path(file).name, state["only"], rest)
