/* kernels.h - the table of loops that each instruction set fills in. */
#ifndef CODEC_KERNELS_H
#define CODEC_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "exact/bits.h"
#include "exact/book.h"
#include "exact/round.h"
#include "exact/scales.h"
#include "exact/seal.h"
#include "exact/wire.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define CODEC_BIG_ENDIAN 1
#else
#define CODEC_BIG_ENDIAN 0
#endif

static inline uint16_t load16(const void *p)
{
	const uint8_t *b = p;

	return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load32(const void *p)
{
	uint32_t x;

	memcpy(&x, p, 4);
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap32(x);
#endif
	return x;
}

static inline uint64_t load64(const void *p)
{
	uint64_t x;

	memcpy(&x, p, 8);
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap64(x);
#endif
	return x;
}

static inline void store16(void *p, uint32_t x)
{
	uint8_t *b = p;

	b[0] = (uint8_t)x;
	b[1] = (uint8_t)(x >> 8);
}

static inline void store32(void *p, uint32_t x)
{
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap32(x);
#endif
	memcpy(p, &x, 4);
}

static inline void store64(void *p, uint64_t x)
{
#if CODEC_BIG_ENDIAN
	x = __builtin_bswap64(x);
#endif
	memcpy(p, &x, 8);
}

/* How a value becomes bytes, most significant first. */
enum form {
	FORM_BYTES1,
	FORM_BYTES2,
	FORM_BYTES4,
	FORM_BYTES8,
	FORM_FLOAT2, /* bits_turn of the upper two bytes, then the others */
	FORM_FLOAT4,
	FORM_FLOAT8,
	FORM_COUNT
};

/* Plane 0 has 8 bits of a float's lowered pattern from this bit on. */
#define FORM_SHIFT 7
#define FORM_SHIFT64 4 /* of FORM_FLOAT8 */

/*
 * A lane's bit sequence is `tail` bits longer than one word. While encoding, `word` is its end (what the decoder
 * takes next) and `part` its beginning, right-justified; while decoding, `word` is its beginning and `part` what
 * follows, left-justified.
 */
typedef struct lanes {
	uint32_t word[WIRE_LANES];
	uint32_t part[WIRE_LANES];
	uint32_t tail[WIRE_LANES];
} lanes;

/*
 * Memory that comes next: `count` pieces of n bytes. Kernels that compute bring it closer meanwhile. Addresses, for
 * they may lie behind objects, where no pointer may.
 */
struct ahead {
	uintptr_t at[WIRE_MAX_PLANES];
	size_t n, count;
};

/* Words that a kernel may write below, or read above, what it was given. */
#define LANES_SLACK 48

/*
 * What comes of the next PAIR_BITS bits of a lane, two symbols at once: for loops that look up in memory. Lies in one
 * thread's buffers, and is made anew when another book comes; whoever places it says that it was made of none.
 */
#define PAIR_BITS 12
struct symbol_pairs {
	const book_lookup *of; /* NULL: none */
	uint32_t at[1 << PAIR_BITS];
};

/* A plane to be decoded: nwords words at any address, zeros follow the last one. */
struct stream {
	const uint8_t *words;
	size_t nwords;
	lanes *state;
	uint8_t *symbol;
	uint32_t *escaped; /* bit i: symbol i is the book's escape */
	struct symbol_pairs *pairs;
	int good;        /* every word was taken and every lane ended on 32 zero bits */
	size_t nescaped; /* how many symbols are the escape: of check_lanes alone */
};

#define COLUMNS 512
struct columns {
	int32_t total[COLUMNS];
	int32_t count[COLUMNS];
};

/* Floats of a caller's tensor: at any address. */
typedef float float_any __attribute__((aligned(1), may_alias));

/* A = theta * ((sqrt(v * V) + eps) * theta_v + theta) + m * M, each operation rounded; without V: theta * theta + ...
 */
struct metric_terms {
	float theta, theta_v, v, eps, m;
};

struct truncate_kind {
	int mbits, sign;     /* bits of mantissa; place of the sign */
	uint32_t bias, last; /* of exponents: `last` is Inf's */
	int guard;           /* k bits may go where exponent(A) - exponent(g) is at least k + guard */
	int by_bit;
	uint8_t drop[4];  /* bits dropped at each level */
	uint8_t width[4]; /* of the pieces that fields are cut into, from the top */
};

/* Sums over at most WIRE_TREE values: of |x|; of x^2 and x; or of |x| where the sign is clear, and where it is set. */
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
	int32_t max[WIRE_LANES]; /* patterns of |x| */
	uint32_t negative;
};

struct row_sums {
	double sum[2];
	uint32_t negative, max; /* max: the largest pattern of |x| */
};

/* Of one frame: a bit a value, and what the two are worth. */
struct signs {
	const uint8_t *bits;
	float negative, positive;
};
enum { SIGNS_STORE, SIGNS_ADD, SIGNS_PAST };      /* to what is there; past the caches, to a multiple of 16 bytes */
enum { SETTLE_AS_IS, SETTLE_TIMES, SETTLE_OVER }; /* what a loop does to values that are settled */

