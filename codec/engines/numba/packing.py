# pyright: basic
"""Packing of codes of a few bits to bytes, and unpacking (docs/spec/format.md, section 8.4)."""

import numpy as np

from codec.engines.numba.jit import jit
from codec.engines.numba.words import U8, U16, U32, U64, copy

TRITS = (np.arange(256)[:, None] // 3 ** np.arange(4, -1, -1) % 3).astype(U8).reshape(-1)  # by byte: its five trits


@jit
def _squeeze(x, bits):
    """Pack eight codes, one in each byte of ``x``, into adjacent fields of ``bits`` bits."""
    gap = U64(8 - bits)
    x = x & U64(0x00FF00FF00FF00FF) | (x & U64(0xFF00FF00FF00FF00)) >> gap
    x = x & U64(0x0000FFFF0000FFFF) | (x & U64(0xFFFF0000FFFF0000)) >> (U64(2) * gap)
    return x & U64(0x00000000FFFFFFFF) | (x & U64(0xFFFFFFFF00000000)) >> (U64(4) * gap)


@jit
def _stretch(x, bits):
    """Unpack eight adjacent fields of ``bits`` bits into the bytes of a word: the inverse of :func:`_squeeze`."""
    b = U64(bits)
    one, two, four = (U64(1) << b) - U64(1), (U64(1) << U64(2) * b) - U64(1), (U64(1) << U64(4) * b) - U64(1)
    x = x & four | (x >> (U64(4) * b) & four) << U64(32)
    two |= two << U64(32)
    x = x & two | (x >> (U64(2) * b) & two) << U64(16)
    one |= one << U64(32)
    one |= one << U64(16)
    return x & one | (x >> b & one) << U64(8)


@jit
def pack(code, n, bits, out):
    """Pack ``n`` codes to bytes; unused bits of the last byte are 0.

    ``code`` must have space for a multiple of 8 codes; codes after the last one are set to 0.
    """
    code[n : (n + 7) // 8 * 8] = U8(0)
    groups = code[: (n + 7) // 8 * 8].view(U64)
    whole = n // 8
    if bits == 8:
        copy(out, code[:n])
        return
    if bits == 4:
        to4 = out[: 4 * whole].view(U32)
        for i in range(whole):
            to4[i] = U32(_squeeze(groups[i], 4))
    elif bits == 2:
        to2 = out[: 2 * whole].view(U16)
        for i in range(whole):
            to2[i] = U16(_squeeze(groups[i], 2))
    elif bits == 1:
        for i in range(whole):
            out[i] = U8(groups[i] * U64(0x0102040810204080) >> U64(56))
    else:
        words = out[: whole * bits // 8 * 8].view(U64)
        word, have, at = U64(0), U64(0), 0
        for i in range(whole):
            x = _squeeze(groups[i], bits)
            word |= x << have
            have += U64(8 * bits)
            if have >= U64(64):
                words[at] = word
                at += 1
                have -= U64(64)
                word = x >> (U64(8 * bits) - have) if have else U64(0)
        for k in range(np.int64(have) // 8):
            out[8 * at + k] = U8(word >> U64(8 * k))
    if n % 8:
        x = _squeeze(groups[whole], bits)
        for k in range(((n % 8) * bits + 7) // 8):
            out[bits * whole + k] = U8(x >> U64(8 * k))


@jit
def unpack(data, n, bits, code):
    """Unpack ``n`` codes: the inverse of :func:`pack`. ``code`` must have space for a multiple of 8 codes."""
    groups = code[: (n + 7) // 8 * 8].view(U64)
    whole = n // 8
    if bits == 8:
        copy(code, data[:n])
        return
    if bits == 4:
        from4 = data[: 4 * whole].view(U32)
        for i in range(whole):
            groups[i] = _stretch(U64(from4[i]), 4)
    elif bits == 2:
        from2 = data[: 2 * whole].view(U16)
        for i in range(whole):
            groups[i] = _stretch(U64(from2[i]), 2)
    elif bits == 1:
        for i in range(whole):
            x = (U64(data[i]) * U64(0x0101010101010101)) & U64(0x8040201008040201)
            groups[i] = (x + U64(0x7F7F7F7F7F7F7F7F)) >> U64(7) & U64(0x0101010101010101)
    else:
        words = data[: whole * bits // 8 * 8].view(U64)
        last, mask = len(words) - 1, (U64(1) << U64(8 * bits)) - U64(1)
        in_words = 8 * (last + 1) // bits if last >= 0 else 0  # number of groups of 8 codes inside whole words
        for i in range(in_words):
            at = bits * i
            k, shift = at // 8, U64(8 * (at % 8))
            x = words[k] >> shift
            x |= words[min(k + 1, last)] << U64(1) << (U64(63) - shift)
            groups[i] = _stretch(x & mask, bits)
        for i in range(in_words, whole):
            x = U64(0)
            for k in range(bits):
                x |= U64(data[bits * i + k]) << U64(8 * k)
            groups[i] = _stretch(x, bits)
    if n % 8:
        x = U64(0)
        for k in range(((n % 8) * bits + 7) // 8):
            x |= U64(data[bits * whole + k]) << U64(8 * k)
        groups[whole] = _stretch(x, bits)


@jit
def pack_trits(code, n, out):
    """Pack ``n`` trits, five per byte, the first one most significant; unused trits of the last byte are 0."""
    code[n : (n + 4) // 5 * 5] = U8(0)
    for i in range((n + 4) // 5):
        a, b, c = U32(code[5 * i]), U32(code[5 * i + 1]), U32(code[5 * i + 2])
        d, e = U32(code[5 * i + 3]), U32(code[5 * i + 4])
        out[i] = U8(U32(81) * a + U32(27) * b + U32(9) * c + U32(3) * d + e)


@jit
def unpack_trits(data, n, code):
    """Unpack trits: the inverse of :func:`pack_trits`. A multiple of five codes is written to ``code``."""
    for i in range((n + 4) // 5):
        five = 5 * np.int64(data[i])
        for k in range(5):
            code[5 * i + k] = TRITS[five + k]
