/* choose.h - what an encoder decides, from shapes and sums of samples. C, C++ and NVRTC.
 *
 * A decoder needs none of it; two encoders that give the same bytes need all of it. Which values are looked at follows
 * from shapes alone, and all arithmetic is on integers. `eighth` is log2 of the patterns in an eighth of an octave.
 */
#ifndef CODEC_CHOOSE_H
#define CODEC_CHOOSE_H

#include "bits.h"
#include "book.h"
#include "wire.h"

#define CHOOSE_MODEL_MIN 4096   /* fewer values get no scale model */
#define CHOOSE_SEGMENT_MIN 8192 /* smaller segments, and what lies between, are one flat segment */
#define CHOOSE_ROWS 1024        /* of a segment, for its base and the rows' shift */
#define CHOOSE_COL_ROWS 128     /* for the columns' offsets */
#define CHOOSE_RUNS 4           /* of a row, for its mean, */
#define CHOOSE_RUN 32           /* of so many neighbours: 128 values find it to a tenth of a step or so */
#define CHOOSE_PARTS_MIN 524288 /* values for which the best eighth of an octave is looked for */
#define CHOOSE_PARTS 8
#define CHOOSE_BINS (256 * CHOOSE_PARTS)
#define CHOOSE_NONE (-1) /* the mean of a row that has no pattern from zero on */

/* Sample i of `take` among n < 2^32 places: spread by the golden ratio, for regular strides meet 3x3 kernels. */
BITS_FN uint64_t choose_spread(uint64_t i, uint64_t take, uint64_t n)
{
	return take == n ? i : (i * 0x9e3779b9u & 0xffffffffu) * n >> 32;
}

/* Of how many quad rows one is looked at for symbols' counts, in a tensor that has nrows of them. */
BITS_FN uint64_t choose_stride(uint64_t nrows)
{
	uint64_t few = nrows / 64 < 16 ? nrows / 64 : 16, most = nrows / 2048;

	few = few ? few : 1;
	return most > few ? most : few;
}

/* The columns of the matrix as which a shape of n values is seen, the one most nearly square; 0: as rows of 512. */
BITS_FN uint32_t choose_columns(uint32_t rank, const uint64_t *shape, uint64_t n)
{
	uint64_t rows = 1, best_rows = 1, best = n, longer = n;

	for (uint32_t i = 0; i < rank; i++) {
		uint64_t cols = n / (rows *= shape[i]);

		if ((rows > cols ? rows : cols) < longer) {
			longer = rows > cols ? rows : cols;
			best_rows = rows;
			best = cols;
		}
	}
	return best_rows < WIRE_MATRIX_MIN || best < WIRE_MATRIX_MIN || best > 0xffffffffu ? 0 : (uint32_t)best;
}

/* The first value of run i of a row of n values, of which n > CHOOSE_RUNS * CHOOSE_RUN; of shorter ones all are taken.
 */
BITS_FN uint64_t choose_run(uint64_t i, uint64_t n)
{
	return i * (n - CHOOSE_RUN) / (CHOOSE_RUNS - 1);
}

/* Rows for the columns' offsets. */
BITS_FN uint64_t choose_col_rows(uint64_t nrows)
{
	uint64_t half = nrows / 2 < 64 ? 64 : nrows / 2;

	half = half < CHOOSE_COL_ROWS ? half : CHOOSE_COL_ROWS;
	return nrows < half ? nrows : half;
}

/* The mean of `count` patterns, which are at most 2^15; CHOOSE_NONE without any. */
BITS_FN int choose_mean(uint32_t sum, uint32_t count)
{
	return count ? (int)((2 * sum + count) / (2 * count)) : CHOOSE_NONE;
}

/* How far a mean lies above a centre, in eighths of an octave. */
BITS_FN int choose_eighths(int mean, int centre, int eighth)
{
	int q = (mean - centre + (1 << eighth >> 1)) >> eighth;

	q = q < -127 ? -127 : q > 127 ? 127 : q;
	return mean == CHOOSE_NONE ? 0 : q;
}

/* The mean of so many differences, in eighths of an octave; 0 without any. */
BITS_FN int choose_mean_eighths(int total, int count, int eighth)
{
	int q = count ? bits_mean(total, (int64_t)count << eighth) : 0;

	return q < -127 ? -127 : q > 127 ? 127 : q;
}

/* The nibble for so many eighths, before it is clamped to -8..7. */
BITS_FN int choose_nibble(int eighths, int shift)
{
	return (eighths + (1 << shift >> 1)) >> shift;
}

BITS_FN int choose_clamped(int nibble)
{
	return nibble < -8 ? -8 : nibble > 7 ? 7 : nibble;
}

