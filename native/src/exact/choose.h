/*
 * choose.h - an encoder's decisions, computed from shapes and from sums over samples. C, C++ and NVRTC.
 *
 * Decoders make no such decisions. All encoders must make the same decisions to produce equal bytes. Sample positions
 * depend on shapes only, and all arithmetic is on integers. `eighth` is log2 of the number of patterns in an eighth of
 * an octave, the unit of offsets. Float8 has another unit: a number of the type.
 *
 * One file: the decisions follow the sections of docs/spec/encoder.md.
 */
#ifndef CODEC_CHOOSE_H
#define CODEC_CHOOSE_H

#include "bits.h"
#include "book.h"
#include "wire.h"

#define CHOOSE_MODEL_MIN 4096   /* tensors of fewer values have no scale model */
#define CHOOSE_SEGMENT_MIN 8192 /* shorter segments (in values) and the gaps between are merged into flat ones */
#define CHOOSE_ROWS 1024        /* number of rows sampled per segment, for its base and the shift of its row offsets */
#define CHOOSE_COL_ROWS 128     /* number of rows sampled per segment, for column offsets */
#define CHOOSE_RUN 32           /* values per run; 4 runs of 32 estimate the mean to about a tenth of a step */
#define CHOOSE_RUNS8 8          /* number of runs sampled per row of float8, to estimate its mean; others: 4 */
#define CHOOSE_COL_ROWS8 512    /* as CHOOSE_COL_ROWS, for float8 */
#define CHOOSE_NONE (-1)        /* mean of a row whose patterns are all too small for the scale model */

/*
 * Return the position of sample i among n < 2^32 positions, if `take` samples are taken. Samples are spread by the
 * golden ratio, because regular strides alias with 3x3 convolution kernels.
 */
BITS_FN uint64_t choose_spread(uint64_t i, uint64_t take, uint64_t n)
{
	return take == n ? i : (i * 0x9e3779b9u & 0xffffffffu) * n >> 32;
}

/* Return s if symbols are counted in one of every s rows of 128 values, for a tensor of nrows such rows. */
BITS_FN uint64_t choose_stride(uint64_t nrows)
{
	uint64_t few = nrows / 64 < 16 ? nrows / 64 : 16, most = nrows / 2048;

	few = few ? few : 1;
	return most > few ? most : few;
}

/*
 * View a shape of n values as the most nearly square matrix, and return its number of columns. Return 0 if a side of
 * that matrix is below 64; the values are then viewed as rows of 512.
 */
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

/*
 * Return the number of runs that are sampled per row, to estimate its mean. float8: 1 for these dtypes, whose offsets
 * must be more precise, because symbols have bits of the mantissa.
 */
BITS_FN uint64_t choose_runs(int float8)
{
	return float8 ? CHOOSE_RUNS8 : 4;
}

/*
 * Return the index of the first value of sampled run i of `runs` in a row of n > runs * CHOOSE_RUN values. In shorter
 * rows, all values are sampled, and there are no runs.
 */
BITS_FN uint64_t choose_run(uint64_t i, uint64_t runs, uint64_t n)
{
	return i * (n - CHOOSE_RUN) / (runs - 1);
}

/* Return the number of rows, out of nrows, that are sampled to compute the offsets of columns. */
BITS_FN uint64_t choose_col_rows(uint64_t nrows, int float8)
{
	uint64_t half = nrows / 2 < 64 ? 64 : nrows / 2, most = float8 ? CHOOSE_COL_ROWS8 : CHOOSE_COL_ROWS;

	half = half < most ? half : most;
	return nrows < half ? nrows : half;
}

/* Return the mean of `count` patterns whose sum is `sum`, each at most 2^15, or CHOOSE_NONE if count is 0. */
BITS_FN int choose_mean(uint32_t sum, uint32_t count)
{
	return count ? (int)((2 * sum + count) / (2 * count)) : CHOOSE_NONE;
}

