/*
 * fit.c - choose an encoder's scale model (segments, offsets and bases) from samples. Formulas: exact/choose.h.
 *
 * The logarithm of a value of a gradient matrix is nearly the sum of a term of its row and a term of its column. A
 * float's pattern is its logarithm, except for the mantissa's curve. A segment (a parameter in a flat bucket, or the
 * whole tensor) has a base and, if that makes the frame smaller, an offset for each row and column. Sample positions
 * depend on the shape only. All arithmetic is on integers.
 *
 * One file: choosing a scale model from samples uses the same functions as fitting it to all values.
 */
#include "gaps.h"
#include "model.h"

#define PIECE_ROWS 128 /* quad rows of a sample's piece; a sample of fewer than LEAST_PIECES needs no second thread */
#define LEAST_PIECES 4
#define NEAR_NBYTES (1u << 20) /* tensors up to this size fit a cache, where prefetching costs more than it saves */

static void add_flat(struct job *j, uint64_t start, uint64_t end)
{
	struct segment s = {.start = start, .count = end - start, .row = WIRE_FLAT_ROW, .kind = WIRE_SEGMENT_ROWS};

	if (end > start)
		model_add(j, &s);
}

static void add_shape(struct job *j, uint64_t start, uint64_t count, uint32_t rank, const uint64_t *shape)
{
	struct segment s = {.start = start, .count = count, .kind = WIRE_SEGMENT_ROWS | WIRE_SEGMENT_COLS};

	s.row = choose_columns(rank, shape, count);
	if (s.row)
		model_add(j, &s);
	else
		add_flat(j, start, start + count);
}

/* Return 1 if the model is flat: all values share one base, without offsets. */
static int is_flat(const struct job *j)
{
	return model_asked(&j->h) == CODEC_MODEL_FLAT || j->h.n < CHOOSE_MODEL_MIN;
}

/* Return 1 if the model always has a base. float64 needs a base, so that its symbols lie far from their wrap-around. */
static int is_based(const struct job *j)
{
	return dtype_of(j->h.dtype)->form == FORM_FLOAT8;
}

/* Cut the tensor into segments. Segments too small for a record, and gaps, are merged into flat segments. */
static void cut_parts(const codec_context *with, struct job *j)
{
	uint64_t flat = 0, end = 0;

	if (is_flat(j) || !with->nsegments) {
		if (j->h.n >= CHOOSE_SEGMENT_MIN)
			add_shape(j, 0, j->h.n, j->h.rank, j->h.shape);
		else
			add_flat(j, 0, j->h.n);
		return;
	}
	for (uint64_t i = 0; i < with->nsegments; i++) {
		const codec_segment *s = with->segments + i;
		uint64_t count = segment_count(s);

		end = s->offset + count;
		if (count < CHOOSE_SEGMENT_MIN)
			continue;
		add_flat(j, flat, s->offset);
		add_shape(j, s->offset, count, s->rank, s->shape);
		flat = end;
	}
	add_flat(j, flat, j->h.n);
}

void model_cut(struct job *j, const codec_context *with)
{
	j->model.nsegments = j->model.nibbles = 0;
	if (dtype_of(j->h.dtype)->octave && (!is_flat(j) || is_based(j)))
		cut_parts(with, j);
	j->model.offsets_at = j->model.segments_at + j->model.nsegments * sizeof(struct segment);
}

/* Load the patterns of values [first, first + n), n <= COLUMNS. Return 0 if all these values are 0, else 1. */
static int patterns(const struct source *src, const struct kernels *k, uint64_t first, uint64_t n, uint16_t *p)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint8_t sums[4 * COLUMNS];
	const void *values = load_native(k, src, first, n, sums);

	k->patterns[d->form](values, n, p);
	return !is_zero(values, n * d->nbytes);
}

/* Prefetch values [first, first + n), because samples lie too far apart for the CPU's prefetcher. */
static void prefetch_values(const struct source *src, const struct dtype *d, uint64_t first, uint64_t n)
{
	uintptr_t at = (uintptr_t)src->data + first * d->nbytes;

	if (src->nbytes < NEAR_NBYTES)
		return;
	for (uint64_t b = 0; b < n * d->nbytes; b += 64)
		__builtin_prefetch((const void *)(at + b));
}

