/* frame/close.cu - last kernel of an encoding: writes what precedes the regions (header, side section, checksums), or
 * the whole frame of a tensor that is stored uncompressed. docs/format.md, section 2.
 */
#include "rows/rows.cuh"
#include "coder/sample.cuh"
#include "frame/encode.cuh"

#define CLOSE_WARPS 8

/*
 * Return byte `at` of the scale model's part of the side section: records of parts, then nibbles of offsets, then
 * zeros.
 */
DEVICE_CALL uint32_t model_byte(const codec_view *v, const uint8_t *memory, const codec_part_found *found, uint64_t at)
{
	const codec_model_part *part = model_parts(v, memory) + at / WIRE_SEGMENT_NBYTES;
	uint64_t nparts = v->model_parts.count, k = at % WIRE_SEGMENT_NBYTES;

	if (at < WIRE_SEGMENT_NBYTES * nparts)
		return (k < 8    ? (uint32_t)(part->count >> 8 * k)
			: k < 12 ? part->row >> 8 * (k - 8)
			: k < 13 ? part->kind
			: k < 14 ? part->shifts
				 : part->base >> 8 * (k - 14)) &
		       255;
	at -= WIRE_SEGMENT_NBYTES * nparts;
	const codec_part_found *f = part_at(found, nparts, &codec_part_found::side_nibbles, at);

	part = model_parts(v, memory) + (f - found);
	k = 2 * (at - f->side_nibbles);
	uint64_t n = part_rows(part), pairs = (n + 1) / 2 * 2;
	const int8_t *offsets = (const int8_t *)memory + v->offsets.at + 2ull * part->nibbles_at;
	int shift = part->shifts & 15;

	if (k >= pairs) {
		offsets += pairs;
		k -= pairs;
		n = part_cols(part);
		shift = part->shifts >> 4;
	}
	return (k < n ? (uint32_t)(offsets[k] >> shift) & 15 : 0) |
	       (k + 1 < n ? ((uint32_t)(offsets[k + 1] >> shift) & 15) << 4 : 0);
}

/* Return byte `at` of a row codec's part of the side section: segment records, then scales, then zeros. */
DEVICE_CALL uint32_t rows_byte(const codec_view *v, const uint8_t *memory, uint64_t at)
{
	const codec_row_part *parts = row_parts(v, memory), *part = parts + at / WIRE_SEGMENT_NBYTES;
	uint64_t nparts = v->row_parts.count, k = at % WIRE_SEGMENT_NBYTES;

	if (v->flags & WIRE_FLAG_SEGMENTS) {
		if (at < WIRE_SEGMENT_NBYTES * nparts)
			return (k < 8    ? (uint32_t)(part->count >> 8 * k)
				: k < 12 ? part->group_size >> 8 * (k - 8)
					 : 0) &
			       255;
		at -= WIRE_SEGMENT_NBYTES * nparts;
	}
	if (at >= 8 * nparts || !row_part_scaled(kind_of(v), parts->group_size))
		return 0;
	return round_bits(parts[at / 8].scale[at / 4 % 2]) >> 8 * (at % 4) & 255;
}

/* Write chunk i of the side section to the frame. Returns its checksum. By one warp. */
DEVICE_CALL uint64_t put_side(const codec_view *v, const uint8_t *memory, const codec_choice *c, uint8_t *frame,
			      uint64_t i, uint32_t lane)
{
	const codec_part_found *found = (const codec_part_found *)(c + 1);
	uint64_t from = 4 * WIRE_CHUNK_WORDS * i, sum = 0;

	for (uint32_t k = lane; k < WIRE_CHUNK_WORDS && from + 4 * k < v->side_nbytes; k += 32) {
		uint32_t word = 0;

		for (uint64_t b = 0; b < 4; b++) {
			uint64_t at = from + 4 * k + b;
			uint32_t byte = at < c->lead_nbytes    ? c->lead[at]
					: v->row_parts.count   ? rows_byte(v, memory, at - c->lead_nbytes)
					: v->model_parts.count ? model_byte(v, memory, found, at - c->lead_nbytes)
							       : 0;

			word |= byte << 8 * b;
		}
		*(uint32_t *)(frame + v->side_offset + from + 4 * k) = word;
		sum += (uint64_t)word * SEAL_KEY[k];
	}
	return seal_chunk(warp_sum(sum), WIRE_SEED_SIDE, i);
}

/* Copy chunk i of the tensor's nbytes bytes to `to`, the data of a stored frame. Returns its checksum. By one warp. */
DEVICE_CALL uint64_t put_stored(const uint8_t *values, uint64_t nbytes, uint8_t *to, uint64_t i, uint32_t lane)
{
	uint64_t from = 4 * WIRE_CHUNK_WORDS * i, sum = 0;

	for (uint32_t k = lane; k < WIRE_CHUNK_WORDS && from + 4 * k < nbytes; k += 32) {
		uint64_t at = from + 4 * k, left = nbytes - at;
		uint32_t word = load_bytes(values + at, left < 4 ? (uint32_t)left : 4);

		if (left >= 4)
			*(uint32_t *)(to + at) = word;
		for (uint32_t b = 0; b < left && left < 4; b++)
			to[at + b] = (uint8_t)(word >> 8 * b);
		sum += (uint64_t)word * SEAL_KEY[k];
	}
	return seal_chunk(warp_sum(sum), WIRE_SEED_REGION, i);
}

/* Return the residual of value i in a stored or lossless frame: the rounding error of tensor + residual. */
DEVICE float residual_of_stored(const codec_view *v, const codec_source *source, uint64_t i)
{
	const codec_source rounded = {source->values, NULL, NULL};

	return source->sums ? round_minus(source->sums[i], value_at(v->dtype, &rounded, i)) : 0;
}

