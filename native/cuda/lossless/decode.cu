/* lossless/decode.cu - kernels that decode lossless frames, one block a warp. docs/format.md, sections 3 and 6.
 *
 * A value is live if its byte in plane 0 is not 0. Planes of a pruned region hold bytes of live values only.
 */
#include "coder/model.cuh"
#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "common/values.cuh"
#include "frame/decode.cuh"

/*
 * Return value i of a quad. plane: a word of each plane; plane 0 holds the highest bits. offset: of the value, in
 * patterns.
 */
template <int SIZE> DEVICE uint64_t merge_value(const uint32_t *plane, uint32_t i, bool is_float, uint16_t offset)
{
	uint64_t x = 0;

	for (int p = 0; p < SIZE; p++)
		x = x << 8 | (plane[p] >> 8 * i & 255);
	if (SIZE > 1 && is_float) {
		const int low = SIZE > 1 ? 8 * SIZE - 16 : 0;
		uint16_t top = bits_unturn((uint16_t)(x >> low), offset, SHIFT_OF(SIZE));

		x = (x & ((1ull << low) - 1)) | (uint64_t)top << low;
	}
	return x;
}

/*
 * Merge a quad from words of its planes to SIZE words as they lie in memory. offset: offsets of two values in each of
 * two words. Plane 0 holds the pattern's upper eight bits, plane 1 the sign and the lower seven. SIZE is 2 or 4.
 */
template <int SIZE> DEVICE void merge_quad(const uint32_t *plane, const uint32_t *offset, uint32_t *out)
{
	uint32_t lower = plane[1] & 0x7f7f7f7f, signs = plane[1] & 0x80808080, top[2];

	for (int h = 0; h < 2; h++) {
		/* selectors that move two bytes to the lower, upper ends of halves */
		uint32_t even = h ? 0x4342 : 0x4140, odd = h ? 0x3424 : 0x1404;
		uint32_t upper = __byte_perm(plane[0], 0, even), u = upper * 128 + __byte_perm(lower, 0, even);

		top[h] = turn_pair(u, upper, offset[h]) | __byte_perm(signs, 0, odd);
	}
	if (SIZE == 2) {
		out[0] = top[0], out[1] = top[1];
		return;
	}
	for (int h = 0; h < 2; h++) {
		uint32_t low = __byte_perm(plane[SIZE - 1], plane[SIZE - 2], h ? 0x7362 : 0x5140);

		out[2 * h % SIZE] = __byte_perm(low, top[h], 0x5410);
		out[(2 * h + 1) % SIZE] = __byte_perm(low, top[h], 0x7632);
	}
}

/* Check the head of a region: modes of its planes, and the flag of a pruned region. */
DEVICE codec_status check_head(const codec_view *v, uint32_t head, int size)
{
	if (head & ~(WIRE_REGION_PRUNED | ((1u << 2 * size) - 1)))
		return CODEC_BAD_REGION;
	for (int p = 0; p < size; p++) {
		uint32_t mode = head >> 2 * p & 3;

		if (v->fixed >> p & 1 ? mode != 0 : mode == WIRE_MODE_CODED && !(v->coded >> p & 1))
			return CODEC_BAD_REGION;
	}
	return head & WIRE_REGION_PRUNED && (!octave_of(v->dtype) || (head & 3) != WIRE_MODE_CODED) ? CODEC_BAD_REGION
												    : CODEC_OK;
}

/*
 * Selectors of __byte_perm that move consecutive bytes to live values of a quad, and 0 to others, by the mask of live
 * values.
 */
static __device__ const uint16_t SPREAD[16] = {0x4444, 0x4440, 0x4404, 0x4410, 0x4044, 0x4140, 0x4104, 0x4210,
					       0x0444, 0x1440, 0x1404, 0x2410, 0x1044, 0x2140, 0x2104, 0x3210};

/* Live values of a lane's quad: a mask, and the number of live values before them in the block. */
struct live_values {
	uint32_t mask, before;
};

