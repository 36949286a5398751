/* parts.c - frames whose values share scales: parts, blocks, regions and the side section. */
#include "rows.h"

static void add_part(struct job *j, uint64_t start, uint64_t count, uint32_t row)
{
	struct part *p = job_parts(j) + j->nparts++;

	*p = (struct part){.start = start, .count = count, .first_block = j->h.nblocks, .group_size = row};
	p->first_sum = (uint32_t)j->nsums;
	j->nsums += (count + WIRE_TREE - 1) / WIRE_TREE;
	j->h.nblocks += row_nblocks(header_kind(&j->h), row, count);
}

/*
 * State while a tensor is cut into parts. `add` is called for each part, in ascending order. A run is a range of
 * consecutive small segments, and of values outside segments, that will become one part.
 */
struct cut {
	struct row_kind q;
	void (*add)(void *to, uint64_t start, uint64_t count, uint32_t row);
	void *to;
	uint64_t start, end; /* values [start, end) of the run */
	uint32_t row;        /* row length (values that share a scale) of the run */
	uint64_t spare;      /* number of parts that may be added beyond one run between two large segments */
};

static void end_run(struct cut *cut)
{
	if (cut->end > cut->start)
		cut->add(cut->to, cut->start, cut->end - cut->start, cut->row);
	cut->start = cut->end;
}

/*
 * Add the values up to `end`, which have rows of `row` values, to the current run if that changes no row; else begin a
 * new run.
 */
static void add_to_run(struct cut *cut, uint64_t end, uint32_t row)
{
	uint64_t n = cut->end - cut->start;

	if (end == cut->end)
		return;
	if (n && cut->spare && (row != cut->row || row_part_scaled(cut->q, row) || n % row)) {
		end_run(cut);
		cut->spare--;
		n = 0;
	}
	if (!n)
		cut->row = row;
	cut->end = end;
}

/* Return the number of parts that small segments may use, in excess of one part between each two large segments. */
static uint64_t spare_parts(uint64_t n, const codec_context *with)
{
	uint64_t large = 0;

	for (uint64_t i = 0; i < with->nsegments; i++)
		large += segment_count(with->segments + i) >= WIRE_PART_MIN;
	return WIRE_MAX_ROW_PARTS(n) - (2 * large + 1);
}

/* Cut a non-empty tensor into parts, and call `add` for each. h->group_size is still the one that the spec requests. */
static void cut_parts(const struct header *h, const codec_context *with,
		      void (*add)(void *to, uint64_t start, uint64_t count, uint32_t row), void *to)
{
	const struct row_kind q = header_kind(h);
	const uint32_t asked = h->group_size, flat = row_in_use(q, asked, 1, NULL);
	const uint32_t least = asked == ROW_ASKED_LAST ? ROW_LEAST : 0;
	struct cut cut = {.q = q, .add = add, .to = to, .spare = spare_parts(h->n, with)};

	if (!with->nsegments) {
		add(to, 0, h->n, row_in_use(q, asked, h->rank, h->shape));
		return;
	}
	for (uint64_t i = 0; i < with->nsegments; i++) {
		const codec_segment *s = with->segments + i;
		uint64_t count = segment_count(s), end = s->offset + count;
		uint32_t row = row_in_use(q, asked, s->rank, s->shape);

		if (!count)
			continue;
		add_to_run(&cut, s->offset, flat);
		if (count < WIRE_PART_MIN) {
			add_to_run(&cut, end, MAX(row, least));
			continue;
		}
		end_run(&cut);
		add(to, s->offset, count, row);
		cut.start = cut.end = end;
	}
	add_to_run(&cut, h->n, flat);
	end_run(&cut);
}

static void add_to_job(void *job, uint64_t start, uint64_t count, uint32_t row)
{
	add_part(job, start, count, row);
}

/* Cut a tensor into parts for encoding, count the blocks, and set the header's group_size to the row length in use. */
void rows_cut(struct job *j, const codec_context *with)
{
	const struct header h = j->h;

	j->nparts = j->nsums = j->h.nblocks = 0;
	cut_parts(&h, with, add_to_job, j);
	j->h.group_size = with->nsegments ? 0 : job_parts(j)->group_size;
	j->h.flags |= with->nsegments ? WIRE_FLAG_SEGMENTS : 0;
}

uint64_t rows_job_nbytes(const struct header *h)
{
	uint64_t parts = WIRE_MAX_ROW_PARTS(h->n);

	return parts * sizeof(struct part) + (parts + h->n / WIRE_TREE + 1) * sizeof(struct row_sums) + 16;
}

