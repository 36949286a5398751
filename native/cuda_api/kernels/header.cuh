/*
 * header.cuh - check the header of a frame on the device, as native/src/frame/head.c does. format.md, section 2.
 *
 * Checks are in the order of head.c, so that damaged frames are reported with the same status. One exception: a frame
 * whose codec, dtype or shape differs from the plan's is rejected before the checks that depend on them.
 */
#ifndef CODEC_CUDA_KERNELS_HEADER_CUH
#define CODEC_CUDA_KERNELS_HEADER_CUH

#include "coder/sample.cuh"
#include "kernels/layout.cuh"
#include "exact/topk.h"
#include "rows/rows.cuh"

DEVICE uint64_t load64(const uint8_t *p)
{
	return load32(p) | (uint64_t)load32(p + 4) << 32;
}

/* Entry of one codec in the table WIRE_CODECS. */
struct codec_entry {
	enum { none, lossless, rows, truncate, delta, topk } family;
	uint32_t dtypes;
	uint8_t variants, options, max_bits, least_max_code_length;
};

/* Return the entry of `codec`; the entry's family is `none` if there is no such codec. */
DEVICE codec_entry entry_of(uint32_t codec)
{
	switch (codec) {
#define CASE(name, family, ...)                                                                                        \
	case CODEC_##name: return {codec_entry::family, __VA_ARGS__};
		WIRE_CODECS(CASE)
#undef CASE
	default: return {codec_entry::none, 0, 0, 0, 0, 0};
	}
}

DEVICE bool is_rows(uint32_t codec)
{
	return entry_of(codec).family == codec_entry::rows;
}

/* Return 1 if the format has the dtype `dtype`, and the codec accepts it. */
DEVICE bool takes_dtype(uint32_t codec, uint32_t dtype)
{
	const uint32_t dtypes = entry_of(codec).dtypes;

	if (dtypes != WIRE_DTYPES_ALL)
		return dtype < 32 && (dtypes >> dtype & 1);
	return (dtype >= CODEC_FLOAT32 && dtype <= CODEC_FLOAT8_E8M0FNU) ||
	       (dtype >= CODEC_BOOL && dtype <= CODEC_UINT64);
}

/*
 * Check the first fields of a header, on which the meaning of all other fields depends (format version, codec, dtype).
 * b: first bytes of the frame; `have` of them exist.
 */
DEVICE codec_status check_kind(const uint8_t *b, uint64_t have)
{
	if (have < 4)
		return CODEC_TRUNCATED;
	if (load32(b) != WIRE_MAGIC)
		return CODEC_BAD_MAGIC;
	if (have < WIRE_AT_SHAPE)
		return CODEC_TRUNCATED;
	if (b[WIRE_AT_VERSION] != CODEC_FORMAT_VERSION || entry_of(b[WIRE_AT_CODEC]).family == codec_entry::none)
		return CODEC_UNSUPPORTED;
	if (!takes_dtype(b[WIRE_AT_CODEC], b[WIRE_AT_DTYPE]) || b[WIRE_AT_RANK] > CODEC_MAX_RANK)
		return CODEC_BAD_HEADER;
	if (have < WIRE_AT_SHAPE + 8u * b[WIRE_AT_RANK])
		return CODEC_TRUNCATED;
	for (int i = WIRE_AT_RESERVED; i < WIRE_AT_NBLOCKS; i++)
		if (b[i])
			return CODEC_BAD_HEADER;
	return CODEC_OK;
}

/* Check that the codec, dtype and shape in a frame's header equal those of the plan. */
DEVICE codec_status check_plan(const uint8_t *b, const opening &a)
{
	if (b[WIRE_AT_CODEC] != a.codec)
		return CODEC_BAD_SPEC;
	if (b[WIRE_AT_DTYPE] != a.dtype || b[WIRE_AT_RANK] != a.rank)
		return CODEC_SHAPE_MISMATCH;
	for (uint32_t i = 0; i < a.rank; i++)
		if (load64(b + WIRE_AT_SHAPE + 8 * i) != a.shape[i])
			return CODEC_SHAPE_MISMATCH;
	return CODEC_OK;
}

/*
 * Read the codec's parameters to *v. Check that they are in range, and that fields which the codec does not use are 0.
 */
