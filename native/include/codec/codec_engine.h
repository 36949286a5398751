/**
 * @file
 * codec_engine.h - codec_encode and codec_decode in steps, for callers with threads of their own.
 *
 * A job is opened by one thread, its blocks are done in ranges by any number of threads in any order, and it is closed
 * by one thread. The frame is the same to the byte as from the one-call functions. All promises of codec.h hold, and:
 *
 *   - A job and the worker buffers are plain memory of the caller, without pointers that outlive the call they are
 *     given to: the tensor, the frame and the context are passed again to every step.
 *   - A job knows what it is for and how far it is. Steps out of order, of the other direction, or with a tensor,
 *     destination or residual unlike those it was opened with are CODEC_BAD_ARGUMENT.
 *   - A step that fails may be repeated or the job abandoned; there is nothing to free. But codec_encode_close ends the
 *     job, unless it returns CODEC_BAD_ARGUMENT.
 *
 * Engines with loops of their own (in other languages, on devices) take over blocks, and nothing else: codec_job_view
 * says what was decided and where it lies in the job's memory, which they may copy to wherever they work. All of it is
 * fixed when codec_encode_open or codec_encode_start, or codec_decode_open or codec_decode_plan, returns, except for
 * offsets of rows (codec_view.offsets); and what a scan leaves (codec_view.row_sums) is taken up by codec_encode_start.
 */
#ifndef CODEC_ENGINE_H
#define CODEC_ENGINE_H

#include "codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a job takes and what has become of it: from whoever opens, plans or starts it. */
typedef struct codec_plan {
	uint64_t nblocks;      /**< 0: the frame is complete (encode) or the tensor is (decode) after opening */
	uint64_t job_nbytes;   /**< size of a job's memory */
	uint64_t work_nbytes;  /**< of one thread's buffer */
	uint64_t region_bound; /**< most bytes that one block's region takes */
	uint64_t regions_at;   /**< first byte of the frame that belongs to regions */
	uint64_t nscans;       /**< encode: pieces to be scanned before codec_encode_start; 0: skip both */
	uint64_t room;         /**< encode: bytes a block to lay ranges out by, see codec_encode_blocks */
} codec_plan;

/** Sizes of a job for a tensor like this one. One for decoding may take less: see codec_plan. */
CODEC_API codec_status codec_job_nbytes(const codec_spec *spec, const codec_tensor *like, size_t *job_nbytes,
					size_t *work_nbytes);

/**
 * A capacity that leaves room between the regions of ranges that are encoded side by side. With less, down to
 * codec_bound, more tensors must be encoded by one thread.
 */
