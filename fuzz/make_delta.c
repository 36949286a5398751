/* make_delta.c - generate DELTA frames region by region, and the tensors to which they decode. */
#include "make_delta.h"

#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "exact/delta.h"
#include "grammar.h"
#include "maker.h"

/* State of writing a bit stream (struct bits), and of generating the region of a block (struct block). */
struct bits {
	uint8_t *p;
	size_t n, room; /* number of bits written; capacity in bits */
};

struct block {
	struct source *s;
	struct delta_kind q;
	const uint8_t *base;
	uint8_t *result;
	uint64_t m, *left; /* *left: number of codes to write before the code that gets the fault */
};

static void put_bits(struct bits *b, uint64_t x, uint32_t n)
{
	if (b->n + n + 8 > b->room) {
		b->room = 2 * (b->n + n) + 4096;
		b->p = realloc(b->p, b->room / 8 + 8);
		if (!b->p)
			abort();
	}
	for (uint32_t i = 0; i < n; i++, b->n++) {
		if (b->n % 8 == 0)
			b->p[b->n / 8] = 0;
		b->p[b->n / 8] |= (uint8_t)((x >> i & 1) << b->n % 8);
	}
}

/* Return x, the number to code; or another number if the fault is to be planted in this code. */
static uint64_t site(struct block *k, uint64_t x)
{
	if ((*k->left)-- != 1)
		return x;
	return below(k->s, 2) ? x ^ 1ull << below(k->s, 20) : noise(k->s) >> below(k->s, 64);
}

static void put_rice(struct block *k, struct bits *b, uint64_t x, uint32_t rice, uint32_t full)
{
	x = site(k, x);
	if (x >> rice >= WIRE_RICE_LONGEST || one_in(k->s, 40)) {
		put_bits(b, 0, WIRE_RICE_LONGEST);
		put_bits(b, x, full);
		return;
	}
	put_bits(b, 1ull << (x >> rice), (uint32_t)(x >> rice) + 1);
	put_bits(b, x, rice);
}

static void put_gamma(struct block *k, struct bits *b, uint64_t x)
{
	uint32_t t;

	x = site(k, x);
	x += !x;
	t = delta_length(x) - 1;
	put_bits(b, 0, t);
	put_bits(b, 1, 1);
	put_bits(b, x, t);
}

static uint64_t get(const uint8_t *p, uint64_t i, uint32_t item)
{
	uint64_t x = 0;

	memcpy(&x, p + i * item, item);
	return x;
}

static void set(uint8_t *p, uint64_t i, uint32_t item, uint64_t x)
{
	memcpy(p + i * item, &x, item);
}

static uint64_t pick_size(struct block *k)
{
	uint64_t most = 1ull << (8 * k->q.item - 1), x = 1 + below(k->s, one_in(k->s, 6) ? 20 : 2);

	if (one_in(k->s, 12))
		x = 1 + noise(k->s) % most;
	return x < most ? x : most;
}

/* Set value i of the result to the base's value moved by `size` ranks, downwards if `negative`. */
static void move(struct block *k, uint64_t i, uint64_t size, uint32_t negative)
{
	uint64_t step = (negative ? 0 - size : size) & delta_mask(k->q.item);

	set(k->result, i, k->q.item, delta_apply(&k->q, get(k->base, i, k->q.item), step));
}

static void make_class(struct block *k, struct bits *b, int scale, uint32_t class_, uint64_t rarely)
{
	struct bits codes = {0};
	uint64_t count = 0, gap = 1;

	for (uint64_t i = 0; i < k->m; i++) {
		uint64_t size;
		uint32_t negative;

		if (delta_class(delta_exponent(&k->q, get(k->base, i, k->q.item)), scale) != class_)
			continue;
		if (!one_in(k->s, rarely)) {
			gap++;
			continue;
		}
		size = pick_size(k);
		negative = (uint32_t)noise(k->s) & 1;
		move(k, i, size, negative);
		put_rice(k, &codes, gap, delta_class_k(class_), WIRE_RICE_GAP_BITS);
		put_bits(&codes, negative, 1);
		gap = 1;
		count++;
		for (uint64_t more = 1; more < size && more <= WIRE_DELTA_MORE; more++, count++)
			put_rice(k, &codes, 0, delta_class_k(class_), WIRE_RICE_GAP_BITS);
		if (size > WIRE_DELTA_MORE)
			put_gamma(k, &codes, size - WIRE_DELTA_MORE);
	}
	put_gamma(k, b, count + 1);
	for (size_t i = 0; i < codes.n; i++)
		put_bits(b, codes.p[i / 8] >> i % 8, 1);
	free(codes.p);
}

