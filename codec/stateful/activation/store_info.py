"""Inspect the files of a store of activations."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from codec.arguments import shown
from codec.errors import ArgumentError, CodecError, StateError
from codec.stateful.activation.entries import Bytes, check_entry, largest_nbytes
from codec.stateful.activation.slots import SlotFile, described, slot_files


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Contents of the files of a store, from :func:`inspect_store`.

    Attributes
    ----------
    edge : int
        Number of the edge.
    dtype : str
        Dtype of the entries: float32, bfloat16 or 8bit.
    samples : int
        Number of samples with stored activations.
    values : tuple of int
        Number of values per sample, for each file.
    nbytes : int
        Total size of all entries in bytes.
    file_nbytes : int
        Total size of all files in bytes.
    visits : float
        Mean number of deltas of a sample since it was sent raw; NaN without samples.
    damaged : int or None
        Number of entries with a wrong checksum; None if checksums were not verified.
    """

    edge: int
    dtype: str
    samples: int
    values: tuple[int, ...]
    nbytes: int
    file_nbytes: int
    visits: float
    damaged: int | None


def inspect_store(folder: str | PathLike[str], *, verify: bool = False) -> StoreInfo:
    """Return a summary of the files of an :class:`ActivationDelta`. The files may be in use.

    Parameters
    ----------
    folder : str or path
        Folder that was passed as `store` to :class:`ActivationDelta`.
    verify : bool
        True: read all entries, and count the entries with a wrong checksum.

    Returns
    -------
    StoreInfo
        Edge, dtype, counts and sizes.

    Raises
    ------
    ArgumentError
        The folder cannot be read, or contains no files of activations.
    StateError
        A file is not a file of activations, its head is damaged, or files belong to different edges or dtypes.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> delta = codec.ActivationDelta(store=folder)
    >>> message = delta.encode(np.ones((2, 500), np.float32), samples=[7, 11])
    >>> delta.commit()
    >>> delta.close()
    >>> info = codec.ActivationDelta.inspect_store(folder, verify=True)
    >>> info.samples, info.values, info.nbytes, info.damaged
    (2, (500,), 4000, 0)
    """
    try:
        path = Path(folder)
        paths = [p for _, p in slot_files(path)]
        if not paths:
            raise ArgumentError(f"{folder} has no files of activations")
        kinds = [described(p) for p in paths]
        if len({(dtype, edge) for dtype, edge, _ in kinds}) != 1:
            raise StateError(f"the files of {folder} do not belong to one store: their edges or dtypes differ")
        counts = [
            _counts(SlotFile(p, *kind, writable=False), kind[0], verify) for p, kind in zip(paths, kinds, strict=True)
        ]
        file_nbytes = sum(p.stat().st_size for p in paths)
    except TypeError:
        raise ArgumentError(f"folder must be a path, got {shown(folder)}") from None
    except (OSError, ValueError) as e:
        raise ArgumentError(f"{folder} cannot be read: {e}") from e
    samples, nbytes, visits, damaged = (sum(column) for column in zip(*counts, strict=True))
    return StoreInfo(
        edge=kinds[0][1],
        dtype=kinds[0][0],
        samples=samples,
        values=tuple(n for _, _, n in kinds),
        nbytes=nbytes,
        file_nbytes=file_nbytes,
        visits=visits / samples if samples else float("nan"),
        damaged=damaged if verify else None,
    )


def is_store(path: str) -> bool:
    """Return True if `path` is a folder that contains files of activations."""
    try:
        return bool(slot_files(Path(path)))
    except (OSError, ValueError):
        return False


def _counts(file: SlotFile, dtype: str, verify: bool) -> tuple[int, int, int, int]:
    """Return totals of a file: number of samples, bytes of their entries, visits, and number of damaged entries."""
    samples = nbytes = visits = damaged = 0
    # do not allocate more bytes than the file occupies on the disk: a sparse file may declare huge entries
    most = min(largest_nbytes(dtype, file.n), 512 * file.path.stat().st_blocks)
    memory = np.empty(most, np.uint8) if verify else None
    for slot, head in file.heads():
        if head is not None:
            samples, nbytes, visits = samples + 1, nbytes + head.nbytes, visits + head.visits
            if memory is not None:
                damaged += not _is_entry(file.read(slot, head.sample, head.check, memory), dtype, file.n)
    file.close()
    return samples, nbytes, visits, damaged


def _is_entry(contents: Bytes | None, dtype: str, n: int) -> bool:
    """Return True if `contents` is an undamaged entry; None stands for an entry with a wrong checksum."""
    try:
        if contents is not None:
            check_entry(contents, dtype, n)
        return contents is not None
    except CodecError:
        return False
