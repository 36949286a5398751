/* model.c - the scale model: an offset for every value, so that one codebook serves a frame.
 *
 * Logarithms of a gradient matrix are nearly row + column. A float's pattern is such a logarithm, but for the
 * mantissa's curve. A segment (a parameter in a flat bucket, or the whole tensor) has a base, and where it pays an
 * offset for each row and column, chosen from a sample whose positions depend on the shape alone. All arithmetic is on
 * integers.
 */
#include "model.h"

#define RUN 32           /* neighbouring values that a row's sample is made of */
#define RUNS 4           /* of a row: 128 values find its mean to a tenth of a step or so */
#define SAMPLED_ROWS 128 /* for the columns' offsets */
#define MODEL_MIN 4096   /* fewer values get no scale model */
#define SEGMENT_MIN 8192 /* smaller segments, and what lies between, are one flat segment */
#define DEAD -128        /* a row or column of zeros, until offsets are rounded */

uint64_t model_nbytes(const struct dtype *d, uint64_t n)
{
	if (!d->octave)
		return 0;
	/* a matrix whose sides are at least 64 has at most count / 32 rows and columns; each of both is padded by one
	 */
	return ALIGN8(WIRE_MAX_PARTS(n) * (sizeof(struct segment) + 2) + n / 32 + 64);
}

/* The split of a shape into rows and columns that is most nearly square. */
static void most_square(uint32_t rank, const uint64_t *shape, uint64_t n, uint64_t *rows, uint64_t *cols)
{
	uint64_t r = 1;

	*rows = 1;
	*cols = n;
	for (uint32_t i = 0; i < rank; i++) {
		r *= shape[i];
		if (MAX(r, n / r) < MAX(*rows, *cols)) {
			*rows = r;
			*cols = n / r;
		}
	}
}

static uint64_t nibble_nbytes(const struct segment *s)
{
	return (segment_rows(s) + 1) / 2 + (segment_cols(s) + 1) / 2;
}

static void add_segment(struct job *j, struct segment *s)
{
	s->nibbles_at = (uint32_t)j->model.nibbles;
	j->model.nibbles += nibble_nbytes(s);
	job_segments(j)[j->model.nsegments++] = *s;
}

static void add_flat(struct job *j, uint64_t start, uint64_t end)
{
	struct segment s = {.start = start, .count = end - start, .row = WIRE_FLAT_COLS, .kind = WIRE_SEGMENT_ROWS};

	if (end > start)
		add_segment(j, &s);
}

static void add_shape(struct job *j, uint64_t start, uint64_t count, uint32_t rank, const uint64_t *shape)
{
	uint64_t rows, cols;

	most_square(rank, shape, count, &rows, &cols);
	if (MIN(rows, cols) < WIRE_MATRIX_MIN || cols > UINT32_MAX)
		add_flat(j, start, start + count);
	else
		add_segment(j, &(struct segment){.start = start,
						 .count = count,
						 .row = (uint32_t)cols,
						 .kind = WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS});
}

/* Segments worth a record of their own; what lies between them is flat. */
static void cut(const codec_context *with, struct job *j)
{
	uint64_t flat = 0, end = 0;

	if (!with || !with->nsegments) {
		if (j->h.n >= SEGMENT_MIN)
			add_shape(j, 0, j->h.n, j->h.rank, j->h.shape);
		else
			add_flat(j, 0, j->h.n);
		return;
	}
	for (uint64_t i = 0; i < with->nsegments; i++) {
		const codec_segment *s = with->segments + i;
		uint64_t count = segment_count(s);

		end = s->offset + count;
		if (count < SEGMENT_MIN)
			continue;
		add_flat(j, flat, s->offset);
		add_shape(j, s->offset, count, s->rank, s->shape);
		flat = end;
	}
	add_flat(j, flat, j->h.n);
}

/* Patterns of n values from `first` on, COLUMNS at most. */
static void patterns(const struct source *src, const struct kernels *k, uint64_t first, uint64_t n, uint16_t *p)
{
	const struct dtype *d = dtype_of(src->dtype);

	uint8_t sums[4 * COLUMNS];

	k->patterns[d->form](load_native(k, src, first, n, sums), n, p);
}

static int clamp(int x, int lo, int hi)
{
	return x < lo ? lo : x > hi ? hi : x;
}

/* Where the mean pattern goes: symbols lie around 128, those of float64 far from where they begin anew. */
static int centre_of(const struct dtype *d)
{
	return d->form == FORM_FLOAT8 ? 0x4800 : 0x4000;
}

