/* make_rows.c - generate frames whose values share scales: docs/spec/format.md, section 8. */
#include "maker.h"
#include "exact/scales.h"

enum { VARIANT, OPTIONS, BITS, RESERVED, ROW };

/* Properties of a codec that follow from the header's params. */
struct kind {
	uint32_t codec, variant, bits, row;
	int entropy, trits, two, affine;
	uint32_t most;       /* largest code */
	uint32_t scale_most; /* largest valid byte of a stored row scale; 0: scales are float32 */
};

static struct kind kind_of(const struct grammar *g)
{
	const uint8_t *p = g->params;
	const struct row_kind r = row_kind_of(g->codec, p[VARIANT], p[OPTIONS], p[BITS], g->dtype);
	struct kind q = {.codec = g->codec, .variant = p[VARIANT]};

	q.row = p[ROW] | p[ROW + 1] << 8 | p[ROW + 2] << 16 | (uint32_t)p[ROW + 3] << 24;
	q.two = q.codec == CODEC_SIGN && q.variant == CODEC_SIGN_TWO_MEAN;
	q.affine = r.affine;
	q.trits = !r.bits;
	q.entropy = r.entropy;
	q.bits = r.bits;
	q.scale_most = r.scale_most;
	q.most = q.trits ? 242 : q.codec == CODEC_TERNARY ? 2 : (1u << q.bits) - 1;
	if (r.odd)
		q.most = (1u << q.bits) - 2;
	return q;
}

/* Pick a row length (values that share a scale) that the codec allows. */
static uint32_t pick_row(struct maker *m, const struct kind *q)
{
	static const uint32_t ROWS[] = {1, 2, 3, 5, 8, 64, 100, 128, 1000, 2560, 2561, 3000, 8192, 16384, 16385, 20000};
	uint32_t most = q->entropy ? WIRE_ROW_BLOCK : WIRE_MAX_ROW, row;

	if (q->codec == CODEC_TERNARY || (q->codec == CODEC_SIGN && below(&m->s, 2)))
		return 0;
	if (q->scale_most)
		return q->scale_most == WIRE_MAX_NVFP4 ? 16 : 32;
	row = below(&m->s, 3) ? ROWS[below(&m->s, sizeof ROWS / sizeof *ROWS)] : 1 + (uint32_t)below(&m->s, 4000);
	return one_in(&m->s, 12) || row > most ? most : row;
}

static void put_row(struct maker *m, uint32_t row)
{
	for (int i = 0; i < 4; i++)
		m->g->params[ROW + i] = (uint8_t)(row >> 8 * i);
}

void pick_rows_params(struct maker *m)
{
#define COUNT(name, family, dtypes, variants, ...) [CODEC_##name] = (variants),
#define OPTION(name, family, dtypes, variants, options, ...) [CODEC_##name] = (options),
	static const uint8_t VARIANTS[] = {WIRE_CODECS(COUNT)}, ALLOWED[] = {WIRE_CODECS(OPTION)};
#undef COUNT
#undef OPTION
	uint8_t *p = m->g->params;
	uint32_t codec = m->g->codec;
	struct kind q;

	p[VARIANT] = (uint8_t)below(&m->s, VARIANTS[codec]);
	p[OPTIONS] = (uint8_t)below(&m->s, 64) & ALLOWED[codec];
	p[BITS] = codec == CODEC_QUANTIZE ? (uint8_t)between(&m->s, p[VARIANT] == CODEC_LEVELS_ODD ? 2 : 1, 8) : 0;
	q = kind_of(m->g);
	if (codec == CODEC_FLOAT8 && q.scale_most && !(p[OPTIONS] & CODEC_OPTION_STOCHASTIC) && below(&m->s, 2))
		p[OPTIONS] |= CODEC_OPTION_RCEIL;
	put_row(m, m->g->n ? pick_row(m, &q) : 0);
}

/* Round a magnitude, as bits of float32, down to the tensor's dtype. */
static uint32_t narrow(const struct maker *m, uint32_t u)
{
	uint32_t e = u >> 23;

	if (m->g->dtype == CODEC_BFLOAT16)
		return u & 0xffff0000;
	if (m->g->dtype != CODEC_FLOAT16)
		return u;
	if (e >= 143)
		return 0x477fe000; /* 65504, float16's largest value */
	return e >= 113 ? u & 0xffffe000 : e >= 103 ? u & 0xffffffffu << (126 - e) : 0;
}

/* 2^119: the product of a larger scale of a part and a row's scale may be Inf */
#define LARGE (246u << 23)