static void make_steps(struct block *k, struct bits *b, int scale, uint64_t rarely)
{
	uint32_t top = 0;

	for (uint64_t i = 0; i < k->m; i++) {
		uint64_t x = get(k->base, i, k->q.item), z = 0;
		uint32_t e = delta_exponent(&k->q, x), class_ = delta_class(e, scale);

		top = class_ > top ? class_ : top;
		if (class_)
			continue;
		if (one_in(k->s, rarely))
			z = (one_in(k->s, 8) ? noise(k->s) : below(k->s, 40)) & delta_mask(k->q.item);
		put_rice(k, b, z, delta_small_k(e, scale, k->q.item), 8 * k->q.item);
		set(k->result, i, k->q.item, delta_apply(&k->q, x, delta_unzigzag(z, k->q.item)));
	}
	for (uint32_t c = 1; c <= top; c++)
		make_class(k, b, scale, c, rarely);
}

static void make_patches(struct block *k, struct bits *b, uint32_t rice, int steps, uint64_t rarely)
{
	uint64_t gap = 0;

	for (uint64_t i = 0; i < k->m; i++, gap++) {
		uint64_t x = get(k->base, i, k->q.item), size = pick_size(k);
		uint64_t bits = noise(k->s) & delta_mask(k->q.item);
		uint32_t negative = (uint32_t)noise(k->s) & 1;

		if (!one_in(k->s, rarely))
			continue;
		put_rice(k, b, gap, rice, WIRE_RICE_GAP_BITS);
		gap = UINT64_MAX;
		if (steps) {
			put_bits(b, negative, 1);
			put_gamma(k, b, size);
			move(k, i, size, negative);
		} else {
			bits += !bits;
			put_bits(b, site(k, bits), 8 * k->q.item);
			set(k->result, i, k->q.item, x ^ bits);
		}
	}
}

/* Generate the region of block k, and append it to the frame `out`. */
static void make_region(struct block *k, struct bytes *out)
{
	static const uint64_t RARELY[] = {2, 5, 30, 30, 300, 300, 3000};
	uint64_t rarely = RARELY[below(k->s, 7)], changes = 0;
	uint32_t mode = (uint32_t)below(k->s, 8), field = 0, head;
	struct bits b = {0};
	size_t at = out->n;

	mode = mode < 4 ? WIRE_DELTA_STEPS : mode - 4;
	if (mode == WIRE_DELTA_STEPS && k->q.last) {
		uint32_t e = delta_exponent(&k->q, get(k->base, below(k->s, k->m), k->q.item));
		int most = delta_most_scale(&k->q), scale = (int)e + (int)below(k->s, 40) - 20;

		if (one_in(k->s, 8))
			scale = (int)below(k->s, (uint64_t)most + 17) - 16;
		scale = scale < -16 ? -16 : scale > most ? most : scale;
		field = (uint32_t)(scale + WIRE_DELTA_BIAS);
		make_steps(k, &b, scale, rarely);
	} else if (mode == WIRE_DELTA_RAW) {
		for (uint64_t i = 0; i < k->m; i++)
			if (one_in(k->s, rarely))
				set(k->result, i, k->q.item, noise(k->s));
		for (uint64_t i = 0; i < k->m; i++)
			put_bits(&b, get(k->result, i, k->q.item), 8 * k->q.item);
	} else if (mode != WIRE_DELTA_SAME) {
		field = (uint32_t)below(k->s, one_in(k->s, 4) ? WIRE_DELTA_MAX_GAP_K + 1 : 8);
		make_patches(k, &b, field, mode == WIRE_DELTA_STEPS, rarely);
	}
	for (uint64_t i = 0; i < k->m; i++)
		changes += get(k->base, i, k->q.item) != get(k->result, i, k->q.item);
	head = changes ? mode | field << WIRE_DELTA_SCALE_AT | (uint32_t)(changes - 1) << WIRE_DELTA_CHANGES_AT : 0;
	head = (uint32_t)site(k, head);
	put_raw(out, &head, 4);
	put_zeros(out, 4);
	if (changes) {
		out->n -= 4;
		put_raw(out, b.p, (b.n + 7) / 8);
		put_zeros(out, (8 - (out->n - at) % 8) % 8);
	}
	free(b.p);
}

/* Fill in the base's values: arbitrary bit patterns, or values with similar exponents, as weights have. */
static void fill(struct delta_case *c, const struct delta_kind *q, struct source *s)
{
	uint64_t kind = below(s, 4), wide = 1 + below(s, 14), middle = q->last / 2;

	for (uint64_t i = 0; i < c->n; i++) {
		uint64_t x = noise(s);

		if (kind && q->last) {
			uint64_t e = middle + noise(s) % wide, field = (uint64_t)q->last << q->mbits;

			x = (x & ~field) | (e < q->last ? e : q->last) << q->mbits;
		}
		if (kind == 3 && noise(s) % 4 == 0)
			x = noise(s) & 1 ? 0 : 1ull << (8 * c->item - 1);
		set(c->base, i, c->item, x);
	}
	memcpy(c->result, c->base, c->n * c->item);
}