struct kernels {
	const char *name;

	/*
	 * Code `rows` quad rows of symbols, last row first, storing words downwards from `end`; LANES_SLACK words
	 * below the last one may be overwritten. Bit i of `escaped` is set where symbol i has no code. Returns the
	 * place of the first word.
	 */
	uint32_t *(*encode_lanes)(const book_codes *book, const uint8_t *symbol, size_t rows, uint32_t *end,
				  lanes *state, uint32_t *escaped, const struct ahead *ahead);
	/*
	 * Decode `rows` quad rows of a, and of b unless it is NULL: two are faster together where one leaves the CPU
	 * waiting for itself.
	 */
	void (*decode_lanes)(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			     const struct ahead *ahead);
	/* The same to know what is `good`, and how many are escapes: the lengths of codes say that. */
	void (*check_lanes)(const book_lookup *book, struct stream *a, struct stream *b, size_t rows,
			    const struct ahead *ahead);

	/* Values to byte planes and back, by enum form. Floats have an offset each (others none). `past`: past the
	 * caches. */
	void (*split[FORM_COUNT])(const void *src, size_t n, const uint16_t *offset, uint8_t *const *plane);
	void (*merge[FORM_COUNT])(const uint8_t *const *plane, size_t n, const uint16_t *offset, void *dst, int past);
	void (*stream)(uint8_t *dst, const uint8_t *src, size_t n);

	/* The patterns of floats; lowered under an offset each (in place if wanted). */
	void (*patterns[FORM_COUNT])(const void *src, size_t n, uint16_t *p);
	void (*lower)(const uint16_t *p, const uint16_t *offset, uint16_t zero, size_t n, uint16_t *u);
	/* offset = start + grain * cols on the circle; |start| <= circle / 2, |cols| <= 64, grain <= 128 */
	void (*offsets)(const int8_t *cols, int start, int grain, uint16_t zero, size_t n, uint16_t *offset);

	/* Sum of the patterns from `zero` on, and how many they are. */
	void (*sum)(const uint16_t *p, size_t n, uint16_t zero, uint32_t *total, uint32_t *count);
	/* Column by column, where p is from `zero` on: total += p - row, count += 1. */
	void (*columns)(const uint16_t *p, int row, uint16_t zero, size_t n, struct columns *sums);

	/* Low nibbles as symbols, high ones two a byte (value i and value i + (n + 1) / 2); and back, in place. */
	void (*halve)(const uint8_t *p, size_t n, uint8_t *symbol, uint8_t *high);
	void (*unhalve)(uint8_t *symbol, const uint8_t *high, size_t n);

	/* Sum of seal_chunk over nbytes bytes, the last chunk padded with zeros. */
	uint64_t (*digest)(const uint8_t *src, size_t nbytes, uint32_t seed);

	/* The OR of p where e is 0. */
	uint8_t (*under_zeros)(const uint8_t *e, const uint8_t *p, size_t n);
	/*
	 * How many e are at least `least`, which is not 0; keep p there (dst may be p, 64 bytes more may be written);
	 * and the inverse, zeros elsewhere (64 bytes more may be read). Both return the number.
	 */
	size_t (*count)(const uint8_t *e, uint8_t least, size_t n);
	size_t (*prune)(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst);
	size_t (*unprune)(const uint8_t *e, uint8_t least, const uint8_t *p, size_t n, uint8_t *dst);
	/* Bit r: run r of 128 bytes is not all zero. Returns the number of bytes in such runs. */
	size_t (*rows)(const uint8_t *p, size_t n, uint8_t *bitmap);

