/* api.h - internal functions behind the C interface: open, process and close jobs for encoding and decoding. */
#ifndef CODEC_API_H
#define CODEC_API_H

#include "delta/delta.h"
#include "frame/frame.h"
#include "isa/cpu.h"
#include "lossless/lossless.h"
#include "rows/rows.h"
#include "topk/topk.h"
#include "truncate/truncate.h"

/* close.c: close an encode job */
codec_status encode_store(const struct source *src, const struct kernels *k, struct header h, uint8_t *dst,
			  size_t capacity, size_t *written);
uint64_t encode_move(const struct header *h, uint8_t *dst, size_t capacity, const codec_range *range, uint64_t to);
codec_status encode_finish(const struct source *src, uint8_t *dst, size_t capacity, const codec_context *with,
			   const struct job *j, const codec_range *ranges, size_t nranges, size_t *written);
codec_status encode_leave(const struct job *j, const struct source *src, const uint8_t *frame,
			  const codec_context *with, void *work);

/* decode.c: decode jobs, also used by codec_reduce */
codec_status decode_open(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 void *memory, size_t job_nbytes, struct job **out);
codec_status decode_step(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 const void *job, const codec_range *range, const void *work, size_t work_nbytes,
			 codec_tensor *copy);
codec_status decode_check(const uint8_t *frame, const codec_context *with, struct job *j, void *work);
codec_status decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, codec_range *range, void *work);
codec_status decode_values(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, void *work);
codec_status decode_close(const codec_context *with, const struct job *j, uint64_t checksum);

/* side.c: the side section */
uint64_t side_write(const struct job *j, uint8_t *dst);
void head_write(const struct job *j, uint64_t frame_nbytes, uint64_t checksum, uint8_t *head);
codec_status side_read(const uint8_t *frame, const codec_context *with, struct job *j);

/* api.c: jobs, sizes and arguments */
int has_blocks(const struct header *h, const codec_range *range);
codec_status context_read(const codec_context *with, codec_context *copy);
codec_status request(const codec_spec *spec, const codec_tensor *like, int with_data, struct header *h,
		     codec_tensor *copy);
uint64_t job_room(const struct header *h, uint32_t kind);
uint64_t job_scratch(const struct header *h);
void *job_work(const struct job *j, void *scratch);
struct job *job_at(const void *memory, uint32_t kind, uint32_t state);
codec_status job_open(void *memory, size_t nbytes, const struct header *h, uint32_t kind, struct job **out);
void job_plan(struct job *j, codec_plan *plan);

/* Return the job at `memory`, for encoding or decoding and in any state, or NULL if there is none. */
const struct job *any_job(const void *memory);

#endif
