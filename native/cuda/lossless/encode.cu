/* lossless/encode.cu - kernels that encode blocks of lossless frames, one block a warp. docs/encoder.md, sections 4.2
 * and 6.
 *
 * A value is live if its byte in plane 0 is not 0. A region is pruned if its planes hold bytes of live values only.
 */
#include "coder/encode.cuh"
#include "coder/fit.cuh"
#include "common/checksum.cuh"
#include "frame/encode.cuh"

/*
 * Split a quad as it lies in memory into a word of each plane; the inverse of merge_quad. offset: the circle's size
 * less the offset, of two values in each of two words. SIZE is 2 or 4.
 */
template <int SIZE> DEVICE void split_pairs(const uint32_t *value, const uint32_t *offset, uint32_t *plane)
{
	uint32_t top[2], turned[2];

	for (int h = 0; h < 2; h++) {
		top[h] = SIZE == 2 ? value[h] : __byte_perm(value[2 * h % SIZE], value[(2 * h + 1) % SIZE], 0x7632);
		turned[h] = turn_pair(top[h] & 0x7fff7fff, __byte_perm(2 * top[h], 0, 0x4341), offset[h]);
	}
	plane[1] = (__byte_perm(turned[0], turned[1], 0x6420) & 0x7f7f7f7f) |
		   (__byte_perm(top[0], top[1], 0x7531) & 0x80808080);
	plane[0] = __byte_perm(2 * turned[0], 2 * turned[1], 0x7531);
	if constexpr (SIZE == 4) {
		uint32_t low[2] = {__byte_perm(value[0], value[1], 0x5410), __byte_perm(value[2], value[3], 0x5410)};

		plane[2] = __byte_perm(low[0], low[1], 0x7531);
		plane[3] = __byte_perm(low[0], low[1], 0x6420);
	}
}

/* Split n values at any address. offset: of each value, in patterns. */
template <int SIZE>
DEVICE void split_some(const uint8_t *from, uint32_t n, bool is_float, const uint16_t *offset, uint32_t *word)
{
	for (int p = 0; p < SIZE; p++)
		word[p] = 0;
	uint64_t four[4];

	load_quad<SIZE>(from, n, four);
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

/* Split the lane's n values from value i on into a word of each plane. offset: of each value, in patterns. */
template <int SIZE>
DEVICE void split_quad(const uint8_t *values, uint64_t i, uint32_t n, bool is_float, const uint16_t *offset,
		       uint32_t *word)
{
	const uint8_t *from = global(values) + SIZE * i;

	if constexpr (SIZE == 2 || SIZE == 4)
		if (is_float && n == 4 && (uint64_t)from % (4 * SIZE) == 0) {
			uint32_t value[SIZE], back[2]; /* the circle's size less the offset */

			for (int h = 0; h < 2; h++)
				back[h] = WIRE_CIRCLE(128) * 0x10001 -
					  (offset[2 * h] | (uint32_t)offset[2 * h + 1] << 16);
			for (int h = 0; h < SIZE; h += 2) {
				uint2 w = ((const uint2 *)from)[h / 2];

				value[h] = w.x, value[h + 1] = w.y;
			}
			return split_pairs<SIZE>(value, back, word);
		}
	split_some<SIZE>(from, n, is_float, offset, word);
}

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
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t mask = ~equal_bytes(((uint32_t *)scratch)[32 * r + lane], 0) & 15, total, word[SIZE];
		uint32_t at = seen + warp_scan(__popc(mask), lane, &total);

		for (int p = 1; p < SIZE; p++)
			word[p] =
				__byte_perm(((uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane], 0, SQUEEZE[mask]);
		__syncwarp(); /* all lanes have read the row: a shuffle orders no memory */
		for (int p = 1; p < SIZE; p++)
			for (int i = 0; i < 4 && !(fixed >> p & 1); i++)
				if (i < __popc(mask))
					to[p][at + i] = (uint8_t)(word[p] >> 8 * i);
		seen += total;
		__syncwarp();
	}
}