	/* row_loops.h. bfloat16, float16 to float32 and back, to nearest even. */
	void (*to_float[2])(const void *src, size_t n, float *x);
	void (*from_float[2])(const float *x, size_t n, void *dst);
	/* max[r]: the largest pattern of |x| in row r, those from `limit` on left out. */
	void (*abs_max)(const float_any *x, size_t n, size_t row, uint32_t limit, uint32_t *max);
	/* `first`: the lanes begin anew; bits: as of sign_bits, unless NULL. row_fold makes of them what the values are
	 * known by; it may be done once. */
	void (*row_sums)(int kind, const float_any *x, size_t n, int first, uint8_t *bits, struct row_lanes *sums);
	void (*row_fold)(int kind, struct row_lanes *sums, struct row_sums *out);
	void (*sign_bits)(const float_any *x, size_t n, uint8_t *bits);
	void (*sign_values)(const uint8_t *bits, size_t from, size_t n, float negative, float positive, int how,
			    float_any *y);
	/* y = the sum of n values of `count` frames, in their order, to what is there if `more`; over `by` unless that
	 * is 0. */
	void (*sign_sums)(const struct signs *s, size_t count, size_t n, int more, float by, float_any *y);
	void (*halves)(struct philox key, uint64_t block, size_t nblocks, uint16_t *h);
	/* h: random halves, NULL for nearest. Returns whether a magnitude lies above TERNARY's scale. */
	int (*encode_rows)(const struct row_kind *q, const float_any *x, size_t n, size_t row, const float *scale,
			   const uint16_t *h, uint8_t *code);
	void (*decode_rows)(const struct row_kind *q, const uint8_t *code, size_t n, size_t row, const float *scale,
			    float_any *y);
	void (*pack_codes)(const uint8_t *code, size_t n, int bits, uint8_t *dst);
	void (*unpack_codes)(const uint8_t *src, size_t n, int bits, uint8_t *code);
	void (*pack_trits)(const uint8_t *code, size_t n, uint8_t *dst);
	void (*unpack_trits)(const uint8_t *src, size_t n, uint8_t *code);
	uint8_t (*max_byte)(const uint8_t *p, size_t n);
	/* sum = x + e (sum may be x); r = x - y (r may be x); out += weight * y, both rounded; out = max(out, y), NaN
	 * if either is. */
	void (*plus)(const float_any *x, const float_any *e, size_t n, float *sum);
	void (*subtract)(const float_any *x, const float *y, size_t n, float_any *r);
	void (*add)(const float *y, size_t n, float weight, float_any *out);
	void (*multiply)(float_any *out, size_t n, float by);
	void (*divide)(float_any *out, size_t n, float by);
	void (*maximum)(const float *y, size_t n, float_any *out);
	/* x over `by`, 0: as it is, to dst, past the caches. Returns the largest pattern of |x / by|. */
	uint32_t (*settle)(const float_any *x, size_t n, float by, float_any *dst);

	/* truncate_loops.h */
	void (*load_patterns)(const void *src, size_t n, int nbytes, uint32_t *x);
	void (*store_patterns)(const uint32_t *x, size_t n, int nbytes, void *dst);
	void (*metric_exponents)(const struct metric_terms *t, const float_any *theta, const float_any *v,
				 const float_any *m, size_t n, uint8_t *ea);
	void (*exponents_of)(const float *a, size_t n, uint8_t *ea);
	void (*drops_of)(const struct truncate_kind *q, const uint8_t *e, const uint8_t *ea, size_t n, uint8_t *drop);
	void (*exponents)(const uint32_t *x, size_t n, int mbits, uint32_t last, uint8_t *e);
	/* e: the exponents that come out. */
	void (*truncate)(const struct truncate_kind *q, const uint8_t *drop, int nearest, size_t n, uint32_t *x,
			 uint8_t *e);
	/* Bits of its field that a value keeps, `most` at most: none where e is 0. Returns their sum. */
	size_t (*widths)(const uint8_t *e, const uint8_t *drop, size_t n, int total, int most, uint8_t *width);
	/* The OR of all fields. */
	uint32_t (*any_field)(const uint32_t *f, size_t n);
	/*
	 * The upper `width` bits of fields of `total` ones, one after the other from bit 0 of the first byte on; 8
	 * bytes more may be written. And back, from nbytes bytes, which are as many as widths say.
	 */
	void (*pack_fields)(const uint32_t *f, const uint8_t *width, size_t n, int total, uint8_t *dst);
	void (*unpack_fields)(const uint8_t *src, size_t nbytes, const uint8_t *width, size_t n, int total,
			      uint32_t *f);
	/* Values to fields or their pieces, and back; where e is 0, to 0. */
	void (*fields)(const struct truncate_kind *q, const uint32_t *x, size_t n, uint32_t *f);
	void (*assemble)(const struct truncate_kind *q, const uint32_t *f, const uint8_t *e, size_t n, uint32_t *x);
	void (*split_pieces)(const struct truncate_kind *q, const uint32_t *x, size_t n, uint8_t *const piece[4]);
	void (*join_pieces)(const struct truncate_kind *q, const uint8_t *const piece[4], const uint8_t *e, size_t n,
			    uint32_t *x);
	void (*levels_of)(const struct truncate_kind *q, const uint8_t *drop, size_t n, uint8_t *level);
	void (*drops_at)(const struct truncate_kind *q, const uint8_t *level, size_t n, uint8_t *drop);
	/* lower and raise of exponents, which are patterns >> shift (in place if wanted). */
	void (*lower_exponents)(const uint8_t *e, const uint16_t *offset, uint8_t last, int shift, size_t n,
				uint8_t *u);
	void (*raise_exponents)(const uint8_t *u, const uint16_t *offset, uint8_t last, int shift, size_t n,
				uint8_t *e);
	size_t (*join)(const uint8_t *e, const uint8_t *level, size_t n, int base, uint16_t *pair, uint8_t *symbol);
	void (*pairs_of)(const uint8_t *symbol, size_t n, int base, uint16_t *pair);
	void (*unjoin)(const uint16_t *pair, size_t n, uint8_t *e, uint8_t *level);
	uint8_t (*drops_under)(const uint8_t *e, const uint8_t *drop, size_t n, uint8_t e0);
	uint8_t (*below_four)(const uint8_t *p, size_t n);
};

extern const struct kernels kernels_scalar; /* the others: cpu.c */

#endif
