/* truncate/truncate.cuh - exponents, levels and pieces of fields, for Truncate. docs/spec/format.md, section 9. */
#ifndef CODEC_CUDA_TRUNCATE_TRUNCATE_CUH
#define CODEC_CUDA_TRUNCATE_TRUNCATE_CUH

#include "coder/model.cuh"
#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "common/values.cuh"

#define PIECES 4

/* Constants of a dtype for Truncate. */
struct cut_kind {
	uint32_t mbits, sign; /* mbits: bits of mantissa; sign: index of the sign bit */
	uint32_t bias, last;  /* bias: exponent of 1.0; last: exponent of Inf */
	uint32_t octave_log2, base;
	uint32_t drops;  /* number of bits dropped at each level, one byte each */
	uint32_t widths; /* bits of each piece of a field, highest piece first, one byte each */
	uint32_t per;    /* 256 * (levels per dropped bit), see cut_of */
};

DEVICE uint32_t bytes_of(const uint8_t *four)
{
	return four[0] | four[1] << 8 | four[2] << 16 | (uint32_t)four[3] << 24;
}

DEVICE cut_kind cut_kind_of(uint32_t dtype)
{
	const uint8_t drops[3][4] = {WIRE_DROPS_FLOAT32, WIRE_DROPS_BFLOAT16, WIRE_DROPS_FLOAT16};
	const uint8_t widths[3][4] = {WIRE_PIECES_FLOAT32, WIRE_PIECES_BFLOAT16, WIRE_PIECES_FLOAT16};

	if (dtype == CODEC_FLOAT32)
		return {23, 31, 127, 255, 7, WIRE_JOINT_BASE, bytes_of(drops[0]), bytes_of(widths[0]), 43};
	if (dtype == CODEC_BFLOAT16)
		return {7, 15, 127, 255, 7, WIRE_JOINT_BASE, bytes_of(drops[1]), bytes_of(widths[1]), 128};
	return {10, 15, 15, 31, 10, 0, bytes_of(drops[2]), bytes_of(widths[2]), 105};
}

/* Return byte k of a word. */
DEVICE uint32_t byte_of(uint32_t quad, uint32_t k)
{
	return __byte_perm(quad, 0, 0x4440 + k);
}

/* Return how many mantissa bits `level` drops. */
DEVICE uint32_t drop_of(const cut_kind &q, uint32_t level)
{
	return byte_of(q.drops, level & 3);
}

/*
 * Return by how much ea, the exponent of the metric A, exceeds e + guard, where e is a value's exponent: round_slack of
 * exact/round.h without its upper bound of 255. guard: from guard_of.
 */
DEVICE int slack_of(const cut_kind &q, uint32_t e, uint32_t ea, int guard)
{
	int d = ea == 255 ? 255 : (int)ea - (int)e - guard;

	return ea == 0 || e == q.last || d < 0 ? 0 : d;
}

/* Return the guard for slack_of: the frame's guard minus the difference of exponent biases. */
DEVICE int guard_of(const cut_kind &q, const codec_view &v)
{
	return v.guard + 127 - (int)q.bias;
}

/*
 * Convert a value's slack (slack_of) to its cut: its level or, with per-bit granularity (by_bit), its number of dropped
 * bits.
 */
DEVICE uint32_t cut_of(const cut_kind &q, bool by_bit, int slack)
{
	if (by_bit)
		return slack < (int)q.mbits ? (uint32_t)slack : q.mbits;
	int most = (int)byte_of(q.drops, 3);

	return (uint32_t)(slack < most ? slack : most) * q.per >> 8; /* the highest level that drops no more bits */
}

/*
 * Compute the cuts (levels, or numbers of dropped bits) of four values from their exponents e and the exponents of the
 * metric A, which encoder and decoder share. ea4: exponents of A, one byte each.
 */
DEVICE void shared_cuts(const cut_kind &q, bool by_bit, int guard, const uint32_t e[4], uint32_t ea4, uint32_t cuts[4])
{
	for (uint32_t k = 0; k < 4; k++)
		cuts[k] = cut_of(q, by_bit, slack_of(q, e[k], byte_of(ea4, k), guard));
}

/*
 * Return a mask of the pieces that a value keeps: byte i is 255 if piece i is kept. Each level keeps one piece less
 * than the level below. A value with exponent 0 keeps no piece.
 */
DEVICE uint32_t kept_of(uint32_t e, uint32_t level)
{
	return e ? FULL >> 8 * level : 0;
}

/* Return the mask of the bits of piece i in a field (sign and mantissa). */
DEVICE uint32_t piece_mask(const cut_kind &q, uint32_t i)
{
	uint32_t ends = 0;

	for (uint32_t k = 0; k <= i; k++)
		ends += byte_of(q.widths, k);
	return ((1u << byte_of(q.widths, i)) - 1) << (q.mbits + 1 - ends);
}

/*
 * Return for each piece of a field the left rotation that moves the piece's lowest bit to bit 0: 14 to 32, one byte
 * each. Adding the number of bits of a lane's earlier values gives the rotation that places the piece after these.
 */
DEVICE uint32_t piece_rotations(const cut_kind &q)
{
	uint32_t ends = 0, rotations = 0;

	for (uint32_t i = 0; i < PIECES; i++) {
		ends += byte_of(q.widths, i);
		rotations |= (32 - (q.mbits + 1 - ends)) << 8 * i;
	}
	return rotations;
}

/* Return for each piece how many of a lane's four values keep it, one byte each. */
DEVICE uint32_t kept_by(const uint32_t e[4], const uint32_t levels[4])
{
	uint32_t kept = 0;

	for (uint32_t k = 0; k < 4; k++)
		kept += kept_of(e[k], levels[k]) & ONES;
	return kept;
}

/* For each piece, the number of values of a block that keep it: at most 512 in a lane, 16,384 in a warp. */
struct kept_sums {
	uint32_t even, odd; /* 16 bits per piece: even: pieces 0 and 2; odd: pieces 1 and 3 */
};

DEVICE void add_kept(kept_sums *s, uint32_t kept)
{
	s->even += kept & 0x00ff00ff;
	s->odd += kept >> 8 & 0x00ff00ff;
}

DEVICE kept_sums warp_sum(kept_sums s)
{
	return {warp_sum(s.even), warp_sum(s.odd)};
}

/* Return how many values keep piece i, given the sums over the values. */
DEVICE uint32_t sum_of(const kept_sums &s, uint32_t i)
{
	return (i % 2 ? s.odd : s.even) >> 16 * (i / 2) & 0xffff;
}

/*
 * Return how many mantissa bits a value with exponent e keeps, at most `most`. cut: number of dropped bits
 * (CODEC_OPTION_BITS).
 */
DEVICE uint32_t bits_kept(const cut_kind &q, uint32_t e, uint32_t cut, uint32_t most)
{
	uint32_t keeps = q.mbits + 1 - cut;

	return !e ? 0 : keeps < most ? keeps : most;
}

/* Return bits_lower_exponent(e, by). Decoders pass last - by, which gives bits_raise_exponent(e, by). */
DEVICE uint32_t lower_exponent(uint32_t e, uint32_t by, uint32_t last)
{
	return e ? e - by + (e <= by ? last : 0) : 0;
}

/* Unpack the four bytes of a word into x. */
DEVICE void unpack(uint32_t quad, uint32_t x[4])
{
	for (uint32_t k = 0; k < 4; k++)
		x[k] = byte_of(quad, k);
}

/* Return four bytes packed into a word. */
DEVICE uint32_t pack(const uint32_t x[4])
{
	return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

#endif
