/*
 * frame/close.cu - last kernel of an encoding: writes the sections before the regions (header with the frame's
 * checksum, side section), or the whole frame of a tensor that is stored uncompressed. docs/spec/format.md, section 2.
 */
#include "rows/rows.cuh"
#include "coder/sample.cuh"
#include "frame/encode.cuh"
#include "common/cta.cuh"

#define CLOSE_WARPS CTA_WARPS

/* Return the nibble of an offset. shift: log2 of the patterns in a unit of the nibble. */
DEVICE uint32_t nibble_of(uint32_t offset, int shift, uint32_t circle)
{
	return (uint32_t)(((int)offset - (int)(offset > circle / 2 ? circle : 0)) >> shift) & 15;
}

/* Return byte `at` of the scale model in the side section: records of parts, then nibbles of offsets, then zeros. */
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
	const uint16_t *offsets = (const uint16_t *)(memory + v->offsets.at) + 2ull * part->nibbles_at;
	const uint32_t circle = circle_of(v);
	int shift = part->shifts & 15;

	if (k >= pairs) {
		offsets += pairs;
		k -= pairs;
		n = part_cols(part);
		shift = part->shifts >> 4;
	}
	shift += __ffs((int)grain_of(v)) - 1;
	return (k < n ? nibble_of(offsets[k], shift, circle) : 0) |
	       (k + 1 < n ? nibble_of(offsets[k + 1], shift, circle) << 4 : 0);
}

/* Row codecs: return byte `at` of the parts in the side section: records of parts, then scales, then zeros. */
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

/*
 * Bytes [from, to) of the scale model in the side section, which store a part's row or column offsets as nibbles, two
 * offsets per byte. from == to: the part has no such offsets.
 */
struct nibble_run {
	uint64_t from, to;
	const uint16_t *offsets; /* offsets to store; the address is a multiple of 4 */
	int shift;               /* see nibble_of */
	uint32_t circle;
};

/*
 * Set run[0] to the row offsets and run[1] to the column offsets of a model with one part. Both are empty if the model
 * has more parts.
 */
DEVICE void nibble_runs(const codec_view *v, const uint8_t *memory, nibble_run run[2])
{
	run[0] = run[1] = {0, 0, NULL, 0, 0};
	if (v->model_parts.count != 1)
		return;
	const codec_model_part part = *model_parts(v, memory);
	const uint64_t rows = part_rows(&part), at = WIRE_SEGMENT_NBYTES, cols_at = at + (rows + 1) / 2;
	const uint16_t *offsets = (const uint16_t *)(memory + v->offsets.at) + 2ull * part.nibbles_at;
	const int grain = __ffs((int)grain_of(v)) - 1;
	const uint32_t circle = circle_of(v);

	run[0] = {at, at + rows / 2, offsets, grain + (part.shifts & 15), circle};
	run[1] = {cols_at, cols_at + part_cols(&part) / 2, offsets + (rows + 1) / 2 * 2, grain + (part.shifts >> 4),
		  circle};
}

/*
 * Return bytes `at` to at + 3 of a nibble_run as a word. Each byte stores two offsets. The loads do not depend on each
 * other.
 */
DEVICE uint32_t nibble_word(const nibble_run &run, uint64_t at)
{
	const uint32_t *pair = (const uint32_t *)(run.offsets + 2 * (at - run.from));
	uint32_t x[4], word = 0;

#pragma unroll
	for (int b = 0; b < 4; b++)
		x[b] = pair[b];
#pragma unroll
	for (int b = 0; b < 4; b++) {
		uint32_t low = nibble_of(x[b] & 0xffff, run.shift, run.circle);
		uint32_t high = nibble_of(x[b] >> 16, run.shift, run.circle);

		word |= (low | high << 4) << 8 * b;
	}
	return word;
}

/* Return byte `at` of the side section. */
DEVICE_CALL uint32_t side_byte(const codec_view *v, const uint8_t *memory, const codec_choice *c, uint64_t at)
{
	const codec_part_found *found = (const codec_part_found *)(c + 1);

	return at < c->lead_nbytes    ? c->lead[at]
	       : v->row_parts.count   ? rows_byte(v, memory, at - c->lead_nbytes)
	       : v->model_parts.count ? model_byte(v, memory, found, at - c->lead_nbytes)
				      : 0;
}