/* Prefetch the samples of row r that row_mean will read. */
static void prefetch_row(const struct source *src, const struct dtype *d, const struct segment *s, uint64_t r)
{
	uint64_t first = s->start + r * s->row, runs = choose_runs(dtype_is_float8(d));

	if (s->row <= runs * CHOOSE_RUN)
		prefetch_values(src, d, first, s->row);
	else
		for (uint64_t i = 0; i < runs; i++)
			prefetch_values(src, d, first + choose_run(i, runs, s->row), CHOOSE_RUN);
}

/* Return the mean pattern of a few runs of row r, or CHOOSE_NONE if none of their patterns is at least model_zero. */
static int row_mean(const struct source *src, const struct kernels *k, const struct job *j, const struct segment *s,
		    uint64_t r)
{
	uint64_t first = s->start + r * s->row, n = MIN(s->row, s->start + s->count - first);
	uint64_t runs = choose_runs(dtype_is_float8(dtype_of(src->dtype)));
	uint16_t p[CHOOSE_RUNS8 * CHOOSE_RUN];
	uint32_t sum, count;

	if (n <= runs * CHOOSE_RUN) {
		patterns(src, k, first, n, p);
	} else {
		for (uint64_t i = 0; i < runs; i++)
			patterns(src, k, first + choose_run(i, runs, n), CHOOSE_RUN, p + i * CHOOSE_RUN);
		n = runs * CHOOSE_RUN;
	}
	k->sum(p, n, model_zero(&j->h, dtype_of(src->dtype)), &sum, &count);
	return choose_mean(sum, count);
}

/*
 * Return the offset of row r, in eighths of an octave. It depends only on the row's values, the mean of all rows and
 * the shift.
 */
static int8_t fit_row(const struct source *src, const struct kernels *k, const struct job *j, const struct segment *s,
		      uint64_t r)
{
	int eighths = choose_eighths(row_mean(src, k, j, s, r), s->mean, eighth_log2(dtype_of(src->dtype)));

	return (int8_t)choose_offset(eighths, s->shifts & 15);
}

/* Return 1 if the offsets of all rows of a segment are computed when the job is opened; 0: when blocks are encoded. */
static int is_fitted(const struct segment *s)
{
	return segment_rows(s) <= CHOOSE_ROWS;
}

/* Compute the mean pattern of a segment's rows, and the shift of row offsets, from a sample of rows. */
static void fit_rows(const struct source *src, const struct kernels *k, struct job *j, struct segment *s, int finest)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t nrows = segment_rows(s), take = MIN(nrows, CHOOSE_ROWS);
	int16_t mean[CHOOSE_ROWS];
	int8_t eighths[CHOOSE_ROWS];
	int64_t total = 0, count = 0;

	for (uint64_t i = 0; i < take; i++) {
		prefetch_row(src, d, s, choose_spread(MIN(i + 4, take - 1), take, nrows));
		mean[i] = (int16_t)row_mean(src, k, j, s, choose_spread(i, take, nrows));
		total += mean[i] == CHOOSE_NONE ? 0 : mean[i];
		count += mean[i] != CHOOSE_NONE;
	}
	s->mean = (uint16_t)(count ? bits_mean(total, count) : choose_centre(d->octave));
	for (uint64_t i = 0; i < take; i++)
		eighths[i] = (int8_t)choose_eighths(mean[i], s->mean, eighth_log2(d));
	s->shifts = (uint8_t)choose_shift(eighths, take, finest, dtype_most_shift(d));
	for (uint64_t i = 0; i < take && is_fitted(s); i++)
		segment_row_offsets(j, s)[i] = (int8_t)choose_offset(eighths[i], s->shifts);
}

