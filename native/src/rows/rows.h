/* rows.h - frames whose values share scales: parts, blocks, regions. docs/spec/format.md, section 8. */
#ifndef CODEC_ROWS_H
#define CODEC_ROWS_H

#include "coder/model.h"
#include "coder/plane.h"
#include "coder/sink.h"

/* number of codes to pack at once if rows are longer than a block */
#define ROW_TILE 10240

/* parts.c: parts and blocks, from header and segments or from a frame's side section */
uint64_t rows_job_nbytes(const struct header *h);
void rows_cut(struct job *j, const codec_context *with);
codec_status rows_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f);
uint64_t rows_side_nbytes(const struct job *j);
void rows_write(const struct job *j, uint8_t *dst);
struct place {
	const struct part *part;
	uint64_t first, n; /* index of the first value, number of values */
	uint64_t nscales;  /* size in bytes of the scales of the block's rows */
};
struct place rows_place(const struct job *j, uint64_t block);
uint64_t rows_bound(const struct header *h);
uint64_t rows_bound_segments(const struct header *h, const codec_context *with);
uint64_t rows_regions_nbytes(const struct job *j, uint64_t first, uint64_t count);

/*
 * Return the number of values to process at once from index i of a block of m values: whole rows, or a piece of one
 * row.
 */
static inline uint64_t rows_run(uint32_t row, uint64_t i, uint64_t m)
{
	uint64_t run = ROW_CHUNK;

	if (row && row <= ROW_CHUNK)
		run = ROW_CHUNK / row * row;
	else if (row)
		run = MIN(run, row - i % row);
	return MIN(run, m - i);
}

/* scan.c: compute scales, and check that values are finite */
uint64_t rows_scan_count(const struct job *j);
void rows_scan(struct job *j, const struct kernels *k, const struct source *src, uint64_t first, uint64_t count);
codec_status rows_finish(struct job *j);
int rows_blocks_can_scan(const struct job *j);
void rows_scan_signs(const struct job *j, const struct kernels *k, const struct source *src, const struct part *p,
		     uint64_t first, uint64_t n, uint8_t *bits);
codec_status rows_sign_scales(const struct job *j, const struct kernels *k, const struct source *src, uint64_t first,
			      uint64_t n, uint32_t row, uint8_t *stored, uint8_t *bits);
codec_status rows_scales(const struct job *j, const struct kernels *k, const struct row_kind *q, const struct part *p,
			 const float_any *x, uint64_t n, struct work *w, uint8_t *stored);
codec_status rows_long_scale(const struct job *j, const struct kernels *k, const struct row_kind *q,
			     const struct part *p, const struct source *src, uint64_t first, uint64_t n, struct work *w,
			     uint8_t *stored);

/* encode.c, decode.c */
int rows_opens_with_work(const struct header *h);
uint64_t rows_work_nbytes(const struct header *h);
void rows_work_place(const struct header *h, char **p, struct work *w);
uint64_t rows_region_bound(const struct job *j);
codec_status rows_begin(struct job *j, const codec_spec *s, const codec_context *with);
codec_status rows_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with);
codec_status rows_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
			       const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
			       uint64_t *nbytes);
codec_status rows_leave(const struct job *j, const struct kernels *k, const codec_context *with,
			const struct source *src, void *work);
codec_status rows_codes(const struct job *j, const struct kernels *k, const struct source *src, uint64_t b, uint64_t *n,
			struct work *w);
codec_status rows_residual(const struct job *j, const struct kernels *k, const struct source *src,
			   const uint8_t *region, uint64_t b, float *residual, struct work *w);
codec_status rows_decode_block(const struct job *j, const struct kernels *k, const uint8_t *frame, uint64_t b,
			       uint64_t at, uint64_t end, const struct sink *sink, struct work *w, codec_fault *f);

codec_status rows_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				const struct job *j, codec_range *range, struct work *w);

int rows_sums_signs(const struct job *j);
codec_status rows_sum_signs(const void *const *frames, const void *const *jobs, size_t count, const codec_context *with,
			    uint64_t b, float divide, float_any *y, uint64_t *checksums, struct work *w);

#endif