/*
 * Store the lane's quad of a fixed plane. section: offset of the plane in the frame. i: index of the quad's first
 * value.
 */
DEVICE void put_fixed(const codec_view *v, uint8_t *frame, uint64_t section, uint64_t i, uint32_t word)
{
	if (i < v->plane_stride)
		*(uint32_t *)(frame + section + i) = word;
}

/* Check that regions hold plane 0 only, and that it is coded. */
DEVICE bool has_single_plane(const codec_view &v, int size)
{
	return size > 1 && octave_of(v.dtype) && v.coded & 1 && !(v.halved & 1) && v.fixed == (1u << size) - 2;
}

/* OR and AND of all symbols of a plane, separately for the four values of quads. */
struct common {
	uint32_t some, all;
};

/* Return the OR of all bytes of all lanes' words. */
DEVICE uint32_t any_byte(uint32_t x)
{
	x = __reduce_or_sync(FULL, x);
	return (x | x >> 8 | x >> 16 | x >> 24) & 255;
}

/* Check that not all symbols of a plane are equal. */
DEVICE bool differs(const common &same)
{
	return any_byte(same.some) & any_byte(~same.all);
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

/* Load a quad of aligned values: SIZE words. */
template <int SIZE> DEVICE void load_words(const uint8_t *from, uint32_t *word)
{
	if constexpr (SIZE == 2) {
		uint2 w = *global((const uint2 *)from);

		word[0] = w.x, word[1] = w.y;
	} else {
		uint4 w = *global((const uint4 *)from);

		word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
	}
}

/*
 * Encode CHUNK_ROWS rows from row r on whose values all exist: plane 0 goes to the coder, others to their sections of
 * the frame from `section` on. from: values, aligned to a quad. o: position of the last of these rows; moves back.
 * Nearly all values of a large tensor are encoded here.
 */
template <int SIZE>
DEVICE void write_whole_rows(const job *j, const uint8_t *from, uint8_t *section, place *o, coding *s, digest *sums,
			     common *same, uint32_t r, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype), round = ROUND_OF(octave);
	const uint32_t *key = CHECKSUM_KEY + lane;
	uint32_t column = o->length ? o->column : ~0u, row = o->row, eighths = row_pair(o->eighths, round), *to[SIZE];

	for (int p = 1; p < SIZE; p++)
		to[p] = global((uint32_t *)(section + (p - 1) * j->v.plane_stride)) + 32 * r + lane;
	if (r && lane < SIZE * CHUNK_ROWS) /* the chunk before, which comes next */
		prefetch(from + SIZE * WIRE_ROW * (r - CHUNK_ROWS) + LINE_NBYTES * lane);
	from += 4 * SIZE * (32 * r + lane);
	/* loads of later rows are in flight while a row is coded: the compiler moves no load above a store */
	const uint32_t AHEAD = SIZE == 2 ? 4 : 2;
	uint32_t ahead[AHEAD][SIZE], columns = o->cols ? columns_at(o->cols + column) : 0;
	auto fetch = [&](uint32_t k) { load_words<SIZE>(from + 4 * SIZE * 32 * k, ahead[k % AHEAD]); };
#pragma unroll
	for (uint32_t k = CHUNK_ROWS; k-- > CHUNK_ROWS - AHEAD;)
		fetch(k);
#pragma unroll
	for (uint32_t k = CHUNK_ROWS; k-- > 0;) {
		const uint32_t four = 0x80808080 ^ columns, here = eighths;
		uint32_t word[SIZE], value[SIZE], offset[2];

		for (int i = 0; i < SIZE; i++)
			value[i] = ahead[k % AHEAD][i];
		if (k >= AHEAD)
			fetch(k - AHEAD);
		if (k) { /* the next row */
			if (column < WIRE_ROW) {
				for (; column < WIRE_ROW; row--)
					column += o->length;
				eighths = row_pair(eighths_of(o->part, o->rows, row), round);
			}
			column -= WIRE_ROW;
			if (o->cols)
				columns = columns_at(o->cols + column);
		}
		for (int h = 0; h < 2; h++) /* the circle's size less the offset */
			offset[h] = WIRE_CIRCLE(128) * 0x10001 -
				    pair_offset(__byte_perm(four, 0, h ? 0x4342 : 0x4140), here, octave);
		split_pairs<SIZE>(value, offset, word);
		for (int p = 1; p < SIZE; p++) {
			sums[p].sum += (uint64_t)word[p] * key[32 * k];
			to[p][32 * k] = word[p];
		}
		same->some |= word[0];
		same->all &= word[0];
		code_quad(s, word[0], r + k, 4, lane);
	}
	if (o->part) {
		o->column = o->length ? column : 0, o->row = row, o->left += WIRE_ROW * (CHUNK_ROWS - 1);
		enter_row(o);
		if (r)
			move_back(j, o, WIRE_ROW);
	}
}

