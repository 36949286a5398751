"""Huffman codes of exponents: native codes of any length, and codebooks of codec, whose codes have at most 8 bits."""

import heapq
import itertools
from typing import Any

import numpy as np

import codec

SYMBOLS = 256
LITERAL = 8  # bits of an escaped exponent
Counts = np.ndarray[Any, np.dtype[np.int64]]


def native_lengths(counts: Counts) -> Counts:
    """Return the code lengths of an optimal prefix code without a limit, for the symbols and, last, the escape code.

    Symbols without occurrences have length 0. The escape code has the weight of one occurrence.
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
    """Return the code lengths of a codebook, for the symbols and, last, the escape code."""
    return np.append(np.frombuffer(book.lengths, np.uint8).astype(np.int64), book.escape_length)


def bits(counts: Counts, lengths: Counts) -> float:
    """Return the mean bits of an exponent; symbols without a code are escaped."""
    of_symbol = np.where(lengths[:SYMBOLS], lengths[:SYMBOLS], lengths[SYMBOLS] + LITERAL)
    return float(counts @ of_symbol / counts.sum())


def entropy(counts: Counts) -> float:
    """Return the entropy of exponents in bits."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())