/* Compute the offset of each column: the mean, over sampled rows, of (pattern - row offset). */
static void fit_cols(const struct source *src, const struct kernels *k, struct job *j, struct segment *s, int finest)
{
	const struct dtype *d = dtype_of(src->dtype);
	int8_t *cols = segment_col_offsets(j, s), offset[CHOOSE_COL_ROWS8];
	uint64_t nrows = segment_rows(s), take = choose_col_rows(nrows, dtype_is_float8(d));
	int shift;

	for (uint64_t i = 0; i < take; i++) {
		uint64_t r = choose_spread(i, take, nrows);

		offset[i] = is_fitted(s) ? segment_row_offsets(j, s)[r] : fit_row(src, k, j, s, r);
	}
	for (uint64_t c = 0; c < s->row; c += COLUMNS) {
		uint64_t n = MIN(COLUMNS, s->row - c);
		struct columns sums = {0};
		uint16_t p[COLUMNS];

		for (uint64_t i = 0; i < take; i++) {
			patterns(src, k, s->start + choose_spread(i, take, nrows) * s->row + c, n, p);
			k->columns(p, s->mean + offset[i] * (1 << eighth_log2(d)), model_zero(&j->h, d), n, &sums);
		}
		for (uint64_t i = 0; i < n; i++)
			cols[c + i] = (int8_t)choose_mean_eighths(sums.total[i], sums.count[i], eighth_log2(d));
	}
	shift = choose_shift(cols, s->row, finest, dtype_most_shift(d));
	for (uint64_t c = 0; c < s->row; c++)
		cols[c] = (int8_t)choose_offset(cols[c], shift);
	s->shifts |= (uint8_t)(shift << 4);
}

/* Compute the offsets of rows [r, end). Rows are adjacent, so one load reads many short rows. */
static void fit_whole(const struct source *src, const struct kernels *k, const struct job *j, const struct segment *s,
		      uint64_t r, uint64_t end, int8_t *rows)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint16_t zero = model_zero(&j->h, d), p[COLUMNS];
	int eighth = eighth_log2(d), shift = s->shifts & 15, centre = s->mean;
	uint64_t row = s->row, n;

	for (; row > choose_runs(dtype_is_float8(d)) * CHOOSE_RUN && r < end; r++)
		rows[r] = fit_row(src, k, j, s, r);
	for (; r < end; r += n) {
		n = MIN(end - r, COLUMNS / row);
		patterns(src, k, s->start + r * row, n * row, p);
		for (uint64_t i = 0; i < n; i++) {
			uint32_t sum, count;

			k->sum(p + i * row, row, zero, &sum, &count);
			rows[r + i] =
				(int8_t)choose_offset(choose_eighths(choose_mean(sum, count), centre, eighth), shift);
		}
	}
}

/*
 * Compute the offsets of rows that begin in values [first, first + n) of a segment and were not computed when the job
 * was opened. Only the thread that encodes these values stores or reads those offsets. If the row of the first value
 * begins before that value, the offset of the row is f->row. It is computed again, because another thread may encode
 * the values before, unless blocks overwrite these with the residual: then they are encoded in order.
 */
static void fit_range(const struct source *src, const struct kernels *k, struct job *j, const struct segment *s,
		      uint64_t first, uint64_t n, struct fitted *f)
{
	uint64_t i = first - s->start, end = i + n, r;
	int8_t *rows = segment_row_offsets(j, s);

	f->from = first;
	if (!s->kind)
		return;
	r = i / s->row;
	if (i % s->row) {
		f->row = is_fitted(s) || j->blocks_leave ? rows[r] : fit_row(src, k, j, s, r);
		r++;
	}
	if (!is_fitted(s) && r * s->row < end)
		fit_whole(src, k, j, s, r, (end + s->row - 1) / s->row, rows);
}

void model_fit(const struct source *src, const struct kernels *k, struct job *j, uint64_t first, uint64_t n,
	       struct fitted *f)
{
	struct fitted later;

	for (const struct segment *s = model_segment_at(j, first); j->model.nsegments && n; s++, f = &later) {
		uint64_t m = MIN(n, s->start + s->count - first);

		fit_range(src, k, j, s, first, m, f);
		first += m;
		n -= m;
	}
}

static void count_bytes(const uint8_t *e, uint64_t n, uint32_t counts[256])
{
	uint64_t i = 0, x;

	for (; i + 8 <= n; i += 8) { /* load eight symbols at once */
		memcpy(&x, e + i, 8);
		for (int k = 0; k < 8; k++)
			counts[x >> 8 * k & 255]++;
	}
	for (; i < n; i++)
		counts[e[i]]++;
}

/*
 * Add the symbols of n patterns to the histogram `bins`. There are two sets of 256 bins, used for alternate values,
 * because incrementing the same bin repeatedly is limited by the latency of the store. close_bins adds them up.
 */
