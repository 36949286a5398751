"""Cost of Huffman codes for exponents: with codes of any length ("native"), and with codebooks of up to 8 bits."""

import heapq
import itertools
from typing import Any

import numpy as np

import codec

SYMBOLS = 256
LITERAL = 8  # bits of an escaped exponent
Counts = np.ndarray[Any, np.dtype[np.int64]]


def native_lengths(counts: Counts) -> Counts:
    """Return the code lengths in bits of an optimal prefix code, without a limit, by symbol; the escape code is last.

    Symbols that do not occur have length 0. The escape code is weighted as one occurrence.
    """
    weights = [*counts.tolist(), 1]
    order = itertools.count()
    heap = [(w, next(order), [i]) for i, w in enumerate(weights) if w]
    heapq.heapify(heap)
    lengths = np.zeros(SYMBOLS + 1, np.int64)
    lengths[heap[0][2]] = len(heap) == 1
    while len(heap) > 1:
        (a, _, left), (b, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (a + b, next(order), left + right))
    return lengths


def capped_lengths(book: codec.Codebook) -> Counts:
    """Return the code lengths in bits of a codebook by symbol; the escape code is last."""
    return np.append(np.frombuffer(book.lengths, np.uint8).astype(np.int64), book.escape_length)


def bits(counts: Counts, lengths: Counts) -> float:
    """Return the mean bits per exponent; symbols without a code are escaped."""
    of_symbol = np.where(lengths[:SYMBOLS], lengths[:SYMBOLS], lengths[SYMBOLS] + LITERAL)
    return float(counts @ of_symbol / counts.sum())


def entropy(counts: Counts) -> float:
    """Return the entropy of exponents in bits per exponent."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())
