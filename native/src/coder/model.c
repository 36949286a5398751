/*
 * model.c - write, read and apply the scale model: an offset for every value, so that one codebook suits the whole
 * frame. fit.c chooses the model.
 */
#include "model.h"

#include "codebook.h"

/*
 * Begin a frame of blocks of 2^block_log2 values. Plane 0 or the exponents may have a scale model and an agreed
 * codebook.
 */
codec_status model_begin(struct job *j, const codec_context *with)
{
	codebook given;

	if (with->ncodebooks)
		TRY(codebook_load(with->codebooks, &j->h, &given));
	if (j->h.n < WIRE_MIN_CODED)
		return CODEC_OK;
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->h.block_log2 = (uint8_t)choose_block_log2(j->h.n);
	return CODEC_OK;
}

uint64_t model_job_nbytes(const struct header *h)
{
	if (!dtype_of(h->dtype)->octave)
		return 0;
	/*
	 * A matrix of m values with sides of at least 64 has at most m / 32 rows and columns in total. The numbers of
	 * rows and of columns are padded to even ones.
	 */
	return ALIGN8(WIRE_MAX_PARTS(h->n) * (sizeof(struct segment) + 2) + h->n / 32 + 64);
}

static uint64_t nibble_nbytes(const struct segment *s)
{
	return (segment_rows(s) + 1) / 2 + (segment_cols(s) + 1) / 2;
}

void model_add(struct job *j, struct segment *s)
{
	s->nibbles_at = (uint32_t)j->model.nibbles;
	j->model.nibbles += nibble_nbytes(s);
	job_segments(j)[j->model.nsegments++] = *s;
}

static void segment_offsets(const struct job *j, const struct kernels *k, const struct segment *s,
			    const struct fitted *f, uint64_t first, uint64_t n, uint16_t *offset)
{
	static const int8_t none[OFFSETS] = {0};
	const struct dtype *d = dtype_of(j->h.dtype);
	const int8_t *rows = segment_row_offsets(j, s), *cols = segment_col_offsets(j, s);
	int circle = WIRE_CIRCLE(model_zero(&j->h, d)), grain = 1 << eighth_log2(d);
	uint64_t length = s->kind ? s->row : OFFSETS; /* number of consecutive values that share a row's offset */
	uint64_t i = first - s->start;

	for (uint64_t row = i / length, col = i % length; n; row++, col = 0) {
		uint64_t m = MIN(n, length - col);
		int start = s->base;

		if (s->kind)
			start += f && s->start + row * length < f->from ? f->row : rows[row];
		start *= grain;
		start = start > circle / 2 ? start - circle : start;
		k->offsets(segment_cols(s) ? cols + col : none, start, grain, model_zero(&j->h, d), m, offset);
		offset += m;
		n -= m;
	}
}

/* Return the segment that contains value `first`. */
const struct segment *model_segment_at(const struct job *j, uint64_t first)
{
	const struct segment *s = job_segments(j);
	uint64_t lo = 0, hi = j->model.nsegments;

	while (hi - lo > 1) {
		uint64_t mid = lo + (hi - lo) / 2;

		if (s[mid].start <= first)
			lo = mid;
		else
			hi = mid;
	}
	return s + lo;
}

void model_offsets(const struct job *j, const struct kernels *k, const struct fitted *f, uint64_t first, uint64_t n,
		   uint16_t *offset)
{
	if (!j->model.nsegments)
		memset(offset, 0, n * sizeof *offset);
	for (const struct segment *s = model_segment_at(j, first); j->model.nsegments && n; s++) {
		uint64_t m = MIN(n, s->start + s->count - first);

		segment_offsets(j, k, s, f, first, m, offset);
		offset += m;
		first += m;
		n -= m;
	}
}

uint64_t model_side_nbytes(const struct job *j)
{
	uint64_t nbytes = j->model.nsegments ? 4 : 0;

	for (uint64_t i = 0; i < j->model.nsegments; i++)
		nbytes += WIRE_SEGMENT_NBYTES + nibble_nbytes(job_segments(j) + i);
	return nbytes;
}

static uint8_t *pack_nibbles(const int8_t *offset, uint64_t n, int shift, uint8_t *dst)
{
	for (uint64_t i = 0; i < n; i += 2) {
		uint32_t lo = (uint32_t)(offset[i] >> shift) & 15;
		uint32_t hi = i + 1 < n ? (uint32_t)(offset[i + 1] >> shift) & 15 : 0;

		*dst++ = (uint8_t)(lo | hi << 4);
	}
	return dst;
}

