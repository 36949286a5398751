/* coder/plane.cuh - read planes in any mode, in rows of 128 values, four per lane. format.md, sections 6 and 7. */
#ifndef CODEC_CUDA_CODER_PLANE_CUH
#define CODEC_CUDA_CODER_PLANE_CUH

#include "coder/decode.cuh"
#include "coder/model.cuh"
#include "exact/choose.h"

/* Bytes of scratch memory for the largest plane, padded to whole rows of 128 values. */
#define PLANE_ROOM ((1u << WIRE_MAX_BLOCK_LOG2) + WIRE_ROW)

/*
 * Access to the bits of a region. words: address, aligned to 4 bytes, at or before the region's first byte. whole:
 * number of whole words before `end`, the region's end.
 */
struct bit_source {
	const uint32_t *words;
	uint32_t whole;
	const uint8_t *end;
};

DEVICE bit_source bits_from(const cursor *c)
{
	const uint32_t *words = (const uint32_t *)((uint64_t)here(c) & ~3ull);
	const uint8_t *end = c->frame + c->end;

	return {words, (uint32_t)((end - (const uint8_t *)words) / 4), end};
}

/* Return the bit index, relative to s.words, of the first bit of *p. */
DEVICE uint32_t bit_of(const bit_source &s, const uint8_t *p)
{
	return 8 * (uint32_t)(p - (const uint8_t *)s.words);
}

/* Version of window_at for the last bytes of a region, past which no word may be loaded. */
DEVICE_CALL uint32_t window_at_end(const uint32_t *words, const uint8_t *end, uint32_t bit)
{
	const uint8_t *from = (const uint8_t *)words + bit / 8;
	uint64_t x = 0;

	for (uint32_t k = 0; k < 5 && from + k < end; k++)
		x |= (uint64_t)from[k] << 8 * k;
	return (uint32_t)(x >> bit % 8);
}

/* Version of window_at for bits whose word and the following word are inside the region. */
DEVICE uint32_t window_inside(const bit_source &s, uint32_t bit)
{
	const uint32_t *word = global(s.words) + bit / 32;

	return __funnelshift_r(word[0], word[1], bit % 32);
}

/* Return 32 bits from bit index `bit` on. Bits past the region's end are undefined. */
DEVICE uint32_t window_at(const bit_source &s, uint32_t bit)
{
	uint32_t i = bit / 32;

	if (i + 2 > s.whole)
		return window_at_end(s.words, s.end, bit);
	return window_inside(s, bit);
}

/* State of reading a plane of k values. */
struct plane {
	uint32_t mode, k;
	/*
	 * address: mode RAW: of the first row; CONSTANT: of the byte that all values share; ROWS: of the bitmap of runs
	 */
	const uint8_t *bytes;
	const pairs *by; /* CODED: table of pairs; NULL: use one table look-up per symbol */
	const uint8_t *table;
	coded coder;
	bool bad;
};

/*
 * Begin to read plane p, of k values, in mode `mode`. Move the cursor past the parts of known size: the whole plane,
 * except literals and, in mode ROWS, the bytes of runs.
 */
static __device__ codec_status plane_open(plane *o, const job *j, uint32_t p, uint32_t mode, const pairs &by,
					  uint32_t k, cursor *c, uint32_t lane)
{
	uint32_t rows = (k + WIRE_ROW - 1) / WIRE_ROW;
	uint64_t nbytes = mode == WIRE_MODE_RAW ? k : mode == WIRE_MODE_ROWS ? (rows + 7) / 8 : 1;

	*o = {mode, k, here(c), by.plane == p ? &by : NULL, table_of(j, p), {0, NULL, 0, 0}, false};
	if (mode == WIRE_MODE_CODED)
		return open_plane(c, &o->coder, lane);
	if (left(c) < nbytes || (mode == WIRE_MODE_ROWS && rows % 8 && o->bytes[nbytes - 1] >> rows % 8))
		return CODEC_BAD_REGION;
	c->at += nbytes;
	return CODEC_OK;
}

/* A lane's four symbols with literals in place of escapes, and the number of literals that all lanes have consumed. */
struct literals {
	uint32_t quad, count;
};

/*
 * Replace the escapes in a row of 128 symbols by literals at p, which has `left` bytes. If there are too few literals,
 * the result's `count` is more than `left` and its quad is unchanged.
 */
DEVICE_CALL literals take_literals(const uint8_t *p, uint64_t left, uint32_t quad, uint32_t escapes, uint32_t lane)
{
	uint32_t total, at = warp_scan(__popc(escapes), lane, &total);

	for (uint32_t i = 0; i < 4 && left >= total; i++)
		if (escapes >> i & 1)
			quad = (quad & ~(255u << 8 * i)) | (uint32_t)p[at++] << 8 * i;
	return {quad, total};
}

/*
 * Replace the escapes in a row of 128 symbols by literals at the cursor, move the cursor past these, and return the
 * lane's four symbols.
 */
DEVICE uint32_t with_literals(plane *o, cursor *c, uint32_t quad, uint32_t escapes, uint32_t lane)
{
	literals l = take_literals(here(c), left(c), quad, escapes, lane);

	o->bad |= left(c) < l.count;
	c->at += left(c) < l.count ? 0 : l.count;
	return l.quad;
}

/*
 * Return the lane's four bytes of row r (128 values); bytes of values with index o->k and above are 0. Must be called
 * for rows in ascending order.
 */
