/* work.c - one thread's buffers: how large, and what lies where. */
#include "region.h"

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

static uint64_t words_room(uint64_t m)
{
	return LANES_SLACK + WIRE_LANES + padded(m) / 4 + 16;
}

uint64_t work_nbytes(const struct dtype *d, uint64_t n)
{
	uint64_t m = largest_block(n);

	return 64 + 2 * (sizeof(lanes) + m / 8 + m + 64 + 16) + 4 * words_room(m) +
	       (uint64_t)(d->nbytes + 1) * (m + 64) + 2 * MIN(m, OFFSETS) + 64 +
	       (d->form == FORM_FLOAT8 ? 2 * m + 64 : 0) + region_room(d, m) + (uint64_t)(d->nbytes + 2) * m + 64;
}

static void *take(char **p, uint64_t nbytes)
{
	void *here = *p;

	*p += ALIGN8(nbytes);
	return here;
}

void work_place(const struct dtype *d, uint64_t n, void *memory, struct work *w)
{
	uint64_t m = largest_block(n);
	char *p = (char *)ALIGN8((uintptr_t)memory);

	for (int i = 0; i < 2; i++) {
		w->top[i].state = take(&p, sizeof(lanes));
		w->top[i].escaped = take(&p, m / 8);
		w->top[i].symbol = take(&p, m + 64);
	}
	w->words = take(&p, 4 * words_room(m));
	w->words_end = w->words + words_room(m) - 16;
	w->plane[0] = w->top[0].symbol;
	for (int i = 1; i < d->nbytes; i++)
		w->plane[i] = take(&p, m + 64);
	w->symbol = take(&p, m + 64);
	w->high = take(&p, m / 2 + 64);
	w->offset = take(&p, 2 * MIN(m, OFFSETS) + 64);
	w->exponent = d->form == FORM_FLOAT8 ? take(&p, 2 * m + 64) : NULL;
	w->region = take(&p, region_room(d, m));
	w->escapes = take(&p, (uint64_t)(d->nbytes + 2) * m);
}
uint64_t region_bound(const struct header *h)
{
	const struct dtype *d = dtype_of(h->dtype);
	uint64_t m = MIN(h->n, h->block), nbytes = 4;

	for (int p = 0; p < d->nbytes; p++)
		if (!(h->fixed >> p & 1))
			nbytes += literal_nbytes(d, p) == 2 ? coded_bound(m, 2) : m;
	return ALIGN8(nbytes);
}
