/* encode_lossless.cuh - values to regions: a warp does a block. docs/encoder.md, sections 4.2 and 6. */
#ifndef CODEC_ENCODE_LOSSLESS_CUH
#define CODEC_ENCODE_LOSSLESS_CUH

#include "encode_coder.cuh"
#include "fit.cuh"
#include "seal.cuh"

/* Values of a row, this lane's four, as a word of each plane. */
template <int SIZE>
DEVICE void split_quad(const uint8_t *values, uint64_t i, uint32_t n, bool is_float, const uint16_t *offset,
		       uint32_t *word)
{
	for (int p = 0; p < SIZE; p++)
		word[p] = 0;
	uint64_t four[4];

	load_quad<SIZE>(values + SIZE * i, n, four);
	for (uint32_t k = 0; k < n; k++) {
		uint64_t x = four[k];

		if (SIZE > 1 && is_float) {
			const int low = SIZE > 1 ? 8 * SIZE - 16 : 0;
			uint16_t top = bits_turn((uint16_t)(x >> low), offset[k], SHIFT_OF(SIZE));

			x = (x & ((1ull << low) - 1)) | (uint64_t)top << low;
		}
		for (int p = 0; p < SIZE; p++)
			word[p] |= (uint32_t)(x >> 8 * (SIZE - 1 - p) & 255) << 8 * k;
	}
}

/* Would coding a plane of k bytes save enough? */
static __device__ bool plane_pays(const job *j, uint32_t p, const uint32_t *plane, uint32_t k, uint32_t lane)
{
	const uint32_t *codes = j->codes + 256 * p;
	uint32_t halved = j->v.halved >> p & 1, cost = 0, count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < k; r += CHOOSE_BLOCK_STRIDE)
		for (uint32_t i = 0; i < there(r, lane, k); i++) {
			uint32_t entry = codes[plane[32 * r + lane] >> 8 * i & (halved ? 15 : 255)];

			cost += CODE_LENGTH(entry) + 8 * CODE_ESCAPES(entry);
			count++;
		}
	return choose_saves(warp_sum(cost), warp_sum(count), halved ? 4 : 8);
}

/* Plane p of k bytes, in whole rows, in the mode that serves it best: bytes at `out`. */
DEVICE_CALL uint32_t put_plane(const job *j, uint32_t p, uint32_t *plane, uint32_t k, uint32_t *symbol, uint32_t *words,
			       uint8_t *out, uint32_t *mode, uint32_t lane)
{
	const uint8_t *bytes = (const uint8_t *)plane;
	uint32_t rows = (k + WIRE_ROW - 1) / WIRE_ROW, nbitmap = (rows + 7) / 8, got = 0, runs = 0, differ = 0;
	uint32_t first = bytes[0] * ONES, halved = j->v.halved >> p & 1;

	for (uint32_t r = 0; r < rows; r++)
		differ |= keep_bytes(plane[32 * r + lane] ^ first, there(r, lane, k));
	bool constant = !__any_sync(FULL, differ != 0);

	if (!constant && j->v.coded >> p & 1 &&
	    ((p == 0 && octave_of(j->v.dtype)) || plane_pays(j, p, plane, k, lane))) {
		uint32_t most = (uint32_t)choose_coded_most(k, (int)halved), half = (k + 1) / 2;

		for (uint32_t r = 0; halved && r < rows; r++)
			symbol[32 * r + lane] = plane[32 * r + lane] & 0x0f0f0f0fu;
		got = encode_plane(j, p, halved ? symbol : plane, k, most, NULL, words, out, lane);
		for (uint32_t i = lane; got && halved && i < half; i += 32)
			out[got + i] = (uint8_t)(bytes[i] >> 4 | (half + i < k ? bytes[half + i] & 0xf0 : 0));
		got += got && halved ? half : 0;
	}
	for (uint32_t r = 0; !constant && !got && r < rows; r++)
		if (__any_sync(FULL, keep_bytes(plane[32 * r + lane], there(r, lane, k)) != 0))
			runs += k - WIRE_ROW * r < WIRE_ROW ? k - WIRE_ROW * r : WIRE_ROW;
	*mode = choose_mode(k, constant, got, nbitmap, runs);
	if (*mode == WIRE_MODE_CODED)
		return got;
	if (*mode == WIRE_MODE_CONSTANT) {
		if (lane == 0)
			out[0] = (uint8_t)first;
		return 1;
	}
	if (*mode == WIRE_MODE_RAW) {
		copy_bytes(out, bytes, k, lane);
		return k;
	}
	uint32_t at = nbitmap, bits = 0;

	for (uint32_t r = 0; r < rows; r++) {
		uint32_t run = k - WIRE_ROW * r < WIRE_ROW ? k - WIRE_ROW * r : WIRE_ROW;

		if (__any_sync(FULL, keep_bytes(plane[32 * r + lane], there(r, lane, k)) != 0)) {
			copy_bytes(out + at, bytes + WIRE_ROW * r, run, lane);
			at += run;
			bits |= 1u << r % 8;
		}
		if ((r % 8 == 7 || r + 1 == rows) && lane == 0)
			out[r / 8] = (uint8_t)bits;
		bits = r % 8 == 7 ? 0 : bits;
	}
	return at;
}