/* Return the live values of the next row. top: word of plane 0. *seen: live values of all rows so far. */
DEVICE live_values live_of(uint32_t top, uint32_t *seen, uint32_t lane)
{
	live_values l = {~equal_bytes(top, 0) & 15, *seen};
	uint32_t all;

	l.before += warp_scan(__popc(l.mask), lane, &all);
	*seen += all;
	return l;
}

/* Read a quad's bytes in a plane of live values only, which begins at bit `begin`. Other values have 0. */
DEVICE uint32_t spread_quad(const bit_source &s, uint32_t begin, const live_values &l)
{
	return l.mask ? __byte_perm(window_at(s, begin + 8 * l.before), 0, SPREAD[l.mask]) : 0;
}

/* Spread a plane of live values only, at `kept`, to all m values. */
static __device__ void spread(const uint32_t *top, uint32_t m, const uint8_t *kept, uint32_t *plane, uint32_t lane)
{
	uint32_t seen = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		live_values l = live_of(top[32 * r + lane], &seen, lane);
		uint32_t quad = load_bytes(kept + l.before, __popc(l.mask));

		plane[32 * r + lane] = __byte_perm(quad, 0, SPREAD[l.mask]);
	}
	__syncwarp();
}

/* Return the number of live values of a block. */
static __device__ uint32_t count_live(const uint32_t *top, uint32_t m, uint32_t lane)
{
	uint32_t count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++)
		count += __popc(~equal_bytes(top[32 * r + lane], 0) & 15);
	return warp_sum(count);
}

/* Check that a fixed plane is 0 where plane 0 is 0. */
static __device__ bool zero_under(const uint32_t *top, uint32_t m, const uint8_t *fixed, uint32_t lane)
{
	bool bad = false;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t n = there(r, lane, m), word = load_bytes(fixed + WIRE_ROW * r + 4 * lane, n);

		bad |= (equal_bytes(top[32 * r + lane], 0) & ~equal_bytes(word, 0) & ((1u << n) - 1)) != 0;
	}
	return !__any_sync(FULL, bad);
}

/* Store a quad, or combine it with its destination, for sinks and quads that need more than a vector store. */
template <int SIZE> DEVICE_CALL void put_any(const codec_sink *sink, uint32_t dtype, uint64_t i, uint4 x)
{
	uint64_t four[4] = {x.x, x.y, x.z, x.w};

	if (SIZE == 2)
		four[0] = x.x & 0xffff, four[1] = x.x >> 16, four[2] = x.y & 0xffff, four[3] = x.y >> 16;
	put_quad<SIZE>(sink, dtype, i, 4, four);
}

template <int SIZE> DEVICE void put_merged(const codec_sink *sink, uint32_t dtype, uint64_t i, uint4 x)
{
	uint8_t *to = global(sink->data) + SIZE * i;

	if (sink->into != CODEC_INTO_STORE || (uint64_t)to % (4 * SIZE))
		return put_any<SIZE>(sink, dtype, i, x);
	if (SIZE == 2)
		*(uint2 *)to = {x.x, x.y};
	else
		*(uint4 *)to = x;
}

/*
 * Merge and store the lane's n values of row r. word: of each plane. o: position of the first value in the model, which
 * moves on by a row.
 */
template <int SIZE>
DEVICE void put_row(const job *j, uint64_t first, uint32_t r, uint32_t n, const uint32_t *word, place *o,
		    const codec_sink *sink, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype);
	const uint64_t i = first + WIRE_ROW * r + 4 * lane;
	uint16_t offset[4] = {0};
	uint64_t values[4];

	if (!sink->data)
		return;
	if (j->v.model_parts.count && n)
		quad_offsets(j, o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
	if constexpr (SIZE == 2 || SIZE == 4)
		if (octave && n == 4) {
			const uint32_t pairs[2] = {offset[0] | (uint32_t)offset[1] << 16,
						   offset[2] | (uint32_t)offset[3] << 16};
			uint32_t out[4] = {0};

			merge_quad<SIZE>(word, pairs, out);
			return put_merged<SIZE>(sink, j->v.dtype, i, {out[0], out[1], out[2], out[3]});
		}
	for (uint32_t k = 0; k < 4; k++)
		values[k] = merge_value<SIZE>(word, k, octave > 0, offset[k]);
	put_quad<SIZE>(sink, j->v.dtype, i, n, values);
}