/*
 * Check that write_whole_rows takes the chunk of rows that ends at a position: each of the lane's quads lies within one
 * row of the part at hand.
 */
DEVICE bool whole_rows_behind(const place *o)
{
	return o->part->count - o->left >= WIRE_ROW * (CHUNK_ROWS - 1) && o->left >= 4 &&
	       !((o->length | o->column) & 3);
}

/*
 * Split and code the m values from value `first` on, from the last row to the first. Other planes than plane 0 go to
 * their sections of the frame. sums: checksums of fixed planes. same: of plane 0.
 */
template <int SIZE>
DEVICE void code_values(const codec_encoding &e, const job *j, uint64_t first, uint32_t m, coding *s, digest *sums,
			common *same, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, pad = table_of(j, 0)[TABLE_PAD] * ONES;
	/* last row in which this lane has a value; ~0: none */
	const uint32_t last = there(rows - 1, lane, m) ? rows - 1 : rows - 2;
	const bool offsets = v.model_parts.count > 0;
	const int octave = octave_of(v.dtype);
	const uint8_t *values = e.source.values + SIZE * first;
	uint8_t *section = e.frame + v.planes_offset + first;
	/* whole quads are written at the ends of sections, too */
	const bool fast = (SIZE == 2 || SIZE == 4) &&
			  ((uint64_t)values % (4 * SIZE) | ((uint64_t)section | v.plane_stride) % 4) == 0;
	place o = {};

	if (offsets && last != ~0u)
		o = place_at(j, first + WIRE_ROW * last + 4 * lane);
	for (uint32_t r = rows; r > 0;) {
		if (fast && r % CHUNK_ROWS == 0 && r <= m / WIRE_ROW &&
		    (!offsets || __all_sync(FULL, whole_rows_behind(&o)))) {
			r -= CHUNK_ROWS;
			if constexpr (SIZE == 2 || SIZE == 4)
				write_whole_rows<SIZE>(j, values, section, &o, s, sums, same, r, lane);
		} else {
			uint32_t n = there(--r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane;
			uint16_t offset[4] = {0};

			if (offsets && n) {
				quad_offsets_here(j, &o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
				if (r)
					move_back(j, &o, WIRE_ROW);
			}
			split_quad<SIZE>(values, i, n, octave > 0, offset, word);
			for (int p = 1; p < SIZE; p++) {
				digest_word(&sums[p], word[p], r, lane);
				put_fixed(&v, e.frame, v.planes_offset + (p - 1) * v.plane_stride, first + i, word[p]);
			}
			same->some |= keep_bytes(word[0], n);
			same->all &= word[0] | ~keep_bytes(FULL, n);
			code_quad(s, filled(word[0], n, pad), r, n, lane);
		}
		if (r % CHUNK_ROWS == 0)
			for (int p = 1; p < SIZE; p++)
				digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
	}
}

/*
 * Encode block b of a tensor for which has_single_plane() is true. Values are read once. As soon as the region's size
 * is known, the region is written to its place in the frame. Returns false if plane 0 must not be coded after all; then
 * only fixed planes have been written. literals, words: see begin_plane.
 */
template <int SIZE>
DEVICE bool write_single_plane(const codec_encoding &e, const job *j, uint64_t b, uint8_t *literals, uint32_t *words,
			       uint32_t lane)
{
	const codec_view &v = j->v;
	const uint32_t m = (uint32_t)block_values(&v, b);
	const uint32_t chunks = (m + WIRE_ROW * CHUNK_ROWS - 1) / (WIRE_ROW * CHUNK_ROWS);
	coding s = begin_plane(j, 0, words, literals, false);
	common same = {0, FULL};
	digest sums[SIZE] = {};
	uint32_t size = 0;
	uint64_t at = 0, checksum = 0;

	code_values<SIZE>(e, j, b * v.block_nvalues, m, &s, sums, &same, lane);
	auto place_for = [&](uint32_t nbytes) -> uint8_t * {
		if (!differs(same))
			return NULL;
		size = (4 + nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
		at = v.regions_offset + look_back(e.places, b, size, lane);
		return at + size <= e.capacity ? e.frame + at + 4 : NULL;
	};
	uint32_t got = end_plane(s, (uint32_t)choose_coded_most(m, 0), place_for, lane);

	if (!size)
		return false;
	if (got) {
		for (int p = 1; p < SIZE; p++)
			checksum += digest_sum(&sums[p], 0, chunks, WIRE_SEED_PLANE + p, lane);
		put32(e.frame + at, WIRE_MODE_CODED, lane);
		end_region(e.frame + at, 4 + got, lane);
		checksum = checksum_of_block(checksum + digest_bytes(e.frame + at, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, checksum, lane);
	return true;
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

/*
 * Bytes of a unit of scratch memory, read by the host. A warp takes one unit for each plane in regions: the plane, and
 * its part of the region. One more is for the coder: literals or halved symbols, and words. Where regions hold one
 * plane only, it has no memory of its own if it is coded (write_single_plane), and blocks in which coding does not pay
 * are not coded again. So then one unit serves for both.
 */
#define LOSSLESS_UNIT (PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_lossless_nbytes[] = {LOSSLESS_UNIT};
static_assert(4 * WORDS_ROOM >= (1 << WIRE_MAX_BLOCK_LOG2) + 4 + WIRE_ALIGN, "room for a region's head and end");

/*
 * Encode blocks: directory entries, fixed planes and regions. Grid: (CTAs, frames). Values are aligned to their size.
 */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) encode_lossless(const codec_encoding *encodings)
{
	const codec_encoding &e = encoding_of(encodings);
	uint32_t lane = threadIdx.x % 32;
	__shared__ uint32_t codes[256 * SIZE];
	const job &j = share_coding(e.view, e.memory, codes, SIZE);
	const bool single = has_single_plane(j.v, SIZE), coded = j.v.coded && !single;
	const uint32_t planes = planes_in_regions(j.v, SIZE), most = planes + coded;
	const uint64_t nbytes = LOSSLESS_UNIT * (most ? most : 1);

	if (blockIdx.x * WARPS >= useful_warps(e.scratch, nbytes, e.warps))
		return;
	const taken_units units = take_units(e.scratch, nbytes, lane);
	uint8_t *scratch = units.memory, *region = scratch + planes * PLANE_ROOM;
	uint8_t *coder = coded ? scratch + planes * LOSSLESS_UNIT : NULL;

	for (uint64_t b; (b = next_block(e.out, lane)) < j.v.nblocks;) {
		uint64_t checksum = 0;

		if (j.v.model_parts.count)
			fit_rows(&j, e.memory, e.source.values, SIZE, octave_of(j.v.dtype), 1u << SHIFT_OF(SIZE),
				 b * j.v.block_nvalues, (uint32_t)block_values(&j.v, b), lane);
		if (single && write_single_plane<SIZE>(e, &j, b, scratch, (uint32_t *)region, lane))
			continue;
		uint32_t size =
			write_block<SIZE>(&j, e.source.values, e.frame, b, scratch, coder, region, &checksum, lane);

		put_region(&j.v, e, b, region, size, checksum, lane);
	}
	give_units(e.scratch, units, lane);
}
