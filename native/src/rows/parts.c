/* parts.c - the geometry of frames whose values share scales: parts, their blocks and regions; their side section. */
#include "rows.h"

#define ROW_FLAT 1024 /* of a vector whose rows are asked for */
#define ROW_LEAST 64  /* trailing dimensions are taken together until a row has as many values */

/* How the loops see this codec. */
void rows_kind(const struct header *h, struct row_kind *q)
{
	*q = (struct row_kind){.codec = h->codec, .variant = h->variant, .bits = 8};
	q->finite = !(h->options & WIRE_OPTION_PROPAGATE);
	switch (h->codec) {
	case CODEC_SIGN: q->bits = 1; break;
	case CODEC_TERNARY: q->bits = h->variant == WIRE_TERNARY_2BIT ? 2 : 0; break;
	case CODEC_FLOAT8: q->max = h->variant == WIRE_FLOAT8_E4M3FN ? 448 : 57344; break;
	case CODEC_FLOAT4: q->bits = 4; break;
	default:
		q->bits = h->bits;
		q->odd = h->variant == WIRE_LEVELS_ODD;
		q->levels = q->odd ? (1 << (h->bits - 1)) - 1 : (1 << h->bits) - 1;
	}
}

/* Has a part scales of its own, beside those of its rows or instead of them? */
int rows_part_scaled(const struct header *h, uint32_t row)
{
	return row == 0 || (h->codec == CODEC_FLOAT4 && h->variant == WIRE_FLOAT4_NVFP4);
}

static int five_a_byte(const struct header *h)
{
	return h->codec == CODEC_TERNARY && h->variant != WIRE_TERNARY_2BIT;
}

int rows_entropy(const struct header *h)
{
	return (h->codec == CODEC_TERNARY && h->variant == WIRE_TERNARY_ENTROPY) ||
	       (h->codec == CODEC_FLOAT8 && h->options & WIRE_OPTION_ENTROPY);
}

uint64_t rows_block(const struct header *h, uint32_t row)
{
	if (!row)
		return five_a_byte(h) ? WIRE_TRITS_BLOCK : WIRE_ROW_BLOCK;
	return row <= WIRE_ROW_BLOCK ? WIRE_ROW_BLOCK / row * row : row;
}

uint64_t rows_codes_nbytes(const struct header *h, uint64_t m)
{
	struct row_kind q;

	rows_kind(h, &q);
	return q.bits ? (m * q.bits + 7) / 8 : (m + 4) / 5;
}

int rows_scale_nbytes(const struct header *h)
{
	switch (h->codec) {
	case CODEC_SIGN: return h->variant == WIRE_SIGN_TWO_MEAN ? 8 : 4;
	case CODEC_FLOAT4: return 1;
	default: return 4;
	}
}

/* Most bytes of a region of m values. */
uint64_t rows_region_nbytes(const struct header *h, uint32_t row, uint64_t m)
{
	uint64_t nrows = row ? (m + row - 1) / row : 0;

	return ALIGN8(nrows * (uint64_t)rows_scale_nbytes(h) + (rows_entropy(h) ? 4 : 0) + rows_codes_nbytes(h, m));
}

/* The row of a part with this shape. */
static uint32_t row_for(const struct header *h, uint32_t rank, const uint64_t *shape)
{
	uint64_t row = h->row;

	if (row == CODEC_ROW_LAST) {
		row = rank > 1 ? 1 : ROW_FLAT;
		for (uint32_t i = rank; rank > 1 && i-- > 0 && row < ROW_LEAST;)
			row *= shape[i];
		if (row > WIRE_MAX_ROW)
			row = ROW_FLAT;
	}
	return (uint32_t)(rows_entropy(h) && row > WIRE_ROW_BLOCK ? ROW_FLAT : row);
}

static void add_part(struct job *j, uint64_t start, uint64_t count, uint32_t row)
{
	struct part *p = job_parts(j) + j->nparts++;
	uint64_t block = rows_block(&j->h, row);

	*p = (struct part){.start = start, .count = count, .first_block = j->h.nblocks, .row = row};
	p->first_sum = (uint32_t)j->nsums;
	j->nsums += (count + WIRE_TREE - 1) / WIRE_TREE;
	j->h.nblocks += (count + block - 1) / block;
}

static void add_flat(struct job *j, uint64_t start, uint64_t end)
{
	if (end > start)
		add_part(j, start, end - start, row_for(&j->h, 1, NULL));
}