/* Convert mean - centre from patterns to eighths of an octave. `eighth`: log2 of the patterns per eighth. */
BITS_FN int choose_eighths(int mean, int centre, int eighth)
{
	int q = (mean - centre + (1 << eighth >> 1)) >> eighth;

	q = q < -127 ? -127 : q > 127 ? 127 : q;
	return mean == CHOOSE_NONE ? 0 : q;
}

/* Return total / count in eighths of an octave, the mean of `count` differences of patterns; 0 if count is 0. */
BITS_FN int choose_mean_eighths(int total, int count, int eighth)
{
	int q = count ? bits_mean(total, (int64_t)count << eighth) : 0;

	return q < -127 ? -127 : q > 127 ? 127 : q;
}

/* Convert an offset in eighths of an octave to units of 2^shift eighths, not yet clamped to a nibble, -8..7. */
BITS_FN int choose_nibble(int eighths, int shift)
{
	return (eighths + (1 << shift >> 1)) >> shift;
}

BITS_FN int choose_clamped(int nibble)
{
	return nibble < -8 ? -8 : nibble > 7 ? 7 : nibble;
}

/*
 * Return the smallest shift, from `shift` to `most`, with which at most one in 32 of n offsets is clamped; `most` if
 * there is none. Offsets are stored as nibbles, in units of 2^shift grains. Clamped offsets cost bits but decode
 * correctly.
 */
BITS_FN int choose_shift(const int8_t *grains, uint64_t n, int shift, int most)
{
	for (; shift < most; shift++) {
		uint64_t outside = 0;

		for (uint64_t i = 0; i < n; i++) {
			int nibble = choose_nibble(grains[i], shift);

			outside += choose_clamped(nibble) != nibble;
		}
		if (32 * outside <= n)
			break;
	}
	return shift;
}

/*
 * Return the offset that a decoder reads back for the offset `eighths`, both in eighths of an octave: rounded and
 * clamped.
 */
BITS_FN int choose_offset(int eighths, int shift)
{
	return choose_clamped(choose_nibble(eighths, shift)) * (1 << shift);
}

/*
 * Return the pattern to which a base moves the mean pattern of a segment: symbols then lie around 128, and symbols of
 * float64 far from their wrap-around.
 */
BITS_FN int choose_centre(int octave)
{
	return octave == 16 ? 0x4800 : 0x4000;
}

/*
 * Return the base that moves a mean pattern to choose_centre, in eighths of an octave, a multiple of 1 << shift. The
 * distribution of exponents falls steeply above its mode. Measured costs are lowest if the mean lies just below a power
 * of two, or further below it in segments without offsets of columns, whose distribution is wider.
 */
BITS_FN uint16_t choose_base(int mean, int eighth, int zero, int shift, uint32_t kind)
{
	int octave = 8 << eighth, wide = kind == WIRE_SEGMENT_ROWS && octave == 128 && shift < WIRE_MAX_SHIFT;
	int top = (octave < 128 ? octave : 128) * (wide ? 3 : 7) / 8, grain = eighth + shift;
	int base = ((mean - choose_centre(octave) - top + (1 << grain >> 1)) >> grain) * (1 << shift);

	return (uint16_t)(base < 0 ? base + (WIRE_CIRCLE(zero) >> eighth) : base);
}

/* Add the counts of symbols to `sum`, after symbols 1 to 255 are shifted down, around, by a base of `by` symbols. */
BITS_LARGE_FN void choose_add_lowered(const uint32_t counts[256], uint32_t by, uint32_t sum[256])
{
	uint32_t low = by % 255;

	sum[0] += counts[0];
	for (uint32_t i = low; i < 255; i++)
		sum[1 + i - low] += counts[1 + i];
	for (uint32_t i = 0; i < low; i++)
		sum[256 - low + i] += counts[1 + i];
}