/* The finest shift from `shift` on under which at most one of 32 offsets is clamped. Any decodes; those do no harm. */
BITS_FN int choose_shift(const int8_t *eighths, uint64_t n, int shift)
{
	for (; shift < WIRE_MAX_SHIFT; shift++) {
		uint64_t outside = 0;

		for (uint64_t i = 0; i < n; i++) {
			int nibble = choose_nibble(eighths[i], shift);

			outside += choose_clamped(nibble) != nibble;
		}
		if (32 * outside <= n)
			break;
	}
	return shift;
}

/* An offset, in eighths. */
BITS_FN int choose_offset(int eighths, int shift)
{
	return choose_clamped(choose_nibble(eighths, shift)) * (1 << shift);
}

/* Where mean patterns go: symbols lie around 128, those of float64 far from where they begin anew. */
BITS_FN int choose_centre(int octave)
{
	return octave == 16 ? 0x4800 : 0x4000;
}

/*
 * The base that takes a mean pattern to the centre, in eighths, a multiple of 1 << shift. The distribution of exponents
 * falls steeply above its mode: measured, symbols are cheapest if the mean comes to lie just below a power of two.
 */
BITS_FN uint16_t choose_base(int mean, int eighth, int zero, int shift)
{
	int octave = 8 << eighth, top = (octave < 128 ? octave : 128) * 7 / 8, grain = eighth + shift;
	int base = ((mean - choose_centre(octave) - top + (1 << grain >> 1)) >> grain) * (1 << shift);

	return (uint16_t)(base < 0 ? base + (WIRE_CIRCLE(zero) >> eighth) : base);
}

/*
 * Symbols are counted in bins: `parts` of a symbol, 1, or CHOOSE_PARTS where plane 0 has a symbol an octave and its
 * eighths matter. Adds bins as they become under a base that lowers by so many of them.
 */
BITS_LARGE_FN void choose_add_lowered(const uint32_t *bins, int parts, uint32_t by, uint32_t *sum)
{
	uint32_t zeros = (uint32_t)parts, circle = 255 * zeros, low = by % circle;

	for (uint32_t i = 0; i < zeros; i++)
		sum[i] += bins[i];
	for (uint32_t i = low; i < circle; i++)
		sum[zeros + i - low] += bins[zeros + i];
	for (uint32_t i = 0; i < low; i++)
		sum[zeros + circle - low + i] += bins[zeros + i];
}

/* Counts of symbols from those of their parts. */
BITS_LARGE_FN void choose_fold(const uint32_t *bins, int parts, uint32_t counts[256])
{
	for (int e = 0; e < 256; e++)
		counts[e] = bins[e * parts];
	for (int i = 1; i < parts; i++)
		for (int e = 0; e < 256; e++)
			counts[e] += bins[e * parts + i];
}

/*
 * Bits that symbols cost under a Huffman code of any length: as book_from_counts, but for its limit. Cheap, for it is
 * asked eight times and more for each segment.
 */
BITS_LARGE_FN uint64_t choose_cost(const uint32_t counts[256])
{
	uint32_t leaf[257], node[257];
	uint32_t total = 0, rest = 0, least;
	uint64_t cost = 0;
	int n = 0, i = 0, from = 0, to = 0;

	for (int e = 0; e < 256; e++)
		total += counts[e];
	least = total / 1280; /* book_keeps */
	for (int e = 0; e <= 256; e++) {
		uint32_t w = e < 256 ? counts[e] : rest + !rest;
		int j = n;

		if (e < 256 && w <= least) {
			rest += w;
			continue;
		}
		for (; j > 0 && leaf[j - 1] > w; j--)
			leaf[j] = leaf[j - 1];
		leaf[j] = w;
		n++;
	}
	for (int left = n; left > 1; left--) {
		uint32_t pair = 0;

		for (int k = 0; k < 2; k++)
			pair += from == to || (i < n && leaf[i] <= node[from]) ? leaf[i++] : node[from++];
		node[to++] = pair;
		cost += pair;
	}
	return cost + 8 * (uint64_t)rest;
}

/*
 * How many eighths all bases should be raised by, so that symbols cost least: counts of symbols, which cost *cost,
 * become those under the raised ones. Each step takes the first part of each symbol to the one before.
 */
BITS_LARGE_FN int choose_phase(const uint32_t bins[CHOOSE_BINS], uint32_t counts[256], uint64_t *cost)
{
	uint32_t raised[256];
	int best = 0;

	*cost = choose_cost(counts);
	for (int e = 0; e < 256; e++)
		raised[e] = counts[e];
	for (int phase = 1; phase < CHOOSE_PARTS; phase++) {
		const uint32_t *part = bins + phase - 1;
		uint64_t bits;

		for (int e = 1; e < 256; e++)
			raised[e] += part[(e < 255 ? e + 1 : 1) * CHOOSE_PARTS] - part[e * CHOOSE_PARTS];
		bits = choose_cost(raised);
		if (bits >= *cost)
			continue;
		*cost = bits;
		best = phase;
		for (int e = 0; e < 256; e++)
			counts[e] = raised[e];
	}
	return best;
}

