/* kernels.h - table of kernels that each instruction set provides. */
#ifndef CODEC_KERNELS_H
#define CODEC_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "exact/bits.h"
#include "exact/book.h"
#include "exact/delta.h"
#include "exact/round.h"
#include "exact/scales.h"
#include "exact/topk.h"
#include "exact/checksum.h"
#include "exact/wire.h"
#include "words.h"

/* Layout of a value's byte planes, plane 0 first. */
enum form {
	FORM_BYTES1,
	FORM_BYTES2,
	FORM_BYTES4,
	FORM_BYTES8,
	FORM_FLOAT2, /* bits_turn of the upper two bytes, then the other bytes */
	FORM_FLOAT4,
	FORM_FLOAT8,
	FORM_E4M3, /* one plane: the sign, then the lowered pattern of 7 bits */
	FORM_E5M2,
	FORM_COUNT
};

/* Plane 0 of a float is 8 bits of its lowered pattern: the bits from this one on. */
#define FORM_SHIFT 7
#define FORM_SHIFT64 4 /* for FORM_FLOAT8 */
#define FORM_SHIFT8 8  /* for FORM_E4M3 and FORM_E5M2, whose patterns have 7 bits, followed by 8 zero bits */

/*
 * State of the lane coder: the next 32 + tail[i] bits of each lane i, in decoding order. While encoding, `part` has the
 * first `tail` of these bits, right-justified, and `word` the last 32. While decoding, `word` has the first 32 bits and
 * `part` the rest, left-justified.
 */
typedef struct lanes {
	uint32_t word[WIRE_LANES];
	uint32_t part[WIRE_LANES];
	uint32_t tail[WIRE_LANES];
} lanes;

/*
 * Memory to prefetch while a kernel computes: `count` pieces of n bytes. Addresses are integers, because they may lie
 * past the end of an object, where C allows no pointers.
 */
struct ahead {
	uintptr_t at[WIRE_MAX_PLANES];
	size_t n, count;
};

/* Number of words that a kernel may write before, or read after, the buffers it is given. */
#define LANES_SLACK 48

/*
 * Decoding table for scalar loops, indexed by the next PAIR_BITS bits of a lane; an entry has up to two symbols. The
 * table is part of a thread's work buffer and is rebuilt when the codebook changes. work_place sets `of` to NULL.
 */
#define PAIR_BITS 12
struct symbol_pairs {
	const book_lookup *of; /* codebook for which the table was built; NULL: none yet */
	uint32_t at[1 << PAIR_BITS];
};

/* Coded plane to decode: nwords words at any address. Reads past the last word give zeros. */
struct stream {
	const uint8_t *words;
	size_t nwords;
	lanes *state;
	uint8_t *symbol;
	uint32_t *escaped; /* bit i: symbol i is the book's escape */
	struct symbol_pairs *pairs;
	int good; /* 1: decoding consumed all words, and left 32 zero bits in every lane */
};

#define COLUMNS 512
struct columns {
	int32_t total[COLUMNS];
	int32_t count[COLUMNS];
};

/* float32 at any address; tensors of callers may be unaligned */
typedef float float_any __attribute__((aligned(1), may_alias));
typedef int16_t int16_any __attribute__((aligned(1), may_alias));
typedef int32_t int32_any __attribute__((aligned(1), may_alias));

/*
 * Factors in A = THETA * ((sqrt(v * V) + eps) * theta_v + theta) + m * M, where THETA, V and M are arrays of the
 * caller; without V: THETA * theta + m * M. Each operation is rounded.
 */
struct metric_terms {
	float theta, theta_v, v, eps, m;
};

struct truncate_kind {
	int mbits, sign;     /* number of mantissa bits; index of the sign bit */
	uint32_t bias, last; /* exponent bias; exponent of Inf and NaN */
	int guard;           /* k bits of gradient g may be dropped if exponent(A) - exponent(g) >= k + guard */
	int by_bit;
	uint8_t drop[4];  /* mantissa bits dropped at each level */
	uint8_t width[4]; /* width in bits of each piece of a field, most significant first */
};

/*
 * Kinds of sums over at most WIRE_TREE values. ABS: of |x|. SQUARES: of x^2, and of x. SIGNS: two sums of |x|, one over
 * values whose sign bit is 0 and one over values whose sign bit is 1.
 */