static void count_bins(const struct dtype *d, const uint16_t *p, uint64_t n, uint32_t bins[512])
{
	int shift = dtype_shift(d);
	uint32_t *other = bins + 256;
	uint64_t i = 0, x;

	for (; i + 4 <= n; i += 4) { /* load, shift and mask four symbols at once */
		memcpy(&x, p + i, 8);
		x = x >> shift & 0x00ff00ff00ff00ff;
		bins[x & 0xffff]++;
		other[x >> 16 & 0xffff]++;
		bins[x >> 32 & 0xffff]++;
		other[x >> 48]++;
	}
	for (; i < n; i++)
		bins[p[i] >> shift & 255]++;
}

/* Return the number of quad rows of a segment in which symbols are counted. */
static uint64_t sampled_rows(const struct job *j, const struct segment *s)
{
	uint64_t stride = choose_stride((j->h.n + WIRE_ROW - 1) / WIRE_ROW);

	return ((s->count + WIRE_ROW - 1) / WIRE_ROW + stride - 1) / stride;
}

/*
 * Count the symbols in part i of n of a segment's sample: of raw patterns, and (if `lowered`) of patterns lowered by
 * their offsets. Parts may be counted by several threads at once.
 */
static void count_piece(const struct source *src, const struct kernels *k, struct job *j, const struct segment *s,
			uint64_t i, uint64_t n, int lowered, struct symbol_counts *to)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t nrows = (s->count + WIRE_ROW - 1) / WIRE_ROW, take = sampled_rows(j, s);
	uint64_t end = take * (i + 1) / n;

	memset(to, 0, sizeof *to);
	for (uint64_t r = take * i / n; r < end; r++) {
		uint64_t at = WIRE_ROW * choose_spread(r, take, nrows), m = MIN(WIRE_ROW, s->count - at);
		uint64_t next = WIRE_ROW * choose_spread(MIN(r + 2, take - 1), take, nrows);
		uint16_t p[WIRE_ROW], offset[WIRE_ROW];
		struct fitted f;

		prefetch_values(src, d, s->start + next, WIRE_ROW);
		if (!patterns(src, k, s->start + at, m, p)) {
			to->empty += m;
			continue;
		}
		count_bins(d, p, m, to->raw);
		if (!lowered)
			continue;
		if (!is_fitted(s))
			prefetch_row(src, d, s, next / s->row);
		fit_range(src, k, j, s, s->start + at, m, &f);
		model_offsets(j, k, &f, s->start + at, m, offset);
		k->lower(p, offset, model_zero(&j->h, d), m, p);
		count_bins(d, p, m, to->lowered);
	}
}

/* Add up the counts of n pieces in the first 256 bins of the first piece, and return these counts. */
static const struct symbol_counts *add_pieces(struct symbol_counts *piece, uint64_t n)
{
	for (int e = 0; e < 256; e++) {
		uint32_t raw = 0, lowered = 0;

		for (uint64_t i = 0; i < n; i++) {
			raw += piece[i].raw[e] + piece[i].raw[256 + e];
			lowered += piece[i].lowered[e] + piece[i].lowered[256 + e];
		}
		piece->raw[e] = raw;
		piece->lowered[e] = lowered;
	}
	for (uint64_t i = 1; i < n; i++)
		piece->empty += piece[i].empty;
	return piece;
}

/* Count the symbols in the whole sample of a segment. */
static const struct symbol_counts *count_segment(const struct source *src, const struct kernels *k, struct job *j,
						 const struct segment *g, int lowered, struct sample *s)
{
	count_piece(src, k, j, g, 0, 1, lowered, s->piece);
	return add_pieces(s->piece, 1);
}

