/* make_topk.c - generate TOPK frames: docs/spec/format.md, section 11. */
#include "maker.h"

enum { VARIANT, OPTIONS, BITS, CAP, GROUP };

static uint32_t chunk_log2(const struct maker *m)
{
	return m->g->params[GROUP + 2];
}

static uint32_t kept_of(const struct maker *m)
{
	return m->g->params[GROUP] | (uint32_t)m->g->params[GROUP + 1] << 8;
}

void pick_topk_params(struct maker *m)
{
	uint32_t log2 = WIRE_TOPK_MIN_CHUNK_LOG2 + (uint32_t)below(&m->s, one_in(&m->s, 4) ? 11 : 5);
	uint32_t kept = 1 + (uint32_t)below(&m->s, 1u << (log2 - 1));
	uint8_t *p = m->g->params;

	p[OPTIONS] = (uint8_t)below(&m->s, 2);
	p[BITS] = (uint8_t)between(&m->s, 1, 8);
	if (!m->g->n)
		return;
	kept = below(&m->s, 2) ? kept : 1 + kept / 32;
	if (slip(m))
		kept = below(&m->s, 2) ? 0 : (1u << (log2 - 1)) + 1;
	p[GROUP] = (uint8_t)kept;
	p[GROUP + 1] = (uint8_t)(kept >> 8);
	p[GROUP + 2] = (uint8_t)log2;
}

/* State of writing a region's bit stream; each byte is filled from its lowest bit. */
struct stream {
	struct bytes *out;
	uint8_t byte;
	int count;
};

static void put_bits(struct stream *to, uint64_t x, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		to->byte = (uint8_t)(to->byte | (x >> i & 1) << to->count);
		if (++to->count == 8) {
			put_raw(to->out, &to->byte, 1);
			to->byte = 0;
			to->count = 0;
		}
	}
}

static void put_rice(struct maker *m, struct stream *to, uint64_t x, uint32_t k)
{
	uint64_t q = x >> k;

	if (q >= 24 || one_in(&m->s, 32)) {
		put_bits(to, 0, 24);
		put_bits(to, x, 20);
		return;
	}
	put_bits(to, 1ull << q, (uint32_t)q + 1);
	put_bits(to, x, k);
}

/* Write the codes of a chunk of n values, of which `kept` are kept. k: Rice parameter of gaps. */
static void put_codes(struct maker *m, struct stream *to, uint64_t n, uint64_t kept, uint32_t k)
{
	uint64_t at = 0;

	for (uint64_t i = 0; i < kept; i++) {
		uint64_t room = n - at - (kept - i), fair = 2 * n / kept + 1;
		uint64_t gap = below(&m->s, (one_in(&m->s, 64) || room < fair ? room : fair) + 1);

		if (slip(m))
			gap = n - at + below(&m->s, 3);
		put_rice(m, to, gap, k);
		put_bits(to, noise(&m->s), m->g->params[BITS]);
		at += gap + 1;
	}
}

/* Write the scales of a chunk. Return 1 if the chunk has codes. */
static int put_scales(struct maker *m)
{
	uint32_t low = pick_scale(m, 1) >> 16, high = pick_scale(m, 1) >> 16, swap = low;
	int one = m->g->params[BITS] == 1;

	if (one_in(&m->s, 5))
		low = high = 0;
	if (low > high) {
		low = high;
		high = swap;
	}
	if (one)
		low = high;
	if (!one && low < high && slip(m)) {
		swap = low;
		low = high;
		high = swap;
	}
	if (slip(m)) {
		high = bad_scale(m) >> 16;
		high = high ? high : 0x8000;
	}
	if (!one)
		put_raw(&m->out, (uint8_t[]){(uint8_t)low, (uint8_t)(low >> 8)}, 2);
	put_raw(&m->out, (uint8_t[]){(uint8_t)high, (uint8_t)(high >> 8)}, 2);
	return high != 0;
}

static void put_block(struct maker *m, uint32_t b, uint64_t n)
{
	uint64_t chunk = 1ull << chunk_log2(m), nchunks = (n + chunk - 1) / chunk;
	uint32_t kept = kept_of(m), k = 0;
	uint8_t *coded = malloc(nchunks);
	struct stream to = {&m->out, 0, 0};

	while (kept && 3ull * kept << (k + 1) <= 2 * chunk)
		k++;
	for (uint64_t c = 0; c < nchunks; c++)
		coded[c] = (uint8_t)put_scales(m);
	for (uint64_t c = 0; c < nchunks; c++) {
		uint64_t own = n - c * chunk < chunk ? n - c * chunk : chunk;

		if (coded[c])
			put_codes(m, &to, own, (own * kept + chunk - 1) / chunk, k);
	}
	free(coded);
	if (slip(m))
		put_bits(&to, 1, 1); /* a 1 bit after the last code, which is invalid */
	put_bits(&to, 0, (uint32_t)(8 - to.count) % 8);
	end_region(m, b);
}

void make_topk(struct maker *m)
{
	uint32_t log2 = chunk_log2(m), b = 0;
	uint64_t n;

	while (log2 < WIRE_TOPK_MAX_BLOCK_LOG2 && 1ull << log2 < m->g->n)
		log2++;
	if (log2 > chunk_log2(m) && one_in(&m->s, 3)) /* encoders always choose the largest block size */
		log2 = (uint32_t)between(&m->s, chunk_log2(m), log2);
	m->block_log2 = (uint8_t)log2;
	m->nblocks = (uint32_t)((m->g->n + (1ull << log2) - 1) >> log2);
	m->directory_at = m->out.n;
	put_zeros(&m->out, WIRE_DIRECTORY_ENTRY * (size_t)m->nblocks);
	for (uint64_t left = m->g->n; left; left -= n) {
		n = 1ull << log2 < left ? 1ull << log2 : left;
		put_block(m, b++, n);
	}
}
