/* lossless/regions.cuh - encoding of blocks with any planes in regions. docs/spec/encoder.md, sections 4.2 and 6.
 *
 * A value is live if its byte in plane 0 is not 0. A region is pruned if its planes hold bytes of live values only.
 */
#ifndef CODEC_CUDA_LOSSLESS_REGIONS_CUH
#define CODEC_CUDA_LOSSLESS_REGIONS_CUH

#include "coder/encode.cuh"
#include "common/checksum.cuh"
#include "lossless/split.cuh"

/* Check, from a sample of a plane's k bytes, that coding it saves enough. */
static __device__ bool plane_pays(const job *j, uint32_t p, const uint32_t *plane, uint32_t k, uint32_t lane)
{
	const uint32_t *codes = j->codes + 256 * p;
	uint32_t halved = j->v.halved >> p & 1, cost = 0, count = 0;

	for (uint32_t r = 0; WIRE_ROW * r < k; r += CHOOSE_BLOCK_STRIDE)
		for (uint32_t i = 0; i < there(r, lane, k); i++) {
			uint32_t entry = codes[plane[32 * r + lane] >> 8 * i & (halved ? 15 : 255)];

			cost += CODE_LENGTH(entry) + (entry & CODE_ESCAPED ? 8 : 0);
			count++;
		}
	return choose_saves(warp_sum(cost), warp_sum(count), halved ? 4 : 8);
}

/*
 * Write plane p of k bytes, which is in memory in whole rows, in the mode that takes least space. Returns the bytes
 * written to `out`. coder: memory for a plane and WORDS_ROOM words; NULL: the plane is not coded.
 */