/* Bytes of values whose plane 0 is not 0, one after the other; `plane` and `kept` may be the same. */
static __device__ void prune(const uint32_t *top, uint32_t m, uint32_t *plane, uint32_t lane)
{
	uint32_t seen = 0, total;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t quad = plane[32 * r + lane], lives = ~equal_bytes(top[32 * r + lane], 0) & 15;
		uint32_t at = seen + warp_scan(__popc(lives), lane, &total);

		__syncwarp(); /* all have read the row; a shuffle orders no memory */
		for (uint32_t i = 0; i < 4; i++)
			if (lives >> i & 1)
				((uint8_t *)plane)[at++] = (uint8_t)(quad >> 8 * i);
		seen += total;
		__syncwarp();
	}
}

/* A quad of plane p, which is fixed, to its section; value i of the tensor is its first. */
DEVICE void put_fixed(const codec_view *v, uint8_t *frame, uint64_t section, uint64_t i, uint32_t word)
{
	if (i < v->plane_stride)
		*(uint32_t *)(frame + section + i) = word;
}

/* Is only plane 0 in regions, and one that is coded, whatever its values? */
DEVICE bool is_alone(const codec_view &v, int size)
{
	return size > 1 && octave_of(v.dtype) && v.coded & 1 && !(v.halved & 1) && v.fixed == (1u << size) - 2;
}

/*
 * Block b of a tensor of which that is true: values are read once, the last row first, and coded at once; as soon as
 * the region's size is known it is written to its place. False: it is not to be coded after all, and nothing has
 * happened but that fixed planes may have been written. `symbol`, `words`: memory for a plane and for WORDS_ROOM.
 */