/* Store x in nbytes bytes, little-endian. */
DEVICE void put_field(uint8_t *to, uint64_t x, uint32_t nbytes)
{
	for (uint32_t i = 0; i < nbytes; i++)
		to[i] = (uint8_t)(x >> 8 * i);
}

/*
 * Write the header. `head`: header of the planned job. `checksum`: of everything behind the header. `image`: shared
 * memory for a header. By one warp.
 */
DEVICE_CALL void put_header(const codec_view *v, const uint8_t *head, bool stored, uint64_t frame_nbytes,
			    uint64_t checksum, uint8_t *frame, uint8_t *image, uint32_t lane)
{
	for (uint32_t i = lane; i < v->side_offset; i += 32)
		image[i] = head[i];
	__syncwarp();
	if (lane == 0) {
		image[WIRE_AT_LAYOUT] = stored ? WIRE_LAYOUT_STORED : WIRE_LAYOUT_BLOCKS;
		image[WIRE_AT_BLOCK_LOG2] = stored ? 0 : head[WIRE_AT_BLOCK_LOG2];
		image[WIRE_AT_FIXED] = stored ? 0 : (uint8_t)v->fixed;
		image[WIRE_AT_CODED] = stored ? 0 : (uint8_t)v->coded;
		image[WIRE_AT_HALVED] = stored ? 0 : (uint8_t)v->halved;
		image[WIRE_AT_FLAGS] = stored ? 0 : (uint8_t)v->flags;
		put_field(image + WIRE_AT_SIDE_NBYTES, stored ? 0 : v->side_nbytes, 4);
		put_field(image + WIRE_AT_NBLOCKS, stored ? 0 : v->nblocks, 4);
		put_field(image + WIRE_AT_FRAME_NBYTES, frame_nbytes, 8);
		put_field(image + WIRE_AT_CHECKSUM, 0, 8);
	}
	__syncwarp();
	checksum += digest_bytes(image, v->side_offset, WIRE_SEED_HEADER, lane);
	__syncwarp(); /* all lanes have read the image */
	if (lane == 0)
		put_field(image + WIRE_AT_CHECKSUM, checksum, 8);
	__syncwarp();
	for (uint32_t i = lane; i < v->side_offset; i += 32)
		frame[i] = image[i];
}

/*
 * Finish frames whose blocks are written, as codec_encode_close does. Grid: (any number of CTAs, frames); warps take
 * chunks of the side section and directory in turn, and the last warp to finish writes the header.
 *
 * Sets out->nbytes to the frame's size in bytes, and out->fault to a status; if that is an error, there is no frame and
 * nbytes is 0. A tensor is stored if its blocks take too much room, or more than the stored frame does.
 */
extern "C" __global__ void __launch_bounds__(32 * CLOSE_WARPS) close_frame(const codec_encoding *encodings)
{
	__shared__ uint64_t image[WIRE_MAX_HEADER / 8];
	const codec_encoding &e = encodings[blockIdx.y];
	const codec_source &source = e.source;
	const codec_view v = *e.view;
	uint8_t *frame = e.frame;
	codec_written *out = e.out;
	const uint32_t size = size_of(v.dtype), lane = threadIdx.x % 32;
	const uint64_t warp = blockIdx.x * CLOSE_WARPS + threadIdx.x / 32, warps = gridDim.x * CLOSE_WARPS;
	const uint64_t nbytes = v.n * size, stored_nbytes = v.side_offset + nbytes, chunk = 4 * WIRE_CHUNK_WORDS;
	const bool rows = v.row_parts.count > 0, large = out->fault == CODEC_SHORT_OUTPUT || out->fault == CODEC_LIMIT;
	const bool stored =
		!rows && (!out->fault || large) && (!v.nblocks || large || choose_stored(out->end, stored_nbytes));
	const uint32_t fault = !stored ? out->fault : stored_nbytes > e.capacity ? (uint32_t)CODEC_SHORT_OUTPUT : 0;
	uint64_t checksum = 0;

	if (!fault && stored) {
		for (uint64_t i = warp; chunk * i < nbytes; i += warps)
			checksum += put_stored(source.values, nbytes, frame + v.side_offset, i, lane);
	} else if (!fault) {
		for (uint64_t i = warp; chunk * i < v.side_nbytes; i += warps)
			checksum += put_side(&v, e.memory, e.found, frame, i, lane);
		for (uint64_t i = warp; chunk * i < WIRE_DIRECTORY_ENTRY * v.nblocks; i += warps)
			checksum += digest_chunk(frame + v.directory_offset, WIRE_DIRECTORY_ENTRY * v.nblocks,
						 WIRE_SEED_DIRECTORY, i, lane);
	}
	const bool has_residual = source.residual && !fault && (stored || v.codec == WIRE_CODEC_LOSSLESS);
	for (uint64_t i = 32 * warp + lane; has_residual && i < v.n; i += 32 * warps)
		source.residual[i] = residual_of_stored(&v, &source, i);
	if (lane == 0 && checksum)
		atomicAdd(stored ? &out->stored : &out->checksum, (unsigned long long)checksum);
	__threadfence();
	uint32_t last = lane == 0 ? atomicAdd(&out->closed, 1u) == warps - 1 : 0;

	if (!__shfl_sync(FULL, last, 0))
		return;
	__threadfence();
	const volatile codec_written *seen = out;

	if (!fault)
		put_header(&v, e.head, stored, stored ? stored_nbytes : seen->end,
			   stored ? seal_block(seen->stored, 0) : seen->checksum, frame, (uint8_t *)image, lane);
	if (lane == 0) {
		out->nbytes = fault ? 0 : stored ? stored_nbytes : seen->end;
		out->fault = fault;
	}
}