static int grain_of(const struct dtype *d)
{
	return d->octave / 8;
}

/*
 * Offsets are kept as nibble << shift, in eighths of an octave. Choose the finest shift from `shift` on under which at
 * most one in 32 is clamped (any offset decodes, so that does no harm), and round.
 */
static uint8_t round_offsets(int8_t *offset, uint64_t n, int middle, uint8_t shift)
{
	for (; shift < WIRE_MAX_SHIFT; shift++) {
		uint64_t outside = 0;

		for (uint64_t i = 0; i < n; i++)
			outside += offset[i] != DEAD &&
				   (offset[i] - middle < -(8 << shift) || offset[i] - middle > 7 << shift);
		if (32 * outside <= n)
			break;
	}
	for (uint64_t i = 0; i < n; i++) {
		int nibble = ((offset[i] == DEAD ? 0 : offset[i] - middle) + (1 << shift >> 1)) >> shift;

		offset[i] = (int8_t)(clamp(nibble, -8, 7) * (1 << shift));
	}
	return shift;
}

/* Rows first: the mean pattern of a few runs of each. Then the base, the mean of those. */
static void fit_rows(const struct source *src, const struct kernels *k, struct job *j, struct segment *s,
		     uint8_t finest)
{
	const struct dtype *d = dtype_of(src->dtype);
	int8_t *rows = segment_row_offsets(j, s);
	uint64_t nrows = segment_rows(s);
	int64_t total = 0, count = 0;
	int reference = -1, middle;

	for (uint64_t r = 0; r < nrows; r++) {
		uint64_t first = s->start + r * s->row, n = MIN(s->row, s->start + s->count - first), got = 0;
		uint16_t p[RUNS * RUN];
		uint32_t sum, nonzero;
		int mean;

		if (n <= RUNS * RUN) {
			patterns(src, k, first, got = n, p);
		} else {
			for (uint64_t i = 0; i < RUNS; i++, got += RUN) {
				uint64_t run = first + i * (n - RUN) / (RUNS - 1);
				uintptr_t ahead = (uintptr_t)src->data + (run + 4 * (uint64_t)s->row) * d->nbytes;

				/* far apart, so the CPU does not see them coming */
				for (uint64_t b = 0; b < RUN * d->nbytes; b += 64)
					__builtin_prefetch((const void *)(ahead + b));
				patterns(src, k, run, RUN, p + got);
			}
		}
		k->sum(p, got, model_zero(&j->h, d), &sum, &nonzero);
		rows[r] = DEAD;
		if (!nonzero)
			continue;
		mean = bits_mean(sum, nonzero);
		reference = reference < 0 ? mean : reference;
		rows[r] = (int8_t)clamp(bits_mean(mean - reference, grain_of(d)), -127, 127);
		total += rows[r];
		count++;
	}
	middle = count ? bits_mean(total, count) : 0;
	s->mean = (uint16_t)(count ? reference + grain_of(d) * middle : centre_of(d));
	s->shifts = round_offsets(rows, nrows, middle, finest);
}

/* Columns: the mean of what the row's offset leaves, over rows spread by the golden ratio. */
static void fit_cols(const struct source *src, const struct kernels *k, struct job *j, struct segment *s,
		     uint8_t finest)
{
	const struct dtype *d = dtype_of(src->dtype);
	const int8_t *rows = segment_row_offsets(j, s);
	int8_t *cols = segment_col_offsets(j, s);
	uint64_t nrows = segment_rows(s), take = MIN(nrows, MIN(SAMPLED_ROWS, MAX(64, nrows / 2)));

	for (uint64_t c = 0; c < s->row; c += COLUMNS) {
		uint64_t n = MIN(COLUMNS, s->row - c);
		struct columns sums = {0};
		uint16_t p[COLUMNS];

		for (uint64_t i = 0; i < take; i++) {
			uint64_t r = take == nrows ? i : (i * 0x9e3779b9u & 0xffffffffu) * nrows >> 32;

			patterns(src, k, s->start + r * s->row + c, n, p);
			k->columns(p, s->mean + grain_of(d) * rows[r], model_zero(&j->h, d), n, &sums);
		}
		for (uint64_t i = 0; i < n; i++) {
			int64_t count = (int64_t)sums.count[i] * grain_of(d);

			cols[c + i] = count ? (int8_t)clamp(bits_mean(sums.total[i], count), -127, 127) : DEAD;
		}
	}
	s->shifts |= (uint8_t)(round_offsets(cols, s->row, 0, finest) << 4);
}