enum { ROW_SUM_ABS, ROW_SUM_SQUARES, ROW_SUM_SIGNS };
struct row_lanes {
	union {
		struct {
			float a[WIRE_LANES], b[WIRE_LANES];
		};
		struct {
			double s[WIRE_LANES], t[WIRE_LANES]; /* ROW_SUM_SQUARES */
		};
	};
	int32_t max[WIRE_LANES]; /* bit patterns of |x| */
	uint32_t negative;
};

struct row_sums {
	double sum[2];
	uint32_t negative, max; /* max: largest bit pattern of |x| */
};

/* SIGN codes of one frame: one bit per value, and the dequantized value of each sign. */
struct signs {
	const uint8_t *bits;
	float negative, positive;
};
enum { SIGNS_STORE, SIGNS_ADD, SIGNS_NONTEMPORAL }; /* NONTEMPORAL: address is a multiple of 16 bytes */
enum { SETTLE_AS_IS, SETTLE_TIMES, SETTLE_OVER };   /* final operation on results: none; multiply; divide */

/* DELTA: positions and new values of a block's changes, `count` of them, in arrays of `room` elements. */
struct delta_list {
	uint32_t *at;
	void *value; /* new values, of `item` bytes each */
	size_t count, room;
};

/* DELTA: buffers for a block. A mask has one bit per value: 64 values per uint64_t. */
#define DELTA_PLANES 4
#define DELTA_CHUNK (4 * WIRE_CHUNK_WORDS) /* bytes of a chunk of the checksum */
#define DELTA_AHEAD 4096                   /* prefetch distance in bytes; hardware prefetchers stop at pages */
#define DELTA_SLACK 65                     /* elements past the ends of before, at and sorted that loops may access */
struct delta_buffers {
	uint64_t *changed;             /* mask: the value differs from the base's */
	uint64_t *plane[DELTA_PLANES]; /* masks: plane p has bit p of the class of the base's value */
	uint64_t *member;              /* mask: the base's value is in the class being coded */
	uint32_t *before;              /* number of the class's values before each word of `member`; last: total */
	uint32_t *at;                  /* encode: positions of changes, ascending */
	uint32_t *sorted;              /* positions of values of class 0; encode: later of changes, by class */
	struct delta_bin *bin;         /* encode: statistics, one per exponent */
};

struct kernels {
	const char *name;

	/*
	 * Encode `rows` rows of 128 symbols (four per lane), last row first, and store words downwards from `end`. Up
	 * to LANES_SLACK more words below the lowest may be overwritten. Set bit i of `escaped` if symbol i has no
	 * code. Return a pointer to the lowest word stored.
	 */
	uint32_t *(*encode_lanes)(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end,
				  lanes *state, uint32_t *escaped, const struct ahead *ahead);
	/*
	 * Decode `rows` rows of 128 symbols of stream a, and of stream b unless it is NULL. Decoding two streams
	 * together hides latency.
	 */
	void (*decode_lanes)(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			     const struct ahead *ahead);

	/*
	 * split: convert n values to byte planes; merge: the inverse. Indexed by enum form. `offset`: the scale model's
	 * offset of each value, for floats only. `nontemporal`: use non-temporal stores.
	 */
	void (*split[FORM_COUNT])(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane);
	void (*merge[FORM_COUNT])(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst,
				  int nontemporal);
	void (*stream)(uint8_t *dst, const uint8_t *src, size_t n);

	/* patterns: extract the 15-bit patterns of floats. lower: lower each pattern by its offset; u may be p. */
	void (*patterns[FORM_COUNT])(const void *src, size_t n, uint16_t *p);
	void (*lower)(const uint16_t *p, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *u);
	/*
	 * offset[i] = (start + grain * cols[i]) mod WIRE_CIRCLE(zero); |start| <= half of that, |grain * cols| <= 8192
	 */
	void (*offsets)(const int8_t *cols, int start, int grain, uint16_t zero, size_t n, uint16_t *offset);

	/* Compute *total and *count: the sum and the number of the patterns that are at least `zero`. */
	void (*sum)(const uint16_t *p, size_t n, uint16_t zero, uint32_t *total, uint32_t *count);
	/* For each column i with p[i] >= zero, add p[i] - row to the column's total, and 1 to its count. */
	void (*columns)(const uint16_t *p, int row, uint16_t zero, size_t n, struct columns *sums);