static void store(uint8_t *p, uint64_t x, int nbytes)
{
	for (int i = 0; i < nbytes; i++)
		p[i] = (uint8_t)(x >> 8 * i);
}

static void put_header(const struct delta_case *c, struct bytes *out, uint64_t log2, uint64_t nblocks)
{
	const uint64_t fields[][3] = {
		{0, WIRE_MAGIC, 4},
		{WIRE_AT_VERSION, CODEC_FORMAT_VERSION, 1},
		{WIRE_AT_CODEC, CODEC_DELTA, 1},
		{WIRE_AT_DTYPE, c->dtype, 1},
		{WIRE_AT_RANK, 1, 1},
		{WIRE_AT_LAYOUT, WIRE_LAYOUT_BLOCKS, 1},
		{WIRE_AT_BLOCK_LOG2, log2, 1},
		{WIRE_AT_SIDE_NBYTES, WIRE_DELTA_SIDE_NBYTES, 4},
		{WIRE_AT_FRAME_NBYTES, out->n, 8},
		{WIRE_AT_NBLOCKS, nblocks, 4},
		{WIRE_AT_SHAPE, c->n, 8},
		{WIRE_AT_SHAPE + 8, digest(c->base, c->n * c->item, WIRE_SEED_VALUES), 8},
		{WIRE_AT_SHAPE + 16, digest(c->result, c->n * c->item, WIRE_SEED_VALUES), 8},
	};

	for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
		store(out->p + fields[i][0], fields[i][1], (int)fields[i][2]);
}

/* Plant the fault c->fault in the frame. Recompute checksums if a mismatch would hide the fault. */
static void spoil(struct delta_case *c, struct source *s)
{
	if (c->fault == DELTA_WRONG_BYTES)
		for (uint64_t i = 1 + below(s, 4); i; i--) {
			uint64_t at = below(s, 2) ? below(s, 100) % c->nbytes : noise(s) % c->nbytes;

			c->frame[at] = (uint8_t)(one_in(s, 2) ? noise(s) : c->frame[at] ^ 1u << below(s, 8));
		}
	grammar_recompute_checksums(c->frame, c->nbytes);
	if (c->fault == DELTA_WRONG_BASE && c->n) {
		if (one_in(s, 4) && memcmp(c->base, c->result, c->n * c->item) != 0)
			memcpy(c->base, c->result, c->n * c->item);
		else
			c->base[noise(s) % (c->n * c->item)] ^= (uint8_t)(1 << below(s, 8));
	}
	if (c->fault == DELTA_CUT)
		c->nbytes = below(s, 2) ? noise(s) % c->nbytes : c->nbytes - 1;
}

void delta_make(struct delta_case *c, struct source *s)
{
	static const uint8_t DTYPES[] = {1, 3, 3, 3, 4, 2, 5, 6, 7, 8, 9, 16, 17, 18, 19, 20, 21, 22, 23, 24};
	uint64_t log2 = between(s, WIRE_DELTA_MIN_BLOCK_LOG2, 12), left, nblocks, first = WIRE_AT_SHAPE + 24;
	struct bytes out = {0};
	struct delta_kind q;

	memset(c, 0, sizeof *c);
	c->dtype = DTYPES[below(s, sizeof DTYPES)];
	c->item = codec_dtype_nbytes(c->dtype);
	c->n = one_in(s, 30) ? 0 : 1 + below(s, one_in(s, 4) ? 9000 : 1500);
	c->fault = below(s, 2) ? DELTA_RIGHT : (enum delta_fault)below(s, DELTA_FAULTS);
	q = delta_kind_of(c->dtype, c->item);
	c->base = malloc(c->n * c->item + 1);
	c->result = malloc(c->n * c->item + 1);
	if (!c->base || !c->result)
		abort();
	fill(c, &q, s);
	left = c->fault == DELTA_WRONG_CODE ? 1 + below(s, 200) : 0;
	nblocks = !c->n || one_in(s, 16) ? 0 : (c->n - 1) / (1ull << log2) + 1;
	put_zeros(&out, (size_t)(first + 8 * nblocks));
	for (uint64_t b = 0; b < nblocks; b++) {
		uint64_t at = b << log2, m = c->n - at < 1ull << log2 ? c->n - at : 1ull << log2;
		struct block k = {s, q, c->base + at * c->item, c->result + at * c->item, m, &left};

		make_region(&k, &out);
		store(out.p + first + 8 * b, out.n / 8, 4);
	}
	put_header(c, &out, nblocks ? log2 : 0, nblocks);
	c->nbytes = out.n;
	c->frame = malloc(out.n);
	if (!c->frame)
		abort();
	memcpy(c->frame, out.p, out.n);
	free(out.p);
	spoil(c, s);
}

void delta_free(struct delta_case *c)
{
	free(c->base);
	free(c->result);
	free(c->frame);
}