/* Write the two scales of a part, if its codec has any. */
static void put_scales(struct maker *m, const struct kind *q, uint32_t row)
{
	uint32_t first;

	if (row && !(q->codec == CODEC_FLOAT4 && q->variant == CODEC_FLOAT4_NVFP4))
		return;
	first = slip(m) ? bad_scale(m) : pick_scale(m, 1);
	if (q->codec == CODEC_TERNARY && !slip(m))
		first = narrow(m, first);
	if (q->codec == CODEC_FLOAT4 && first > LARGE && !slip(m))
		first = LARGE - (first & 0x7fffff);
	put(m, first, 4);
	put(m, q->two ? pick_scale(m, 1) : 0, 4);
}

/* Pack the n codes in m->symbol: five per byte (trits), or q->bits bits each. */
static void pack(struct maker *m, const struct kind *q, struct bytes *b, size_t n)
{
	uint32_t have = 0;

	if (q->trits) {
		for (size_t i = 0; i < n; i += 5) {
			uint32_t x = 0;

			for (size_t v = i; v < i + 5; v++)
				x = 3 * x + (v < n ? (uint32_t)(noise(&m->s) % 3) : 0);
			put_raw(b, &(uint8_t){(uint8_t)x}, 1);
		}
		if (n && slip(m))
			b->p[b->n - 1] = (uint8_t)below(&m->s, 256);
		return;
	}
	for (size_t i = 0; i < n; i++) {
		uint32_t code = (uint32_t)(noise(&m->s) % (q->most + 1));

		for (uint32_t k = 0; k < q->bits; k++, have++) {
			if (have % 8 == 0)
				put_zeros(b, 1);
			b->p[b->n - 1] |= (uint8_t)((code >> k & 1) << have % 8);
		}
	}
	if (n && slip(m)) /* change the last byte, perhaps its padding */
		b->p[b->n - 1] ^= (uint8_t)(1 << below(&m->s, 8));
	if (n && q->bits > 1 && q->bits < 8 && slip(m)) /* plant an invalid code */
		b->p[below(&m->s, b->n)] = 0xff;
}

/* Write the codes of n values with the entropy stage, whose input is k bytes. */
static void put_entropy(struct maker *m, const struct kind *q, size_t n)
{
	size_t k = q->trits ? (n + 4) / 5 : n;
	uint32_t mode = (uint32_t)below(&m->s, 4), least = 1;
	struct bytes b = {0};

	mode = mode == 3 ? 2 : mode;
	put(m, mode, 4);
	switch (mode) {
	case 0: /* mode constant: all bytes equal the byte written; the last byte of trits is padded with 0 */
		put(m, q->trits ? n % 5 ? 0 : below(&m->s, 243) : below(&m->s, 256), 1);
		break;
	case 1:
		pack(m, q, &b, n);
		put_raw(&m->out, b.p, b.n);
		free(b.p);
		break;
	default:
		draw(m, m->book, k, q->trits ? 243 : 256);
		for (size_t i = n % 5; i && i < 5; i++)
			least *= 3;
		if (q->trits && m->plane[k - 1] % least && !slip(m)) {
			m->symbol[k - 1] = ESCAPE;
			m->literal[k - 1] = (uint16_t)(m->plane[k - 1] / least * least);
		}
		put_coded(m, m->book, k, 1);
	}
}

/* Write the scales of n rows. */
static void put_row_scales(struct maker *m, const struct kind *q, uint64_t n)
{
	uint64_t wrong = n && slip(m) ? below(&m->s, n) : n;

	for (uint64_t r = 0; r < n; r++) {
		uint32_t u = 0x3f800000 + (uint32_t)(noise(&m->s) & 0xffffff);
		uint8_t b[4];

		if (q->scale_most) {
			u = (uint32_t)(r == wrong ? between(&m->s, q->scale_most + 1, 255)
						  : noise(&m->s) % (q->scale_most + 1));
		} else if (r == wrong) {
			u = bad_scale(m);
		} else if (r < 3 || noise(&m->s) % 64 == 0) {
			u = pick_scale(m, q->codec != CODEC_FLOAT8);
		}
		for (int i = 0; i < 4; i++)
			b[i] = (uint8_t)(u >> 8 * i);
		put_raw(&m->out, b, q->scale_most ? 1 : 4);
	}
}