/* Do `count` values save more than so many bits, if a sample of them has these costs? */
BITS_FN int choose_pays(uint64_t before, uint64_t after, uint64_t samples, uint64_t count, uint64_t bits)
{
	/* per value in 1/65536 bit, so that the product stays below 2^64 */
	return samples && before > after && ((before - after) << 16) / samples * count > bits << 16;
}

/* The same of so many offsets, and of a record for a part that has none. */
BITS_FN int choose_offsets_pay(uint64_t before, uint64_t after, uint64_t samples, uint64_t count, uint64_t offsets)
{
	return choose_pays(before, after, samples, count, 4 * offsets + 64);
}

BITS_FN int choose_record_pays(uint64_t before, uint64_t after, uint64_t samples, uint64_t count)
{
	return choose_pays(before, after, samples, count, 8 * (4 + WIRE_SEGMENT_NBYTES) + 64);
}

BITS_FN uint64_t choose_total(const uint32_t counts[256])
{
	uint64_t total = 0;

	for (int i = 0; i < 256; i++)
		total += counts[i];
	return total;
}

/*
 * How uneven counts are: the sum of their squares, times how many values there may be, beyond what it is if all are as
 * frequent, with what chance adds. In shares of total^2 it is at least ln 2 times the bits a value that a codebook can
 * save, and near the uniform distribution twice that; it is found much faster than a book. A sample of a plane has
 * 64 quad rows at most, so that squares are added in 32 bits, many at once.
 */
BITS_FN uint64_t choose_excess_of(uint32_t squares, uint64_t values, uint64_t total)
{
	uint64_t even = total * total + (values - 1) * total;

	return squares * values > even ? squares * values - even : 0;
}

BITS_FN uint64_t choose_excess(const uint32_t counts[256], uint64_t values, uint64_t total)
{
	uint32_t squares = 0;

	for (int i = 0; i < 256; i++)
		squares += counts[i] * counts[i];
	return choose_excess_of(squares, values, total);
}

/* Is that too little for a codebook to save 2%? */
BITS_FN int choose_near_uniform(uint64_t excess, uint64_t total)
{
	return excess <= total * total / 7;
}

/* The finest shift, by how uneven mantissas are. */
BITS_FN int choose_finest_of(int has_pattern, uint64_t excess, uint64_t total)
{
	return has_pattern || !choose_near_uniform(excess, total) ? WIRE_MAX_SHIFT : 0;
}

/*
 * The finest shift that a model may have: offsets that are not whole octaves move mantissas, too. Where these are worth
 * coding (few bits of them are in use, say) they should stay as they are. `plane1` has signs and mantissas in its lower
 * bits, mantissas of octave / 8 patterns.
 */
BITS_FN int choose_finest(const uint32_t plane1[256], int octave, int has_pattern)
{
	uint32_t counts[256] = {0}, values = 2 * (uint32_t)octave;
	uint64_t total;

	if (octave > 128) /* mantissas' upper bits are in plane 0 */
		return 0;
	for (uint32_t i = 0; i < 256; i++)
		counts[i % values] += plane1[i];
	total = choose_total(counts);
	return choose_finest_of(has_pattern, choose_excess(counts, values, total), total);
}

/* Of planes but the exponent's few quad rows are looked at; of codecs of rows, as many blocks: place i of n. */
BITS_FN uint64_t choose_plane_rows(uint64_t nrows)
{
	uint64_t half = (nrows + 1) / 2;

	return half < 64 ? half : 64;
}

BITS_FN uint64_t choose_code_blocks(uint64_t nblocks)
{
	return nblocks < 16 ? nblocks : 16;
}

BITS_FN uint64_t choose_even(uint64_t i, uint64_t take, uint64_t n)
{
	return i * n / take;
}

/* Are so many of m values 0 that planes had better not hold them? */
BITS_FN int choose_prunes(uint64_t nzeros, uint64_t m)
{
	return 64 * nzeros >= m;
}

/* Does coding save 2% of count * raw bits? Less is not worth the time, nor surer than a sample. */
BITS_FN int choose_saves(uint64_t cost, uint64_t count, uint64_t raw)
{
	return 100 * cost < 98 * raw * count;
}

/* What becomes of a plane: coded with the book that was made, whole or halved; raw in every block; or each decides. */
enum { CHOOSE_CODED, CHOOSE_HALVED, CHOOSE_FIXED, CHOOSE_BY_BLOCK };

