/* work.c - one thread's buffers: how large, and what lies where. */
#include "work.h"

#include "model.h"
#include "plane.h"

static uint64_t largest_block(uint64_t n)
{
	return padded(MIN(n, 1u << WIRE_MAX_BLOCK_LOG2));
}

/* Most bytes of a coded plane: every value escaped under codes of 8 bits. */
static uint64_t coded_bound(uint64_t m, int literal_nbytes)
{
	return STATE_NBYTES + 4 * WIRE_LANES + 4 * WIRE_LANES + 8 + padded(m) * (uint64_t)(1 + literal_nbytes);
}

static uint64_t region_room(const struct dtype *d, uint64_t m)
{
	return ALIGN8(16 + m * d->nbytes + coded_bound(m, 2) + 64);
}

/* As much again for scales of rows of a single value. */
static uint64_t region_buffer(const struct header *h, const struct dtype *d, uint64_t m)
{
	return region_room(d, m) + (codec_is_rows(h->codec) ? 4 * m : 0);
}

static uint64_t words_room(uint64_t m)
{
	return LANES_SLACK + WIRE_LANES + padded(m) / 4 + 16;
}

/* Codecs of rows code bytes, if anything. */
static const struct dtype *coded_dtype(const struct header *h)
{
	return dtype_of(codec_is_rows(h->codec) ? CODEC_UINT8 : h->dtype);
}

static uint64_t coded_block(const struct header *h)
{
	return largest_block(codec_is_rows(h->codec) && !header_kind(h).entropy ? 0 : h->n);
}

#define CODES (WIRE_ROW_BLOCK + 64)

/* Pieces begin with a cache line: vectors that lie across two of them cost twice. */
#define LINE 64
#define ALIGN_LINE(x) (((x) + LINE - 1) & ~(uint64_t)(LINE - 1))
#define MOST_PIECES 40

uint64_t work_nbytes(const struct header *h)
{
	const struct dtype *d = coded_dtype(h);
	uint64_t m = coded_block(h);
	uint64_t rows = codec_is_rows(h->codec) ? 4 * WIRE_TREE + 18 * ROW_CHUNK + 64 + CODES + 64 : 0;

	uint64_t cuts = h->codec == CODEC_TRUNCATE ? 6 * m + 9 * (m + 64) + 64 : 0;

	return rows + cuts + LINE * (1 + MOST_PIECES) + sizeof(struct symbol_pairs) +
	       2 * (sizeof(lanes) + m / 8 + m + 64 + 16) + 4 * words_room(m) + (uint64_t)(d->nbytes + 1) * (m + 64) +
	       2 * MIN(m, OFFSETS) + 64 + region_buffer(h, d, m) + 64;
}

static void *take(char **p, uint64_t nbytes)
{
	void *here = *p;

	*p += ALIGN_LINE(nbytes);
	return here;
}

void work_place(const struct header *h, void *memory, struct work *w)
{
	const struct dtype *d = coded_dtype(h);
	uint64_t m = coded_block(h);
	char *p = (char *)ALIGN_LINE((uintptr_t)memory);

	for (int i = 0; i < 2; i++) {
		w->top[i].state = take(&p, sizeof(lanes));
		w->top[i].escaped = take(&p, m / 8);
		w->top[i].symbol = take(&p, m + 64);
	}
	w->top[0].pairs = w->top[1].pairs = take(&p, sizeof(struct symbol_pairs));
	w->top[0].pairs->of = NULL;
	w->words = take(&p, 4 * words_room(m));
	w->words_end = w->words + words_room(m) - 16;
	w->plane[0] = w->top[0].symbol;
	for (int i = 1; i < d->nbytes; i++)
		w->plane[i] = take(&p, m + 64);
	w->symbol = take(&p, m + 64);
	w->high = take(&p, m / 2 + 64);
	w->offset = take(&p, 2 * MIN(m, OFFSETS) + 64);
	w->region = take(&p, region_buffer(h, d, m));
	w->values = (char *)w->region;
	if (h->codec == CODEC_TRUNCATE) {
		w->exponent = take(&p, 2 * m + 64);
		w->patterns = take(&p, 4 * m);
		for (int i = 0; i < 4; i++)
			w->piece[i] = take(&p, m + 64);
		w->fields = (uint32_t *)w->piece[0];
		w->e = take(&p, m + 64);
		w->ea = take(&p, m + 64);
		w->drop = take(&p, m + 64);
		w->width = take(&p, m + 64);
		w->level = take(&p, m + 64);
	}
	if (!codec_is_rows(h->codec))
		return;
	w->x = take(&p, 4 * WIRE_TREE);
	w->y = take(&p, 4 * ROW_CHUNK);
	w->scale = take(&p, 4 * ROW_CHUNK);
	w->scale_below = take(&p, 4 * ROW_CHUNK);
	w->max = take(&p, 4 * ROW_CHUNK);
	w->half = take(&p, 2 * ROW_CHUNK + 32);
	w->code = take(&p, CODES);
}

uint64_t region_bound(const struct job *j)
{
	const struct header *h = &j->h;
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t m = MIN(h->n, h->block), nbytes = 4;

	if (!h->nblocks)
		return 0;
	if (h->codec == CODEC_TRUNCATE)
		return region_room(d, m);
	if (codec_is_rows(h->codec)) {
		const struct row_kind q = header_kind(h);
		const struct part *p = job_parts(j);

		for (nbytes = 0; p < job_parts(j) + j->nparts; p++)
			nbytes = MAX(nbytes, row_region_nbytes(q, p->row, MIN(p->count, row_block(q, p->row))));
		return nbytes;
	}

	for (int p = 0; p < d->nbytes; p++)
		if (!(h->fixed >> p & 1))
			nbytes += m;
	return ALIGN8(nbytes);
}

/*
 * Most of what regions take beyond their values, with side section and directory, while ranges of blocks leave gaps
 * between each other. TRUNCATE's bound is larger, but its regions are hardly ever larger than their values.
 */
uint64_t region_gaps(const struct header *h)
{
	return ((h->n >> WIRE_MAX_BLOCK_LOG2) + 1) * 1024 + h->n / 64 + 65536;
}
