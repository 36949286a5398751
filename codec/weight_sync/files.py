"""Updates of .safetensors files: encode the difference of two files, apply updates, and merge a chain of updates."""

import mmap
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codec._options import CallOptions
from codec.errors import ArgumentError, FrameError, StateError
from codec.files.header import SAFETENSORS, FileTensor, read_header
from codec.files.index import is_container
from codec.files.opening import FileKind, MemoryBytes, kind_of, open_regular, opened, printable, readable
from codec.files.replacing import replaced
from codec.weight_sync.bases.base import Base
from codec.weight_sync.updates.coding import merge_deltas
from codec.weight_sync.updates.kinds import Bytes, TensorKind
from codec.weight_sync.updates.mapping import mapped
from codec.weight_sync.updates.shards import Name
from codec.weight_sync.updates.update import MAX_RANK, Update
from codec.weight_sync.updates.weights import Slot, Weights
from codec.weight_sync.updates.writing import Encoder, Progress, write_update


def weights_in(path: str, memory: Bytes | None = None) -> Weights:
    """Map a .safetensors file to memory, and return its tensors with their digests.

    Parameters
    ----------
    path : str
        Path of a regular file.
    memory : array of uint8, optional
        Contents of the file. Default: map it.

    Raises
    ------
    ArgumentError
        The file cannot be read, is not a .safetensors file, or is packed.
    """
    weights, _ = read_safetensors(path, memory)
    for slot in weights.values():
        slot.digests = slot.measure()
    return weights


def read_safetensors(path: str, memory: Bytes | None = None) -> tuple[Weights, Mapping[str, str]]:
    """Return the weights in a .safetensors file, without digests (see :func:`weights_in`), and the file's metadata."""
    with opened(path) as fd:
        if (kind := kind_of(fd)) is not FileKind.SAFETENSORS:
            raise ArgumentError(f"{printable(path)} is {kind.value}, not a .safetensors file")
    data = np.frombuffer(mapped(path), np.uint8) if memory is None else memory
    with readable(path):
        header = read_header(MemoryBytes(data))
    if is_container(header):
        raise ArgumentError(f"{printable(path)} is packed: codec unpack restores the .safetensors file")
    values = data[len(header.prefix) :]
    tensors = {t.name: t for t in header.tensors}
    return Weights({name: _slot(tensors[name], values) for name in header.names}), header.metadata


def _slot(t: FileTensor, values: Bytes) -> Slot:
    """Return the slot of a tensor, a view of `values`. Dtypes that frames lack become unsigned integers."""
    exact = t.dtype in SAFETENSORS and len(t.shape) <= MAX_RANK
    return Slot(TensorKind(t.wire, t.shape) if exact else TensorKind("uint8", (t.nbytes,)), values[t.begin : t.end])


def diff_files(old: str, new: str, out: str, *, version: int = 1, **how: Any) -> Update:
    """Encode the difference between two .safetensors files, and write it as an update.

    Parameters
    ----------
    old, new : str
        Paths of files whose tensors have the same names, dtypes and shapes.
    out : str
        File for the update.
    version : int
        Version of `new`; the version of `old` is lower by 1.
    **how
        ``options`` and ``progress``, as in :func:`write_update`.
    """
    given: CallOptions | None = how.get("options")
    after = {name: slot.view for name, slot in weights_in(new).items()}
    progress: Progress | None = how.get("progress")
    return write_update(after, version, weights_in(old), version - 1, file=out, options=given, progress=progress)


def apply_files(old: str, updates: Sequence[Update], out: str, progress: Progress | None = None) -> Base:
    """Apply updates to the .safetensors file `old`, and write the result, with the header of `old`, to `out`.

    Raises
    ------
    StateError
        An update needs a base other than the weights before it, or was applied already.
    """
    kinds = read_safetensors(old)[0].kinds  # before anything is copied
    if not all(update.fits(kinds) for update in updates):
        raise StateError(f"the names, dtypes or shapes of the update differ from those of {old}")
    with replaced(Path(out)) as target:
        with open(open_regular(old), "rb") as source:
            shutil.copyfileobj(source, target, 1 << 24)
        target.flush()
        memory = np.frombuffer(mmap.mmap(target.fileno(), 0), np.uint8)
        base = Base()
        base.weights = weights_in(old, memory)
        for k, update in enumerate(updates):
            digest = base.weights.digest()
            if update.digest == digest != update.base_digest:
                raise StateError(f"the update to version {update.version} was applied already")
            if update.base is not None and update.base_digest != digest:
                raise StateError(
                    f"the update needs the weights of version {update.base}, but the weights in {old} differ"
                )
            base.version = update.base
            base.check(update)
            base.apply(update)
            if progress is not None:
                progress(k + 1, len(updates))
    return base


def compose_files(old: str, updates: Sequence[Update], out: str, progress: Progress | None = None) -> Update:
    """Merge a chain of updates of the .safetensors file `old` into one update, and write the update to `out`.

    Raises
    ------
    StateError
        The base of the first update is not `old`, or the base of another update is not the result of its predecessor.
    FrameError
        An update is damaged.
    """
    weights = weights_in(old)
    digest, kinds = weights.digest(), weights.kinds
    for update in updates:
        if update.base_digest != digest or not update.fits(kinds):
            raise StateError(
                f"the base of the update to version {update.version} must be {old} or the result of the previous "
                "update, but is neither"
            )
        digest = update.digest
    first, last = updates[0], updates[-1]
    with replaced(Path(out)) as target:
        encoder = Encoder(weights.kinds, weights, target, None)
        for n, (name, slot) in enumerate(weights.items()):
            encoder.put(name, _composed(name, slot, updates))
            if progress is not None:
                progress(n + 1, len(weights))
        if encoder.finish(last.version, first.base) != last.digest:
            raise FrameError(
                f"the weights after the update to version {last.version} do not have the digest that the update names"
            )
        target.flush()
        return Update(mmap.mmap(target.fileno(), 0, prot=mmap.PROT_READ))  # what readers refuse, replaces nothing


def _composed(name: Name, slot: Slot, updates: Sequence[Update]) -> Iterator[tuple[bytes | None, bytes]]:
    """Merge the frames of a tensor in a chain of updates.

    Yields
    ------
    (bytes or None, bytes)
        Merged frame of each piece, None for an unchanged piece; and the digest of the piece in the base.
    """
    for k, digest in enumerate(slot.digests):
        frames = [frame for update in updates if (frame := update.frame(name, k)) is not None]
        yield merge_deltas(frames, slot.piece(k), slot.kind.dtype) if frames else None, digest