/* Parts of a tensor about to be encoded; the blocks are counted, and the header's row is that in use. */
void rows_cut(struct job *j, const codec_context *with)
{
	uint64_t flat = 0, end = 0;

	j->nparts = j->nsums = j->h.nblocks = 0;
	if (!with->nsegments) {
		add_part(j, 0, j->h.n, row_for(&j->h, j->h.rank, j->h.shape));
		j->h.row = job_parts(j)->row;
		return;
	}
	for (uint64_t i = 0; i < with->nsegments; i++) {
		const codec_segment *s = with->segments + i;
		uint64_t count = segment_count(s);

		end = s->offset + count;
		if (count < WIRE_PART_MIN)
			continue;
		add_flat(j, flat, s->offset);
		add_part(j, s->offset, count, row_for(&j->h, s->rank, s->shape));
		flat = end;
	}
	add_flat(j, flat, j->h.n);
	j->h.row = 0;
	j->h.flags |= WIRE_FLAG_SEGMENTS;
}

uint64_t rows_job_nbytes(const struct header *h)
{
	uint64_t parts = WIRE_MAX_PARTS(h->n);

	return parts * sizeof(struct part) + (parts + h->n / WIRE_TREE + 1) * sizeof(struct row_sums) + 16;
}

/* The values of a block. */
struct place rows_place(const struct job *j, uint64_t block)
{
	const struct part *p = job_parts(j);
	uint64_t lo = 0, hi = j->nparts, nvalues, from, n, nrows;

	while (hi - lo > 1) {
		uint64_t mid = lo + (hi - lo) / 2;

		if (p[mid].first_block <= block)
			lo = mid;
		else
			hi = mid;
	}
	p += lo;
	nvalues = rows_block(&j->h, p->row);
	from = (block - p->first_block) * nvalues;
	n = MIN(nvalues, p->count - from);
	nrows = p->row ? (n + p->row - 1) / p->row : 0;
	return (struct place){p, p->start + from, n, nrows * (uint64_t)rows_scale_nbytes(&j->h)};
}

/* Most bytes of the regions of blocks [first, first + count); without an entropy stage, all that there can be. */
uint64_t rows_regions_nbytes(const struct job *j, uint64_t first, uint64_t count)
{
	uint64_t nbytes = 0;

	for (uint64_t b = first; b < first + count; b++) {
		struct place at = rows_place(j, b);

		nbytes += rows_region_nbytes(&j->h, at.part->row, at.n);
	}
	return nbytes;
}

/* The largest frame, whatever the segments: each part may end a block early. */
uint64_t rows_bound(const struct header *h)
{
	uint32_t row = row_for(h, h->rank, h->shape);
	uint64_t block = rows_block(h, row), nblocks = (h->n + block - 1) / block, most, cut, nparts;
	uint64_t head = WIRE_AT_SHAPE + 8 * (uint64_t)h->rank + ALIGN8(16 + (rows_entropy(h) ? BOOK_MAX_NBYTES : 0));

	if (!h->n)
		return head;
	/* no segments, or parts of WIRE_PART_MIN values and what lies between them, whose rows have ROW_LEAST or more
	 */
	most = nblocks * (WIRE_DIRECTORY_ENTRY + 8) + (row ? (h->n + row - 1) / row + nblocks : 0) * 8 + nblocks * 8 +
	       rows_codes_nbytes(h, h->n);
	nparts = WIRE_MAX_PARTS(h->n);
	row = h->row == CODEC_ROW_LAST ? ROW_LEAST : h->row;
	cut = h->n / (WIRE_ROW_BLOCK / 2) + nparts;
	cut = cut * (WIRE_DIRECTORY_ENTRY + 16) + (row ? (h->n / row + cut) * 8 : 0) + rows_codes_nbytes(h, h->n) +
	      nparts * (WIRE_SEGMENT_NBYTES + 8);
	return head + MAX(most, cut);
}

/* TERNARY's values are 0 and plus or minus the scale, which is then one of the dtype's numbers. */
float rows_round_scale(const struct header *h, float x)
{
	if (h->dtype == CODEC_BFLOAT16)
		return round_float(round_from_bfloat16(round_to_bfloat16(round_bits(x))));
	if (h->dtype == CODEC_FLOAT16)
		return round_float(round_from_float16(round_to_float16(round_bits(x))));
	return x;
}

/* The same, not below x if that can be: values that saturate are not unbiased. Sums with what was lost need it. */
float rows_raise_scale(const struct header *h, float x)
{
	uint32_t u = round_bits(x);

	if (rows_round_scale(h, x) >= x)
		return rows_round_scale(h, x);
	if (h->dtype == CODEC_BFLOAT16)
		return round_float(round_from_bfloat16((uint16_t)MIN(round_to_bfloat16(u) + 1, 0x7f7f)));
	return round_float(round_from_float16((uint16_t)MIN(round_to_float16(u) + 1, 0x7bff)));
}

/* Is a scale that was given 0 or Inf as float32 or, TERNARY, in the tensor's dtype? Rounding itself stops short of Inf.
 */