/* Return a block's part, its range of values, and the size of its scales. */
struct place rows_place(const struct job *j, uint64_t block)
{
	const struct row_kind q = header_kind(&j->h);
	const struct part *p = job_parts(j);
	uint64_t lo = 0, hi = j->nparts, n;

	while (hi - lo > 1) {
		uint64_t mid = lo + (hi - lo) / 2;

		if (p[mid].first_block <= block)
			lo = mid;
		else
			hi = mid;
	}
	p += lo;
	block -= p->first_block;
	n = row_block_n(q, p->group_size, p->count, block);
	return (struct place){p, p->start + block * row_block(q, p->group_size), n,
			      row_count(p->group_size, n) * row_scale_nbytes(q)};
}

/* Return an upper bound in bytes of the regions of blocks [first, first + count); exact without an entropy stage. */
uint64_t rows_regions_nbytes(const struct job *j, uint64_t first, uint64_t count)
{
	uint64_t nbytes = 0;

	for (uint64_t b = first; b < first + count; b++) {
		struct place at = rows_place(j, b);

		nbytes += row_region_nbytes(header_kind(&j->h), at.part->group_size, at.n);
	}
	return nbytes;
}

/* Return the size in bytes of the largest frame, for any segments. Each part may end with an incomplete block. */
uint64_t rows_bound(const struct header *h)
{
	const struct row_kind q = header_kind(h);
	uint32_t row = row_in_use(q, h->group_size, h->rank, h->shape);
	uint64_t nblocks = row_nblocks(q, row, h->n), nparts = WIRE_MAX_ROW_PARTS(h->n), most, cut;
	uint64_t head = WIRE_AT_SHAPE + 8 * (uint64_t)h->rank + ALIGN8(16 + (q.entropy ? BOOK_MAX_NBYTES : 0));

	if (!h->n)
		return head;
	/*
	 * There are two cases. Without segments, the tensor is one part. With segments, it has at most
	 * WIRE_MAX_ROW_PARTS(n) parts, with rows of at least ROW_LEAST values; a part's last row may be shorter.
	 */
	most = nblocks * (WIRE_DIRECTORY_ENTRY + 16) + (row_count(row, h->n) + (row ? nblocks : 0)) * 8;
	row = h->group_size == CODEC_GROUP_SIZE_ROW ? ROW_LEAST : row;
	cut = h->n / (WIRE_ROW_BLOCK / 2) + nparts;
	cut = cut * (WIRE_DIRECTORY_ENTRY + 16) + (row ? (h->n / row + cut) * 8 : 0) +
	      nparts * (WIRE_SEGMENT_NBYTES + 8);
	return head + row_codes_nbytes(q, h->n) + MAX(most, cut);
}

/* Sizes in bytes, and counts, that depend on a frame's parts. */
struct parts_nbytes {
	struct row_kind q;
	uint64_t nparts, scales, nblocks, regions; /* scales: bytes of the scales of parts, not of rows */
};

static void add_nbytes(void *to, uint64_t start, uint64_t count, uint32_t row)
{
	struct parts_nbytes *sum = to;
	uint64_t block = row_block(sum->q, row), rest = count % block;

	(void)start;
	sum->nparts++;
	sum->scales += row_part_scaled(sum->q, row) ? 8 : 0;
	sum->nblocks += row_nblocks(sum->q, row, count);
	sum->regions += count / block * row_region_nbytes(sum->q, row, block);
	sum->regions += rest ? row_region_nbytes(sum->q, row, rest) : 0;
}

/* Return the size in bytes of the largest frame with these segments; exact without an entropy stage. */
uint64_t rows_bound_segments(const struct header *h, const codec_context *with)
{
	struct parts_nbytes sum = {.q = header_kind(h)};
	uint64_t head = WIRE_AT_SHAPE + 8 * (uint64_t)h->rank, side = sum.q.entropy ? BOOK_MAX_NBYTES : 0;

	if (!h->n)
		return head;
	cut_parts(h, with, add_nbytes, &sum);
	side += (with->nsegments ? 4 + WIRE_SEGMENT_NBYTES * sum.nparts : 0) + sum.scales;
	return head + ALIGN8(side) + WIRE_DIRECTORY_ENTRY * sum.nblocks + sum.regions;
}

uint64_t rows_side_nbytes(const struct job *j)
{
	uint64_t nbytes = j->h.flags & WIRE_FLAG_SEGMENTS ? 4 + WIRE_SEGMENT_NBYTES * j->nparts : 0;

	/* either all parts have scales per row, or none has */
	return nbytes + (row_part_scaled(header_kind(&j->h), job_parts(j)->group_size) ? 8 * j->nparts : 0);
}

