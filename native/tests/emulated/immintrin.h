/*
 * immintrin.h - replace the compiler's header by vector instructions in plain C, from SIMDe (Debian: libsimde-dev).
 *
 * isa/avx512.c compiled with this header runs on any CPU, slowly, and must give the same bytes as on an AVX-512 CPU.
 * Instructions that Debian's SIMDe lacks are implemented below.
 *
 * One file: it replaces one header of the compiler.
 */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>

typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

static inline __m512i emulated_cvtepu8_epi32(__m128i a)
{
	uint8_t b[16];
	uint32_t w[16];

	memcpy(b, &a, 16);
	for (int i = 0; i < 16; i++)
		w[i] = b[i];
	return simde_mm512_loadu_si512(w);
}

static inline __m512i emulated_cvtepu8_epi16(__m256i a)
{
	uint8_t b[32];
	uint16_t h[32];

	memcpy(b, &a, 32);
	for (int i = 0; i < 32; i++)
		h[i] = b[i];
	return simde_mm512_loadu_si512(h);
}

static inline __m512i emulated_madd_epi16(__m512i a, __m512i b)
{
	int16_t x[32], y[32];
	int32_t w[16];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 16; i++)
		w[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
	return simde_mm512_loadu_si512(w);
}

static inline void emulated_mask_storeu_epi32(void *p, __mmask16 k, __m512i a)
{
	uint32_t w[16];

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		if (k >> i & 1)
			memcpy((char *)p + 4 * i, w + i, 4);
}

static inline __m512i emulated_popcnt_epi64(__m512i a)
{
	uint64_t x[8];

	memcpy(x, &a, 64);
	for (int i = 0; i < 8; i++)
		x[i] = (uint64_t)__builtin_popcountll(x[i]);
	return simde_mm512_loadu_si512(x);
}

static inline __m512i emulated_alignr_epi64(__m512i a, __m512i b, int by)
{
	uint64_t x[16], out[8];

	memcpy(x, &b, 64);
	memcpy(x + 8, &a, 64);
	for (int i = 0; i < 8; i++)
		out[i] = x[i + by];
	return simde_mm512_loadu_si512(out);
}

static inline __mmask32 emulated_cmpeq_epi16_mask(__m512i a, __m512i b)
{
	uint16_t x[32], y[32];
	uint32_t k = 0;

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 32; i++)
		k |= (uint32_t)(x[i] == y[i]) << i;
	return k;
}

static inline uint8_t emulated_cmpeq_epi64_mask(__m512i a, __m512i b)
{
	uint64_t x[8], y[8];
	unsigned k = 0;

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 8; i++)
		k |= (unsigned)(x[i] == y[i]) << i;
	return (uint8_t)k;
}

static inline __m512i emulated_maskz_expand_epi32(__mmask16 k, __m512i a)
{
	uint32_t w[16], out[16];
	int n = 0;

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		out[i] = k >> i & 1 ? w[n++] : 0;
	return simde_mm512_loadu_si512(out);
}

static inline __m512i emulated_maskz_compress_epi32(__mmask16 k, __m512i a)
{
	uint32_t w[16], out[16] = {0};
	int n = 0;

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		if (k >> i & 1)
			out[n++] = w[i];
	return simde_mm512_loadu_si512(out);
}

static inline __mmask64 emulated_movepi8_mask(__m512i a)
{
	uint8_t b[64];
	__mmask64 k = 0;

	memcpy(b, &a, 64);
	for (int i = 0; i < 64; i++)
		k |= (uint64_t)(b[i] >> 7) << i;
	return k;
}

static inline __mmask16 emulated_movepi32_mask(__m512i a)
{
	uint32_t w[16];
	unsigned k = 0;

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		k |= (w[i] >> 31) << i;
	return (__mmask16)k;
}

static inline __m512i emulated_shuffle_i64x2(__m512i a, __m512i b, int choose)
{
	uint64_t x[8], y[8], out[8];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 8; i++)
		out[i] = (i < 4 ? x : y)[2 * (choose >> i / 2 * 2 & 3) + i % 2];
	return simde_mm512_loadu_si512(out);
}

static inline __m512i emulated_cvtepu16_epi32(__m256i a)
{
	uint16_t h[16];
	uint32_t w[16];

	memcpy(h, &a, 32);
	for (int i = 0; i < 16; i++)
		w[i] = h[i];
	return simde_mm512_loadu_si512(w);
}