int rows_scale_lost(const struct header *h, float x)
{
	uint32_t inf = ROUND_INF;

	if (h->codec == CODEC_TERNARY && h->dtype == CODEC_BFLOAT16)
		inf = 0x7f7f8000; /* half a unit above the largest number */
	if (h->codec == CODEC_TERNARY && h->dtype == CODEC_FLOAT16)
		inf = 0x477ff000; /* 65520 */
	return round_bits(x) >= inf || (h->codec == CODEC_TERNARY && !(rows_round_scale(h, x) > 0));
}

uint64_t rows_side_nbytes(const struct job *j)
{
	uint64_t nbytes = j->h.flags & WIRE_FLAG_SEGMENTS ? 4 + WIRE_SEGMENT_NBYTES * j->nparts : 0;

	/* rows were asked for of all parts or of none */
	return nbytes + (rows_part_scaled(&j->h, job_parts(j)->row) ? 8 * j->nparts : 0);
}

void rows_write(const struct job *j, uint8_t *dst)
{
	const struct part *p = job_parts(j), *end = p + j->nparts;

	if (j->h.flags & WIRE_FLAG_SEGMENTS) {
		store32(dst, (uint32_t)j->nparts);
		dst += 4;
		for (; p < end; p++, dst += WIRE_SEGMENT_NBYTES) {
			store64(dst, p->count);
			store32(dst + 8, p->row);
			store32(dst + 12, 0);
		}
	}
	for (p = job_parts(j); p < end && rows_part_scaled(&j->h, p->row); p++, dst += 8) {
		store32(dst, round_bits(p->scale[0]));
		store32(dst + 4, round_bits(p->scale[1]));
	}
}

#define BAD(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

/* Scales of a part at frame[at, at + 8). */
static codec_status read_scales(const uint8_t *frame, uint64_t at, const struct header *h, struct part *p,
				codec_fault *f)
{
	int used = h->codec == CODEC_SIGN && h->variant == WIRE_SIGN_TWO_MEAN ? 2 : 1;

	for (int i = 0; i < 2; i++) {
		uint32_t u = load32(frame + at + 4 * (uint64_t)i);

		if (u >= (i < used ? ROUND_INF : 1))
			BAD(at + 4 * (uint64_t)i, u, i < used ? ROUND_INF : 0);
		p->scale[i] = round_float(u);
		if (h->codec == CODEC_TERNARY && round_bits(rows_round_scale(h, p->scale[i])) != u)
			BAD(at + 4 * (uint64_t)i, u, round_bits(rows_round_scale(h, p->scale[i])));
	}
	return CODEC_OK;
}

/* Records of parts from frame[*at, end) on. */
static codec_status read_records(const uint8_t *frame, uint64_t *at, uint64_t end, struct job *j, codec_fault *f)
{
	uint64_t nparts = end - *at < 4 ? 0 : load32(frame + *at), start = 0;

	if (!nparts || nparts > WIRE_MAX_PARTS(j->h.n) || nparts > (end - *at - 4) / WIRE_SEGMENT_NBYTES)
		BAD(*at, nparts, (end - *at) / WIRE_SEGMENT_NBYTES);
	*at += 4;
	for (uint64_t i = 0; i < nparts; i++, *at += WIRE_SEGMENT_NBYTES) {
		uint64_t count = load64(frame + *at);
		uint32_t row = load32(frame + *at + 8);

		if (!count || count > j->h.n - start)
			BAD(*at, count, j->h.n - start);
		if (!row_allowed(&j->h, row))
			BAD(*at + 8, row, WIRE_MAX_ROW);
		if (load32(frame + *at + 12))
			BAD(*at + 12, load32(frame + *at + 12), 0);
		add_part(j, start, count, row);
		start += count;
	}
	if (start != j->h.n)
		BAD(*at, start, j->h.n);
	return CODEC_OK;
}

/* Parts from frame[at, end). */
codec_status rows_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f)
{
	uint64_t nblocks = j->h.nblocks;

	j->nparts = j->nsums = j->h.nblocks = 0;
	if (j->h.flags & WIRE_FLAG_SEGMENTS)
		TRY(read_records(frame, &at, end, j, f));
	else
		add_part(j, 0, j->h.n, j->h.row);
	for (struct part *p = job_parts(j); p < job_parts(j) + j->nparts; p++) {
		if (!rows_part_scaled(&j->h, p->row))
			continue;
		if (end - at < 8)
			BAD(at, end - at, 8);
		TRY(read_scales(frame, at, &j->h, p, f));
		at += 8;
	}
	if (j->h.nblocks != nblocks)
		BAD(WIRE_AT_NBLOCKS, nblocks, j->h.nblocks);
	*used = at;
	return CODEC_OK;
}