/*
 * Decode CHUNK_ROWS rows from row r on whose values all exist. Words of planes are aligned to 4 bytes, and values at
 * `to` to a quad. fixed: plane 1; other planes follow, j->v.plane_stride bytes apart. more: a chunk follows. Nearly all
 * values of a large tensor are decoded here.
 *
 * Memory traffic of a lane and row: words of SIZE - 1 planes, words of the coder, one quad written.
 */
template <int SIZE>
DEVICE void read_whole_rows(const job *j, plane *top, const pairs &by, const uint8_t *fixed, digest *sums, cursor *c,
			    place *o, uint8_t *to, uint32_t r, bool more, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype), round = ROUND_OF(octave);
	const uint32_t length = o->length ? o->length : ~0u; /* no rows: one that has no end */
	const uint32_t *key = CHECKSUM_KEY + lane;
	const uint8_t *from = global(fixed) + 4 * (32 * r + lane);
	const uint64_t stride = j->v.plane_stride;
	uint32_t column = o->column, row = o->row, eighths = row_pair(o->eighths, round);

	const bool stores = to != NULL; /* else the frame is only checked */

	to += 4 * SIZE * (32 * r + lane);
	/* loads of later rows are in flight while a row is decoded: the compiler moves no load above a store */
	const uint32_t AHEAD = SIZE == 2 ? 4 : 2;
	uint32_t ahead[AHEAD][SIZE], columns = o->cols ? columns_at(o->cols + column) : 0;
	auto fetch = [&](uint32_t k) {
		for (int p = 1; p < SIZE; p++)
			ahead[k % AHEAD][p] = *(const uint32_t *)(from + (p - 1) * stride + WIRE_ROW * k);
	};
	if (more && lane < CHUNK_ROWS * (SIZE - 1))
		prefetch(from + CHUNK_ROWS * WIRE_ROW + lane / CHUNK_ROWS * stride +
			 (LINE_NBYTES * (lane % CHUNK_ROWS) - 4 * lane));
	fill_window(&top->coder, lane);
#pragma unroll
	for (uint32_t k = 0; k < AHEAD; k++)
		fetch(k);
#pragma unroll(SIZE == 2 ? CHUNK_ROWS : AHEAD)
	for (uint32_t k = 0; k < CHUNK_ROWS; k++) {
		const uint32_t four = 0x80808080 ^ columns, here = eighths;
		uint32_t word[SIZE], value[SIZE], offset[2];

		for (int p = 1; p < SIZE; p++) {
			word[p] = ahead[k % AHEAD][p];
			sums[p].sum += (uint64_t)word[p] * key[32 * k];
		}
		if (k + AHEAD < CHUNK_ROWS)
			fetch(k + AHEAD);
		if (k + 1 < CHUNK_ROWS) { /* the next row */
			if ((column += WIRE_ROW) >= length) {
				for (; column >= length; row++)
					column -= length;
				eighths = row_pair(eighths_of(o->part, o->rows, row), round);
			}
			if (o->cols)
				columns = columns_at(o->cols + column);
		}
		word[0] = plane_whole_row(top, by, c, lane);
		offset[0] = pair_offset(__byte_perm(four, 0, 0x4140), here, octave);
		offset[1] = pair_offset(__byte_perm(four, 0, 0x4342), here, octave);
		merge_quad<SIZE>(word, offset, value);
		if (!stores)
			continue;
		if constexpr (SIZE == 2)
			*global((uint2 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1]};
		else
			*global((uint4 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1], value[2], value[3]};
	}
	if (j->v.model_parts.count) {
		o->column = column, o->row = row, o->left -= WIRE_ROW * (CHUNK_ROWS - 1);
		enter_row(o);
		move_on(j, o, WIRE_ROW);
	}
}