/* Sample the planes other than the exponent, to find planes that are worth coding, constant or mostly zero. */
static void sample_planes(const struct source *src, const struct kernels *k, struct job *j, struct sample *s,
			  int first_plane)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t nrows = (j->h.n + WIRE_ROW - 1) / WIRE_ROW, take = choose_plane_rows(nrows, dtype_is_float8(d));
	uint8_t bytes[WIRE_MAX_PLANES][WIRE_ROW], value[WIRE_MAX_PLANES];
	uint8_t *plane[WIRE_MAX_PLANES], other_zeros = 0;
	uint32_t zeros = 0, sampled = 0;

	for (int p = 0; p < WIRE_MAX_PLANES; p++)
		plane[p] = bytes[p];
	s->is_constant = 0xff;
	s->has_zero_run = 0;
	memset(s->counts + first_plane, 0, ((size_t)d->nbytes - (size_t)first_plane) * sizeof *s->counts);
	for (uint64_t i = 0; i < take; i++) {
		uint64_t first = WIRE_ROW * choose_even(i, take, nrows), n = MIN(WIRE_ROW, j->h.n - first);
		int is_empty = is_zero((const char *)src->data + first * d->nbytes, n * d->nbytes);
		uint16_t offset[WIRE_ROW];
		struct fitted f;

		model_fit(src, k, j, first, n, &f);
		model_offsets(j, k, &f, first, n, offset);
		k->split[d->form]((const char *)src->data + first * d->nbytes, n, offset, plane);
		for (int p = first_plane; p < d->nbytes; p++) {
			uint8_t any = 0, differ = 0;

			if (i == 0)
				value[p] = plane[p][0];
			for (uint64_t v = 0; v < n; v++) {
				any |= plane[p][v];
				differ |= plane[p][v] ^ value[p];
			}
			s->is_constant &= (uint8_t)~(!!differ << p);
			if (is_empty)
				continue;
			s->has_zero_run |= (uint8_t)(!any << p);
			if (differ)
				count_bytes(plane[p], n, s->counts[p]);
			else
				s->counts[p][value[p]] += (uint32_t)n;
			if (d->form == FORM_FLOAT8)
				other_zeros |= k->under_zeros(plane[0], plane[p], n);
		}
		s->has_empty_row |= (uint8_t)is_empty;
		zeros += is_empty ? 0 : (uint32_t)(n - k->count(plane[0], 1, n));
		sampled += is_empty ? 0 : (uint32_t)n;
	}
	/* Only zeros have byte 0 in plane 1. If zeros are frequent and all +0, blocks omit them from the plane. */
	if (d->form == FORM_FLOAT8 && choose_prunes(zeros, sampled) && !other_zeros)
		s->counts[1][0] = 0;
}

static void base_alone(struct segment *s, uint16_t base)
{
	s->kind = s->shifts = 0;
	s->row = 0;
	s->base = base;
}

/* Add a segment's counts of symbols to the tensor's. Counts of float8, with signs, come from sample_planes. */
static void add_counts(const struct dtype *d, const uint32_t counts[256], uint32_t sum[256])
{
	for (int e = 0; e < 256 && dtype_has_top(d); e++)
		sum[e] += counts[e];
}

/* Return the finest unit of offsets that the codec allows for this sample of planes. */
static int finest_shift(const struct job *j, const struct sample *s)
{
	int pattern = (s->is_constant | s->has_zero_run) >> 1 & 1;

	if (family_of(&j->h)->whole_octaves)
		return WIRE_MAX_SHIFT;
	return choose_finest(s->counts[1], dtype_of(j->h.dtype)->octave, pattern);
}

/* Return the base of a segment without offsets. */
static uint16_t centre_of(const struct job *j, const struct segment *g)
{
	const struct dtype *d = dtype_of(j->h.dtype);

	return choose_base(g->mean, eighth_log2(d), model_zero(&j->h, d), dtype_is_float8(d) ? 0 : WIRE_MAX_SHIFT, 0);
}

/* Fit a segment's base and, unless the model is flat, its offsets. */
static void fit_segment(const struct source *src, const struct kernels *k, struct job *j, struct segment *g,
			const struct sample *s)
{
	const struct dtype *d = dtype_of(src->dtype);
	int finest = finest_shift(j, s);

	fit_rows(src, k, j, g, finest);
	if (is_flat(j)) {
		base_alone(g, centre_of(j, g));
		return;
	}
	g->base = choose_base(g->mean, eighth_log2(d), model_zero(&j->h, d), finest, g->kind);
	if (g->kind & WIRE_SEGMENT_COLS)
		fit_cols(src, k, j, g, finest);
}

/*
 * Keep a segment's offsets if they make the frame smaller. Add the histogram after lowering to s->counts[0]. `sum`:
 * counts of the segment's sample.
 */