	/*
	 * halve: separate n bytes into low nibbles (symbols, one per byte) and high nibbles, two per byte: the nibble
	 * of byte i is stored with the nibble of byte i + (n + 1) / 2. unhalve is the inverse, in place.
	 */
	void (*halve)(const uint8_t *p, size_t n, uint8_t *symbol, uint8_t *high);
	void (*unhalve)(uint8_t *symbol, const uint8_t *high, size_t n);

	/*
	 * take_bits: separate n bytes of float8 into symbols, and bits that are stored raw (bits_symbol, bits_raw; raw:
	 * 1 or 2), each in a byte of its own. join_bits is the inverse, in place.
	 */
	void (*take_bits)(const uint8_t *p, size_t n, int raw, uint8_t *symbol, uint8_t *bits);
	void (*join_bits)(uint8_t *symbol, const uint8_t *bits, int raw, size_t n);

	/*
	 * Return the digest of nbytes bytes: the sum of checksum_of_chunk over chunks, the last one padded with zeros.
	 */
	uint64_t (*digest)(const uint8_t *src, size_t nbytes, uint32_t seed);

	/* Return the bitwise OR of p[i] over all i with e[i] 0. */
	uint8_t (*under_zeros)(const uint8_t *e, const uint8_t *p, size_t n);
	/*
	 * Omit bytes p[i] of values whose exponent e[i] is below `least` > 0. count: count the values with e[i] >=
	 * least. prune: pack p[i] of these values to dst, which may be p; up to 64 more bytes may be written. unprune:
	 * the inverse, with 0 for the omitted bytes; up to 64 more bytes may be read. All three return the number of
	 * values with e[i] >= least.
	 */
	size_t (*count)(const uint8_t *e, uint8_t least, size_t n);
	size_t (*prune)(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst);
	size_t (*unprune)(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst);
	/* Set bit r of bitmap if run r of 128 bytes has a non-zero byte. Returns the number of bytes in such runs. */
	size_t (*rows)(const uint8_t *p, size_t n, uint8_t *bitmap);

	/* row_loops.h. Convert [0] bfloat16 or [1] float16 to float32, and back, rounding to nearest even. */
	void (*to_float[2])(const void *src, size_t n, float *x);
	void (*from_float[2])(const float *x, size_t n, void *dst);
	/* Set max[r] to the largest bit pattern of |x| below `limit` in row r, which has `row` values. */
	void (*abs_max)(const float_any *x, size_t n, size_t row, uint32_t limit, uint32_t *max);
	/* Set low[r] and high[r] to the smallest and largest value of row r. Return 1 if a value is NaN or Inf. */
	int (*extremes)(const float_any *x, size_t n, size_t row, float *low, float *high);
	/*
	 * row_sums: add n values to the lanes' sums. `first`: clear the lanes before. `bits`, unless NULL: also store
	 * sign bits as sign_bits does. row_fold: reduce the lanes to the result; it overwrites the lanes.
	 */
	void (*row_sums)(int kind, const float_any *x, size_t n, int first, uint8_t *bits, struct row_lanes *sums);
	void (*row_fold)(int kind, struct row_lanes *sums, struct row_sums *out);
	void (*sign_bits)(const float_any *x, size_t n, uint8_t *bits);
	void (*sign_values)(const uint8_t *bits, size_t from, size_t n, float negative, float positive, int how,
			    float_any *y);
	/*
	 * Add n decoded values of each of `count` SIGN frames, in frame order, to 0, or to y if `more`. Divide the sums
	 * by `by` unless it is 0, and store them in y.
	 */
	void (*sign_sums)(const struct signs *s, size_t count, size_t n, int more, float by, float_any *y);
	void (*halves)(struct philox key, uint64_t block, size_t nblocks, uint16_t *h);
	/*
	 * Convert n values to codes, in rows of `row` values. scale, middle: one per row; middle is used if q->affine.
	 * h: random bits for stochastic rounding; NULL: round to nearest. Return 1 if a magnitude exceeds the scale
	 * that the caller gave for TERNARY.
	 */
	int (*encode_rows)(const struct row_kind *q, const float_any *x, size_t n, size_t row, const float *scale,
			   const float *middle, const uint16_t *h, uint8_t *code);
	void (*decode_rows)(const struct row_kind *q, const uint8_t *code, size_t n, size_t row, const float *scale,
			    const float *middle, float_any *y);
	void (*pack_codes)(const uint8_t *code, size_t n, int bits, uint8_t *dst);
	void (*unpack_codes)(const uint8_t *src, size_t n, int bits, uint8_t *code);
	void (*pack_trits)(const uint8_t *code, size_t n, uint8_t *dst);
	void (*unpack_trits)(const uint8_t *src, size_t n, uint8_t *code);
	uint8_t (*max_byte)(const uint8_t *p, size_t n);
	/*
	 * Convert TERNARY's codes 0, 1, 2 to integers 0, 1, -1 of `nbytes` bytes, and store them in y, or add them to y
	 * if `more`.
	 */
	void (*sum_codes)(const uint8_t *code, size_t n, int more, size_t nbytes, void *y);
	/*
	 * plus: sum = x + e; sum may be x. minus: difference = x - e. subtract: residual r = x - y, or 0 where x is NaN
	 * or Inf; r may be x. add: out += weight * y, both operations rounded. maximum: out = max(out, y), NaN if
	 * either is NaN.
	 */
	void (*plus)(const float_any *x, const float_any *e, size_t n, float_any *sum);
	void (*minus)(const float_any *x, const float_any *e, size_t n, float *difference);
	void (*subtract)(const float_any *x, const float *y, size_t n, float_any *r);
	void (*add)(const float *y, size_t n, float weight, float_any *out);
	void (*multiply)(float_any *out, size_t n, float by);
	void (*divide)(float_any *out, size_t n, float by);
	void (*maximum)(const float *y, size_t n, float_any *out);
	/*
	 * Store x / by, or x if `by` is 0, to dst with non-temporal stores. Return the largest bit pattern of the
	 * stored magnitudes.
	 */
	uint32_t (*settle)(const float_any *x, size_t n, float by, float_any *dst);

