/* rows/decode.cu - kernels that decode frames of row codecs. */
#include "frame/decode.cuh"
#include "rows/rows.cuh"

/* Round four values to a dtype of 16 bits. */
DEVICE uint2 halves_of(uint32_t dtype, const float y[4])
{
	uint32_t u[4];

	for (uint32_t k = 0; k < 4; k++)
		u[k] = dtype == WIRE_BFLOAT16 ? round_to_bfloat16(round_bits(y[k]))
					      : round_to_float16(round_bits(y[k]));
	return {u[0] | u[1] << 16, u[2] | u[3] << 16};
}

/* Combine values with a destination as put_values does, for sinks and quads that need more than a vector store. */
DEVICE_CALL void put_others(const codec_sink *sink, uint32_t dtype, uint64_t i, uint32_t n, float a, float b, float c,
			    float d, float scale)
{
	const float y[4] = {a, b, c, d};

	put_values(sink, dtype, i, n, y, scale);
}

/* Codes of a block: nbytes packed bytes. */
struct found_codes {
	const uint8_t *codes;
	uint64_t nbytes;
	codec_status status;
};

/*
 * Find the codes of a block's region, and check its size and the codes' end. Codes that an entropy stage has coded are
 * decoded to scratch memory. nscales: bytes of scales before the codes.
 */
DEVICE found_codes find_codes(const job *j, struct row_kind q, uint32_t m, uint64_t nscales, cursor c, const pairs &by,
			      uint8_t *scratch, uint32_t lane)
{
	found_codes o = {here(&c) + nscales, row_codes_nbytes(q, m), CODEC_BAD_REGION};
	codec_status status = CODEC_OK;
	bool bad = false;

	if (q.entropy) {
		if (left(&c) < nscales + 4)
			return o;
		uint32_t mode = load32(o.codes);

		if (mode > WIRE_MODE_CODED)
			return o;
		c.at += nscales + 4;
		status = read_plane(j, 0, mode, by, (uint32_t)o.nbytes, (uint32_t *)scratch, &c, lane);
		o.codes = scratch;
	} else {
		if (left(&c) < nscales + o.nbytes)
			return o;
		c.at += nscales + o.nbytes;
	}
	if (status == CODEC_OK)
		status = close_region(&c, lane);
	if (status == CODEC_OK) {
		if (lane == 0)
			bad = !allowed_end(q, o.codes, o.nbytes, m);
		for (uint64_t i = lane; i < o.nbytes && !q.bits; i += 32)
			bad |= o.codes[i] > 242;
		status = __any_sync(FULL, bad) ? CODEC_BAD_REGION : CODEC_OK;
	}
	o.status = status;
	return o;
}

/* Fill a table with the values of all codes in the current row. By one warp. */
DEVICE void fill_values(const row_walk &w, float *values, uint32_t lane)
{
	__syncwarp(); /* the row before has been read */
	for (uint32_t code = lane; code < 128; code += 32) {
		float y = dequantize<WIRE_CODEC_FLOAT8>(shared(w.ratio)[code], w.scale);

		shared(values)[code] = y;
		shared(values)[code + 128] = round_float(round_bits(y) | ~ROUND_ABS);
	}
	__syncwarp();
}

/*
 * Decode and store whole rows of 128 values: nearly all values of most tensors. BITS: bits of a code, if they are known
 * at compile time; else 0. TABLED: rows of the codec are long, and multiples of the rows that are decoded together;
 * values[]: memory for a table. Returns the number of rows decoded; *bad is set if scales or codes are invalid.
 */