static inline __m512i emulated_cvttps_epi32(__m512 a)
{
	float x[16];
	int32_t w[16];

	memcpy(x, &a, 64);
	for (int i = 0; i < 16; i++)
		w[i] = x[i] >= -0x1p31f && x[i] < 0x1p31f ? (int32_t)x[i] : INT32_MIN;
	return simde_mm512_loadu_si512(w);
}

static inline __m512 emulated_cvtepi32_ps(__m512i a)
{
	int32_t w[16];
	float x[16];

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		x[i] = (float)w[i];
	return simde_mm512_loadu_ps(x);
}

static inline __m512i emulated_srai_epi32(__m512i a, unsigned n)
{
	int32_t w[16];

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		w[i] >>= n;
	return simde_mm512_loadu_si512(w);
}

static inline __m512i emulated_mask_shuffle_epi32(__m512i a, __mmask16 k, __m512i b, int choose)
{
	uint32_t x[16], y[16];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 16; i++)
		if (k >> i & 1)
			x[i] = y[i / 4 * 4 + (choose >> 2 * (i % 4) & 3)];
	return simde_mm512_loadu_si512(x);
}

static inline __m512i emulated_maskz_expand_epi8(__mmask64 k, __m512i a)
{
	uint8_t b[64], out[64];
	int n = 0;

	memcpy(b, &a, 64);
	for (int i = 0; i < 64; i++)
		out[i] = k >> i & 1 ? b[n++] : 0;
	return simde_mm512_loadu_si512(out);
}

static inline __m512i emulated_maskz_compress_epi8(__mmask64 k, __m512i a)
{
	uint8_t b[64], out[64] = {0};
	int n = 0;

	memcpy(b, &a, 64);
	for (int i = 0; i < 64; i++)
		if (k >> i & 1)
			out[n++] = b[i];
	return simde_mm512_loadu_si512(out);
}

static inline __m512 emulated_cvtph_ps(__m256i a)
{
	_Float16 h[16];
	float x[16];

	memcpy(h, &a, 32);
	for (int i = 0; i < 16; i++)
		x[i] = (float)h[i];
	return simde_mm512_loadu_ps(x);
}

static inline __m256i emulated_cvtps_ph(__m512 a, int mode)
{
	_Float16 h[16];
	float x[16];

	(void)mode;
	memcpy(x, &a, 64);
	for (int i = 0; i < 16; i++)
		h[i] = (_Float16)x[i];
	return simde_mm256_loadu_si256((const simde__m256i *)h);
}

static inline __m256i emulated_cvtepi32_epi16(__m512i a)
{
	uint32_t w[16];
	uint16_t h[16];

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		h[i] = (uint16_t)w[i];
	return simde_mm256_loadu_si256((const simde__m256i *)h);
}

/* a * b + c, rounded once; SIMDe's version rounds twice if the CPU has no FMA */
static inline __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
	float x[16], y[16], z[16];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	memcpy(z, &c, 64);
	for (int i = 0; i < 16; i++)
		z[i] = fmaf(x[i], y[i], z[i]);
	return simde_mm512_loadu_ps(z);
}

static inline __mmask32 emulated_mask_cmplt_epi16_mask(__mmask32 k, __m512i a, __m512i b)
{
	int16_t x[32], y[32];
	__mmask32 less = 0;

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	for (int i = 0; i < 32; i++)
		less |= (__mmask32)(x[i] < y[i]) << i;
	return k & less;
}

static inline __m512i emulated_mask_sub_epi16(__m512i from, __mmask32 k, __m512i a, __m512i b)
{
	uint16_t x[32], y[32], out[32];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	memcpy(out, &from, 64);
	for (int i = 0; i < 32; i++)
		if (k >> i & 1)
			out[i] = (uint16_t)(x[i] - y[i]);
	return simde_mm512_loadu_si512(out);
}

static inline __m512i emulated_mask_shuffle_epi8(__m512i from, __mmask64 k, __m512i a, __m512i order)
{
	uint8_t x[64], o[64], out[64];

	memcpy(x, &a, 64);
	memcpy(o, &order, 64);
	memcpy(out, &from, 64);
	for (int i = 0; i < 64; i++)
		if (k >> i & 1)
			out[i] = o[i] & 0x80 ? 0 : x[i / 16 * 16 + o[i] % 16];
	return simde_mm512_loadu_si512(out);
}