	/* truncate_loops.h */
	void (*load_patterns)(const void *src, size_t n, int nbytes, uint32_t *x);
	void (*store_patterns)(const uint32_t *x, size_t n, int nbytes, void *dst);
	void (*metric_exponents)(const struct metric_terms *t, const float_any *theta, const float_any *v,
				 const float_any *m, size_t n, uint8_t *ea);
	void (*exponents_of)(const float *a, size_t n, uint8_t *ea);
	void (*drops_of)(const struct truncate_kind *q, const uint8_t *e, const uint8_t *ea, size_t n, uint8_t *drop);
	void (*exponents)(const uint32_t *x, size_t n, int mbits, uint32_t last, uint8_t *e);
	/* Drop drop[i] bits of each pattern x[i] in place, and store the results' exponents in e */
	void (*truncate)(const struct truncate_kind *q, const uint8_t *drop, int nearest, size_t n, uint32_t *x,
			 uint8_t *e);
	/*
	 * Set width[i] to the number of kept bits, at most `most`, in the field of value i (its sign and mantissa);
	 * to 0 if e[i] is 0. Return the sum of all widths.
	 */
	size_t (*widths)(const uint8_t *e, const uint8_t *drop, size_t n, int total, int most, uint8_t *width);
	/* Return the bitwise OR of n patterns. */
	uint32_t (*any_bits)(const uint32_t *x, size_t n);
	/*
	 * Pack the upper width[i] bits of the field (sign and mantissa) of each pattern x[i] contiguously, from bit 0
	 * of the first byte on; up to 8 more bytes may be written. unpack_fields unpacks fields of `total` bits;
	 * nbytes: size of the packed bits in bytes.
	 */
	void (*pack_fields)(const struct truncate_kind *q, const uint32_t *x, const uint8_t *width, size_t n,
			    uint8_t *dst);
	void (*unpack_fields)(const uint8_t *src, size_t nbytes, const uint8_t *width, size_t n, int total,
			      uint32_t *f);
	/* Convert fields, or pieces of fields, to patterns x, and back. Where the exponent e is 0, x is 0. */
	void (*assemble)(const struct truncate_kind *q, const uint32_t *f, const uint8_t *e, size_t n, uint32_t *x);
	void (*split_pieces)(const struct truncate_kind *q, const uint32_t *x, size_t n, uint8_t *const piece[4]);
	void (*join_pieces)(const struct truncate_kind *q, const uint8_t *const piece[4], const uint8_t *e, size_t n,
			    uint32_t *x);
	void (*levels_of)(const struct truncate_kind *q, const uint8_t *drop, size_t n, uint8_t *level);
	void (*drops_at)(const struct truncate_kind *q, const uint8_t *level, size_t n, uint8_t *drop);
	/*
	 * Lower and raise exponents by offset >> shift, possibly in place. Offsets are in patterns; an exponent is a
	 * pattern >> shift.
	 */
	void (*lower_exponents)(const uint8_t *e, const uint16_t *offset, uint8_t last, int shift, size_t n,
				uint8_t *u);
	void (*raise_exponents)(const uint8_t *u, const uint16_t *offset, uint8_t last, int shift, size_t n,
				uint8_t *e);
	size_t (*join)(const uint8_t *e, const uint8_t *level, size_t n, int base, uint16_t *pair, uint8_t *symbol);
	void (*pairs_of)(const uint8_t *symbol, size_t n, int base, uint16_t *pair);
	void (*unjoin)(const uint16_t *pair, size_t n, uint8_t *e, uint8_t *level);
	uint8_t (*drops_under)(const uint8_t *e, const uint8_t *drop, size_t n, uint8_t e0);
	uint8_t (*below_four)(const uint8_t *p, size_t n);