DEVICE codec_status read_params(const uint8_t *b, codec_view *v)
{
	const codec_entry most = entry_of(v->codec);
	const uint32_t length = b[WIRE_PARAM_MAX_CODE_LENGTH], rest = load32(b + WIRE_PARAM_GROUP_SIZE);

	v->variant = b[WIRE_PARAM_VARIANT];
	v->options = b[WIRE_PARAM_OPTIONS];
	v->bits = b[WIRE_PARAM_BITS];
	v->max_code_length = length;
	if (v->variant >= most.variants || v->options & ~(uint32_t)most.options || v->bits > most.max_bits ||
	    length < most.least_max_code_length || length > (most.least_max_code_length ? WIRE_MAX_CODE_LENGTH : 0))
		return CODEC_BAD_HEADER;
	if (v->codec == CODEC_QUANTIZE && v->bits < (v->variant == CODEC_LEVELS_ODD ? 2 : 1))
		return CODEC_BAD_HEADER;
	if (v->options & CODEC_OPTION_RCEIL && (v->options & CODEC_OPTION_STOCHASTIC || !row_is_mx(kind_of(v))))
		return CODEC_BAD_HEADER;
	if (v->codec == CODEC_TRUNCATE) {
		const bool is_fixed = v->variant == CODEC_LEVEL_CODING_FIXED;

		v->guard = (int8_t)(rest - WIRE_GUARD);
		return (v->options & CODEC_OPTION_BITS && v->variant != CODEC_LEVEL_CODING_SHARED) ||
				       (v->bits && !is_fixed) || (v->guard && is_fixed) || rest > 255
			       ? CODEC_BAD_HEADER
			       : CODEC_OK;
	}
	if (v->codec == CODEC_TOPK && (!v->bits || (rest && !topk_is_group(rest))))
		return CODEC_BAD_HEADER;
	v->group_size = is_rows(v->codec) || v->codec == CODEC_TOPK ? rest : 0;
	return v->group_size == rest ? CODEC_OK : CODEC_BAD_HEADER;
}

/*
 * Check that the header fields of a frame with blocks are consistent. log2: log2 of the number of values per block; 0:
 * the block size is computed from the row size.
 */
DEVICE codec_status check_blocks(const codec_view *v, uint32_t log2)
{
	const uint32_t planes = (1u << size_of(v->dtype)) - 1, octave = octave_of(v->dtype) != 0;
	const bool float8 = is_float8(v->dtype);
	bool bad;

	if (is_rows(v->codec)) {
		const row_kind q = kind_of(v);

		bad = log2 || v->fixed || v->halved || v->coded != q.entropy || v->flags & ~WIRE_FLAG_SEGMENTS ||
		      (v->flags ? v->group_size != 0 : !row_allowed(q, v->group_size));
		return bad ? CODEC_BAD_HEADER : CODEC_OK;
	}
	if (v->codec == CODEC_DELTA) {
		bad = v->fixed || v->coded || v->halved || v->flags || v->side_nbytes != WIRE_DELTA_SIDE_NBYTES ||
		      (log2 && (log2 < WIRE_DELTA_MIN_BLOCK_LOG2 || log2 > WIRE_DELTA_MAX_BLOCK_LOG2));
		return bad ? CODEC_BAD_HEADER : CODEC_OK;
	}
	if (v->codec == CODEC_TOPK) {
		bad = !v->group_size || v->fixed || v->coded || v->halved || v->flags || v->side_nbytes ||
		      log2 < v->group_size >> WIRE_TOPK_CHUNK_AT || log2 > WIRE_TOPK_MAX_BLOCK_LOG2;
		return bad ? CODEC_BAD_HEADER : CODEC_OK;
	}
	bad = log2 < WIRE_MIN_BLOCK_LOG2 || log2 > WIRE_MAX_BLOCK_LOG2;
	if (v->codec == CODEC_TRUNCATE)
		bad |= v->fixed || v->coded != 1 || v->halved;
	else
		bad |= (v->fixed & ~planes) || (v->coded & (~planes | v->fixed)) ||
		       (float8 ? v->halved && (!v->coded || v->halved > 4 || v->halved == 3)
			       : (v->halved & (~v->coded | octave)) != 0) ||
		       (v->flags && (!(v->coded & 1) || !octave)) || (float8 && v->flags & WIRE_FLAG_PRIOR);
	return bad ? CODEC_BAD_HEADER : CODEC_OK;
}

/*
 * Compute the sections' offsets from the header fields of a frame with blocks. No sum overflows, since n is less than
 * 2^60.
 */