/* Check that read_whole_rows takes the next chunk: each of the lane's quads lies within one row of the part at hand. */
DEVICE bool whole_rows_ahead(const place *o)
{
	return o->left >= WIRE_ROW * (CHUNK_ROWS - 1) + 4 && !((o->length | o->column) & 3);
}

/* Decode a region that holds plane 0 only, in any mode, row by row. The cursor is behind the region's head. */
template <int SIZE>
DEVICE codec_status read_single_plane(const job *j, uint64_t b, uint32_t mode, cursor c, const pairs &by,
				      const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const uint8_t *fixed = c.frame + v.planes_offset + first;
	digest sums[SIZE] = {};
	place o = {};
	plane top;
	codec_status status = plane_open(&top, j, 0, mode, by, m, &c, lane);

	if (status != CODEC_OK)
		return status;
	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	bool fast = (SIZE == 2 || SIZE == 4) && octave_of(v.dtype) && mode == WIRE_MODE_CODED && by.plane == 0 &&
		    (!sink->data || (sink->into == CODEC_INTO_STORE && (uint64_t)sink->data % (4 * SIZE) == 0)) &&
		    ((uint64_t)top.coder.words | (uint64_t)fixed | v.plane_stride) % 4 == 0;

	for (uint32_t r = 0; r < rows;) {
		if (fast && r % CHUNK_ROWS == 0 && r + CHUNK_ROWS <= m / WIRE_ROW &&
		    (!v.model_parts.count || __all_sync(FULL, whole_rows_ahead(&o)))) {
			if constexpr (SIZE == 2 || SIZE == 4)
				read_whole_rows<SIZE>(j, &top, by, fixed, sums, &c, &o,
						      sink->data ? sink->data + SIZE * first : NULL, r,
						      r + 2 * CHUNK_ROWS <= m / WIRE_ROW, lane);
			r += CHUNK_ROWS;
		} else {
			uint32_t n = there(r, lane, m), word[SIZE];

			word[0] = plane_row(&top, r, &c, lane);
			for (int p = 1; p < SIZE; p++) {
				word[p] = load_bytes(fixed + (p - 1) * v.plane_stride + WIRE_ROW * r + 4 * lane, n);
				digest_word(&sums[p], word[p], r, lane);
			}
			put_row<SIZE>(j, first, r++, n, word, &o, sink, lane);
		}
		if (r % CHUNK_ROWS == 0 || r == rows)
			for (int p = 1; p < SIZE; p++)
				digest_end_chunk(&sums[p], (r - 1) / CHUNK_ROWS, lane);
	}
	for (int p = 1; p < SIZE; p++)
		*checksum += digest_sum(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p, lane);
	status = plane_close(&top);
	return status == CODEC_OK ? close_region(&c, lane) : status;
}

/* Places from which planes of a block are read. */
template <int SIZE> struct plane_places {
	const uint8_t *at[SIZE]; /* address of the plane; NULL: it is in scratch memory */
	uint32_t apart;          /* mask of planes at at[] that hold live values only */
};

/* Find all planes of a region of m values. Planes that are not raw are read to scratch memory. */
template <int SIZE>
DEVICE codec_status find_planes(const job *j, uint64_t first, uint32_t m, uint32_t head, cursor *c, const pairs &by,
				uint8_t *scratch, plane_places<SIZE> *o, uint32_t lane)
{
	const codec_view &v = j->v;
	const bool pruned = head & WIRE_REGION_PRUNED;
	const uint32_t *top = (const uint32_t *)scratch;
	uint8_t *some = scratch + planes_in_regions(v, SIZE) * PLANE_ROOM; /* plane of live values only */
	const uint8_t *section = c->frame + v.planes_offset + first;
	codec_status status = CODEC_OK;
	uint32_t k = m;

	o->apart = 0;
	for (uint32_t p = 0; p < SIZE; p++) {
		o->at[p] = v.fixed >> p & 1 ? section : NULL;
		section += v.fixed >> p & 1 ? v.plane_stride : 0;
	}
	for (uint32_t p = 0; p < SIZE && status == CODEC_OK; p++) {
		uint32_t *to = (uint32_t *)(scratch + p * PLANE_ROOM), mode = head >> 2 * p & 3;

		if (v.fixed >> p & 1)
			continue;
		if (p && mode == WIRE_MODE_RAW) {
			if (left(c) < k)
				return CODEC_BAD_REGION;
			o->at[p] = here(c);
			o->apart |= (uint32_t)pruned << p;
			c->at += k;
			continue;
		}
		status = read_plane(j, p, mode, by, k, p && pruned ? (uint32_t *)some : to, c, lane);
		if (status != CODEC_OK || !pruned)
			continue;
		if (p) {
			spread(top, m, some, to, lane);
			continue;
		}
		k = count_live(top, m, lane);
		for (int f = 1; f < SIZE; f++)
			if (v.fixed >> f & 1 && !zero_under(top, m, o->at[f], lane))
				status = CODEC_BAD_REGION;
		if (!k)
			status = CODEC_BAD_REGION;
	}
	return status;
}