template <int SIZE>
static __device__ bool write_alone(const codec_encoding &e, const job *j, uint64_t b, uint32_t *symbol, uint32_t *words,
				   uint32_t lane)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const uint32_t last = there(rows - 1, lane, m) ? rows - 1 : rows - 2; /* of this lane's rows; ~0: it has none */
	const bool offsets = v.model_parts.count > 0;
	const int octave = octave_of(v.dtype);
	uint32_t differ = 0, some = 0, size = 0;
	uint64_t at = 0, sealed = 0;
	digest sums[SIZE];
	place o = {};

	for (int p = 0; p < SIZE; p++)
		sums[p] = {0, 0};
	if (offsets && last != ~0u)
		o = place_at(j, first + WIRE_ROW * last + 4 * lane);
	auto quad_of = [&](uint32_t r) {
		uint32_t n = there(r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane;
		uint64_t section = v.planes_offset;
		uint16_t offset[4] = {0};

		if (offsets && n) {
			quad_offsets_here(j, &o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
			if (r)
				move_back(j, &o, WIRE_ROW);
		}
		split_quad<SIZE>(e.source.values, first + i, n, octave > 0, offset, word);
		for (int p = 1; p < SIZE; p++, section += v.plane_stride) {
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == 0)
				digest_keep(&sums[p], r / CHUNK_ROWS, lane);
			put_fixed(&v, e.frame, section, first + i, word[p]);
		}
		if (r == rows - 1)
			some = __shfl_sync(FULL, word[0], 0) & 255;
		differ |= keep_bytes(word[0] ^ some * ONES, n);
		return word[0];
	};
	auto place_for = [&](uint32_t nbytes) -> uint8_t * {
		if (!__any_sync(FULL, differ != 0))
			return NULL;
		size = (4 + nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
		at = v.regions_offset + look_back(e.places, b, size, lane);
		return at + size <= e.capacity ? e.frame + at + 4 : NULL;
	};
	uint32_t most = (uint32_t)choose_coded_most(m, 0);
	uint32_t got = encode_quads(j, 0, quad_of, symbol, m, most, NULL, words, place_for, lane);

	if (!size)
		return false;
	if (got) {
		for (int p = 1; p < SIZE; p++)
			sealed += digest_end(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
					     lane);
		put32(e.frame + at, WIRE_MODE_CODED, lane);
		end_region(e.frame + at, 4 + got, lane);
		sealed = seal_block(sealed + digest_bytes(e.frame + at, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, sealed, lane);
	return true;
}

/*
 * Block b to a region at `region`, fixed planes to their sections of the frame, whose digests become *sealed. Returns
 * the region's size. `scratch`: memory for a plane more than values have, and for WORDS_ROOM.
 */
template <int SIZE>
static __device__ uint32_t write_block(const job *j, const uint8_t *values, uint8_t *frame, uint64_t b,
				       uint8_t *scratch, uint8_t *region, uint64_t *sealed, uint32_t lane)
{
	const codec_view &v = j->v;
	uint64_t first = b * v.block_nvalues;
	uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW, k = m, head = 0, at = 4;
	uint32_t all = (1u << SIZE) - 1, *top = (uint32_t *)scratch, under = 0, zeros = 0;
	uint32_t *symbol = (uint32_t *)(scratch + SIZE * PLANE_ROOM);
	uint32_t *words = (uint32_t *)(scratch + (SIZE + 1) * PLANE_ROOM);
	int octave = octave_of(v.dtype);
	bool offsets = v.model_parts.count > 0;
	digest sums[SIZE];
	place o = {};

	if (offsets)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (int p = 0; p < SIZE; p++)
		sums[p] = {0, 0};
	for (uint32_t r = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane, others = 0;
		uint64_t section = v.planes_offset;
		uint16_t offset[4] = {0};

		if (offsets && n)
			quad_offsets(j, &o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
		split_quad<SIZE>(values, first + i, n, octave > 0, offset, word);
		for (int p = 0; p < SIZE; p++) {
			others |= p ? word[p] : 0;
			if (!(v.fixed >> p & 1)) {
				((uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane] = word[p];
				continue;
			}
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_keep(&sums[p], r / CHUNK_ROWS, lane);
			put_fixed(&v, frame, section, first + i, word[p]);
			section += v.plane_stride;
		}
		uint32_t none = equal_bytes(word[0], 0) & ((1u << n) - 1);

		zeros += __popc(none);
		under |= none & ~equal_bytes(others, 0); /* something is set where plane 0 is 0 */
	}
	__syncwarp();
	zeros = (uint32_t)warp_sum(zeros);
	for (uint32_t p = 0; p < SIZE; p++) {
		uint32_t mode, *plane = (uint32_t *)(scratch + p * PLANE_ROOM);

		if (v.fixed >> p & 1)
			continue;
		at += put_plane(j, p, plane, p ? k : m, symbol, words, region + at, &mode, lane);
		head |= mode << 2 * p;
		__syncwarp();
		if (p || mode != WIRE_MODE_CODED || !octave || (v.fixed | 1) == all || !choose_prunes(zeros, m) ||
		    __any_sync(FULL, under != 0))
			continue;
		k = m - zeros;
		for (int f = 1; f < SIZE; f++)
			if (!(v.fixed >> f & 1))
				prune(top, m, (uint32_t *)(scratch + f * PLANE_ROOM), lane);
	}
	head |= k < m ? WIRE_REGION_PRUNED : 0;
	put32(region, head, lane);
	for (int p = 0; p < SIZE; p++)
		if (v.fixed >> p & 1)
			*sealed += digest_end(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
					      lane);
	return end_region(region, at, lane);
}

#endif