static void choose_segment(const struct source *src, const struct kernels *k, struct job *j, struct segment *g,
			   const struct symbol_counts *sum, struct sample *s)
{
	const struct dtype *d = dtype_of(src->dtype);
	uint64_t samples = choose_total(sum->raw) + sum->empty;

	s->nzeros += sum->lowered[0] + sum->empty;
	s->nvalues += samples;
	if (is_flat(j) || model_asked(&j->h) == CODEC_MODEL_SEPARABLE ||
	    choose_offsets_pay(choose_cost(sum->raw), choose_cost(sum->lowered), samples, g->count,
			       segment_rows(g) + segment_cols(g))) {
		add_counts(d, sum->lowered, s->counts[0]);
		return;
	}
	base_alone(g, centre_of(j, g));
	if (d->form == FORM_FLOAT8) /* symbols wrap around after 256, patterns only after 2047 symbols */
		add_counts(d, count_segment(src, k, j, g, 1, s)->lowered, s->counts[0]);
	else if (dtype_has_top(d))
		choose_add_lowered(sum->raw, d->octave > 128 ? g->base : g->base / 8u, s->counts[0]);
}

/*
 * Choose the segments' bases and offsets, and count the symbols of plane 0. `alone`: drop the record of a single
 * segment without offsets.
 */
static void choose_segments(const struct source *src, const struct kernels *k, struct job *j, int alone,
			    struct sample *s)
{
	struct segment *segment = job_segments(j);
	const struct symbol_counts *sum = s->piece;

	for (uint64_t i = 0; i < j->model.nsegments; i++) {
		if (j->nscans) {
			sum = add_pieces(s->piece, j->nscans);
		} else {
			fit_segment(src, k, j, segment + i, s);
			sum = count_segment(src, k, j, segment + i, 1, s);
		}
		choose_segment(src, k, j, segment + i, sum, s);
	}
	if (!alone || j->model.nsegments > 1 || segment->kind)
		return;
	j->model.nsegments = 0;
	if (dtype_has_top(dtype_of(src->dtype)))
		memcpy(s->counts[0], sum->raw, sizeof s->counts[0]);
}

/* Sample planes that the model does not change, and cut the tensor into segments. */
static void begin_choice(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
			 struct sample *s)
{
	memset(s->counts, 0, sizeof *s->counts);
	s->nzeros = s->nvalues = s->has_empty_row = s->has_zero_run = s->is_constant = 0;
	j->model.nsegments = j->model.nibbles = 0;
	if (!family_of(&j->h)->whole_octaves)
		sample_planes(src, k, j, s, dtype_has_top(dtype_of(src->dtype)));
	if (dtype_of(src->dtype)->octave)
		model_cut(j, with);
}

uint64_t model_sample(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
		      struct sample *s)
{
	uint64_t n = 0;

	model_cut(j, with);
	if (j->model.nsegments == 1 && !is_flat(j))
		n = MIN(SAMPLE_PIECES, sampled_rows(j, job_segments(j)) / PIECE_ROWS);
	if (n < LEAST_PIECES)
		return 0;
	begin_choice(src, with, k, j, s);
	fit_segment(src, k, j, job_segments(j), s);
	memset(s->piece, 0, n * sizeof *s->piece);
	return n;
}

void model_scan(const struct source *src, const struct kernels *k, struct job *j, uint64_t first, uint64_t count,
		struct sample *s)
{
	for (uint64_t i = first; i < first + count; i++)
		count_piece(src, k, j, job_segments(j), i, j->nscans, 1, s->piece + i);
}

void model_choose(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
		  struct sample *s)
{
	const struct dtype *d = dtype_of(src->dtype);
	struct segment whole = {.count = j->h.n};
	uint8_t without;

	if (!j->nscans)
		begin_choice(src, with, k, j, s);
	if (!d->octave)
		return;
	if (!j->model.nsegments) {
		const struct symbol_counts *sum;

		if (dtype_is_float8(d))
			return;
		sum = count_segment(src, k, j, &whole, 0, s);
		memcpy(s->counts[0], sum->raw, sizeof s->counts[0]);
		s->nvalues = choose_total(s->counts[0]) + sum->empty;
		s->nzeros = sum->empty + s->counts[0][0];
		return;
	}
	choose_segments(src, k, j, !is_based(j), s);
	if (is_based(j)) /* plane 1 has bits of the exponent, which the model changes */
		sample_planes(src, k, j, s, 1);
	if (dtype_is_float8(d) && j->model.nsegments) {
		memcpy(s->counts[1], s->counts[0], sizeof s->counts[0]);
		without = (uint8_t)(s->is_constant << 1 & 2);
		sample_planes(src, k, j, s, 0);
		s->is_constant = (uint8_t)((s->is_constant & 1) | without);
		s->has_zero_run |= (uint8_t)(s->has_zero_run << 1); /* the model does not change zeros */
	}
}