/* What a sample says of a plane, beside its counts. */
struct choose_sample {
	int exponent; /* it is plane 0 of a float */
	int given;    /* and its book is the caller's */
	int constant; /* all its bytes are one value */
	int by_block; /* it has runs of zeros, or may lose zeros */
};

/* A book's own bits, shared among n values: what `sample` of them pay. */
BITS_LARGE_FN uint64_t choose_price(const codebook *b, uint64_t sample, uint64_t n)
{
	return 8 * (uint64_t)book_nbytes(b) * sample / n;
}

/*
 * Low bytes of sums of products are even too often: a book of bytes with codes of at most 8 bits cannot say so, a book
 * of their low nibbles can. Is that cheaper than *cost bits? Then it takes the place of *b.
 */
BITS_LARGE_FN int choose_halved(const uint32_t counts[256], uint64_t total, uint64_t n, int cap, uint64_t *cost,
				codebook *b)
{
	uint32_t low[256] = {0};
	uint64_t halved;
	codebook nibbles;

	for (int i = 0; i < 256; i++)
		low[i & 15] += counts[i];
	book_from_counts(&nibbles, low, cap);
	halved = book_cost(&nibbles, low, 8) + 4 * total + choose_price(&nibbles, total, n);
	if (halved >= *cost)
		return 0;
	*cost = halved;
	*b = nibbles;
	return 1;
}

/* Is a book worth making, where it saves no more than 8 ln 2 of the excess, rounded down, less its bytes? */
BITS_FN int choose_may_pay(uint64_t excess, uint64_t total, uint64_t n)
{
	return excess > total * total / 7 + 5 * BOOK_MAX_NBYTES * total * total / n;
}

/* What becomes of a plane of which `total` values cost so much. */
BITS_FN int choose_fate(uint64_t cost, uint64_t total, int halved, struct choose_sample s)
{
	if (choose_saves(cost, total, 8))
		return halved ? CHOOSE_HALVED : CHOOSE_CODED;
	return s.constant || s.by_block ? CHOOSE_BY_BLOCK : CHOOSE_FIXED;
}

/* What becomes of a plane of n values; a book that was made is *b. */
BITS_LARGE_FN int choose_plane(const uint32_t counts[256], struct choose_sample s, uint64_t n, int cap, codebook *b)
{
	uint64_t total = choose_total(counts), cost = 8 * total, excess = 0;
	int uneven = 0, halved = 0;

	if (s.exponent) {
		if (!s.given)
			book_from_counts(b, counts, cap);
		cost = book_cost(b, counts, 8);
	} else if (!s.constant) {
		excess = choose_excess(counts, 256, total);
		uneven = !choose_near_uniform(excess, total);
	}
	if (uneven && choose_may_pay(excess, total, n)) {
		book_from_counts(b, counts, cap);
		cost = book_cost(b, counts, 8) + choose_price(b, total, n);
	}
	if (uneven)
		halved = choose_halved(counts, total, n, cap, &cost, b);
	return choose_fate(cost, total, halved, s);
}

/* A block's mode for a plane of n bytes: coded, if that takes `coded` > 0 bytes; as runs, with a bitmap, if those that
 * are not all zero have few bytes. */
BITS_FN uint32_t choose_mode(uint64_t n, int constant, uint64_t coded, uint64_t bitmap, uint64_t runs)
{
	if (constant)
		return WIRE_MODE_CONSTANT;
	if (coded)
		return WIRE_MODE_CODED;
	return bitmap + runs < n ? WIRE_MODE_ROWS : WIRE_MODE_RAW;
}

/* Which quad rows of a block tell whether coding a plane (not an exponent) saves enough. */
#define CHOOSE_BLOCK_STRIDE 8

/* Most bytes of a coded plane and its escapes; halved: without its high nibbles. */
BITS_FN uint64_t choose_coded_most(uint64_t n, int halved)
{
	return (halved ? n / 2 : n) - 1;
}

/* Blocks: as long as all values, within limits. */
BITS_FN int choose_block_log2(uint64_t n)
{
	int log2 = WIRE_MIN_BLOCK_LOG2;

	while (log2 < WIRE_MAX_BLOCK_LOG2 && 1ull << log2 < n)
		log2++;
	return log2;
}

/* Is a frame of so many bytes, or at least so many, replaced by a stored one? */
BITS_FN int choose_stored(uint64_t nbytes, uint64_t stored)
{
	return nbytes >= stored;
}

/* TRUNCATE: the guard in the header. A gradient of few mantissa bits tells less of parameters of many. */
BITS_FN int choose_guard(int asked, int theta_mbits, int mbits)
{
	int guard = asked + theta_mbits - mbits;

	return guard < -128 ? -128 : guard > 127 ? 127 : guard;
}

#endif
