"""Store of activations in memory."""

from collections.abc import Iterable

import numpy as np

from codec.errors import CodecError
from codec.stateful.activation.entries import Bytes, Floats, SampleEntry, check_entry, largest_nbytes, pack, unpack


class RamStore:
    """Entries by sample, in host memory. Replacing an entry reuses its buffer.

    Parameters
    ----------
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.

    Attributes
    ----------
    found : dict of int to SampleEntry
        Entries that the store contained when it was opened; always empty.
    """

    persistent = False

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.found: dict[int, SampleEntry] = {}
        self._entries: dict[int, tuple[Bytes, int]] = {}  # buffer, and size of the entry in it in bytes

    def read(self, sample: int, row: Floats) -> bool:
        """Write a sample's m to `row`. Return False if the entry is damaged; `row` is then undefined."""
        try:
            unpack(self.entry(sample), self._dtype, row)
        except CodecError:
            return False
        return True

    def write(self, sample: int, entry: SampleEntry, row: Floats) -> None:
        """Store a sample's m, which replaces the sample's old entry.

        Raises
        ------
        ArgumentError
            The row contains NaN or Inf, and the dtype is "8bit". The sample then has no entry.
        """
        memory, _ = self._entries.pop(sample, (None, 0))
        largest = largest_nbytes(self._dtype, entry.n)
        if memory is None or len(memory) != largest:
            memory = np.empty(largest, np.uint8)
        self._entries[sample] = memory, pack(row, self._dtype, memory)

    def delete(self, sample: int) -> None:
        """Remove a sample's entry, if there is one."""
        self._entries.pop(sample, None)

    def entry(self, sample: int) -> Bytes:
        """Return the bytes of a sample's entry."""
        memory, nbytes = self._entries[sample]
        return memory[:nbytes]

    def restore(self, sample: int, entry: SampleEntry, contents: Bytes) -> None:
        """Store a copy of an entry given as bytes.

        Raises
        ------
        CodecError
            The bytes are not a valid entry with this number of values.
        """
        check_entry(contents, self._dtype, entry.n)
        memory = np.empty(largest_nbytes(self._dtype, entry.n), np.uint8)
        memory[: len(contents)] = contents
        self._entries[sample] = memory, len(contents)

    def prefetch(self, samples: Iterable[int]) -> None:
        """Do nothing: all entries are in memory already."""

    def flush(self) -> None:
        """Do nothing: there is no disk to wait for."""

    def close(self) -> None:
        """Do nothing: there are no files."""