/* The base, a multiple of `unit`, that takes the mean pattern to the centre. */
static void settle_base(const struct job *j, const struct dtype *d, struct segment *s, int unit)
{
	int circle = WIRE_CIRCLE(model_zero(&j->h, d)) / grain_of(d);
	/* measured: symbols are cheapest if the mean comes to lie just below a power of two */
	int top = MIN(d->octave, 128) * 7 / 8;
	int base = unit * bits_mean(s->mean - centre_of(d) - top, unit * grain_of(d));

	s->base = (uint16_t)(base + (base < 0 ? circle : 0));
}

static void segment_offsets(const struct job *j, const struct kernels *k, const struct segment *s, uint64_t first,
			    uint64_t n, uint16_t *offset)
{
	static const int8_t none[WIRE_FLAT_COLS] = {0};
	const struct dtype *d = dtype_of(j->h.dtype);
	const int8_t *rows = segment_row_offsets(j, s), *cols = segment_col_offsets(j, s);
	int circle = WIRE_CIRCLE(model_zero(&j->h, d)), matrix = s->kind & WIRE_SEGMENT_COLS;
	uint64_t i = first - s->start;

	for (uint64_t row = i / s->row, col = i % s->row; n; row++, col = 0) {
		uint64_t m = MIN(n, s->row - col);
		int start = grain_of(d) * (s->base + (s->kind & WIRE_SEGMENT_ROWS ? rows[row] : 0));

		start = start > circle / 2 ? start - circle : start;
		k->offsets(matrix ? cols + col : none, start, grain_of(d), model_zero(&j->h, d), m, offset);
		offset += m;
		n -= m;
	}
}

void model_offsets(const struct job *j, const struct kernels *k, uint64_t first, uint64_t n, uint16_t *offset)
{
	const struct segment *s = job_segments(j);
	uint64_t lo = 0, hi = j->model.nsegments;

	if (!hi)
		memset(offset, 0, n * sizeof *offset);

	while (hi - lo > 1) {
		uint64_t mid = lo + (hi - lo) / 2;

		if (s[mid].start <= first)
			lo = mid;
		else
			hi = mid;
	}
	for (; hi && n; lo++) {
		uint64_t m = MIN(n, s[lo].start + s[lo].count - first);

		segment_offsets(j, k, s + lo, first, m, offset);
		offset += m;
		first += m;
		n -= m;
	}
}

static void count_bytes(const uint8_t *e, uint64_t n, uint32_t counts[256])
{
	for (uint64_t i = 0; i < n; i++)
		counts[e[i]]++;
}

/* Plane 0 of patterns. */
static void count_patterns(const struct dtype *d, const uint16_t *p, uint64_t n, uint32_t counts[256])
{
	for (uint64_t i = 0; i < n; i++)
		counts[p[i] >> dtype_shift(d) & 255]++;
}

/* Counts of the segment's symbols without offsets (raw) and with them (fitted), from every stride-th quad row. */
static void count_segment(const struct source *src, const struct kernels *k, const struct job *j,
			  const struct segment *s, uint64_t stride, uint32_t *raw, uint32_t *fitted)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t first = (s->start + stride * WIRE_ROW - 1) / (stride * WIRE_ROW) * stride * WIRE_ROW;

	for (; first < s->start + s->count; first += stride * WIRE_ROW) {
		uint64_t n = MIN(WIRE_ROW, s->start + s->count - first);
		uint16_t p[WIRE_ROW], offset[WIRE_ROW];

		__builtin_prefetch((const void *)((uintptr_t)src->data + (first + stride * WIRE_ROW) * d->nbytes));
		patterns(src, k, first, n, p);
		if (raw)
			count_patterns(d, p, n, raw);
		if (fitted) {
			segment_offsets(j, k, s, first, n, offset);
			k->lower(p, offset, model_zero(&j->h, d), n, p);
			count_patterns(d, p, n, fitted);
		}
	}
}

static uint64_t sum_counts(const uint32_t counts[256])
{
	uint64_t total = 0;

	for (int i = 0; i < 256; i++)
		total += counts[i];
	return total;
}