/* shldv: upper half of a:b shifted left; shrdv: lower half of b:a shifted right */
static inline __m512i emulated_shldv_epi32(__m512i a, __m512i b, __m512i n)
{
	uint32_t x[16], y[16], c[16];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	memcpy(c, &n, 64);
	for (int i = 0; i < 16; i++)
		x[i] = (uint32_t)(((uint64_t)x[i] << 32 | y[i]) << c[i] % 32 >> 32);
	return simde_mm512_loadu_si512(x);
}

static inline __m512i emulated_shrdv_epi32(__m512i a, __m512i b, __m512i n)
{
	uint32_t x[16], y[16], c[16];

	memcpy(x, &a, 64);
	memcpy(y, &b, 64);
	memcpy(c, &n, 64);
	for (int i = 0; i < 16; i++)
		x[i] = (uint32_t)(((uint64_t)y[i] << 32 | x[i]) >> c[i] % 32);
	return simde_mm512_loadu_si512(x);
}

static inline __m512i emulated_mask_loadu_epi8(__m512i from, __mmask64 k, const void *p)
{
	uint8_t b[64];

	memcpy(b, &from, 64);
	for (int i = 0; i < 64; i++)
		if (k >> i & 1)
			b[i] = ((const uint8_t *)p)[i];
	return simde_mm512_loadu_si512(b);
}

static inline __m128i emulated_cvtepi32_epi8(__m512i a)
{
	uint32_t w[16];
	uint8_t b[16];
	__m128i out;

	memcpy(w, &a, 64);
	for (int i = 0; i < 16; i++)
		b[i] = (uint8_t)w[i];
	memcpy(&out, b, 16);
	return out;
}

#undef _mm512_mask_loadu_epi8
#undef _mm512_cvtepi32_epi8
#define _mm512_mask_loadu_epi8 emulated_mask_loadu_epi8
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32(a, choose) emulated_mask_shuffle_epi32(a, 0xffff, a, choose)
#undef _mm512_mask_shuffle_epi8
#undef _mm512_shldv_epi32
#undef _mm512_shrdv_epi32
#define _mm512_mask_shuffle_epi8 emulated_mask_shuffle_epi8
#define _mm512_shldv_epi32 emulated_shldv_epi32
#define _mm512_shrdv_epi32 emulated_shrdv_epi32
#undef _mm512_mask_cmplt_epi16_mask
#undef _mm512_mask_sub_epi16
#undef _mm512_stream_si512
#define _mm512_mask_cmplt_epi16_mask emulated_mask_cmplt_epi16_mask
#define _mm512_mask_sub_epi16 emulated_mask_sub_epi16
#define _mm512_stream_si512(p, a) simde_mm512_storeu_si512(p, a)
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 emulated_cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvttps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_srai_epi32
#undef _mm512_mask_shuffle_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph emulated_cvtps_ph
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#undef _mm512_maskz_expand_epi8
#undef _mm512_maskz_compress_epi8
#define _mm512_maskz_expand_epi8 emulated_maskz_expand_epi8
#define _mm512_maskz_compress_epi8 emulated_maskz_compress_epi8
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_fnmadd_ps(a, b, c) emulated_fmadd_ps(_mm512_sub_ps(_mm512_setzero_ps(), a), b, c)
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvttps_epi32 emulated_cvttps_epi32
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_srai_epi32 emulated_srai_epi32
#define _mm512_mask_shuffle_epi32 emulated_mask_shuffle_epi32
#undef _mm512_popcnt_epi64
#undef _mm512_alignr_epi64
#undef _mm512_cmpeq_epi16_mask
#undef _mm512_cmpeq_epi64_mask
#define _mm512_cmpeq_epi16_mask emulated_cmpeq_epi16_mask
#define _mm512_popcnt_epi64 emulated_popcnt_epi64
#define _mm512_alignr_epi64 emulated_alignr_epi64
#define _mm512_cmpeq_epi64_mask emulated_cmpeq_epi64_mask
#undef _mm512_madd_epi16
#undef _mm512_mask_storeu_epi32
#undef _mm512_maskz_expand_epi32
#undef _mm512_maskz_compress_epi32
#undef _mm512_movepi8_mask
#undef _mm512_movepi32_mask
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 emulated_shuffle_i64x2
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_mask_storeu_epi32 emulated_mask_storeu_epi32
#define _mm512_maskz_expand_epi32 emulated_maskz_expand_epi32
#define _mm512_maskz_compress_epi32 emulated_maskz_compress_epi32
#define _mm512_movepi8_mask emulated_movepi8_mask
#define _mm512_movepi32_mask emulated_movepi32_mask

#endif