	/* delta_loops.h */
	/* Compute, for each of n chunks of 1 KiB, the sum that checksum_of_chunk mixes. */
	void (*chunk_sums)(const uint8_t *src, size_t n, uint64_t *sums);
	/*
	 * change_sums: given the checksum sums of the base's chunks, add the effect of a block's changes to them.
	 * put_changes: write the new values to the block.
	 */
	void (*change_sums)(const void *base, const struct delta_list *list, uint32_t item, uint64_t *sums);
	void (*put_changes)(const struct delta_list *list, uint32_t item, void *dst);
	/* Set bit i of `changed` if values i of a and b, of `item` bytes, differ. Returns the number of such values. */
	size_t (*differences)(const void *a, const void *b, size_t n, uint32_t item, uint64_t *changed);
	/* Compare n chunks of 1 KiB as `differences` does, and compute the checksum sums of the chunks of a and b. */
	size_t (*compare_chunks)(const void *a, const void *b, size_t n, uint32_t item, uint64_t *changed,
				 uint64_t *sums_a, uint64_t *sums_b);
	/*
	 * List the positions of the set bits of a mask of n bits. Return their number. Up to DELTA_SLACK more items may
	 * be written.
	 */
	size_t (*list_changes)(const uint64_t *changed, size_t n, uint32_t *at);
	/*
	 * Decode a block's bit stream to a list of changes. Both functions return 0 if the stream is invalid: it must
	 * be consumed to its end, and unused last bits must be 0. delta_decode reads steps coded by class, and computes
	 * the sums of the base's whole chunks unless `sums` is NULL. delta_patches reads patches: the gap to the next
	 * changed value, as a Rice code with parameter k, followed by a step if `steps` is set, else by the XOR of old
	 * and new value.
	 */
	int (*delta_decode)(const struct delta_kind *q, const void *base, size_t n, int scale,
			    const struct delta_buffers *b, const uint8_t *stream, size_t nbytes,
			    struct delta_list *list, uint64_t *sums);
	int (*delta_patches)(const struct delta_kind *q, const void *base, size_t n, uint32_t k, int steps,
			     const uint8_t *stream, size_t nbytes, struct delta_list *list);
	/*
	 * Encode the `count` changes listed in b->at to a bit stream, the inverse of delta_decode and of delta_patches.
	 * delta_encode chooses *scale. Return the size in bytes, or 0 if it exceeds `room`.
	 */
	size_t (*delta_encode)(const struct delta_kind *q, const void *base, const void *values, size_t n,
			       const struct delta_buffers *b, size_t count, int *scale, uint8_t *dst, size_t room);
	size_t (*delta_encode_patches)(const struct delta_kind *q, const void *base, const void *values,
				       const uint32_t *at, size_t count, uint32_t k, int steps, uint8_t *dst,
				       size_t room);

	/*
	 * topk_loops.h. Count the values whose magnitude, as a bit pattern, is at least `key`; list_above lists their
	 * positions.
	 */
	size_t (*count_above)(const float_any *x, size_t n, uint32_t key);
	/*
	 * List the positions of values whose magnitude, as a bit pattern, is at least `key`. Return their number, or
	 * room + 1 if there are more than `room`.
	 */
	size_t (*list_above)(const float_any *x, size_t n, uint32_t key, size_t room, uint32_t *at);
};

extern const struct kernels kernels_scalar; /* kernels of other instruction sets: cpu.c */

#endif