/* Write chunk i of the side section to the frame. Returns the chunk's checksum. Called by a CTA. */
DEVICE_CALL uint64_t put_side(const codec_view *v, const uint8_t *memory, const codec_choice *c, uint8_t *frame,
			      uint64_t i)
{
	const uint64_t from = 4 * WIRE_CHUNK_WORDS * i, lead = c->lead_nbytes;
	uint64_t sum = 0;
	nibble_run run[2];

	nibble_runs(v, memory, run);
	for (uint32_t k = threadIdx.x; k < WIRE_CHUNK_WORDS && from + 4 * k < v->side_nbytes; k += CTA_THREADS) {
		const uint64_t at = from + 4 * k, in_model = at - lead;
		uint32_t word = 0;

		if (at >= lead && in_model >= run[0].from && in_model + 4 <= run[0].to)
			word = nibble_word(run[0], in_model);
		else if (at >= lead && in_model >= run[1].from && in_model + 4 <= run[1].to)
			word = nibble_word(run[1], in_model);
		else
			for (uint32_t b = 0; b < 4; b++)
				word |= side_byte(v, memory, c, at + b) << 8 * b;
		*(uint32_t *)(frame + v->side_offset + at) = word;
		sum += (uint64_t)word * CHECKSUM_KEY[k];
	}
	return checksum_of_chunk(cta_sum(sum), WIRE_SEED_SIDE, i);
}

/*
 * Copy chunk i of the tensor's nbytes bytes to `to`, the data of a stored frame. Returns the chunk's checksum. Called
 * by one warp.
 */
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
		sum += (uint64_t)word * CHECKSUM_KEY[k];
	}
	return checksum_of_chunk(warp_sum(sum), WIRE_SEED_REGION, i);
}

/* Return the residual of value i in a stored or lossless frame: the rounding error of tensor + residual. */
DEVICE float residual_of_stored(const codec_view *v, const codec_source *source, uint64_t i)
{
	const codec_source rounded = {source->values, NULL, NULL};

	return source->sums ? round_minus(source->sums[i], value_at(v->dtype, &rounded, i)) : 0;
}

/*
 * Write Delta's side section, which consists of the digests of base and result. Returns its checksum. Called by one
 * warp.
 */
DEVICE uint64_t put_digests(const codec_view *v, const codec_written *out, uint8_t *frame, uint32_t lane)
{
	const uint64_t digest = lane < 2 ? out->base : out->result;
	const uint32_t word = (uint32_t)(digest >> 32 * (lane % 2));

	if (lane < 4)
		((uint32_t *)(frame + v->side_offset))[lane] = word;
	return checksum_of_chunk(warp_sum(lane < 4 ? (uint64_t)word * CHECKSUM_KEY[lane] : 0), WIRE_SEED_SIDE, 0);
}

/* Store x as a little-endian number of nbytes bytes. */
DEVICE void put_field(uint8_t *to, uint64_t x, uint32_t nbytes)
{
	for (uint32_t i = 0; i < nbytes; i++)
		to[i] = (uint8_t)(x >> 8 * i);
}

/*
 * Write the header. `head`: header of the planned job. `checksum`: checksum of everything after the header. `image`:
 * shared memory for a header. `unchanged`: true if the tensor equals Delta's base, so that the frame has no blocks.
 * Called by one warp.
 */
DEVICE_CALL void put_header(const codec_view *v, const uint8_t *head, bool stored, bool unchanged,
			    uint64_t frame_nbytes, uint64_t checksum, uint8_t *frame, uint8_t *image, uint32_t lane)
{
	for (uint32_t i = lane; i < v->side_offset; i += 32)
		image[i] = head[i];
	__syncwarp();
	if (lane == 0) {
		image[WIRE_AT_LAYOUT] = stored ? WIRE_LAYOUT_STORED : WIRE_LAYOUT_BLOCKS;
		image[WIRE_AT_BLOCK_LOG2] = stored || unchanged ? 0 : head[WIRE_AT_BLOCK_LOG2];
		image[WIRE_AT_FIXED] = stored ? 0 : (uint8_t)v->fixed;
		image[WIRE_AT_CODED] = stored ? 0 : (uint8_t)v->coded;
		image[WIRE_AT_HALVED] = stored ? 0 : (uint8_t)v->halved;
		image[WIRE_AT_FLAGS] = stored ? 0 : (uint8_t)v->flags;
		put_field(image + WIRE_AT_SIDE_NBYTES, stored ? 0 : v->side_nbytes, 4);
		put_field(image + WIRE_AT_NBLOCKS, stored || unchanged ? 0 : v->nblocks, 4);
		put_field(image + WIRE_AT_FRAME_NBYTES, frame_nbytes, 8);
		put_field(image + WIRE_AT_CHECKSUM, 0, 8);
	}
	__syncwarp();
	checksum += digest_bytes(image, v->side_offset, WIRE_SEED_HEADER, lane);
	__syncwarp(); /* all lanes have read the image, which lane 0 changes next */
	if (lane == 0)
		put_field(image + WIRE_AT_CHECKSUM, checksum, 8);
	__syncwarp();
	for (uint32_t i = lane; i < v->side_offset; i += 32)
		frame[i] = image[i];
}

