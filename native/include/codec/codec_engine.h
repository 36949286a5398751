/**
 * @file
 * codec_engine.h - codec_encode and codec_decode in steps, for callers with their own threads.
 *
 * One thread opens a job, any number of threads process ranges of its blocks in any order, and one thread closes it.
 * The frame is bit-identical to that of the one-call functions. All guarantees of codec.h hold, and:
 *
 *   - A job and the work buffers are the caller's memory. They hold no pointers: the tensor, the frame and the context
 *     are passed to every step.
 *   - A job records its direction and its progress. CODEC_BAD_ARGUMENT: a step out of order or of the other direction,
 *     or a tensor, destination or residual that does not match the one the job was opened with.
 *   - A step that fails may be repeated, or the job abandoned; there is nothing to free. codec_encode_close ends the
 *     job, unless it returns CODEC_BAD_ARGUMENT.
 *
 * An engine with its own kernels (in another language, or on a device) may process the blocks and nothing else. It
 * reads the decisions with codec_job_view and may copy the job's arrays to where its kernels run. The arrays are final
 * when codec_encode_open, codec_encode_start, codec_decode_open or codec_decode_plan returns, with three exceptions:
 * the engine may still write offsets of rows (codec_view.offsets) and digests of blocks (codec_view.row_sums), and
 * codec_encode_start reads results of a scan (codec_view.row_sums).
 */
#ifndef CODEC_ENGINE_H
#define CODEC_ENGINE_H

#include "codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Sizes in bytes and block counts of a job, set by the function that opens, plans or starts the job. */
typedef struct codec_plan {
	uint64_t nblocks;      /**< number of blocks; 0: the frame (encode) or the tensor (decode) is complete */
	uint64_t job_nbytes;   /**< size of a job, in bytes */
	uint64_t work_nbytes;  /**< size of one thread's work buffer, in bytes */
	uint64_t region_bound; /**< upper bound of one block's region, in bytes */
	uint64_t regions_at;   /**< offset of the first region in the frame */
	uint64_t nscans;       /**< encode: number of pieces for codec_encode_scan; 0: no scan and no start */
	uint64_t room; /**< encode: bytes of the frame to reserve per block of a range, see codec_encode_blocks */
} codec_plan;

/** Range of blocks that one step processes: [first, first + count). The caller sets `first`, `count` and `at`. */
typedef struct codec_range {
	uint64_t first;    /**< index of the first block */
	uint64_t count;    /**< number of blocks */
	uint64_t at;       /**< encode: offset in the frame where the blocks' regions begin, a multiple of 8 */
	uint64_t end;      /**< encode: offset in the frame of the end of the regions, set by the step */
	uint64_t checksum; /**< sum (mod 2^64) of the blocks' checksums, set by the step */
	void *buffer;      /**< encode: memory for the regions until they are moved; NULL: the frame, from `at` on */
} codec_range;

/**
 * Compute the sizes in bytes of a job and of one thread's work buffer, for a tensor like `like`. A job for decoding may
 * need less: see codec_plan.
 */
CODEC_API codec_status codec_job_nbytes(const codec_spec *spec, const codec_tensor *like, size_t *job_nbytes,
					size_t *work_nbytes);

/**
 * Compute the frame capacity in bytes with which threads can encode all ranges of blocks concurrently, with gaps
 * between their regions. With a smaller capacity, down to codec_bound_segments, more tensors must be encoded by a
 * single thread.
 */