CODEC_API codec_status codec_encode_room(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/**
 * Sample src, choose model and codebooks; or, if there are pieces to be scanned, leave that to codec_encode_start.
 * Nothing is written to dst but by codec_encode_blocks and codec_encode_close. Of a tensor that will be stored
 * plan->nblocks is 0.
 *
 * With a residual, codecs whose values share scales write it along with the blocks, so there must be room for all that
 * could become of them, codec_bound in any case: otherwise CODEC_SHORT_OUTPUT is returned before anything is written.
 */
CODEC_API codec_status codec_encode_open(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
					 const codec_context *with, void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Scales of whole tensors are known only after all of it was read: scan pieces [first, first + count) of plan->nscans,
 * in any order, then start.
 */
CODEC_API codec_status codec_encode_scan(const codec_tensor *src, const codec_context *with, void *job, uint64_t first,
					 uint64_t count);

/** Once, when all pieces were scanned: completes the plan. */
CODEC_API codec_status codec_encode_start(const codec_tensor *src, void *dst, size_t capacity,
					  const codec_context *with, void *job, codec_plan *plan);

/**
 * Encode blocks [first, first + count) into regions from byte `at` of dst on, as far as capacity allows. `at` is a
 * multiple of 8, at least plan->regions_at; ranges of blocks must get bytes that do not overlap:
 * count * plan->region_bound is enough for a range. *end is where the range's last region ends.
 *
 * If that is more than there is, a range from plan->regions_at + first * plan->room on, ended where the next one
 * begins, fits but for rare tensors: CODEC_SHORT_OUTPUT then, and codec_encode does it. Where plan->room is 0 that is
 * to be done from the beginning.
 *
 * What follows from the blocks' values for the side section is left in the job, in bytes of their own.
 */
CODEC_API codec_status codec_encode_blocks(const codec_tensor *src, void *dst, size_t capacity,
					   const codec_context *with, void *job, uint64_t first, uint64_t count,
					   uint64_t at, uint64_t *end, uint64_t *seal, void *work, size_t work_nbytes);

/**
 * Move the regions of a range that was encoded at `at` to `to`, not after it, where those of the blocks before end now:
 * *end is where these do. codec_encode_close moves what was not moved; but threads that are done with one range may do
 * this while others encode the ranges behind.
 */
CODEC_API codec_status codec_encode_move(const void *job, void *dst, size_t capacity, uint64_t first, uint64_t count,
					 uint64_t at, uint64_t to, uint64_t *end);

/**
 * Move the regions together, write all that precedes the directory, seal the frame. nranges ranges of blocks, ascending
 * and without gaps: range i has counts[i] blocks whose regions begin at ats[i]. `seal` is the sum (mod 2^64) of what
 * codec_encode_blocks gave. A frame that would be larger than the tensor is replaced by a stored one.
 */
CODEC_API codec_status codec_encode_close(const codec_tensor *src, void *dst, size_t capacity,
					  const codec_context *with, void *job, const uint64_t *counts,
					  const uint64_t *ats, size_t nranges, uint64_t seal, size_t *written);

/**
 * Check header, side section and directory, and build what decoding needs. A stored tensor is decoded here, after its
 * checksum. CODEC_VERIFY_FIRST and CODEC_CHECK_ONLY are not for steps: see codec_decode_check.
 */
CODEC_API codec_status codec_decode_open(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/**
 * All checks of blocks [first, first + count), digest, structure and state, without a destination. To leave a
 * destination as it was whatever is wrong with the frame: check all blocks, close, then decode them with
 * CODEC_NO_CHECKSUM.
 */
CODEC_API codec_status codec_decode_check(const void *frame, size_t nbytes, const codec_context *with, const void *job,
					  uint64_t first, uint64_t count, uint64_t *seal, void *work,
					  size_t work_nbytes);

/** Decode blocks [first, first + count). */
CODEC_API codec_status codec_decode_blocks(const void *frame, size_t nbytes, codec_tensor *dst,
					   const codec_context *with, const void *job, uint64_t first, uint64_t count,
					   uint64_t *seal, void *work, size_t work_nbytes);

/**
 * codec_reduce's share of blocks [first, first + nblocks), whose jobs were opened, frame by frame, with
 * CODEC_INTO_FLOAT32. seals[i] is for closing job i. CODEC_BAD_ARGUMENT: their blocks do not match, so that frames must
 * be done one after the other.
 */
CODEC_API codec_status codec_reduce_blocks(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
					   codec_tensor *dst, const codec_context *with, const void *const *jobs,
					   uint64_t first, uint64_t nblocks, uint64_t *seals, void *work,
					   size_t work_nbytes);

/** An array in a job's memory. */
typedef struct codec_array {
	uint64_t at;       /**< bytes from the job's beginning to the first item */
	uint64_t count;    /**< of items */
	uint64_t itemsize; /**< bytes an item */
} codec_array;

/** Values [start, start + count) under the scale model (docs/format.md, section 5.2). */
typedef struct codec_model_part {
	uint64_t start;      /**< its first value */
	uint64_t count;      /**< values */
	uint32_t row;        /**< values of a row; 0: of kind 0 */
	uint32_t nibbles_at; /**< twice that in codec_view.offsets: its rows' (an even number), then its columns' */
	uint16_t base;       /**< in eighths of an octave, as in the format */
	uint16_t mean;       /**< encode: the mean pattern of its rows (docs/encoder.md, section 4.2) */
	uint8_t kind;        /**< as in the format */
	uint8_t shifts;      /**< as in the format */
} codec_model_part;

/** Values whose blocks and rows are their own (section 8). */
typedef struct codec_row_part {
	uint64_t start;       /**< its first value */
	uint64_t count;       /**< values */
	uint64_t first_block; /**< number of its first block */
	uint32_t first_sum;   /**< number of its first piece for codec_encode_scan */
	uint32_t row;         /**< values that share a scale; 0: all do */
	float scale[2];       /**< of the part, if such parts have any */
} codec_row_part;

/** What a piece of codec_encode_scan leaves: sums as in docs/encoder.md, section 7.2. */
typedef struct codec_row_sums {
	double sum[2];     /**< of abs(v), or of v^2 and v; two_mean: without a sign bit, and with one */
	uint32_t negative; /**< two_mean: how many have one */
	uint32_t max;      /**< bits of the largest abs(v), as float32 */
} codec_row_sums;

/** Fields of the header as in docs/format.md, and what follows from them. Offsets are bytes from the frame's start. */
typedef struct codec_view {
	uint32_t struct_nbytes; /**< sizeof(codec_view), set by the caller */
	uint32_t encoding;      /**< 0: decoding */
	/** @{ */
	/** As in the header (docs/format.md, section 2). */
	uint32_t codec, dtype, layout;
	uint32_t variant, options, bits, row;
	int32_t guard;
	uint32_t flags, fixed, coded, halved;
	uint64_t n, block_nvalues, nblocks, frame_nbytes;
	/** @} */
	/** @{ */
	/** Where sections begin, and the bytes of a fixed plane. */
	uint64_t side_offset, side_nbytes, directory_offset, planes_offset, plane_stride, regions_offset;
	/** @} */
	/** @{ */
	/** Encode. Codecs of rows: the key of draws, the scale that was given, the clip; 0: none. */
	uint32_t seed;
	float scale, clip;
	uint32_t cap; /* encode: bits of the longest code */
	uint64_t stream;
	/** @} */
	codec_array lengths; /**< a codebook a plane, where `coded` says so: lengths of values 0..255, of the escape */
	/**
	 * The same as tables, 256 bytes and 256 bytes and 2. Encode: codes, right-justified; their lengths, with bit 7
	 * the escape's; then a value without a code, if there is one, and the value of the first code. Decode, by the
	 * next 8 bits: values, lengths; then the value that stands for the escape, and that of the first code.
	 */
	codec_array tables;
	codec_array model_parts; /**< codec_model_part; none: all offsets are 0 */
	/**
	 * int8, in eighths of an octave. Encode: of a part of more than 1,024 rows, those of its rows are for the
	 * blocks in which rows begin, to be stored here before codec_encode_close or codec_encode_head.
	 */
	codec_array offsets;
	codec_array row_parts; /**< codec_row_part */
	/** Encode: codec_row_sums of all pieces, which may be stored here instead of by codec_encode_scan. */
	codec_array row_sums;
	uint64_t codebook_id; /**< what the frame calls a codebook that was given; 0: none was */
} codec_view;

/** Describe a job, whatever it is for and however far it is. */
CODEC_API codec_status codec_job_view(const void *job, codec_view *view);

/**
 * For tensors that lie elsewhere, where all that depends on values is decided: a job from what is known without them.
 * Parts of the scale model are cut but have no bases, a codebook that was given has its tables; plan->nblocks is 0 if
 * such a tensor is stored whatever its values are. codec_encode_head then writes the header alone.
 */
CODEC_API codec_status codec_encode_plan(const codec_spec *spec, const codec_tensor *like, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Instead of codec_encode_close, where blocks lie elsewhere: all that precedes the directory, with the frame's size and
 * checksum blank, plan->regions_at bytes at most.
 */
CODEC_API codec_status codec_encode_head(const void *job, void *head, size_t capacity, size_t *written);

/** Then the same with both: `seal` is the sum of the seals of blocks and of the directory's digest (section 11). */
CODEC_API codec_status codec_encode_seal(const void *job, uint64_t frame_nbytes, uint64_t seal, void *head,
					 size_t head_nbytes);

/**
 * For blocks that are decoded elsewhere: a job from a frame's header and side section alone, the first head_nbytes of
 * its nbytes bytes. With fewer than that takes, CODEC_TRUNCATED is returned and the fault says what is expected. The
 * rest is for whoever decodes: to compare the destination, the directory and what fixed planes end in; to check blocks
 * and to close with the seals of blocks plus the directory's digest (stored: that of the values as block 0).
 */
CODEC_API codec_status codec_decode_plan(const void *head, size_t head_nbytes, size_t nbytes, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/** `seal` is the sum of what codec_decode_blocks gave: is it the frame's checksum? */
CODEC_API codec_status codec_decode_close(const codec_context *with, const void *job, uint64_t seal);

#ifdef __cplusplus
}
#endif

#endif