/* Merge all planes of a block, and store its values. Adds checksums of fixed planes to *checksum. */
template <int SIZE>
DEVICE void merge_planes(const job *j, const plane_places<SIZE> &from, const bit_source &source, uint64_t first,
			 uint32_t m, const uint8_t *scratch, const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, *top = (const uint32_t *)scratch;
	digest sums[SIZE] = {};
	place o = {};

	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (uint32_t r = 0, seen = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE];
		live_values l = {0, 0};

		if (from.apart)
			l = live_of(top[32 * r + lane], &seen, lane);
		for (int p = 0; p < SIZE; p++) {
			const uint8_t *at = from.at[p];

			if (!at) {
				word[p] = ((const uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane];
				continue;
			}
			word[p] = from.apart >> p & 1 ? spread_quad(source, bit_of(source, at), l)
						      : load_bytes(at + WIRE_ROW * r + 4 * lane, n);
			if (!(v.fixed >> p & 1))
				continue;
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
		}
		put_row<SIZE>(j, first, r, n, word, &o, sink, lane);
	}
	for (int p = 0; p < SIZE; p++)
		if (v.fixed >> p & 1)
			*checksum += digest_sum(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
						lane);
}

/* Decode a region with any planes. scratch: see lossless_scratch_nbytes. */
template <int SIZE>
DEVICE codec_status read_planes(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by, uint8_t *scratch,
				const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const uint64_t first = b * j->v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&j->v, b);
	const bit_source source = bits_from(&c);
	plane_places<SIZE> from;
	codec_status status = find_planes<SIZE>(j, first, m, head, &c, by, scratch, &from, lane);

	if (status != CODEC_OK)
		return status;
	merge_planes<SIZE>(j, from, source, first, m, scratch, sink, checksum, lane);
	return close_region(&c, lane);
}

/* Decode block b, whose region is at the cursor. Adds checksums of its parts of fixed planes to *checksum. */
template <int SIZE>
DEVICE codec_status read_block(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
			       const codec_sink *sink, uint64_t *checksum, uint32_t lane)
{
	const codec_view &v = j->v;
	uint32_t head = load32(here(&c));
	codec_status status = check_head(&v, head, SIZE);

	bool single = v.fixed == (1u << SIZE) - 2 && !(v.halved & 1) && !(head & WIRE_REGION_PRUNED);

	c.at += 4;
	if (status != CODEC_OK)
		return status;
	if (!single)
		return read_planes<SIZE>(j, b, head, c, by, scratch, sink, checksum, lane);
	return read_single_plane<SIZE>(j, b, head & 3, c, by, sink, checksum, lane);
}

/* Bytes of a unit of scratch memory, read by the host: a plane. A warp takes lossless_scratch_nbytes bytes. */
extern "C" __device__ const uint64_t decode_lossless_nbytes[] = {PLANE_ROOM};

/* Decode blocks. Grid: (CTAs, frames). */
template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS, SIZE > 4 ? 3 : 4) decode_lossless(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, SIZE,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane, uint64_t *checksum) {
				  return read_block<SIZE>(j, b, c, by, mine, &d.sink, checksum, lane);
			  });
}