CODEC_API codec_status codec_encode_room(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/**
 * Open a job that encodes `src`: sample it and choose the model and the codebooks. If plan->nscans is not 0,
 * codec_encode_start makes these choices. `dst` is not written. plan->nblocks is 0 if the tensor will be stored.
 *
 * If the context has a residual, codecs whose values share scales write the residual together with the blocks.
 * `capacity` must then hold the largest frame, for which codec_bound_segments is enough; otherwise CODEC_SHORT_OUTPUT
 * is returned before anything is written.
 */
CODEC_API codec_status codec_encode_open(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
					 const codec_context *with, void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Scan pieces [first, first + count) of plan->nscans: of all values, for scales of a whole tensor, or of LOSSLESS's
 * sample. Scan all pieces, in any order, by any threads, then call codec_encode_start.
 */
CODEC_API codec_status codec_encode_scan(const codec_tensor *src, const codec_context *with, void *job, uint64_t first,
					 uint64_t count);

/** Make the choices that depend on the scan, and complete the plan. Call it once, after all pieces were scanned. */
CODEC_API codec_status codec_encode_start(const codec_tensor *src, void *dst, size_t capacity,
					  const codec_context *with, void *job, codec_plan *plan);

/**
 * Encode the blocks of *range into consecutive regions that begin at dst[range->at], at least plan->regions_at. Set
 * range->end and range->checksum, for codec_encode_close.
 *
 * Ranges of blocks must not overlap in dst. A range needs at most count * plan->region_bound bytes. If dst is too small
 * to give each range that many bytes, begin each range at plan->regions_at + first * plan->room, and pass the beginning
 * of the next range as `capacity`. A range rarely exceeds that limit. If one does, CODEC_SHORT_OUTPUT is returned, and
 * the tensor must be encoded with codec_encode. If plan->room is 0, encode the tensor with codec_encode from the start.
 *
 * With range->buffer, the regions are written to this buffer of capacity - range->at bytes, and to their place in the
 * frame when they are moved. So a thread can encode many small ranges in a buffer that stays in its cache, and no pages
 * of the frame are touched that the regions do not fill in the end.
 *
 * Results of the blocks that the side section needs, such as scales, are stored in the job, at addresses that no other
 * range writes.
 */
CODEC_API codec_status codec_encode_blocks(const codec_tensor *src, void *dst, size_t capacity,
					   const codec_context *with, void *job, codec_range *range, void *work,
					   size_t work_nbytes);

/**
 * Move the regions of an encoded range to `to`, the end of the preceding block's region, which must not exceed
 * range->at. Set range->at and range->end, and range->buffer to NULL. Optional: codec_encode_close moves all remaining
 * regions, but threads can move a finished range while others encode later ones, or move other ranges.
 */
CODEC_API codec_status codec_encode_move(const void *job, void *dst, size_t capacity, codec_range *range, uint64_t to);

/**
 * Join the regions, write header, side section and checksum, and set *written to the frame's size. `ranges` must be
 * ascending and contain each block once; empty ranges are skipped. If the frame would be larger than the tensor, a
 * stored frame replaces it.
 */
CODEC_API codec_status codec_encode_close(const codec_tensor *src, void *dst, size_t capacity,
					  const codec_context *with, void *job, const codec_range *ranges,
					  size_t nranges, size_t *written);

/**
 * Open a job that decodes a frame: check header, side section and directory, and build the tables. A stored tensor is
 * decoded here, after its checksum was verified. CODEC_VERIFY_FIRST and CODEC_CHECK_ONLY return CODEC_BAD_ARGUMENT: use
 * codec_decode_check.
 */
CODEC_API codec_status codec_decode_open(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Check the blocks of *range as decoding would (checksum, structure and state), without a destination. Set
 * range->checksum. To leave the destination unchanged on any fault of the frame, check all blocks, call
 * codec_decode_close, then decode with CODEC_NO_CHECKSUM.
 */
CODEC_API codec_status codec_decode_check(const void *frame, size_t nbytes, const codec_context *with, const void *job,
					  codec_range *range, void *work, size_t work_nbytes);

/**
 * DELTA: copy the changes that codec_decode_check has found, after codec_decode_close: to `at` the indices of the
 * values that change, to `values` their new values, and to *count their number. Both arrays have room for `room`
 * changes.
 *
 * CODEC_SHORT_OUTPUT: there are more changes, or a block was not checked or changes more than one value in 8, of which
 * the job keeps no list, or the tensor has 2^32 values or more. Decode the blocks instead.
 */
CODEC_API codec_status codec_decode_changes(const void *job, uint32_t *at, void *values, size_t room, size_t *count);

/** Decode the blocks of *range. Set range->checksum; pass the sum over all ranges to codec_decode_close. */
CODEC_API codec_status codec_decode_blocks(const void *frame, size_t nbytes, codec_tensor *dst,
					   const codec_context *with, const void *job, codec_range *range, void *work,
					   size_t work_nbytes);

/**
 * Frames to reduce as codec_reduce does, each with an opened job. Several threads may use one codec_reduction at once.
 */
typedef struct codec_reduction {
	const void *const *frames; /**< `count` frames */
	const size_t *nbytes;      /**< size of each frame, in bytes */
	const void *const *jobs;   /**< opened job of each frame */
	size_t count;              /**< number of frames */
	uint32_t op;               /**< CODEC_REDUCE_* */
} codec_reduction;

/**
 * Reduce the blocks of *range, of all frames. Jobs must be opened with CODEC_INTO_FLOAT32, or CODEC_INTO_CODES for
 * CODEC_REDUCE_CODES. Set checksums[i] to the sum of the checksums of frame i's blocks; pass the sum over all ranges to
 * codec_decode_close of job i. CODEC_BAD_ARGUMENT: the frames are cut into different blocks; decode them one after the
 * other.
 */
CODEC_API codec_status codec_reduce_blocks(const codec_reduction *reduction, codec_tensor *dst,
					   const codec_context *with, const codec_range *range, uint64_t *checksums,
					   void *work, size_t work_nbytes);

/** Array in a job's memory. */
typedef struct codec_array {
	uint64_t at;       /**< offset in bytes from the job's start to the first item */
	uint64_t count;    /**< number of items */
	uint64_t itemsize; /**< size of an item in bytes */
} codec_array;

/** Part of the scale model (docs/spec/format.md, section 5.2): values [start, start + count). */
typedef struct codec_model_part {
	uint64_t start;      /**< index of the first value */
	uint64_t count;      /**< number of values */
	uint32_t row;        /**< values per row; 0: part of kind 0 */
	uint32_t nibbles_at; /**< half an index into codec_view.offsets: rows (an even number), then columns */
	uint16_t base;       /**< base, in units of offsets (`grain` of docs/spec/format.md, section 3) */
	uint16_t mean;       /**< encode: mean pattern of the rows (docs/spec/encoder.md, section 4.2) */
	uint8_t kind;        /**< kind of the segment's record, as in the format */
	uint8_t shifts;      /**< shifts of row and column offsets, as in the format */
} codec_model_part;

/** Part of the tensor whose blocks and groups do not extend into other parts (docs/spec/format.md, section 8). */
typedef struct codec_row_part {
	uint64_t start;       /**< index of the first value */
	uint64_t count;       /**< number of values */
	uint64_t first_block; /**< index of the first block */
	uint32_t first_sum;   /**< index of the first piece for codec_encode_scan */
	uint32_t group_size;  /**< values that share a scale; 0: all */
	float scale[2];       /**< scales of the part, if its codec has one per part */
} codec_row_part;

/** Sums over one piece of codec_encode_scan, as in docs/spec/encoder.md, section 7.2. */
typedef struct codec_row_sums {
	double sum[2];     /**< of |v|; or of v^2 and v; two_mean: of |v| where the sign bit is 0, and where it is 1 */
	uint32_t negative; /**< two_mean: number of values whose sign bit is 1 */
	uint32_t max;      /**< bit pattern of the largest |v|, as float32 */
} codec_row_sums;

/** Block of a DELTA frame: its contribution to the digests of the side section, and its number of changes. */
typedef struct codec_delta_block {
	uint64_t base;    /**< the block's contribution to the base's digest */
	uint64_t result;  /**< the block's contribution to the result's digest */
	uint32_t changes; /**< number of values that differ from the base */
	uint32_t state;   /**< decode: 0 until both digests are set; an engine then sets 1, before it writes values */
	uint32_t reserved[4]; /**< decode: used by the C library; an engine leaves them unchanged */
} codec_delta_block;

/**
 * Header fields as in docs/spec/format.md, and values derived from them. Offsets are in bytes from the frame's start.
 */
typedef struct codec_view {
	uint32_t struct_nbytes; /**< sizeof(codec_view), set by the caller */
	uint32_t encoding;      /**< 1: encoding; 0: decoding */
	/** @{ */
	/** As in the header (docs/spec/format.md, section 2). */
	uint32_t codec, dtype, layout;
	uint32_t variant, options, bits, group_size;
	int32_t guard;
	uint32_t flags, fixed, coded, halved;
	uint64_t n, block_nvalues, nblocks, frame_nbytes;
	/** @} */
	/** @{ */
	/** Offsets and sizes in bytes of the frame's sections; plane_stride: bytes per fixed plane. */
	uint64_t side_offset, side_nbytes, directory_offset, planes_offset, plane_stride, regions_offset;
	/** @} */
	/** @{ */
	/**
	 * Encode, codecs 2 to 6: seed of the random bits; the caller's scale and clipping limit, 0 if not given. scale
	 * -1: the caller's scale is 0, and encoding any value but 0 returns CODEC_BAD_SCALE.
	 */
	uint32_t seed;
	float scale, clip;
	uint32_t max_code_length; /* encode: longest code in bits */
	uint64_t stream;
	/** @} */
	codec_array lengths; /**< code lengths of each plane in `coded`: of symbols 0..255, then of the escape */
	/**
	 * Lookup tables of the codebooks: per plane, two tables of 256 bytes and two single bytes. Encode, indexed by
	 * symbol: codes, right-justified; code lengths, with bit 7 set for the escape. Decode, indexed by the next 8
	 * bits: symbols; code lengths. The single bytes: a symbol without a code (decode: it stands for the escape),
	 * and the symbol of the first code.
	 */
	codec_array tables;
	codec_array model_parts; /**< codec_model_part of each part of the scale model; empty: all offsets are 0 */
	/**
	 * Offsets of rows and columns: int8, in units of offsets. Encode: in a part of more than 1,024 rows, the
	 * engine that encodes the block in which a row begins stores the row's offset here, before codec_encode_close
	 * or codec_encode_head.
	 */
	codec_array offsets;
	codec_array row_parts; /**< row codecs: codec_row_part of each part */
	/**
	 * Encode: codec_row_sums of all pieces. An engine may write them here in place of calling codec_encode_scan.
	 *
	 * DELTA, encode and decode: codec_delta_block of all blocks. An engine that processes blocks writes all members
	 * when it encodes, digests and state when it decodes; codec_encode_close and codec_decode_close add them up.
	 *
	 * TOPK, encode with a residual: uint32_t, the bit pattern of the largest |v| of each block, as float32.
	 */
	codec_array row_sums;
	uint64_t codebook_id; /**< id of the agreed codebook that the frame names; 0: none */
	uint32_t traits;      /**< CODEC_TRAIT_* of the codec; 0 in views that kernels fill */
	uint32_t reserved;    /**< 0 */
} codec_view;

/** Fill *view with a description of the job, which may be for encoding or decoding, in any state. */
CODEC_API codec_status codec_job_view(const void *job, codec_view *view);

/** Kernel of native/cuda. */
typedef struct codec_kernel {
	const char *name; /**< name expression for NVRTC, for example "encode_rows<4>" */
	const char *file; /**< source file in native/cuda, without ".cu"; "": the file is in native/cuda_api/kernels */
	/** name of the file's constant array of uint64_t that codec_scratch_units.index selects from */
	const char *sizes;
	uint32_t threads;  /**< threads of a CTA */
	uint32_t resident; /**< number of CTAs that are resident on a multiprocessor at once */
	uint32_t blocks;   /**< blocks of values for which a CTA is launched; 1: all warps of a CTA share a block */
	uint32_t warps;    /**< warps of a CTA, as the kernel's arguments and its scratch memory count them */
} codec_kernel;

/** Return the kernel with this number, which counts from 1; NULL if there is none. */
CODEC_API const codec_kernel *codec_kernel_at(uint32_t number);

/**
 * Scratch memory of a kernel, in units that its warps acquire and release. A unit has more + times * s bytes, where s
 * is element `index` of the kernel's constant array `sizes`. A unit of 0 bytes: the kernel needs no scratch memory.
 */
typedef struct codec_scratch_units {
	uint32_t index;    /**< element of `sizes` */
	uint32_t units;    /**< number of units per warp with which all warps can run at once */
	uint32_t most;     /**< maximum units that a warp acquires; if it exceeds `units`, fewer warps run at once */
	uint32_t reserved; /**< 0 */
	uint64_t times;    /**< factor of the element */
	uint64_t more;     /**< bytes of a unit besides */
} codec_scratch_units;

/** Kernels of native/cuda that encode the tensor of a job, or decode its frame; 0: no kernel. */
typedef struct codec_launch {
	uint32_t struct_nbytes; /**< sizeof(codec_launch), set by the caller */
	uint32_t choose;        /**< makes the choices that precede all blocks; 0: each block makes its own */
	uint32_t encode;        /**< encodes blocks; not launched if there are no blocks */
	uint32_t finish;        /**< launched after all blocks, unless a residual is written */
	uint32_t decode;        /**< decodes blocks, or the values of a stored tensor */
	/**
	 * decodes blocks faster, to a tensor of the frame's dtype at an address that is a multiple of four values. Job
	 * for encoding: open.cu decides for each frame whether it is used.
	 */
	uint32_t decode_fast;
	uint32_t reduce;                    /**< adds up several frames of the same codec and shape */
	uint32_t reserved;                  /**< 0 */
	codec_scratch_units encode_scratch; /**< scratch memory of `encode` */
	/** scratch memory of `decode`; job for encoding: sufficient for any frame */
	codec_scratch_units decode_scratch;
} codec_launch;

/**
 * Fill *launch with the kernels for a job: encode a planned job (codec_encode_plan), or decode a frame
 * (codec_decode_plan). A job for encoding also has the kernels that decode frames of its spec and shape.
 */
CODEC_API codec_status codec_job_launch(const void *job, codec_launch *launch);

/**
 * Plan a job for a tensor whose values are elsewhere, for example on a device, where an engine makes all choices that
 * depend on values. The parts of the scale model are set, but not their bases. The lookup tables of an agreed codebook
 * are built. plan->nblocks is 0 if the tensor is stored whatever its values are; codec_encode_head then writes only the
 * header.
 */
CODEC_API codec_status codec_encode_plan(const codec_spec *spec, const codec_tensor *like, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Write the part of the frame that precedes the directory, at most plan->regions_at bytes, with frame size and checksum
 * left blank. Call it in place of codec_encode_close if the blocks are not in the same buffer as the head.
 */
CODEC_API codec_status codec_encode_head(const void *job, void *head, size_t capacity, size_t *written);

/**
 * Write the part of the frame that precedes the directory, with frame size and checksum filled in. `checksum` is the
 * sum of the blocks' checksums and of the directory's digest (docs/spec/format.md, section 13).
 */
CODEC_API codec_status codec_encode_final_head(const void *job, uint64_t frame_nbytes, uint64_t checksum, void *head,
					       size_t head_nbytes);

/**
 * Plan a job for blocks that are decoded elsewhere, from the first `head_nbytes` of a frame of `nbytes` bytes. Only
 * header and side section are read. CODEC_TRUNCATED: head_nbytes does not include them; fault->expected is the size
 * needed.
 *
 * The engine must do the remaining checks: compare the destination with the frame, check the directory, the padding of
 * fixed planes and the blocks, and call codec_decode_close with the sum of the blocks' checksums and the directory's
 * digest. In a stored frame, the values count as block 0, and there is no directory.
 */
CODEC_API codec_status codec_decode_plan(const void *head, size_t head_nbytes, size_t nbytes, const codec_context *with,
					 void *job, size_t job_nbytes, codec_plan *plan);

/**
 * Check the frame's checksum against `checksum`, the sum (mod 2^64) of the checksums of all ranges. Return
 * CODEC_CHECKSUM if they do not match.
 */
CODEC_API codec_status codec_decode_close(const codec_context *with, const void *job, uint64_t checksum);

#ifdef __cplusplus
}
#endif

#endif
