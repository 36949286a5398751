/* gaps.c - leave empty quad rows out of a block's planes; see gaps.h. */
#include "gaps.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* Return the number of values of quad row q of m values. */
static uint64_t row_values(uint64_t q, uint64_t m)
{
	return MIN(WIRE_ROW, m - q * WIRE_ROW);
}

static int has_row(const uint8_t *bitmap, uint64_t q)
{
	return bitmap[q / 8] >> q % 8 & 1;
}

uint64_t gaps_find(const void *values, uint64_t m, uint64_t size, uint8_t bitmap[GAPS_NBYTES])
{
	const uint8_t *row = values;
	uint64_t present = 0;

	memset(bitmap, 0, GAPS_NBYTES);
	for (uint64_t q = 0; q * WIRE_ROW < m; q++, row += WIRE_ROW * size) {
		uint64_t n = row_values(q, m);

		if (is_zero(row, n * size))
			continue;
		bitmap[q / 8] |= (uint8_t)(1 << q % 8);
		present += n;
	}
	return present ? present : m;
}

void gaps_pack(const uint8_t *bitmap, void *values, uint64_t m, uint64_t size)
{
	uint8_t *to = values;

	for (uint64_t q = 0; q * WIRE_ROW < m; q++) {
		uint64_t n = row_values(q, m) * size;
		uint8_t *from = (uint8_t *)values + q * WIRE_ROW * size;

		if (!has_row(bitmap, q))
			continue;
		if (to != from)
			memmove(to, from, n);
		to += n;
	}
}

uint64_t gaps_put(const uint8_t *bitmap, uint64_t m, uint8_t *p)
{
	memcpy(p, bitmap, WIRE_GAPS_NBYTES(m));
	return WIRE_GAPS_NBYTES(m);
}

codec_status gaps_open(struct block *o, codec_fault *f)
{
	uint64_t nbytes = WIRE_GAPS_NBYTES(o->m), at = o->c.at, nrows = padded(o->m) / WIRE_ROW, some = 0;

	o->present = o->m;
	o->gaps = (o->head & WIRE_REGION_GAPS) != 0;
	if (!o->gaps)
		return CODEC_OK;
	if (o->c.end - at < nbytes)
		BAD(at, o->c.end - at, nbytes);
	memcpy(o->bitmap, o->c.frame + at, nbytes); /* another thread may change the frame */
	for (uint64_t q = 0; q < 8 * nbytes; q++) {
		if (!has_row(o->bitmap, q))
			continue;
		if (q >= nrows)
			BAD(at + q / 8, o->bitmap[q / 8], 0);
		some++;
	}
	if (!some || some == nrows)
		BAD(at, some, nrows - 1);
	o->present = some * WIRE_ROW;
	if (has_row(o->bitmap, nrows - 1))
		o->present -= padded(o->m) - o->m;
	o->c.at += nbytes;
	return CODEC_OK;
}

void gaps_expand(const struct block *o, uint8_t *p)
{
	uint64_t from = o->present;

	for (uint64_t q = padded(o->m) / WIRE_ROW; q-- > 0;) {
		uint64_t n = row_values(q, o->m);

		if (has_row(o->bitmap, q))
			memmove(p + q * WIRE_ROW, p + (from -= n), n);
		else
			memset(p + q * WIRE_ROW, 0, n);
	}
}
