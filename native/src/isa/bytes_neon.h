/* bytes_neon.h - look up 16 bytes at a time in tables of 64 or 256 bytes, and gather the top bits of bytes. */
#ifndef CODEC_BYTES_NEON_H
#define CODEC_BYTES_NEON_H

#include <arm_neon.h>

#include "kernels.h"

static inline uint8x16x4_t bytes64_load(const uint8_t *p)
{
	return (uint8x16x4_t){{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}

/* Return p[x] for each byte x. Each of the four lookups leaves bytes unchanged whose index is not in its 64 bytes. */
static inline uint8x16_t bytes256_find(const uint8_t *p, uint8x16_t x)
{
	uint8x16_t y = vqtbl4q_u8(bytes64_load(p), x);

	y = vqtbx4q_u8(y, bytes64_load(p + 64), vsubq_u8(x, vdupq_n_u8(64)));
	y = vqtbx4q_u8(y, bytes64_load(p + 128), vsubq_u8(x, vdupq_n_u8(128)));
	return vqtbx4q_u8(y, bytes64_load(p + 192), vsubq_u8(x, vdupq_n_u8(192)));
}

/* Return a mask of 32 bits: bit i is bit 7 of byte i of a, bit 16 + i that of byte i of b. */
static inline uint32_t top_bits(uint8x16_t a, uint8x16_t b)
{
	static const int8_t PLACES[16] = {-7, -6, -5, -4, -3, -2, -1, 0, -7, -6, -5, -4, -3, -2, -1, 0};
	const int8x16_t places = vld1q_s8(PLACES);
	const uint8x16_t top = vdupq_n_u8(128);
	uint8x16_t bits = vpaddq_u8(vshlq_u8(vandq_u8(a, top), places), vshlq_u8(vandq_u8(b, top), places));

	bits = vpaddq_u8(bits, bits);
	bits = vpaddq_u8(bits, bits);
	return vgetq_lane_u32(vreinterpretq_u32_u8(bits), 0);
}

/* Widen 16 bytes to words of 32 bits. */
static inline void by_word(uint8x16_t bytes, uint32x4_t word[4])
{
	uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);

	word[0] = vmovl_u16(vget_low_u16(low));
	word[1] = vmovl_high_u16(low);
	word[2] = vmovl_u16(vget_low_u16(high));
	word[3] = vmovl_high_u16(high);
}

/* Shift words left (right) by counts of 0 to 32. */
static inline uint32x4_t shift_left(uint32x4_t x, uint32x4_t count)
{
	return vshlq_u32(x, vreinterpretq_s32_u32(count));
}

static inline uint32x4_t shift_right(uint32x4_t x, uint32x4_t count)
{
	return vshlq_u32(x, vnegq_s32(vreinterpretq_s32_u32(count)));
}

/*
 * Byte orders for masks m of four words: EXPAND moves the first words to those in m, and sets the others to 0; COMPRESS
 * moves the words in m to the last ones. The other words of COMPRESS are 0.
 */
#define WORD(i) 4 * (i), 4 * (i) + 1, 4 * (i) + 2, 4 * (i) + 3
#define NONE 255, 255, 255, 255
static const uint8_t EXPAND[16][16] = {
	{NONE, NONE, NONE, NONE},          {WORD(0), NONE, NONE, NONE},
	{NONE, WORD(0), NONE, NONE},       {WORD(0), WORD(1), NONE, NONE},
	{NONE, NONE, WORD(0), NONE},       {WORD(0), NONE, WORD(1), NONE},
	{NONE, WORD(0), WORD(1), NONE},    {WORD(0), WORD(1), WORD(2), NONE},
	{NONE, NONE, NONE, WORD(0)},       {WORD(0), NONE, NONE, WORD(1)},
	{NONE, WORD(0), NONE, WORD(1)},    {WORD(0), WORD(1), NONE, WORD(2)},
	{NONE, NONE, WORD(0), WORD(1)},    {WORD(0), NONE, WORD(1), WORD(2)},
	{NONE, WORD(0), WORD(1), WORD(2)}, {WORD(0), WORD(1), WORD(2), WORD(3)},
};
static const uint8_t COMPRESS[16][16] = {
	{NONE, NONE, NONE, NONE},          {NONE, NONE, NONE, WORD(0)},
	{NONE, NONE, NONE, WORD(1)},       {NONE, NONE, WORD(0), WORD(1)},
	{NONE, NONE, NONE, WORD(2)},       {NONE, NONE, WORD(0), WORD(2)},
	{NONE, NONE, WORD(1), WORD(2)},    {NONE, WORD(0), WORD(1), WORD(2)},
	{NONE, NONE, NONE, WORD(3)},       {NONE, NONE, WORD(0), WORD(3)},
	{NONE, NONE, WORD(1), WORD(3)},    {NONE, WORD(0), WORD(1), WORD(3)},
	{NONE, NONE, WORD(2), WORD(3)},    {NONE, WORD(0), WORD(2), WORD(3)},
	{NONE, WORD(1), WORD(2), WORD(3)}, {WORD(0), WORD(1), WORD(2), WORD(3)},
};
#undef WORD
#undef NONE

/* Size in bytes of the words in a mask of four. */
static const uint8_t MASKED_NBYTES[16] = {0, 4, 4, 8, 4, 8, 8, 12, 4, 8, 8, 12, 8, 12, 12, 16};

#endif