/* Do the offsets save more than the nibbles they cost? */
static int pays(const struct segment *s, const uint32_t raw[256], const uint32_t fitted[256])
{
	uint64_t samples = sum_counts(raw), before = book_entropy_q16(raw), after = book_entropy_q16(fitted);
	uint64_t nibbles = segment_rows(s) + segment_cols(s);

	if (!samples || before <= after)
		return 0;
	/* per value in 1/65536 bit, so that the product stays below 2^64 */
	return (before - after) / samples * s->count > (4 * nibbles + 64) << 16;
}

/* Planes other than the exponent: few samples tell whether they are worth coding, constant or full of zeros. */
static void sample_planes(const struct source *src, const struct kernels *k, const struct job *j, struct sample *s,
			  int first_plane)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t nrows = (j->h.n + WIRE_ROW - 1) / WIRE_ROW, take = MIN((nrows + 1) / 2, 64);
	uint8_t bytes[WIRE_MAX_PLANES][WIRE_ROW], value[WIRE_MAX_PLANES];
	uint8_t *plane[WIRE_MAX_PLANES], other_zeros = 0;
	uint32_t zeros = 0, sampled = 0;

	for (int p = 0; p < WIRE_MAX_PLANES; p++)
		plane[p] = bytes[p];
	s->is_constant = 0xff;
	for (uint64_t i = 0; i < take; i++) {
		uint64_t first = i * nrows / take * WIRE_ROW, n = MIN(WIRE_ROW, j->h.n - first);
		uint16_t offset[WIRE_ROW];

		model_offsets(j, k, first, n, offset);
		k->split[d->form]((const char *)src->data + first * d->nbytes, n, offset, plane);
		for (int p = first_plane; p < d->nbytes; p++) {
			uint8_t any = 0, differ = 0;

			if (i == 0)
				value[p] = plane[p][0];
			for (uint64_t v = 0; v < n; v++) {
				any |= plane[p][v];
				differ |= plane[p][v] ^ value[p];
			}
			s->has_zero_run |= (uint8_t)(!any << p);
			s->is_constant &= (uint8_t)~(!!differ << p);
			count_bytes(plane[p], n, s->counts[p]);
			other_zeros |= k->under_zeros(plane[0], plane[p], n);
		}
		zeros += (uint32_t)(n - k->count(plane[0], 1, n));
		sampled += (uint32_t)n;
	}
	/* no other value of float64 has this byte, and where they are many and all +0 blocks prune them */
	if (d->form == FORM_FLOAT8 && 64 * zeros >= sampled && !other_zeros)
		s->counts[1][0] = 0;
}

/*
 * Offsets that are not whole octaves move mantissas, too. Where these are worth coding (few bits of them are in use,
 * say) they should stay as they are.
 */
static uint8_t finest_shift(const struct dtype *d, const struct sample *s)
{
	int values = 2 << dtype_shift(d);
	uint32_t counts[256] = {0}; /* of signs and mantissas */

	if (d->octave > 128) /* its mantissas' upper bits are in plane 0 */
		return 0;
	for (int i = 0; i < 256; i++)
		counts[i % values] += s->counts[1][i];
	return (s->is_constant | s->has_zero_run) & 2 || !near_uniform(counts, (uint64_t)values) ? WIRE_MAX_SHIFT : 0;
}