/*
 * Kernel: finish frames whose blocks are written, as codec_encode_close does. Grid: (any number of CTAs, frames). CTAs
 * process chunks of the side section round-robin, and warps process chunks of the directory round-robin, beginning with
 * the last CTA. The first warp of the CTA that finishes last writes the header.
 *
 * Sets out->nbytes to the frame's size in bytes, and out->fault to a status; if the status is an error, there is no
 * frame and nbytes is 0. A tensor is stored uncompressed if its blocks do not fit the capacity, or if the frame would
 * be larger than a stored one. With Delta the tensor is never stored, and the frame has no blocks if the tensor equals
 * the base.
 */
extern "C" __global__ void __launch_bounds__(32 * CLOSE_WARPS) close_frame(const codec_encoding *encodings)
{
	__shared__ uint64_t image[CODEC_HEADER_NBYTES / 8];
	const codec_encoding &e = encodings[blockIdx.y];
	const codec_source &source = e.source;
	const codec_view &v = share_job(e.view, e.memory).v;
	uint8_t *frame = e.frame;
	codec_written *out = e.out;
	const uint32_t size = size_of(v.dtype), lane = threadIdx.x % 32;
	const uint64_t warp = blockIdx.x * CLOSE_WARPS + threadIdx.x / 32, warps = gridDim.x * CLOSE_WARPS;
	const uint64_t nbytes = v.n * size, stored_nbytes = v.side_offset + nbytes, chunk = 4 * WIRE_CHUNK_WORDS;
	/* row codecs and TopK store only empty tensors */
	const bool never_stored = v.row_parts.count > 0 || (v.codec == CODEC_TOPK && v.nblocks);
	const bool large = out->fault == CODEC_SHORT_OUTPUT || out->fault == CODEC_LIMIT;
	const bool delta = v.codec == CODEC_DELTA, unchanged = delta && !out->changed;
	const bool stored = !never_stored && !delta && (!out->fault || large) &&
			    (!v.nblocks || large || choose_stored(out->end, stored_nbytes));
	/* the size and checksum of frames without blocks are computed separately */
	const bool blocks = !stored && !unchanged;
	const uint64_t known_nbytes = stored ? stored_nbytes : v.side_offset + WIRE_DELTA_SIDE_NBYTES;
	const uint32_t fault = !stored && out->fault                  ? out->fault
			       : !blocks && known_nbytes > e.capacity ? (uint32_t)CODEC_SHORT_OUTPUT
								      : 0;
	uint64_t checksum = 0;

	if (!fault && stored) {
		for (uint64_t i = warp; chunk * i < nbytes; i += warps)
			checksum += put_stored(source.values, nbytes, frame + v.side_offset, i, lane);
	} else if (!fault) {
		if (delta && warp == 0)
			checksum += put_digests(&v, out, frame, lane);
		for (uint64_t i = blockIdx.x; !delta && chunk * i < v.side_nbytes; i += gridDim.x) {
			uint64_t sum = put_side(&v, e.memory, e.found, frame, i);

			checksum += threadIdx.x == 0 ? sum : 0;
		}
		for (uint64_t i = warps - 1 - warp; blocks && chunk * i < WIRE_DIRECTORY_ENTRY * v.nblocks; i += warps)
			checksum += digest_chunk(frame + v.directory_offset, WIRE_DIRECTORY_ENTRY * v.nblocks,
						 WIRE_SEED_DIRECTORY, i, lane);
	}
	const bool has_residual = source.residual && !fault && (stored || v.codec == CODEC_LOSSLESS);
	for (uint64_t i = 32 * warp + lane; has_residual && i < v.n; i += 32 * warps)
		source.residual[i] = residual_of_stored(&v, &source, i);
	if (lane == 0 && checksum)
		atomicAdd(blocks ? &out->checksum : &out->stored, (unsigned long long)checksum);
	/* no fence is needed: the last CTA reads only sums that were computed by atomics */
	if (!cta_is_last(&out->closed, gridDim.x) || threadIdx.x >= 32)
		return;
	const volatile codec_written *seen = out;

	if (!fault)
		put_header(&v, e.head, stored, unchanged, blocks ? seen->end : known_nbytes,
			   blocks   ? seen->checksum
			   : stored ? checksum_of_block(seen->stored, 0)
				    : seen->stored,
			   frame, (uint8_t *)image, lane);
	if (lane == 0) {
		out->nbytes = fault ? 0 : blocks ? seen->end : known_nbytes;
		out->fault = fault;
	}
}