/*
 * Return the coded size in bits of symbols with these counts, under a Huffman code of unlimited length. Values get
 * codes as in book_from_counts. Called twice per segment, so it must be faster than building a book.
 */
BITS_LARGE_FN uint64_t choose_cost(const uint32_t counts[256])
{
	uint32_t leaf[257], node[257];
	uint32_t total = 0, rest = 0, least;
	uint64_t cost = 0;
	int n = 0, i = 0, from = 0, to = 0;

	for (int e = 0; e < 256; e++)
		total += counts[e];
	least = total / 1280; /* the rule of book_keeps */
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
 * Return 1 if a change saves more than `bits` bits in `count` values. `before` and `after`: coded size in bits of
 * `samples` of these values without and with the change.
 */
BITS_FN int choose_pays(uint64_t before, uint64_t after, uint64_t samples, uint64_t count, uint64_t bits)
{
	/* bits per value in units of 1/65536, so that the product stays below 2^64 */
	return samples && before > after && ((before - after) << 16) / samples * count > bits << 16;
}

/* Return 1 if the `offsets` offsets of a segment save more bits than they cost. */
BITS_FN int choose_offsets_pay(uint64_t before, uint64_t after, uint64_t samples, uint64_t count, uint64_t offsets)
{
	return choose_pays(before, after, samples, count, 4 * offsets + 64);
}

BITS_FN uint64_t choose_total(const uint32_t counts[256])
{
	uint64_t total = 0;

	for (int i = 0; i < 256; i++)
		total += counts[i];
	return total;
}

/*
 * Return how uneven counts are: the sum of their squares times the number of possible values, minus the expected value
 * of that product for a uniform distribution. Divided by total^2 the result is at least ln 2 times the bits per value
 * that a codebook can save, and twice that near the uniform distribution. Computing it is much faster than building a
 * book. Squares are added in 32 bits so that the loop vectorizes; the sum does not overflow, because a sample of a
 * plane has at most 256 * 128 values.
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

/* Return 1 if counts with this excess (choose_excess_of) are too even for a codebook to save 2%. */
BITS_FN int choose_near_uniform(uint64_t excess, uint64_t total)
{
	return excess <= total * total / 7;
}

/* Return the finest shift that a model may have, given the excess (choose_excess_of) of the mantissas' counts. */
BITS_FN int choose_finest_of(int has_pattern, uint64_t excess, uint64_t total)
{
	return has_pattern || !choose_near_uniform(excess, total) ? WIRE_MAX_SHIFT : 0;
}

/*
 * Return the finest shift that a model may have: offsets are multiples of 2^shift eighths of an octave. Offsets that
 * are not whole octaves change mantissas. Mantissas should remain unchanged if they are worth coding, for example
 * because few of their bits are used. `plane1`: counts of bytes whose lower bits are the sign and, below it,
 * log2(octave) mantissa bits.
 */
BITS_FN int choose_finest(const uint32_t plane1[256], int octave, int has_pattern)
{
	uint32_t counts[256] = {0}, values = 2 * (uint32_t)octave;
	uint64_t total;

	if (octave > 128) /* float16, float8: the mantissas' upper bits are in plane 0 */
		return 0;
	for (uint32_t i = 0; i < 256; i++)
		counts[i % values] += plane1[i];
	total = choose_total(counts);
	return choose_finest_of(has_pattern, choose_excess(counts, values, total), total);
}

/*
 * Return the number of samples to take of `nrows`: rows of 128 values in planes other than the exponent, or blocks in
 * row codecs. choose_even returns the position of sample i. More rows of float8 are sampled, whose books are larger.
 */
BITS_FN uint64_t choose_plane_rows(uint64_t nrows, int float8)
{
	uint64_t half = (nrows + 1) / 2, most = float8 ? 256 : 64;

	return half < most ? half : most;
}

BITS_FN uint64_t choose_code_blocks(uint64_t nblocks)
{
	return nblocks < 16 ? nblocks : 16;
}

BITS_FN uint64_t choose_even(uint64_t i, uint64_t take, uint64_t n)
{
	return i * n / take;
}

/* Return 1 if the nzeros zeros among m values are so frequent that planes should omit their bytes. */
BITS_FN int choose_prunes(uint64_t nzeros, uint64_t m)
{
	return 64 * nzeros >= m;
}

/*
 * Return 1 if a coded size of `cost` bits is at least 2% below `count` values of `raw` bits. A smaller saving is not
 * worth the time and lies within the sampling error.
 */
BITS_FN int choose_saves(uint64_t cost, uint64_t count, uint64_t raw)
{
	return 100 * cost < 98 * raw * count;
}

/*
 * Treatment of a plane: coded with the book that was built (CODED); raw in every block (FIXED); or chosen block by
 * block (BY_BLOCK).
 */
enum { CHOOSE_CODED, CHOOSE_FIXED, CHOOSE_BY_BLOCK };

/* Properties of a sampled plane, besides its counts. */
struct choose_sample {
	int exponent; /* 1: plane 0 of a float, except float8 */
	int float8;   /* 1: plane of a float8 */
	int given;    /* 1: plane 0 has an agreed codebook */
	int constant; /* 1: all bytes are equal */
	int by_block; /* 1: has runs of zeros, or zeros that blocks may omit */
};

/*
 * Return the packed size of book b in bits, scaled by sample / n to compare it with the cost of `sample` of n values.
 */
BITS_LARGE_FN uint64_t choose_price(const codebook *b, uint64_t sample, uint64_t n)
{
	return 8 * (uint64_t)book_nbytes(b) * sample / n;
}

/*
 * Replace *b by a book for symbols with `raw` raw bits per value (WIRE_RAW_BITS) if the values then cost fewer than
 * *cost bits. Return 1 if *b was replaced. The low bytes of sums of products are more often even than odd, which a book
 * of all byte values with codes of at most 8 bits cannot exploit. Neither can such a book code 256 values of float8
 * well, whose signs and last bits are mostly random.
 */
BITS_LARGE_FN int choose_raw_bits(const uint32_t counts[256], int raw, uint64_t total, uint64_t n, int max_code_length,
				  uint64_t *cost, codebook *b)
{
	uint32_t kept[256] = {0};
	uint64_t less;
	codebook symbols;

	for (int i = 0; i < 256; i++)
		kept[bits_symbol((uint8_t)i, raw)] += counts[i];
	book_from_counts(&symbols, kept, max_code_length);
	less = book_cost(&symbols, kept, 8) + (uint64_t)raw * total + choose_price(&symbols, total, n);
	if (less >= *cost)
		return 0;
	*cost = less;
	*b = symbols;
	return 1;
}

/* Return 1 if a book may save more than its packed size. `excess` (choose_excess_of) bounds the saving. */
BITS_FN int choose_may_pay(uint64_t excess, uint64_t total, uint64_t n)
{
	return excess > total * total / 7 + 5 * BOOK_MAX_NBYTES * total * total / n;
}

/* Return CHOOSE_* for a plane, given the coded size `cost` in bits of `total` sampled values. */
BITS_FN int choose_fate(uint64_t cost, uint64_t total, struct choose_sample s)
{
	if (choose_saves(cost, total, 8))
		return CHOOSE_CODED;
	return s.constant || s.by_block ? CHOOSE_BY_BLOCK : CHOOSE_FIXED;
}

/* How a plane is stored, and its estimated size in bits, of the sampled values. */
struct choose_result {
	int what; /* CHOOSE_* */
	int raw;  /* WIRE_RAW_BITS */
	uint64_t cost;
};

/* Choose how a plane of n values is stored. If it is coded, *b is the book. */
BITS_LARGE_FN struct choose_result choose_plane(const uint32_t counts[256], struct choose_sample s, uint64_t n,
						int max_code_length, codebook *b)
{
	uint64_t total = choose_total(counts), cost = 8 * total, excess = 0;
	struct choose_result chosen;
	int uneven = 0, raw = 0;

	if (s.exponent) {
		if (!s.given)
			book_from_counts(b, counts, max_code_length);
		cost = book_cost(b, counts, 8);
	} else if (!s.constant) {
		excess = choose_excess(counts, 256, total);
		uneven = !choose_near_uniform(excess, total);
	}
	if (uneven && choose_may_pay(excess, total, n)) {
		book_from_counts(b, counts, max_code_length);
		cost = book_cost(b, counts, 8) + choose_price(b, total, n);
	}
	if (uneven && choose_raw_bits(counts, 4, total, n, max_code_length, &cost, b))
		raw = 4;
	for (int bits = 1; uneven && s.float8 && bits <= 2; bits++)
		if (choose_raw_bits(counts, bits, total, n, max_code_length, &cost, b))
			raw = bits;
	chosen.what = choose_fate(cost, total, s);
	chosen.raw = raw;
	chosen.cost = cost;
	return chosen;
}

/*
 * Return 1 if a float8 tensor of n values has its scale model of `nbytes` bytes: if it makes the frame smaller, or the
 * caller asked for it. before, after: results without and with the model, for `total` sampled values.
 */
BITS_FN int choose_model8(struct choose_result before, struct choose_result after, uint64_t nbytes, uint64_t total,
			  uint64_t n, int asked)
{
	return after.what == CHOOSE_CODED && (asked || after.cost + 8 * nbytes * total / n < before.cost);
}

/*
 * Return a block's mode for a plane of n bytes: constant, if all bytes are equal. Otherwise coded, if the plane's coded
 * size in bytes, `coded`, is not 0. Otherwise a bitmap followed by the runs that are not all zero, if these are smaller
 * than n bytes. Otherwise raw.
 */
BITS_FN uint32_t choose_mode(uint64_t n, int constant, uint64_t coded, uint64_t bitmap, uint64_t runs)
{
	if (constant)
		return WIRE_MODE_CONSTANT;
	if (coded)
		return WIRE_MODE_CODED;
	return bitmap + runs < n ? WIRE_MODE_ROWS : WIRE_MODE_RAW;
}

/* a block samples one in 8 rows of 128 values to decide if coding a plane other than the exponent saves enough */
#define CHOOSE_BLOCK_STRIDE 8

/* Return the size in bytes of the raw bits of n values, `raw` bits each. */
BITS_FN uint64_t choose_raw_nbytes(uint64_t n, int raw)
{
	return (n * (uint64_t)raw + 7) / 8;
}

/* Return the largest size in bytes, without raw bits, at which a coded plane of n >= 2 values is kept. */
BITS_FN uint64_t choose_coded_most(uint64_t n, int raw)
{
	return n - choose_raw_nbytes(n, raw) - 1;
}

/* Return log2 of the number of values per block: one block for all n values, within the format's limits. */
BITS_FN int choose_block_log2(uint64_t n)
{
	int log2 = WIRE_MIN_BLOCK_LOG2;

	while (log2 < WIRE_MAX_BLOCK_LOG2 && 1ull << log2 < n)
		log2++;
	return log2;
}

/* Return 1 if a stored frame of `stored` bytes must replace a frame of at least `nbytes` bytes. */
BITS_FN int choose_stored(uint64_t nbytes, uint64_t stored)
{
	return nbytes >= stored;
}

/*
 * Return TRUNCATE's guard for the header, given the spec's guard `asked`. The header's guard is larger if parameters
 * have more mantissa bits (theta_mbits) than the gradient (mbits).
 */
BITS_FN int choose_guard(int asked, int theta_mbits, int mbits)
{
	int guard = asked + theta_mbits - mbits;

	return guard < -128 ? -128 : guard > 127 ? 127 : guard;
}

#endif