template <int CODEC, int BITS, bool TABLED>
DEVICE uint32_t read_whole_rows(struct row_kind q, row_walk *w, uint32_t m, uint8_t *to, bool wide, uint32_t dtype,
				float *values, uint32_t *bad, uint32_t lane)
{
	const uint32_t AT_ONCE = 8; /* rows whose loads are in flight together: no load moves above a store */
	uint32_t r = 0;

	if (BITS)
		q.bits = BITS;
	auto put_row = [&](uint32_t row, uint32_t quad) {
		const uint32_t i = WIRE_ROW * row + 4 * lane;
		float y[4];

		if (!TABLED)
			*bad |= walk_on(q, w, i);
		for (uint32_t k = 0; k < 4; k++) {
			uint32_t code = __byte_perm(quad, 0, 0x4440 + k);

			if (TABLED)
				y[k] = shared(values)[code];
			else
				*bad |= walk_code<CODEC>(*w, code, &y[k]);
		}
		if (!to || *bad)
			return;
		if (wide)
			global((uint4 *)to)[32 * row + lane] = {round_bits(y[0]), round_bits(y[1]), round_bits(y[2]),
								round_bits(y[3])};
		else
			global((uint2 *)to)[32 * row + lane] = halves_of(dtype, y);
	};

	for (; WIRE_ROW * (r + AT_ONCE) <= m; r += AT_ONCE) {
		uint32_t quad[AT_ONCE];

		for (uint32_t k = 0; k < AT_ONCE; k++)
			quad[k] = TABLED ? global((const uint32_t *)w->codes)[32 * (r + k) + lane]
					 : read_codes<CODEC>(q, w->codes, WIRE_ROW * (r + k) + 4 * lane, 4);
		if (TABLED && WIRE_ROW * r >= w->end) {
			*bad |= walk_on(q, w, WIRE_ROW * r);
			fill_values(*w, values, lane);
		}
#pragma unroll
		for (uint32_t k = 0; k < AT_ONCE; k++)
			put_row(r + k, quad[k]);
	}
	for (; !TABLED && WIRE_ROW * (r + 1) <= m; r++)
		put_row(r, read_codes<CODEC>(q, w->codes, WIRE_ROW * r + 4 * lane, 4));
	return r;
}

/*
 * Decode block b, whose region is at the cursor. scratch: memory of a plane, for codes that an entropy stage has coded.
 */
template <int CODEC>
static __device__ codec_status read_rows(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
					 const float *ratio, const codec_sink *sink, uint32_t lane)
{
	const struct row_kind q = kind_of(&j->v);
	const row_place p = row_place_of(j, q, b);
	const uint64_t nscales = row_count(p.part->group_size, p.m) * row_scale_nbytes(q);
	const uint8_t *scales = here(&c);
	const found_codes found = find_codes(j, q, p.m, nscales, c, by, scratch, lane);

	if (found.status != CODEC_OK)
		return found.status;
	row_walk w = walk_rows(q, p.part, scales, found.codes, ratio, sink->unscaled);
	const bool wide = j->v.dtype == WIRE_FLOAT32;
	uint8_t *to = sink->data ? sink->data + (wide ? 4 : 2) * p.first : NULL;
	uint32_t r = 0, bad = 0;

	if (sink->into == CODEC_INTO_STORE && (uint64_t)to % (wide ? 16 : 8) == 0 && w.row % 4 == 0) {
		const bool tabled = CODEC == WIRE_CODEC_FLOAT8 && !q.entropy && w.row && w.row % (WIRE_ROW * 8) == 0 &&
				    (uint64_t)w.codes % 4 == 0;
		float *values = (float *)by.entry + 256 * (threadIdx.x / 32); /* unused without an entropy stage */

		if (tabled)
			r = read_whole_rows<CODEC, 8, true>(q, &w, p.m, to, wide, j->v.dtype, values, &bad, lane);
		else if (CODEC == WIRE_CODEC_QUANTIZE && q.bits == 4)
			r = read_whole_rows<CODEC, 4, false>(q, &w, p.m, to, wide, j->v.dtype, NULL, &bad, lane);
		else
			r = read_whole_rows<CODEC, 0, false>(q, &w, p.m, to, wide, j->v.dtype, NULL, &bad, lane);
	}
	for (; (uint64_t)WIRE_ROW * r < p.m; r++) {
		uint32_t n = there(r, lane, p.m), i = WIRE_ROW * r + 4 * lane;
		float y[4];

		bad |= walk_quad<CODEC>(q, &w, i, n, y);
		if (sink->data && !bad)
			put_others(sink, j->v.dtype, p.first + i, n, y[0], y[1], y[2], y[3], p.part->scale[0]);
	}
	return __any_sync(FULL, bad != 0) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Bytes of scratch memory for a warp, read by the host. */
extern "C" __device__ const uint64_t decode_rows_nbytes[] = {PLANE_ROOM};

/* Decode blocks. Grid: (CTAs, frames). */
template <int CODEC> __global__ void __launch_bounds__(32 * WARPS, 6) decode_rows(const codec_decoding *decodings)
{
	__shared__ float ratio[256];

	fill_ratios<CODEC>(decodings[blockIdx.y].view, ratio);
	decode_blocks<12>(decodings, PLANE_ROOM, 0,
			  [&](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			      uint8_t *mine, uint32_t lane,
			      uint64_t *) { return read_rows<CODEC>(j, b, c, by, mine, ratio, &d.sink, lane); });
}
