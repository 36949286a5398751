/* work.c - sizes and layout of one thread's work buffers. */
#include "work.h"

#include "model.h"

uint64_t largest_block(uint64_t n)
{
	return padded(MIN(n, 1u << WIRE_MAX_BLOCK_LOG2));
}

uint64_t coded_bound(uint64_t m)
{
	return STATE_NBYTES + 4 * WIRE_LANES + 4 * WIRE_LANES + 8 + padded(m) * (1 + 2);
}

uint64_t region_room(const struct dtype *d, uint64_t m)
{
	return ALIGN8(16 + m * d->nbytes + coded_bound(m) + 64);
}

/* Return the size in bytes of the buffer for a region of m values. Rows of a single value add a scale per value. */
static uint64_t region_buffer(const struct header *h, const struct dtype *d, uint64_t m)
{
	return region_room(d, m) + (codec_is_rows(h->codec) ? 4 * m : 0);
}

static uint64_t words_room(uint64_t m)
{
	return LANES_SLACK + WIRE_LANES + padded(m) / 4 + 16;
}

/* Return the dtype whose planes the lane coder encodes: the frame's, but bytes for row codecs with an entropy stage. */
static const struct dtype *coded_dtype(const struct header *h)
{
	return dtype_of(codec_is_rows(h->codec) ? CODEC_UINT8 : h->dtype);
}

static uint64_t coded_block(const struct header *h)
{
	if (codec_is_delta(h->codec) || h->codec == CODEC_TOPK)
		return 0;
	return largest_block(codec_is_rows(h->codec) && !header_kind(h).entropy ? 0 : h->n);
}

/* Buffers begin at cache lines: a vector access that crosses two lines costs twice. */
#define LINE 64
#define ALIGN_LINE(x) (((x) + LINE - 1) & ~(uint64_t)(LINE - 1))
#define MOST_PIECES 40

uint64_t work_nbytes(const struct header *h)
{
	const struct dtype *d = coded_dtype(h);
	uint64_t m = coded_block(h);
	uint64_t own = family_of(h)->work_nbytes ? family_of(h)->work_nbytes(h) : 0;

	return own + LINE * (1 + MOST_PIECES) + sizeof(struct symbol_pairs) +
	       2 * (sizeof(lanes) + m / 8 + m + 64 + 16) + 4 * words_room(m) + (uint64_t)(d->nbytes + 1) * (m + 64) +
	       2 * MIN(m, OFFSETS) + 64 + region_buffer(h, d, m) + 64;
}

void *work_take(char **p, uint64_t nbytes)
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
		w->top[i].state = work_take(&p, sizeof(lanes));
		w->top[i].escaped = work_take(&p, m / 8);
		w->top[i].symbol = work_take(&p, m + 64);
	}
	w->top[0].pairs = w->top[1].pairs = work_take(&p, sizeof(struct symbol_pairs));
	w->top[0].pairs->of = NULL;
	w->words = work_take(&p, 4 * words_room(m));
	w->words_end = w->words + words_room(m) - 16;
	w->plane[0] = w->top[0].symbol;
	for (int i = 1; i < d->nbytes; i++)
		w->plane[i] = work_take(&p, m + 64);
	w->symbol = work_take(&p, m + 64);
	w->raw = work_take(&p, m + 64);
	w->offset = work_take(&p, 2 * MIN(m, OFFSETS) + 64);
	w->region = work_take(&p, region_buffer(h, d, m));
	w->values = (char *)w->region;
	w->ahead = (struct ahead){.count = 0};
	if (family_of(h)->work_place)
		family_of(h)->work_place(h, &p, w);
}

uint64_t region_bound(const struct job *j)
{
	return j->h.nblocks ? family_of(&j->h)->region_bound(j) : 0;
}

/*
 * Return the bytes that a frame may need beyond its values while it is encoded: for the side section, the directory,
 * the overhead of regions, and gaps between ranges of blocks. TRUNCATE's true bound is larger, but its regions are
 * rarely larger than their values.
 */
uint64_t region_gaps(const struct header *h)
{
	return ((h->n >> WIRE_MAX_BLOCK_LOG2) + 1) * 1024 + h->n / 64 + 65536;
}
