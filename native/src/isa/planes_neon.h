/*
 * planes_neon.h - split values into byte planes, merge them, and compute the checksum, in vectors of 16 bytes.
 *
 * Loops stop at a multiple of 16 values; the portable loops of plane_loops.h process the rest.
 */
#ifndef CODEC_PLANES_NEON_H
#define CODEC_PLANES_NEON_H

#include <arm_neon.h>

#include "kernels.h"

/* Return the mask of patterns that are at least 128: those that the scale model changes. */
static inline uint16x8_t moving_neon(uint16x8_t u)
{
	return vtstq_u16(u, vdupq_n_u16(0x7f80));
}

/* Vectorized bits_turn and bits_unturn, for the two top bytes of 8 floats. */
static inline uint16x8_t turn_neon(uint16x8_t x, uint16x8_t offset)
{
	uint16x8_t p = vandq_u16(x, vdupq_n_u16(0x7fff)), moves = moving_neon(p), u, below, low;

	u = vsubq_u16(p, vandq_u16(moves, offset));
	below = vandq_u16(moves, vcltq_s16(vreinterpretq_s16_u16(u), vdupq_n_s16(128)));
	u = vaddq_u16(u, vandq_u16(below, vdupq_n_u16(WIRE_CIRCLE(128))));
	low = vbslq_u16(vdupq_n_u16(0x7f), u, vshrq_n_u16(x, 8));
	return vbslq_u16(vdupq_n_u16(0xff00), vshlq_n_u16(u, 1), low);
}

static inline uint16x8_t unturn_neon(uint16x8_t y, uint16x8_t offset)
{
	uint16x8_t u = vbslq_u16(vdupq_n_u16(0x7f), y, vshrq_n_u16(y, 1)), p;

	p = vaddq_u16(u, vandq_u16(moving_neon(u), offset));
	p = vsubq_u16(p, vandq_u16(vcltzq_s16(vreinterpretq_s16_u16(p)), vdupq_n_u16(WIRE_CIRCLE(128))));
	return vbslq_u16(vdupq_n_u16(0x8000), vshlq_n_u16(y, 8), p);
}

/* Store the upper bytes of 16 words at `upper`, and their lower bytes at `lower`. */
static inline void put_planes_neon(uint16x8_t a, uint16x8_t b, uint8_t *upper, uint8_t *lower)
{
	vst1q_u8(lower, vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b)));
	vst1q_u8(upper, vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b)));
}

/* Load 16 words, whose upper bytes are at `upper`, and whose lower bytes are at `lower`. */
static inline uint16x8x2_t get_planes_neon(const uint8_t *upper, const uint8_t *lower)
{
	uint8x16_t low = vld1q_u8(lower), high = vld1q_u8(upper);

	return (uint16x8x2_t){{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))}};
}

static inline size_t split2_neon(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	const uint8_t *p = src;
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(p + 2 * i));
		uint16x8_t b = vreinterpretq_u16_u8(vld1q_u8(p + 2 * i + 16));

		if (offset) {
			a = turn_neon(a, vld1q_u16(offset + i));
			b = turn_neon(b, vld1q_u16(offset + i + 8));
		}
		put_planes_neon(a, b, plane[0] + i, plane[1] + i);
	}
	return i;
}

static inline size_t split4_neon(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane)
{
	const uint8_t *p = src;
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		uint16x8_t high[2], low[2];

		for (int k = 0; k < 2; k++) {
			uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(p + 4 * i + 32 * k));
			uint16x8_t b = vreinterpretq_u16_u8(vld1q_u8(p + 4 * i + 32 * k + 16));

			low[k] = vuzp1q_u16(a, b);
			high[k] = vuzp2q_u16(a, b);
			if (offset)
				high[k] = turn_neon(high[k], vld1q_u16(offset + i + 8 * k));
		}
		put_planes_neon(high[0], high[1], plane[0] + i, plane[1] + i);
		put_planes_neon(low[0], low[1], plane[2] + i, plane[3] + i);
	}
	return i;
}

static inline size_t merge2_neon(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst)
{
	uint8_t *d = dst;
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		uint16x8x2_t y = get_planes_neon(plane[0] + i, plane[1] + i);

		for (int k = 0; k < 2; k++) {
			if (offset)
				y.val[k] = unturn_neon(y.val[k], vld1q_u16(offset + i + 8 * k));
			vst1q_u8(d + 2 * i + 16 * k, vreinterpretq_u8_u16(y.val[k]));
		}
	}
	return i;
}

static inline size_t merge4_neon(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst)
{
	uint8_t *d = dst;
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		uint16x8x2_t high = get_planes_neon(plane[0] + i, plane[1] + i);
		uint16x8x2_t low = get_planes_neon(plane[2] + i, plane[3] + i);

		for (int k = 0; k < 2; k++) {
			if (offset)
				high.val[k] = unturn_neon(high.val[k], vld1q_u16(offset + i + 8 * k));
			vst1q_u8(d + 4 * i + 32 * k, vreinterpretq_u8_u16(vzip1q_u16(low.val[k], high.val[k])));
			vst1q_u8(d + 4 * i + 32 * k + 16, vreinterpretq_u8_u16(vzip2q_u16(low.val[k], high.val[k])));
		}
	}
	return i;
}

/* Return sum(word[i] * key[i]) over a chunk of 1 KiB. */
static inline uint64_t chunk_sum_neon(const uint8_t *src, const uint32_t *key)
{
	uint64x2_t sum[4] = {vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0)};

	for (int i = 0; i < WIRE_CHUNK_WORDS; i += 8)
		for (int k = 0; k < 2; k++) {
			uint32x4_t x = vreinterpretq_u32_u8(vld1q_u8(src + 4 * i + 16 * k));
			uint32x4_t y = vld1q_u32(key + i + 4 * k);

			sum[2 * k] = vmlal_u32(sum[2 * k], vget_low_u32(x), vget_low_u32(y));
			sum[2 * k + 1] = vmlal_high_u32(sum[2 * k + 1], x, y);
		}
	return vaddvq_u64(vaddq_u64(vaddq_u64(sum[0], sum[1]), vaddq_u64(sum[2], sum[3])));
}

#define SPLIT2_FIRST split2_neon
#define MERGE2_FIRST(plane, n, offset, dst, nontemporal) ((void)(nontemporal), merge2_neon(plane, n, offset, dst))
#define SPLIT4_FIRST split4_neon
#define MERGE4_FIRST(plane, n, offset, dst, nontemporal) ((void)(nontemporal), merge4_neon(plane, n, offset, dst))
#define CHUNK_SUM chunk_sum_neon

#endif
