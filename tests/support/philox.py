"""Independent implementation of Philox4x32-10, the random number generator of stochastic codecs."""

import numpy as np


def philox(key, counter):
    """Return one block of Philox4x32-10: four words of 32 bits for a key of two words and a counter of four."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_words(n, seed, stream, word=0):
    """Return the random 16-bit word that each of n values uses; `word=1`: the second word, used for ties."""
    words = [philox((seed, stream & 0xFFFFFFFF), (b, 0, word, stream >> 32)) for b in range(-(-n // 8))]
    return np.array(words, np.uint32).view(np.uint16).ravel()[:n].astype(np.int64)