void model_choose(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
		  struct sample *s)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t nrows = (j->h.n + WIRE_ROW - 1) / WIRE_ROW;
	uint64_t stride = MAX(nrows / 2048, MAX(1, MIN(16, nrows / 64)));
	const struct segment whole = {.count = j->h.n};
	uint8_t finest;

	memset(s, 0, sizeof *s);
	j->model.nsegments = j->model.nibbles = 0;
	if (j->h.codec != CODEC_TRUNCATE)
		sample_planes(src, k, j, s, d->octave != 0);
	if (!d->octave)
		return;
	finest = j->h.codec == CODEC_TRUNCATE ? WIRE_MAX_SHIFT : finest_shift(d, s);
	if (j->h.n >= MODEL_MIN) {
		cut(with, j);
		j->model.offsets_at = j->model.segments_at + j->model.nsegments * sizeof(struct segment);
	}
	if (model_asked(&j->h) == WIRE_MODEL_FLAT || j->h.n < MODEL_MIN) {
		j->model.nsegments = 0;
		count_segment(src, k, j, &whole, stride, s->counts[0], NULL);
		s->nzeros = s->counts[0][0];
		s->nvalues = sum_counts(s->counts[0]);
		return;
	}
	for (uint64_t i = 0; i < j->model.nsegments; i++) {
		struct segment *g = job_segments(j) + i;
		uint32_t raw[256] = {0}, fitted[256] = {0};

		fit_rows(src, k, j, g, finest);
		if (g->kind & WIRE_SEGMENT_COLS)
			fit_cols(src, k, j, g, finest);
		settle_base(j, d, g, 1 << finest);
		count_segment(src, k, j, g, stride, raw, fitted);
		s->nzeros += fitted[0];
		s->nvalues += sum_counts(raw);
		if (model_asked(&j->h) != WIRE_MODEL_SEPARABLE && !pays(g, raw, fitted)) {
			if (j->model.nsegments == 1) {
				j->model.nsegments = 0;
				memcpy(s->counts[0], raw, sizeof raw);
				return;
			}
			g->kind = 0;
			g->row = WIRE_FLAT_COLS;
			g->shifts = 0;
			settle_base(j, d, g, 8);
			memset(fitted, 0, sizeof fitted);
			count_segment(src, k, j, g, stride, NULL, fitted);
		}
		for (int v = 0; v < 256; v++)
			s->counts[0][v] += fitted[v];
	}
	if (d->form == FORM_FLOAT8) { /* whose plane 1 has bits of the exponent, as the model moves it */
		memset(s->counts + 1, 0, sizeof s->counts - sizeof *s->counts);
		s->has_zero_run = 0;
		sample_planes(src, k, j, s, 1);
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
		store32(record + 8, s->kind ? s->row : 0);
		record[12] = s->kind;
		record[13] = s->shifts;
		store16(record + 14, s->base);
		p = pack_nibbles(segment_row_offsets(j, s), segment_rows(s), s->shifts & 15, p);
		p = pack_nibbles(segment_col_offsets(j, s), segment_cols(s), s->shifts >> 4, p);
	}
}

#define BAD(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

/* The record at frame[at]: the next segment, if it may be one. */
static codec_status read_record(const uint8_t *frame, uint64_t at, struct job *j, struct segment *s, codec_fault *f)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint32_t bases = (uint32_t)(WIRE_CIRCLE(model_zero(&j->h, d)) / grain_of(d));
	uint32_t row = load32(frame + at + 8), rows_shift, cols_shift;
	int matrix;

	s->count = load64(frame + at);
	s->kind = frame[at + 12];
	s->shifts = frame[at + 13];
	s->base = load16(frame + at + 14);
	s->row = s->kind ? row : WIRE_FLAT_COLS;
	matrix = s->kind == (WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS);
	rows_shift = s->shifts & 15;
	cols_shift = s->shifts >> 4;
	if (!s->count || s->count > j->h.n - s->start)
		BAD(at, s->count, j->h.n - s->start);
	if (s->kind > WIRE_SEGMENT_ROWS && !matrix)
		BAD(at + 12, s->kind, WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS);
	if (!matrix && row != (s->kind ? WIRE_FLAT_COLS : 0))
		BAD(at + 8, row, s->kind ? WIRE_FLAT_COLS : 0);
	if (matrix && (row < WIRE_MATRIX_MIN || s->count % row || s->count / row < WIRE_MATRIX_MIN))
		BAD(at + 8, row, WIRE_MATRIX_MIN);
	if (rows_shift > (s->kind ? WIRE_MAX_SHIFT : 0) || cols_shift > (matrix ? WIRE_MAX_SHIFT : 0))
		BAD(at + 13, s->shifts, WIRE_MAX_SHIFT);
	if (s->base >= bases)
		BAD(at + 14, s->base, bases - 1);
	if (j->h.codec == CODEC_TRUNCATE && (s->base % 8 || rows_shift != (s->kind ? WIRE_MAX_SHIFT : 0) ||
					     cols_shift != (matrix ? WIRE_MAX_SHIFT : 0)))
		BAD(at + 13, s->shifts, WIRE_MAX_SHIFT);
	return CODEC_OK;
}

/* n nibbles at frame[*p]. */
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

/* Read the scale model at frame[at, end). */
codec_status model_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f)
{
	uint64_t nsegments, start = 0, p;

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
		add_segment(j, &s);
		TRY(read_nibbles(frame, &p, segment_rows(&s), s.shifts & 15, segment_row_offsets(j, &s), f));
		TRY(read_nibbles(frame, &p, segment_cols(&s), s.shifts >> 4, segment_col_offsets(j, &s), f));
		start += s.count;
	}
	if (start != j->h.n)
		BAD(at, start, j->h.n);
	*used = p;
	return CODEC_OK;
}
