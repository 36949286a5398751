/*
 * topk/decode.cuh - decode a block of TopK with one warp. docs/spec/format.md, section 11.
 *
 * Codes have variable sizes, so all lanes read the same code at a time, and lane k keeps the k-th code. After every 32
 * codes, values are stored: each lane combines the value of its code with the destination before the lanes overwrite
 * the values in between with 0.
 */
#ifndef CODEC_CUDA_TOPK_DECODE_CUH
#define CODEC_CUDA_TOPK_DECODE_CUH

#include "common/bit_stream.cuh"
#include "frame/decode.cuh"
#include "topk/topk.cuh"

/* State of decoding a chunk, and the lane's kept value: position in the chunk, and code. */
struct topk_codes {
	topk_kind q;
	topk_range range;
	uint64_t first; /* index of the chunk's first value */
	uint32_t n;
	uint32_t at, code;
};

/*
 * Return true if the `count` scales of a block are finite and not negative, and no chunk's lowest level is above its
 * highest. `each`: number of scales per chunk.
 */
DEVICE bool scales_valid(const uint8_t *scales, uint32_t count, uint32_t each, uint32_t lane)
{
	bool bad = false;

	for (uint32_t i = lane; i < count; i += 32) {
		const uint32_t scale = ((const uint16_t *)scales)[i];

		bad |= scale >= ROUND_INF >> 16 || (each == 2 && i % 2 && scale < ((const uint16_t *)scales)[i - 1]);
	}
	return !__any_sync(FULL, bad);
}

/* Read the next kept value: return its gap, and set *code. One load of 32 bits contains most gaps and codes. */
DEVICE uint32_t read_kept(const topk_kind &q, bit_reader *r, uint32_t *code, bool *bad)
{
	const uint32_t bits = peek_bits(*r), zeros = (uint32_t)__ffs((int)(bits | 1u << WIRE_RICE_LONGEST)) - 1;
	const uint32_t size = zeros + 1 + q.rice_k + q.bits;

	if (size <= 32 && zeros < WIRE_RICE_LONGEST) {
		const uint32_t gap = bits >> zeros >> 1 & ((1u << q.rice_k) - 1);

		*code = bits >> (size - q.bits) & ((1u << q.bits) - 1);
		*bad |= zeros >> 1 >> (WIRE_RICE_GAP_BITS - 1 - q.rice_k);
		r->at += size;
		return zeros << q.rice_k | gap;
	}
	const uint32_t gap = (uint32_t)read_rice(r, q.rice_k, WIRE_RICE_GAP_BITS, bad);

	*code = (uint32_t)read_bits(r, q.bits);
	return gap;
}

/*
 * Store the kept values of the first `count` lanes, and 0 for all other values from position `from` up to `to`. With
 * CODEC_INTO_ADD, these other values are written only if the results are divided.
 */
DEVICE void put_codes(const codec_sink &sink, const topk_codes &c, uint32_t count, uint32_t from, uint32_t to,
		      uint32_t lane)
{
	const bool own = lane < count, stores = sink.into == CODEC_INTO_STORE;
	const bool adds = sink.into == CODEC_INTO_ADD && !(sink.divide > 0);
	float *there = (float *)sink.data + c.first, y = 0;

	if (own)
		y = topk_value(c.code, c.range.low, c.range.high, topk_steps(c.q.bits), c.q.dtype);
	if (own && !stores)
		y = put_float(&sink, sink.into == CODEC_INTO_FLOAT32 ? 0 : there[c.at], y, 0);
	__syncwarp(); /* all lanes have read the values that other lanes overwrite */
	for (uint32_t i = from / 4 * 4 + 4 * lane; !adds && i < to; i += 128) {
		const uint32_t begin = i < from ? from : i, end = i + 4 < to ? i + 4 : to;
		const float zero[4] = {0, 0, 0, 0};

		put_values(&sink, c.q.dtype, c.first + begin, end - begin, zero, 0);
	}
	__syncwarp();
	if (own && stores && c.q.dtype != CODEC_FLOAT32)
		((uint16_t *)sink.data)[c.first + c.at] = (uint16_t)bits_of_float(c.q.dtype, y);
	else if (own)
		there[c.at] = y;
	__syncwarp();
}

/* Decode a chunk that has codes for `kept` values. Return false if the codes are invalid. */
DEVICE bool read_chunk(const codec_sink &sink, topk_codes *c, uint32_t kept, bit_reader *r, uint32_t lane)
{
	uint32_t next = 0, done = 0;
	bool bad = false;

	do { /* also runs once for a chunk without codes, to store zeros */
		const uint32_t count = kept < 32 ? kept : 32;

		for (uint32_t i = 0; i < count; i++) {
			uint32_t code;
			const uint32_t at = next + read_kept(c->q, r, &code, &bad);

			if (bad || at >= c->n)
				return false;
			next = at + 1;
			c->at = i == lane ? at : c->at;
			c->code = i == lane ? code : c->code;
		}
		kept -= count;
		if (sink.data)
			put_codes(sink, *c, count, done, kept ? next : c->n, lane);
		done = next;
	} while (kept);
	return r->at <= 32ull * r->nwords;
}

/* Decode, or only check, block b of a TopK frame. The region of the block is at `cursor`. */
DEVICE codec_status read_topk(const codec_decoding &d, const codec_view &v, uint64_t b, const cursor &cursor,
			      uint32_t lane)
{
	topk_codes c = {kind_of_topk(v), {0, 0}, 0, 0, 0, 0};
	const uint32_t m = (uint32_t)block_values(&v, b), each = topk_scales(c.q.bits), chunk = 1u << c.q.chunk_log2;
	const uint32_t nbytes = (uint32_t)topk_scales_nbytes(&c.q, m);
	const uint16_t *scales = (const uint16_t *)here(&cursor);
	bit_reader r = {(const uint32_t *)scales, (uint32_t)(left(&cursor) / 4), 8ull * nbytes};

	if (left(&cursor) < nbytes || !scales_valid((const uint8_t *)scales, nbytes / 2, each, lane))
		return CODEC_BAD_REGION;
	for (uint32_t i = 0; i < m; i += chunk, scales += each) {
		c.first = b * v.block_nvalues + i;
		c.n = m - i < chunk ? m - i : chunk;
		c.range = range_of(scales[0], scales[each - 1]);
		if (!read_chunk(d.sink, &c, c.range.high > 0 ? topk_kept(&c.q, c.n) : 0, &r, lane))
			return CODEC_BAD_REGION;
	}
	return stream_ends(r) ? CODEC_OK : CODEC_BAD_REGION;
}

#endif