/* Write, for each of n rows, its smallest and its largest value in the tensor's dtype. */
static void put_row_ends(struct maker *m, uint64_t n)
{
	uint64_t wrong = n && slip(m) ? below(&m->s, n) : n;
	int wide = m->g->dtype == CODEC_FLOAT32;

	for (uint64_t r = 0; r < n; r++) {
		/* bit patterns of magnitudes, which ascend with the magnitude */
		uint32_t inf = wide ? 0x7f800000 : m->g->dtype == CODEC_FLOAT16 ? 0x7c00 : 0x7f80;
		uint32_t sign = wide ? 0x80000000 : 0x8000, a = (uint32_t)noise(&m->s) % inf;
		uint32_t b = one_in(&m->s, 8) ? a : (uint32_t)noise(&m->s) % inf, low = a < b ? a : b,
			 high = a ^ b ^ low;
		uint8_t bytes[8];

		switch (below(&m->s, 3)) {
		case 0: break; /* row ends: both positive */
		case 1:        /* row ends: both negative */
			low = high ? sign | high : 0;
			high = a ^ b ^ (low & ~sign);
			high = high ? sign | high : 0;
			break;
		default: low = low ? sign | low : 0;
		}
		if (r == wrong)
			*(below(&m->s, 2) ? &low : &high) = below(&m->s, 2) ? inf + (uint32_t)below(&m->s, 9) : sign;
		for (int i = 0; i < (wide ? 4 : 2); i++) {
			bytes[i] = (uint8_t)(low >> 8 * i);
			bytes[i + (wide ? 4 : 2)] = (uint8_t)(high >> 8 * i);
		}
		put_raw(&m->out, bytes, wide ? 8 : 4);
	}
}

static void put_block(struct maker *m, const struct kind *q, uint32_t b, uint32_t row, uint64_t n)
{
	struct bytes codes = {0};

	if (q->affine)
		put_row_ends(m, (n + row - 1) / row);
	else
		put_row_scales(m, q, row ? (n + row - 1) / row * (q->two ? 2 : 1) : 0);
	if (q->entropy) {
		put_entropy(m, q, (size_t)n);
	} else {
		pack(m, q, &codes, (size_t)n);
		put_raw(&m->out, codes.p, codes.n);
		free(codes.p);
	}
	end_region(m, b);
}

static uint64_t block_of(const struct kind *q, uint64_t row)
{
	if (!row)
		return q->trits ? WIRE_TRITS_BLOCK : WIRE_ROW_BLOCK;
	return row < WIRE_ROW_BLOCK ? WIRE_ROW_BLOCK / row * row : row;
}

#define PARTS 128 /* maximum number of parts of a frame */

struct part {
	uint64_t count;
	uint32_t row;
};

/* Write the frame's parts: one, or several with different row lengths. */
static uint64_t put_parts(struct maker *m, const struct kind *q, struct part *part)
{
	uint64_t n = m->g->n, nparts = 0, most = WIRE_MAX_ROW_PARTS(n), done = 0, allowed = most;
	/* 1: frames of the codec may have parts with different row lengths */
	int rows = q->codec == CODEC_FLOAT8 || q->codec == CODEC_FLOAT4 || q->codec == CODEC_QUANTIZE;

	if (below(&m->s, 2) && (q->row || !rows)) {
		part[0] = (struct part){n, q->row};
		put_scales(m, q, q->row);
		return 1;
	}
	put_row(m, 0);
	m->flags = WIRE_FLAG_SEGMENTS;
	most = 1 + below(&m->s, most < 64 ? most : 64);
	if (allowed < PARTS && n > allowed && slip(m))
		most = allowed + 1 + below(&m->s, (n < PARTS ? n : PARTS) - allowed);
	for (; done < n; done += part[nparts++].count) {
		uint64_t left = n - done;

		part[nparts].count = nparts + 1 >= most                   ? left
				     : most > allowed || one_in(&m->s, 4) ? 1
									  : 1 + below(&m->s, left);
		part[nparts].row = pick_row(m, q);
	}
	put(m, nparts, 4);
	for (uint64_t i = 0; i < nparts; i++) {
		put(m, part[i].count, 8);
		put(m, part[i].row, 4);
		put(m, 0, 1);
		put(m, 0, 1);
		put(m, 0, 2);
	}
	for (uint64_t i = 0; i < nparts; i++)
		put_scales(m, q, part[i].row);
	return nparts;
}

void make_rows(struct maker *m)
{
	struct kind q = kind_of(m->g);
	struct part part[PARTS];
	uint64_t nparts, n;
	uint32_t b = 0;

	m->coded = (uint8_t)q.entropy;
	if (q.entropy) {
		book_make(m, m->book, 0, q.trits && !slip(m) ? 242 : 255, 1);
		book_put(m, m->book);
	}
	nparts = put_parts(m, &q, part);
	put_gap(m);
	m->directory_at = m->out.n;
	for (uint64_t i = 0; i < nparts; i++)
		m->nblocks += (uint32_t)((part[i].count - 1) / block_of(&q, part[i].row) + 1);
	put_zeros(&m->out, WIRE_DIRECTORY_ENTRY * m->nblocks);
	for (uint64_t i = 0; i < nparts; i++)
		for (uint64_t left = part[i].count; left; left -= n) {
			n = block_of(&q, part[i].row);
			n = n < left ? n : left;
			put_block(m, &q, b++, part[i].row, n);
		}
}
