/*
 * pack_loops.h - loops without intrinsics that pack codes of fixed width, and add codes as integers. Included by
 * row_loops.h.
 */
#include "kernels.h"

#ifndef PACK_CODES
#define PACK_CODES(code, n, bits, dst) 0
#define UNPACK_CODES(src, n, bits, code) 0
#endif

static inline void pack_bits_of(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	size_t i = PACK_CODES(code, n, bits, dst);

	dst += i / 8 * (size_t)bits;
	for (; i + 8 <= n; i += 8, dst += bits) {
		uint64_t x = bits_squeeze(load64(code + i), bits);

		if (n - i >= 72) { /* 72 codes have at least 9 bytes, so an 8-byte store fits dst */
			store64(dst, x);
		} else {
			uint8_t last[8];

			store64(last, x);
			memcpy(dst, last, (size_t)bits);
		}
	}
	if (i < n) {
		uint8_t last[8] = {0};

		memcpy(last, code + i, n - i);
		store64(last, bits_squeeze(load64(last), bits));
		memcpy(dst, last, (n - i) * (size_t)bits / 8 + ((n - i) * (size_t)bits % 8 != 0));
	}
}

static inline void unpack_bits_of(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	size_t i = UNPACK_CODES(src, n, bits, code);

	src += i / 8 * (size_t)bits;
	for (; i + 8 <= n; i += 8, src += bits) {
		uint8_t last[8] = {0};

		if (n - i >= 72) {
			store64(code + i, bits_spread(load64(src), bits));
		} else {
			memcpy(last, src, (size_t)bits);
			store64(code + i, bits_spread(load64(last), bits));
		}
	}
	if (i < n) {
		uint8_t last[8] = {0};

		memcpy(last, src, (n - i) * (size_t)bits / 8 + ((n - i) * (size_t)bits % 8 != 0));
		store64(last, bits_spread(load64(last), bits));
		memcpy(code + i, last, n - i);
	}
}

static void pack_codes(const uint8_t *code, size_t n, int bits, uint8_t *dst)
{
	switch (bits) { /* a constant `bits` in each call lets the compiler specialize the loops */
	case 1: pack_bits_of(code, n, 1, dst); break;
	case 2: pack_bits_of(code, n, 2, dst); break;
	case 3: pack_bits_of(code, n, 3, dst); break;
	case 4: pack_bits_of(code, n, 4, dst); break;
	case 5: pack_bits_of(code, n, 5, dst); break;
	case 6: pack_bits_of(code, n, 6, dst); break;
	case 7: pack_bits_of(code, n, 7, dst); break;
	default: memcpy(dst, code, n);
	}
}

static void unpack_codes(const uint8_t *src, size_t n, int bits, uint8_t *code)
{
	switch (bits) {
	case 1: unpack_bits_of(src, n, 1, code); break;
	case 2: unpack_bits_of(src, n, 2, code); break;
	case 3: unpack_bits_of(src, n, 3, code); break;
	case 4: unpack_bits_of(src, n, 4, code); break;
	case 5: unpack_bits_of(src, n, 5, code); break;
	case 6: unpack_bits_of(src, n, 6, code); break;
	case 7: unpack_bits_of(src, n, 7, code); break;
	default: memcpy(code, src, n);
	}
}

#ifndef PACK_TRITS
#define PACK_TRITS(code, n, dst) 0
#define UNPACK_TRITS(src, n, code) 0
#endif

/* Pack five codes 0..2 per byte, the first most significant; missing codes are 0. */
static void pack_trits(const uint8_t *code, size_t n, uint8_t *dst)
{
	size_t i = PACK_TRITS(code, n, dst);

	dst += i / 5;
	for (; i + 5 <= n; i += 5)
		*dst++ = bits_trits(code[i], code[i + 1], code[i + 2], code[i + 3], code[i + 4]);
	if (i < n) {
		uint8_t last[5] = {0};

		memcpy(last, code + i, n - i);
		*dst = bits_trits(last[0], last[1], last[2], last[3], last[4]);
	}
}

static void unpack_trits(const uint8_t *src, size_t n, uint8_t *restrict code)
{
	size_t done = UNPACK_TRITS(src, n, code);

	src += done / 5;
	for (size_t i = done; i < n; i += 5, src++) {
		uint32_t b = *src;
		uint8_t five[5];

		for (int k = 4; k >= 0; k--) {
			uint32_t third = bits_third(b);

			five[k] = (uint8_t)(b - 3 * third);
			b = third;
		}
		memcpy(code + i, five, n - i < 5 ? n - i : 5);
	}
}

static uint8_t max_byte(const uint8_t *p, size_t n)
{
	uint8_t most = 0;

	for (size_t i = 0; i < n; i++)
		most = p[i] > most ? p[i] : most;
	return most;
}

/* Convert a ternary code 0, 1 or 2 to the integer 0, 1 or -1. */
static inline int unit_of(uint8_t code)
{
	return (code & 1) - (code >> 1);
}

static inline void sum_int8(const uint8_t *code, size_t n, int more, int8_t *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int8_t)((more ? y[i] : 0) + unit_of(code[i]));
}

static inline void sum_int16(const uint8_t *code, size_t n, int more, int16_any *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int16_t)((more ? y[i] : 0) + unit_of(code[i]));
}

static inline void sum_int32(const uint8_t *code, size_t n, int more, int32_any *y)
{
	for (size_t i = 0; i < n; i++)
		y[i] = (int32_t)((uint32_t)(more ? y[i] : 0) + (uint32_t)unit_of(code[i]));
}

static void sum_codes(const uint8_t *code, size_t n, int more, size_t nbytes, void *y)
{
	if (nbytes == 1)
		more ? sum_int8(code, n, 1, y) : sum_int8(code, n, 0, y);
	else if (nbytes == 2)
		more ? sum_int16(code, n, 1, y) : sum_int16(code, n, 0, y);
	else
		more ? sum_int32(code, n, 1, y) : sum_int32(code, n, 0, y);
}
