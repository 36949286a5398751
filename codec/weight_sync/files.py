"""Updates of .safetensors files: encode the difference of two files, apply updates, and merge a chain of updates."""

import json
import math
import mmap
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from codec._c.library import ITEMSIZE
from codec._options import CallOptions
from codec.errors import ArgumentError, FrameError, StateError
from codec.files.header import MAX_JSON, SAFETENSORS
from codec.files.replacing import replaced
from codec.weight_sync.base import Base
from codec.weight_sync.coding import compose_deltas
from codec.weight_sync.update import MAX_RANK, Bytes, Kind, Update, mapped
from codec.weight_sync.weights import Slot, Weights
from codec.weight_sync.writing import Encoder, Progress, write_update

_OTHER_DTYPES = {"complex64": "uint64"}  # by dtype that frames do not support: integer dtype of the same size


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
        The file cannot be read, or is not a .safetensors file.
    """
    weights, _ = read_safetensors(path, memory)
    for slot in weights.values():
        slot.digests = slot.measure()
    return weights


def read_safetensors(path: str, memory: Bytes | None = None) -> tuple[Weights, Mapping[str, Any]]:
    """Return the weights in a .safetensors file, without digests (see :func:`weights_in`), and the file's metadata."""
    data = np.frombuffer(mapped(path), np.uint8) if memory is None else memory
    weights = Weights()
    try:
        size = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or size > min(MAX_JSON, len(data) - 8):
            raise ValueError("its header would be longer than the file, or than 100 MB")
        header: Any = json.loads(data[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                values = data[8 + size :]
                weights[name] = _slot(entry["dtype"], entry["shape"], entry["data_offsets"], values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ArgumentError(f"{path} cannot be read as a .safetensors file: {e}") from None
    metadata = header.get("__metadata__")
    return weights, cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {}


def _slot(dtype: Any, shape: Any, offsets: Any, values: Bytes) -> Slot:
    """Return the slot of a tensor, a view of `values`. Dtypes of less than a byte, such as FP4, become uint8."""
    begin, end = offsets
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or not begin <= end <= len(values):
        raise ValueError("shape or offsets of a tensor in its header are invalid, or lie outside of the file")
    name = SAFETENSORS.get(dtype)
    name = _OTHER_DTYPES.get(name or "", name)
    kind = Kind("uint8", (end - begin,)) if name is None or len(shape) > MAX_RANK else Kind(name, tuple(shape))
    if name is not None and math.prod(shape) * ITEMSIZE[name] != end - begin:
        raise ValueError("a tensor does not have the size that follows from its dtype and shape")
    return Slot(kind, values[begin:end])


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
    after = weights_in(new)
    pairs = ((name, slot.view) for name, slot in after.items())
    progress: Progress | None = how.get("progress")
    return write_update(pairs, version, weights_in(old), version - 1, file=out, options=given, progress=progress)


def apply_files(old: str, updates: Sequence[Update], out: str, progress: Progress | None = None) -> Base:
    """Apply updates to the .safetensors file `old`, and write the result, with the header of `old`, to `out`.

    Raises
    ------
    StateError
        An update needs a base other than the weights before it, or was applied already.
    """
    with replaced(Path(out)) as target:
        with Path(old).open("rb") as source:
            shutil.copyfileobj(source, target, 1 << 24)
        target.flush()
        memory = np.frombuffer(mmap.mmap(target.fileno(), 0), np.uint8)
        base = Base()
        base.weights = weights_in(old, memory)
        for k, update in enumerate(updates):
            digest = base.weights.digest()
            if update.tensors != base.weights.kinds:
                raise StateError(f"the names, dtypes or shapes of the update differ from those of {old}")
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
    digest = weights.digest()
    for update in updates:
        if update.base_digest != digest or update.tensors != weights.kinds:
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
    return Update.open(out)


def _composed(name: str, slot: Slot, updates: Sequence[Update]) -> Iterator[tuple[bytes | None, bytes]]:
    """Merge the frames of a tensor in a chain of updates.

    Yields
    ------
    (bytes or None, bytes)
        Merged frame of each piece, None for an unchanged piece; and the digest of the piece in the base.
    """
    for k, digest in enumerate(slot.digests):
        frames = [frame for update in updates if (frame := update.frame(name, k)) is not None]
        yield compose_deltas(frames, slot.piece(k), slot.kind.dtype) if frames else None, digest
