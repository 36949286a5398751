"""Store of activations in memory."""

import numpy as np

from codec.errors import ArgumentError, CodecError
from codec.inspection import inspect
from codec.stateful.activation.entries import Bytes, Floats, largest_nbytes, pack, unpack


class RamStore:
    """Entries by sample, in arrays that are reused.

    Parameters
    ----------
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._entries: dict[int, tuple[Bytes, int]] = {}  # memory, and the bytes of it that are the entry

    def read(self, sample: int, row: Floats) -> bool:
        """Write a sample's m to a row of as many values. Return False if the entry is damaged; `row` is undefined."""
        try:
            unpack(self.entry(sample), self._dtype, row)
        except CodecError:
            return False
        return True

    def write(self, sample: int, check: int, row: Floats) -> None:
        """Store a sample's m, in place of the entry that the sample has.

        Raises
        ------
        ArgumentError
            The row holds NaN or Inf, and entries have 8 bits. The sample has no entry then.
        """
        memory, _ = self._entries.pop(sample, (None, 0))
        largest = largest_nbytes(self._dtype, len(row))
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

    def restore(self, sample: int, n: int, entry: Bytes) -> None:
        """Store the bytes of an entry of n values.

        Raises
        ------
        CodecError
            The bytes are not such an entry.
        """
        if self._dtype == "8bit":
            if inspect(entry).shape != (n,):
                raise ArgumentError(f"its frame does not have {n} values")
            unpack(entry, self._dtype, np.empty(n, np.float32))
        elif len(entry) != largest_nbytes(self._dtype, n):
            raise ArgumentError(f"it has {len(entry)} bytes for {n} values")
        memory = np.empty(largest_nbytes(self._dtype, n), np.uint8)
        if len(entry) > len(memory):
            raise ArgumentError(f"it has {len(entry)} bytes for {n} values")
        memory[: len(entry)] = entry
        self._entries[sample] = memory, len(entry)