static __device__ uint32_t plane_row(plane *o, uint32_t r, cursor *c, uint32_t lane)
{
	uint32_t n = there(r, lane, o->k), run = o->k - WIRE_ROW * r, escapes;

	if (o->mode == WIRE_MODE_CODED) {
		uint32_t quad = decode_row(&o->coder, o->by, o->table, r, o->k, lane, &escapes, &o->bad);

		if (__any_sync(FULL, escapes != 0))
			quad = with_literals(o, c, quad, escapes, lane);
		return keep_bytes(quad, n);
	}
	if (o->mode == WIRE_MODE_CONSTANT)
		return keep_bytes(o->bytes[0] * ONES, n);
	if (o->mode == WIRE_MODE_RAW)
		return load_bytes(o->bytes + WIRE_ROW * r + 4 * lane, n);
	run = run < WIRE_ROW ? run : WIRE_ROW;
	if (!(o->bytes[r / 8] >> r % 8 & 1))
		return 0;
	o->bad |= left(c) < run;
	if (left(c) < run)
		return 0;
	c->at += run;
	return load_bytes(here(c) - run + 4 * lane, n);
}

/* After the last row: return CODEC_OK if the plane was valid, else a status. */
DEVICE codec_status plane_close(const plane *o)
{
	bool bad = o->bad || (o->mode == WIRE_MODE_CODED && !ends_well(&o->coder));

	return __any_sync(FULL, bad) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Halved plane of k values: combine the high nibbles at the cursor with the low nibbles, one per byte, at `plane`. */
static __device__ codec_status read_high(uint32_t *plane, uint32_t k, cursor *c, uint32_t lane)
{
	uint32_t nbytes = (k + 1) / 2, any = 0;
	const uint8_t *high = here(c);

	if (left(c) < nbytes)
		return CODEC_BAD_REGION;
	c->at += nbytes;
	for (uint32_t r = 0; WIRE_ROW * r < k; r++) {
		uint32_t quad = plane[32 * r + lane];

		any |= quad & 0xf0f0f0f0u;
		const uint32_t first = WIRE_ROW * r + 4 * lane;

		if (first + 4 <=
		    nbytes) /* low nibbles of `high` belong to the first half of values, high nibbles to the second */
			quad |= load32(high + first) << 4 & 0xf0f0f0f0u;
		else if (first >= nbytes && first + 4 <= k)
			quad |= load32(high + first - nbytes) & 0xf0f0f0f0u;
		else
			for (uint32_t i = 0; i < there(r, lane, k); i++) {
				uint32_t at = first + i;

				quad |= (at < nbytes ? (uint32_t)high[at] << 4 & 0xf0 : high[at - nbytes] & 0xf0)
					<< 8 * i;
			}
		plane[32 * r + lane] = quad;
	}
	any |= k % 2 && high[nbytes - 1] > 15;
	return __any_sync(FULL, any != 0) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Plane of k float8 values: combine the raw bits at the cursor with the symbols, one per byte, at `plane`. */
static __device__ codec_status read_raw_bits(uint32_t *plane, uint32_t k, int raw, cursor *c, uint32_t lane)
{
	const uint32_t nbytes = (uint32_t)choose_raw_nbytes(k, raw), used = k * (uint32_t)raw % 8;
	const uint8_t *bits = here(c);
	uint32_t any = 0;

	if (left(c) < nbytes)
		return CODEC_BAD_REGION;
	c->at += nbytes;
	for (uint32_t r = 0; WIRE_ROW * r < k; r++) {
		const uint32_t first = WIRE_ROW * r + 4 * lane, quad = plane[32 * r + lane], n = there(r, lane, k);
		/* bits of four values, which lie in one byte */
		const uint32_t some = n ? (uint32_t)bits[first * (uint32_t)raw / 8] >> first * (uint32_t)raw % 8 : 0;
		uint32_t joined = 0;

		any |= keep_bytes(quad, n) & ~((255u >> raw) * ONES);
		for (uint32_t i = 0; i < n; i++)
			joined |= (uint32_t)bits_with_raw((uint8_t)(quad >> 8 * i),
							  (uint8_t)(some >> (uint32_t)raw * i & ((1u << raw) - 1)), raw)
				  << 8 * i;
		plane[32 * r + lane] = joined;
	}
	any |= used ? (uint32_t)bits[nbytes - 1] >> used : 0;
	return __any_sync(FULL, any != 0) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Read all k bytes of plane p to `to`, padded to whole rows of 128. */
static __device__ codec_status read_plane(const job *j, uint32_t p, uint32_t mode, const pairs &by, uint32_t k,
					  uint32_t *to, cursor *c, uint32_t lane)
{
	const int raw = raw_bits_of(&j->v, p);
	plane o;
	codec_status status = plane_open(&o, j, p, mode, by, k, c, lane);

	if (status != CODEC_OK)
		return status;
	for (uint32_t r = 0; WIRE_ROW * r < k; r++)
		to[32 * r + lane] = plane_row(&o, r, c, lane);
	status = plane_close(&o);
	if (status == CODEC_OK && mode == WIRE_MODE_CODED && raw == 4)
		status = read_high(to, k, c, lane);
	else if (status == CODEC_OK && mode == WIRE_MODE_CODED && raw)
		status = read_raw_bits(to, k, raw, c, lane);
	__syncwarp();
	return status;
}

#endif