DEVICE_CALL uint32_t put_plane(const job *j, uint32_t p, uint32_t *plane, uint32_t k, uint8_t *coder, uint8_t *out,
			       uint32_t *mode, uint32_t lane)
{
	const uint8_t *bytes = (const uint8_t *)plane;
	uint32_t rows = (k + WIRE_ROW - 1) / WIRE_ROW, nbitmap = (rows + 7) / 8, got = 0, runs = 0, differ = 0;
	uint32_t first = bytes[0] * ONES, halved = j->v.halved >> p & 1;

	for (uint32_t r = 0; r < rows; r++) {
		uint32_t n = there(r, lane, k), word = plane[32 * r + lane];

		differ |= keep_bytes(word ^ first, n);
		if (__any_sync(FULL, keep_bytes(word, n) != 0))
			runs += k - WIRE_ROW * r < WIRE_ROW ? k - WIRE_ROW * r : WIRE_ROW;
	}
	bool constant = !__any_sync(FULL, differ != 0);

	if (!constant && coder && j->v.coded >> p & 1 &&
	    ((p == 0 && octave_of(j->v.dtype)) || plane_pays(j, p, plane, k, lane))) {
		uint32_t most = (uint32_t)choose_coded_most(k, (int)halved), half = (k + 1) / 2;
		uint32_t *symbol = (uint32_t *)coder, *words = (uint32_t *)(coder + PLANE_ROOM);

		for (uint32_t r = 0; halved && r < rows; r++)
			symbol[32 * r + lane] = plane[32 * r + lane] & 0x0f0f0f0fu;
		got = encode_plane(j, p, halved ? symbol : plane, k, most, words, coder, false, out, lane);
		for (uint32_t i = lane; got && halved && i < half; i += 32)
			out[got + i] = (uint8_t)(bytes[i] >> 4 | (half + i < k ? bytes[half + i] & 0xf0 : 0));
		got += got && halved ? half : 0;
	}
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

/* Selectors of __byte_perm that move the bytes of live values of a quad together, by the mask of live values. */
static __device__ const uint16_t SQUEEZE[16] = {0x4444, 0x4440, 0x4441, 0x4410, 0x4442, 0x4420, 0x4421, 0x4210,
						0x4443, 0x4430, 0x4431, 0x4310, 0x4432, 0x4320, 0x4321, 0x3210};

/*
 * Remove bytes of values that are not live from planes 1 and above, but for fixed ones. Planes in scratch memory are
 * overwritten; if `out` is not NULL, they are written there instead, k bytes each.
 */
template <int SIZE>
DEVICE_CALL void prune(uint8_t *scratch, uint32_t m, uint32_t fixed, uint8_t *out, uint32_t k, uint32_t lane)
{
	uint32_t seen = 0;
	uint8_t *to[SIZE];

	for (int p = 1; p < SIZE; p++) {
		to[p] = global(out ? out : scratch + p * PLANE_ROOM);
		out += out && !(fixed >> p & 1) ? k : 0;
	}
	/* the next row is on its way while a row is written, which never reaches it */
	uint32_t ahead[SIZE];
	auto fetch = [&](uint32_t r) {
		for (int p = 0; p < SIZE; p++)
			ahead[p] = global((const uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane];
	};
	fetch(0);
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t mask = ~equal_bytes(ahead[0], 0) & 15, total, word[SIZE];

		for (int p = 1; p < SIZE; p++)
			word[p] = __byte_perm(ahead[p], 0, SQUEEZE[mask]);
		if (WIRE_ROW * (r + 1) < m)
			fetch(r + 1);
		uint32_t at = seen + warp_scan(__popc(mask), lane, &total);

		__syncwarp(); /* all lanes have read both rows: a shuffle orders no memory */
		for (int p = 1; p < SIZE; p++)
			for (int i = 0; i < 4 && !(fixed >> p & 1); i++)
				if (i < __popc(mask))
					to[p][at + i] = (uint8_t)(word[p] >> 8 * i);
		seen += total;
	}
	__syncwarp();
}

/*
 * Note bytes of live values in planes 1 and above. *runs: mask of planes that may have a run of 128 zeros among live
 * values: such a run covers half of some row of 128 values, all of whose live values are then 0.
 */
template <int SIZE> DEVICE void note_live_bytes(const uint32_t *word, common *same, uint32_t *runs)
{
	const uint32_t live = ~equal_mask(word[0], 0);

	for (int p = 1; p < SIZE; p++) {
		uint32_t some = __ballot_sync(FULL, (word[p] & live) != 0);

		same[p].some |= word[p] & live;
		same[p].all &= word[p] | ~live;
		*runs |= (uint32_t)(!(some & 0xffff) || !(some >> 16)) << p;
	}
}

/*
 * Return a mask of planes that may end with a run of fewer than 128 zeros: planes whose byte of the block's last value
 * is 0; all, if that value is not live. i: index of the lane's first value. live: see note_live_bytes.
 */
template <int SIZE>
DEVICE uint32_t may_end_in_zeros(const uint32_t *word, uint32_t live, uint32_t i, uint32_t n, uint32_t m)
{
	const uint32_t last = n && i + n == m ? 255u << 8 * (n - 1) : 0; /* the last value's byte */
	uint32_t planes = 0;

	for (int p = 0; p < SIZE; p++)
		planes |= (uint32_t)(last && !(word[p] & live & last)) << p;
	return __reduce_or_sync(FULL, planes);
}

/* Properties of a block's planes, found while its values are split. */
template <int SIZE> struct split_block {
	common same[SIZE];
	digest sums[SIZE]; /* checksums of fixed planes */
	uint32_t runs;     /* mask of planes that may have a run of 128 zeros */
	uint32_t zeros;    /* values whose byte in plane 0 is 0 */
	uint32_t under;    /* not 0: some of these have another byte that is not 0 */
};

/* Split m values from value `first` on: fixed planes go to their sections of the frame, others to scratch memory. */
template <int SIZE>
DEVICE void split_values(const job *j, const uint8_t *values, uint8_t *frame, uint64_t first, uint32_t m,
			 uint8_t *scratch, split_block<SIZE> *o, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, all = (1u << SIZE) - 1;
	const int octave = octave_of(v.dtype);
	const bool offsets = v.model_parts.count > 0;
	place at = {};

	if (offsets)
		at = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	o->runs = o->zeros = o->under = 0;
	for (int p = 0; p < SIZE; p++) {
		o->sums[p] = {0, 0};
		o->same[p] = {0, FULL};
	}
	for (uint32_t r = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane, others = 0;
		uint64_t section = v.planes_offset;
		uint16_t offset[4] = {0};

		if (offsets && n)
			quad_offsets(j, &at, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
		split_quad<SIZE>(values, first + i, n, octave > 0, offset, word);
		for (int p = 0; p < SIZE; p++) {
			others |= p ? word[p] : 0;
			if (!(v.fixed >> p & 1)) {
				((uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane] = word[p];
				continue;
			}
			digest_word(&o->sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_end_chunk(&o->sums[p], r / CHUNK_ROWS, lane);
			put_fixed(&v, frame, section, first + i, word[p]);
			section += v.plane_stride;
		}
		if (octave && v.fixed != all - 1)
			note_live_bytes<SIZE>(word, o->same, &o->runs);
		if (r + 1 == rows)
			o->runs |= may_end_in_zeros<SIZE>(word, ~equal_mask(word[0], 0), i, n, m);
		uint32_t none = equal_bytes(word[0], 0) & ((1u << n) - 1);

		o->zeros += __popc(none);
		o->under |= none & ~equal_bytes(others, 0);
	}
	__syncwarp();
	o->zeros = (uint32_t)warp_sum(o->zeros);
	o->under = __any_sync(FULL, o->under != 0);
}

/*
 * Write the planes in scratch memory to a region, behind its head. Returns the head; *size: bytes of head and planes.
 * coder: see put_plane.
 */
template <int SIZE>
DEVICE uint32_t put_planes(const job *j, const split_block<SIZE> &o, uint32_t m, uint8_t *scratch, uint8_t *coder,
			   uint8_t *region, uint32_t *size, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t all = (1u << SIZE) - 1;
	const bool prunes = octave_of(v.dtype) && (v.fixed | 1) != all && !o.under && choose_prunes(o.zeros, m);
	uint32_t k = m, head = 0, at = 4, raw = 0; /* mask of planes that are certainly raw in a pruned region */

	for (int p = 1; p < SIZE; p++)
		raw |= (uint32_t)(!((v.fixed | v.coded | o.runs) >> p & 1) && differs(o.same[p])) << p;
	for (uint32_t p = 0; p < SIZE; p++) {
		uint32_t mode, *plane = (uint32_t *)(scratch + p * PLANE_ROOM);

		if (v.fixed >> p & 1)
			continue;
		at += put_plane(j, p, plane, p ? k : m, coder, region + at, &mode, lane);
		head |= mode << 2 * p;
		__syncwarp();
		if (p || mode != WIRE_MODE_CODED || !prunes)
			continue;
		k = m - o.zeros;
		if (raw == (~(v.fixed | 1) & all)) { /* most mantissas: prune all planes directly into the region */
			prune<SIZE>(scratch, m, v.fixed, region + at, k, lane);
			for (p = 1; p < SIZE; p++)
				if (raw >> p & 1) {
					head |= WIRE_MODE_RAW << 2 * p;
					at += k;
				}
			break;
		}
		prune<SIZE>(scratch, m, v.fixed, NULL, 0, lane);
	}
	*size = at;
	return head | (k < m ? WIRE_REGION_PRUNED : 0);
}

/*
 * Encode block b to a region, and fixed planes to their sections of the frame. Adds checksums of the block's parts of
 * fixed planes to *checksum. Returns the region's size. scratch, coder: memory for planes; see put_plane.
 */
template <int SIZE>
DEVICE_CALL uint32_t write_block(const job *j, const uint8_t *values, uint8_t *frame, uint64_t b, uint8_t *scratch,
				 uint8_t *coder, uint8_t *region, uint64_t *checksum, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t m = (uint32_t)block_values(&v, b);
	const uint32_t chunks = (m + WIRE_ROW * CHUNK_ROWS - 1) / (WIRE_ROW * CHUNK_ROWS);
	split_block<SIZE> o;
	uint32_t size;

	split_values<SIZE>(j, values, frame, b * v.block_nvalues, m, scratch, &o, lane);
	put32(region, put_planes<SIZE>(j, o, m, scratch, coder, region, &size, lane), lane);
	for (int p = 0; p < SIZE; p++)
		if (v.fixed >> p & 1)
			*checksum += digest_sum(&o.sums[p], 0, chunks, WIRE_SEED_PLANE + p, lane);
	return end_region(region, size, lane);
}

#endif