void rows_write(const struct job *j, uint8_t *dst)
{
	const struct part *p = job_parts(j), *end = p + j->nparts;
	const struct row_kind q = header_kind(&j->h);

	if (j->h.flags & WIRE_FLAG_SEGMENTS) {
		store32(dst, (uint32_t)j->nparts);
		dst += 4;
		for (; p < end; p++, dst += WIRE_SEGMENT_NBYTES) {
			store64(dst, p->count);
			store32(dst + 8, p->group_size);
			store32(dst + 12, 0);
		}
	}
	for (p = job_parts(j); p < end && row_part_scaled(q, p->group_size); p++, dst += 8) {
		store32(dst, round_bits(p->scale[0]));
		store32(dst + 4, round_bits(p->scale[1]));
	}
}

#define BAD(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

/* Read and check the scales of a part at frame[at, at + 8). */
static codec_status read_scales(const uint8_t *frame, uint64_t at, const struct header *h, struct part *p,
				codec_fault *f)
{
	int used = h->codec == CODEC_SIGN && h->variant == CODEC_SIGN_TWO_MEAN ? 2 : 1;

	for (int i = 0; i < 2; i++) {
		uint32_t u = load32(frame + at + 4 * (uint64_t)i);

		if (u >= (i < used ? ROUND_INF : 1))
			BAD(at + 4 * (uint64_t)i, u, i < used ? ROUND_INF : 0);
		p->scale[i] = round_float(u);
		if (h->codec == CODEC_TERNARY && round_bits(scale_in_dtype(p->scale[i], h->dtype)) != u)
			BAD(at + 4 * (uint64_t)i, u, round_bits(scale_in_dtype(p->scale[i], h->dtype)));
	}
	return CODEC_OK;
}

/* Read and check the records of parts at frame[*at, end), and advance *at. */
static codec_status read_records(const uint8_t *frame, uint64_t *at, uint64_t end, struct job *j, codec_fault *f)
{
	uint64_t nparts = end - *at < 4 ? 0 : load32(frame + *at), start = 0;

	if (!nparts || nparts > WIRE_MAX_ROW_PARTS(j->h.n) || nparts > (end - *at - 4) / WIRE_SEGMENT_NBYTES)
		BAD(*at, nparts, (end - *at) / WIRE_SEGMENT_NBYTES);
	*at += 4;
	for (uint64_t i = 0; i < nparts; i++, *at += WIRE_SEGMENT_NBYTES) {
		uint64_t count = load64(frame + *at);
		uint32_t row = load32(frame + *at + 8);

		if (!count || count > j->h.n - start)
			BAD(*at, count, j->h.n - start);
		if (!row_allowed(header_kind(&j->h), row))
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

/* Read and check the side section at frame[at, end), and set *used to the offset of its end. */
codec_status rows_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f)
{
	uint64_t nblocks = j->h.nblocks;

	j->nparts = j->nsums = j->h.nblocks = 0;
	if (j->h.flags & WIRE_FLAG_SEGMENTS)
		TRY(read_records(frame, &at, end, j, f));
	else
		add_part(j, 0, j->h.n, j->h.group_size);
	for (struct part *p = job_parts(j); p < job_parts(j) + j->nparts; p++) {
		if (!row_part_scaled(header_kind(&j->h), p->group_size))
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

/*
 * Return 1 if opening an encode job needs a work buffer: the entropy stage's codebook is built from a sample of blocks.
 */
int rows_opens_with_work(const struct header *h)
{
	return header_kind(h).entropy;
}

#define CODES (WIRE_ROW_BLOCK + 64)

uint64_t rows_work_nbytes(const struct header *h)
{
	(void)h;
	return 4 * WIRE_TREE + 18 * ROW_CHUNK + 64 + CODES + 64;
}

void rows_work_place(const struct header *h, char **p, struct work *w)
{
	(void)h;
	w->x = work_take(p, 4 * WIRE_TREE);
	w->y = work_take(p, 4 * ROW_CHUNK);
	w->scale = work_take(p, 4 * ROW_CHUNK);
	w->scale_below = work_take(p, 4 * ROW_CHUNK);
	w->max = work_take(p, 4 * ROW_CHUNK);
	w->half = work_take(p, 2 * ROW_CHUNK + 32);
	w->code = work_take(p, CODES);
}

uint64_t rows_region_bound(const struct job *j)
{
	const struct row_kind q = header_kind(&j->h);
	uint64_t most = 0;

	for (const struct part *p = job_parts(j); p < job_parts(j) + j->nparts; p++)
		most = MAX(most, row_region_nbytes(q, p->group_size, MIN(p->count, row_block(q, p->group_size))));
	return most;
}