DEVICE void derive_sections(codec_view *v, uint32_t log2)
{
	if (log2 || v->codec == CODEC_DELTA) {
		v->block_nvalues = 1ull << log2;
		v->nblocks = log2 ? (v->n + v->block_nvalues - 1) / v->block_nvalues : 0;
	}
	v->planes_offset = v->directory_offset + WIRE_DIRECTORY_ENTRY * v->nblocks;
	v->plane_stride = (v->n + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
	v->regions_offset =
		v->planes_offset + v->plane_stride * (uint32_t)__popc(v->fixed & ((1u << size_of(v->dtype)) - 1));
}

/*
 * Check that the frame has as many blocks and bytes as its header fields require. given: number of blocks in the
 * header.
 */
DEVICE codec_status check_nbytes(const codec_view *v, uint64_t given)
{
	const bool delta = v->codec == CODEC_DELTA;

	if ((!v->n && (!delta || v->block_nvalues > 1)) || given != v->nblocks || v->nblocks > v->n ||
	    v->frame_nbytes % WIRE_ALIGN || v->frame_nbytes < v->regions_offset + WIRE_ALIGN * v->nblocks)
		return CODEC_BAD_HEADER;
	if (delta && !v->nblocks && v->frame_nbytes != v->regions_offset)
		return CODEC_BAD_HEADER;
	if (is_rows(v->codec)) {
		const row_kind q = kind_of(v);

		if (q.entropy ? v->n / (q.bits ? WIRE_ROW_BLOCK : WIRE_TRITS_BLOCK) > v->nblocks
			      : v->frame_nbytes < v->regions_offset + row_codes_nbytes(q, v->n))
			return CODEC_BAD_HEADER;
	}
	return v->frame_nbytes / WIRE_ALIGN > 0xffffffffu ? CODEC_LIMIT : CODEC_OK;
}

/*
 * Read a header, of which `have` bytes are at b, and set all fields of *v except the arrays. n: number of values of
 * the plan. After an error, kernels must not read *v.
 */
static __device__ codec_status read_header(const uint8_t *b, uint64_t have, const opening &a, uint64_t n, codec_view *v)
{
	const uint32_t log2 = b[WIRE_AT_BLOCK_LOG2], blocks = load32(b + WIRE_AT_NBLOCKS);
	codec_status status;

	if ((status = check_kind(b, have)) || (status = check_plan(b, a)))
		return status;
	v->codec = a.codec;
	v->dtype = a.dtype;
	v->n = n;
	if ((status = read_params(b + WIRE_AT_PARAMS, v)))
		return status;
	v->layout = b[WIRE_AT_LAYOUT];
	v->fixed = b[WIRE_AT_FIXED];
	v->coded = b[WIRE_AT_CODED];
	v->halved = b[WIRE_AT_HALVED];
	v->flags = b[WIRE_AT_FLAGS];
	v->side_nbytes = load32(b + WIRE_AT_SIDE_NBYTES);
	v->frame_nbytes = load64(b + WIRE_AT_FRAME_NBYTES);
	v->side_offset = WIRE_AT_SHAPE + 8 * a.rank;
	v->directory_offset = v->planes_offset = v->regions_offset = v->side_offset + v->side_nbytes;
	if (v->flags & ~WIRE_FLAGS_KNOWN || v->layout > WIRE_LAYOUT_BLOCKS || v->side_nbytes % WIRE_ALIGN)
		return CODEC_BAD_HEADER;
	if (v->layout == WIRE_LAYOUT_STORED)
		return log2 || v->fixed || v->coded || v->side_nbytes || v->flags || v->halved || v->group_size ||
				       ((is_rows(v->codec) || v->codec == CODEC_TOPK) && n) ||
				       v->codec == CODEC_DELTA || blocks ||
				       v->frame_nbytes != v->side_offset + n * size_of(v->dtype)
			       ? CODEC_BAD_HEADER
			       : CODEC_OK;
	if ((status = check_blocks(v, log2)))
		return status;
	v->nblocks = blocks;
	derive_sections(v, log2);
	if ((status = check_nbytes(v, blocks)))
		return status;
	if (v->codec == CODEC_DELTA)
		return v->nblocks && v->block_nvalues > a.block_nvalues ? CODEC_BAD_SPEC : CODEC_OK;
	return is_rows(v->codec) && kind_of(v).entropy != a.entropy ? CODEC_BAD_SPEC : CODEC_OK;
}

/* Compare the frame's size according to its header with the size that the caller passes. */
DEVICE codec_status check_span(const codec_view *v, uint64_t nbytes, uint32_t flags)
{
	if (v->frame_nbytes > nbytes)
		return CODEC_TRUNCATED;
	return v->frame_nbytes < nbytes && !(flags & CODEC_ALLOW_SLACK) ? CODEC_TRAILING : CODEC_OK;
}

/*
 * Check the directory's last entry and the padding of fixed planes, whose errors take precedence over those of the
 * side section.
 */
DEVICE codec_status check_sections(const codec_view *v, const uint8_t *frame)
{
	if (!v->nblocks)
		return CODEC_OK;
	if ((uint64_t)WIRE_ALIGN * load32(frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * (v->nblocks - 1)) !=
	    v->frame_nbytes)
		return CODEC_BAD_DIRECTORY;
	for (uint64_t p = v->planes_offset; p < v->regions_offset; p += v->plane_stride)
		for (uint64_t i = p + v->n; i < p + v->plane_stride; i++)
			if (frame[i])
				return CODEC_BAD_HEADER;
	return CODEC_OK;
}

#endif
