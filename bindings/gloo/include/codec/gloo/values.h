/*
 * values.h - loops over values: convert bfloat16 and float16 to float32 and back, and sum up float32. Rounding is to
 * nearest, ties to even. NaN stays NaN, but its payload may change.
 */
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <codec/codec.h>

namespace codec::gloo::detail
{

/* Call f(i) for all i < n. Compilers vectorize the inner loop at -O2, since its length is constant. */
template <class F> inline void each(uint64_t n, F f)
{
	constexpr uint64_t BLOCK = 256;
	uint64_t i = 0;

	for (; n - i >= BLOCK; i += BLOCK)
		for (uint64_t k = 0; k < BLOCK; k++)
			f(i + k);
	for (; i < n; i++)
		f(i);
}

inline uint32_t bits_of(float x)
{
	uint32_t u;

	std::memcpy(&u, &x, sizeof u);
	return u;
}

inline float float_of(uint32_t u)
{
	float x;

	std::memcpy(&x, &u, sizeof x);
	return x;
}

inline uint16_t to_bfloat16(float x)
{
	uint32_t u = bits_of(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;

	return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline float from_bfloat16(uint16_t h)
{
	return float_of(static_cast<uint32_t>(h) << 16);
}

inline uint16_t to_float16(float x)
{
	uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
	/* float16's exponent bias is smaller by 112; a carry out of the mantissa correctly increments the exponent */
	uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
	/* the last bit of 0.5f has the weight of float16's smallest subnormal, to which the addition rounds */
	uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
	uint32_t found = magnitude < 113u << 23 ? small : normal;

	found = magnitude >= 143u << 23 ? 0x7c00 : found;
	found = magnitude > 0x7f800000 ? 0x7e00 : found;
	return static_cast<uint16_t>(sign | found);
}

inline float from_float16(uint16_t h)
{
	uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
	/* value of a subnormal: 0.5 with the subnormal's bits as low mantissa bits, minus 0.5 */
	float small = float_of(bits_of(0.5f) + (magnitude >> 13)) - 0.5f;
	uint32_t normal = magnitude + (112u << 23);

	normal = magnitude >= 31u << 23 ? magnitude | 255u << 23 : normal;
	return float_of(sign | (magnitude < 1u << 23 ? bits_of(small) : normal));
}

/* Convert n values of a dtype to float32. */
inline void widen(uint32_t dtype, const void *from, size_t n, float *__restrict to)
{
	const auto *halves = static_cast<const uint16_t *>(from);

	if (!n) /* the pointers may be null */
		return;
	if (dtype == CODEC_FLOAT32)
		std::memcpy(to, from, n * sizeof *to);
	else if (dtype == CODEC_BFLOAT16)
		each(n, [=](uint64_t i) { to[i] = from_bfloat16(halves[i]); });
	else
		each(n, [=](uint64_t i) { to[i] = from_float16(halves[i]); });
}

/* Convert n float32 values to a dtype. */
inline void narrow(uint32_t dtype, const float *__restrict from, size_t n, void *to)
{
	auto *halves = static_cast<uint16_t *>(to);

	if (!n)
		return;
	if (dtype == CODEC_FLOAT32)
		std::memcpy(to, from, n * sizeof *from);
	else if (dtype == CODEC_BFLOAT16)
		each(n, [=](uint64_t i) { halves[i] = to_bfloat16(from[i]); });
	else
		each(n, [=](uint64_t i) { halves[i] = to_float16(from[i]); });
}

/*
 * Convert n float32 values to a dtype. Finite values beyond the dtype's largest finite number become that number
 * instead of Inf.
 */
inline void narrow_numbers(uint32_t dtype, const float *__restrict from, size_t n, void *to)
{
	const uint16_t infinite = dtype == CODEC_BFLOAT16 ? 0x7f80 : 0x7c00;
	auto *halves = static_cast<uint16_t *>(to);

	narrow(dtype, from, n, to);
	if (dtype != CODEC_FLOAT32)
		each(n, [=](uint64_t i) {
			halves[i] -= (halves[i] & 0x7fff) == infinite && (bits_of(from[i]) & 0x7fffffff) < 0x7f800000;
		});
}

inline void add(float *__restrict total, const float *__restrict x, uint64_t n)
{
	each(n, [=](uint64_t i) { total[i] += x[i]; });
}

/*
 * Divide n values in place. If `by` is a power of two, multiply by its inverse, which is faster and gives the same
 * bits.
 */
inline void divide(float *total, uint64_t n, float by)
{
	const float inverse = 1 / by;

	if (bits_of(by) & 0x7fffff)
		each(n, [=](uint64_t i) { total[i] /= by; });
	else
		each(n, [=](uint64_t i) { total[i] *= inverse; });
}

/* Store the larger of total[i] and x[i] in total[i]; NaN if one of them is NaN. */
inline void keep_larger(float *__restrict total, const float *__restrict x, uint64_t n)
{
	each(n, [=](uint64_t i) { total[i] = total[i] >= x[i] || total[i] != total[i] ? total[i] : x[i]; });
}

/* Replace every NaN by 7fc00000: the payload after an addition depends on processor and compiler. */
inline void one_nan(float *total, uint64_t n)
{
	each(n, [=](uint64_t i) { total[i] = total[i] != total[i] ? float_of(0x7fc00000) : total[i]; });
}

/*
 * Compute the residual `values` - `seen` (the decoded values); 0 for Inf and NaN, which error feedback must not
 * propagate to later steps.
 */
inline void lost(float *__restrict residual, const float *__restrict values, const float *__restrict seen, uint64_t n)
{
	each(n, [=](uint64_t i) {
		residual[i] = (bits_of(values[i]) & 0x7fffffff) < 0x7f800000 ? values[i] - seen[i] : 0;
	});
}

/* Return true if none of n values is NaN or Inf. */
inline bool finite(uint32_t dtype, const void *x, uint64_t n)
{
	const uint32_t infinite = dtype == CODEC_FLOAT32 ? 0x7f800000 : dtype == CODEC_BFLOAT16 ? 0x7f80 : 0x7c00;
	const auto *words = static_cast<const float *>(x);
	const auto *halves = static_cast<const uint16_t *>(x);
	uint32_t most = 0;

	if (dtype == CODEC_FLOAT32)
		each(n, [&](uint64_t i) { most = std::max(most, bits_of(words[i]) & 0x7fffffff); });
	else
		each(n, [&](uint64_t i) { most = std::max<uint32_t>(most, halves[i] & 0x7fff); });
	return most < infinite;
}

} // namespace codec::gloo::detail
