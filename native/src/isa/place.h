/* place.h - positions of a decoding loop: in the words that it reads, and in the memory that it prefetches. */
#ifndef CODEC_PLACE_H
#define CODEC_PLACE_H

#include "kernels.h"

/* Return how many bytes of each piece to prefetch per row of 128 symbols, rounded up to whole cache lines. */
static inline size_t ahead_step(const struct ahead *ahead, size_t rows)
{
	return rows ? (ahead->n + 64 * rows - 1) / (64 * rows) * 64 : 0;
}

static inline void ahead_fetch(const struct ahead *ahead, size_t step, size_t row)
{
	for (size_t c = 0; c < ahead->count; c++)
		for (size_t i = 0; i < step; i += 64)
			__builtin_prefetch((const void *)(ahead->at[c] + row * step + i));
}

/*
 * Copy of a stream's last words, followed by zeros. A row of 128 symbols consumes at most 32 words, and a vector may
 * read LANES_SLACK words beyond them.
 */
struct tail {
	uint8_t bytes[4 * (WIRE_LANES + 2 * LANES_SLACK)];
};

/* Read position in a stream's words, or in the copy of its last words. */
struct place {
	const uint8_t *p, *end;
	struct tail last;
	int in_last;
};

static inline void place_begin(struct place *at, const struct stream *s)
{
	at->p = s->words;
	at->end = at->p + 4 * s->nwords;
	at->in_last = 0;
}

/* bytes that a row of 128 symbols may consume, plus bytes that a vector may read after them */
#define PLACE_LEAST (4 * (WIRE_LANES + LANES_SLACK))

static inline void place_row(struct place *at)
{
	if (__builtin_expect(at->end - at->p >= PLACE_LEAST, 1))
		return;
	if (!at->in_last) {
		size_t left = (size_t)(at->end - at->p);

		memset(&at->last, 0, sizeof at->last);
		memcpy(at->last.bytes, at->p, left);
		at->p = at->last.bytes;
		at->end = at->p + left;
		at->in_last = 1;
	}
	at->p = at->p > at->end ? at->end : at->p; /* stay at the stream's end, where only zeros follow */
}

#endif