void model_write(const struct job *j, uint8_t *dst)
{
	uint8_t *p;

	if (!j->model.nsegments)
		return;
	store32(dst, (uint32_t)j->model.nsegments);
	p = dst + 4 + WIRE_SEGMENT_NBYTES * j->model.nsegments;
	for (uint64_t i = 0; i < j->model.nsegments; i++) {
		const struct segment *s = job_segments(j) + i;
		uint8_t *record = dst + 4 + WIRE_SEGMENT_NBYTES * i;

		store64(record, s->count);
		store32(record + 8, s->row);
		record[12] = s->kind;
		record[13] = s->shifts;
		store16(record + 14, s->base);
		p = pack_nibbles(segment_row_offsets(j, s), segment_rows(s), s->shifts & 15, p);
		p = pack_nibbles(segment_col_offsets(j, s), segment_cols(s), s->shifts >> 4, p);
	}
}

#define BAD(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

/* Read and check the record at frame[at], which describes the next segment. */
static codec_status read_record(const uint8_t *frame, uint64_t at, struct job *j, struct segment *s, codec_fault *f)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint32_t bases = (uint32_t)(WIRE_CIRCLE(model_zero(&j->h, d)) >> eighth_log2(d));
	uint32_t row = load32(frame + at + 8), rows_shift, cols_shift, most = (uint32_t)dtype_most_shift(d);
	int matrix;

	s->count = load64(frame + at);
	s->kind = frame[at + 12];
	s->shifts = frame[at + 13];
	s->base = load16(frame + at + 14);
	s->row = row;
	matrix = s->kind == (WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS);
	rows_shift = s->shifts & 15;
	cols_shift = s->shifts >> 4;
	if (!s->count || s->count > j->h.n - s->start)
		BAD(at, s->count, j->h.n - s->start);
	if (s->kind > WIRE_SEGMENT_ROWS && !matrix)
		BAD(at + 12, s->kind, WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS);
	if (!matrix && row != (s->kind ? WIRE_FLAT_ROW : 0))
		BAD(at + 8, row, s->kind ? WIRE_FLAT_ROW : 0);
	if (matrix && (row < WIRE_MATRIX_MIN || s->count % row || s->count / row < WIRE_MATRIX_MIN))
		BAD(at + 8, row, WIRE_MATRIX_MIN);
	if (rows_shift > (s->kind ? most : 0) || cols_shift > (matrix ? most : 0))
		BAD(at + 13, s->shifts, most);
	if (s->base >= bases)
		BAD(at + 14, s->base, bases - 1);
	if (family_of(&j->h)->whole_octaves && (s->base % 8 || rows_shift != (s->kind ? WIRE_MAX_SHIFT : 0) ||
						cols_shift != (matrix ? WIRE_MAX_SHIFT : 0)))
		BAD(at + 13, s->shifts, WIRE_MAX_SHIFT);
	return CODEC_OK;
}

/* Read n offsets, each the nibble at frame[*p] << shift, and advance *p. */
static codec_status read_nibbles(const uint8_t *frame, uint64_t *p, uint64_t n, int shift, int8_t *offset,
				 codec_fault *f)
{
	const uint8_t *src = frame + *p;

	for (uint64_t i = 0; i < n; i++)
		offset[i] = (int8_t)(((int)((src[i / 2] >> 4 * (i % 2) & 15u) ^ 8u) - 8) * (1 << shift));
	*p += (n + 1) / 2;
	if (n % 2 && src[n / 2] >> 4)
		BAD(*p - 1, src[n / 2], src[n / 2] & 15);
	return CODEC_OK;
}

/* Read the scale model at frame[at, end), if there is one. Sets *used to the offset of the model's end. */
codec_status model_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f)
{
	uint64_t nsegments, start = 0, p;

	*used = at;
	if (!(j->h.flags & WIRE_FLAG_SEGMENTS))
		return CODEC_OK;
	if (end - at < 4)
		BAD(at, end - at, 4);
	nsegments = load32(frame + at);
	if (!nsegments || nsegments > WIRE_MAX_PARTS(j->h.n))
		BAD(at, nsegments, WIRE_MAX_PARTS(j->h.n));
	at += 4;
	if (nsegments > (end - at) / WIRE_SEGMENT_NBYTES)
		BAD(at, nsegments, (end - at) / WIRE_SEGMENT_NBYTES);
	p = at + WIRE_SEGMENT_NBYTES * nsegments;
	j->model.nsegments = j->model.nibbles = 0;
	j->model.offsets_at = j->model.segments_at + nsegments * sizeof(struct segment);
	for (uint64_t i = 0; i < nsegments; i++, at += WIRE_SEGMENT_NBYTES) {
		struct segment s = {.start = start};

		TRY(read_record(frame, at, j, &s, f));
		if (nibble_nbytes(&s) > end - p)
			BAD(p, nibble_nbytes(&s), end - p);
		model_add(j, &s);
		TRY(read_nibbles(frame, &p, segment_rows(&s), s.shifts & 15, segment_row_offsets(j, &s), f));
		TRY(read_nibbles(frame, &p, segment_cols(&s), s.shifts >> 4, segment_col_offsets(j, &s), f));
		start += s.count;
	}
	if (start != j->h.n)
		BAD(at, start, j->h.n);
	*used = p;
	return CODEC_OK;
}
