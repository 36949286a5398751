/* rows/decode.cu - kernels that decode frames of row codecs. */
#include "frame/decode.cuh"
#include "rows/rows.cuh"
#include "rows/store.cuh"
#include "rows/store_float8.cuh"

/* Version of put_values, not inlined, for four values that cannot be stored by one vector store. */
DEVICE_CALL void put_others(const codec_sink *sink, uint32_t dtype, uint64_t i, uint32_t n, float a, float b, float c,
			    float d, float scale)
{
	const float y[4] = {a, b, c, d};

	put_values(sink, dtype, i, n, y, scale);
}

/* Address and size of a block's packed codes, or the error with which they were rejected. */
struct found_codes {
	const uint8_t *codes;
	uint64_t nbytes;
	codec_status status;
};

/*
 * Find the codes in a block's region, and check the region's size and the unused bits of the last code byte.
 * Entropy-coded codes are decoded to scratch memory. nscales: bytes of scales before the codes.
 */
template <int CODEC>
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
		if ((CODEC == CODEC_TERNARY || CODEC == CODEC_QUANTIZE) && checks_words(q))
			bad |= !check_codes(q, o.codes, o.nbytes, lane);
		status = __any_sync(FULL, bad) ? CODEC_BAD_REGION : CODEC_OK;
	}
	o.status = status;
	return o;
}

/*
 * Decode and store whole rows of 128 values, from row r on, of a block of m values. Decodes nearly all values of most
 * tensors. Return the index of the first row that was not decoded. Set *bad if scales or codes are invalid.
 */
template <int CODEC>
DEVICE uint32_t read_whole_rows(struct row_kind q, row_walk *w, uint32_t r, uint32_t m, uint8_t *to, uint32_t dtype,
				uint32_t *bad, uint32_t lane)
{
	/* number of rows whose loads are in flight together: the compiler moves no load above a store */
	const uint32_t AT_ONCE = 8;
	const bool e4m3 = !q.e5m2, words = CODEC == CODEC_FLOAT8 && (uint64_t)w->codes % 4 == 0;
	float inverse = CODEC == CODEC_FLOAT8 ? float8_inverse(w->scale) : 0;

	auto load_row = [&](uint32_t row) -> uint32_t {
		return words ? global((const uint32_t *)w->codes)[32 * row + lane]
			     : read_codes<CODEC>(q, w->codes, WIRE_ROW * row + 4 * lane, 4);
	};
	auto put_row = [&](uint32_t row, uint32_t quad) {
		const uint32_t i = WIRE_ROW * row + 4 * lane;
		float y[4];

		if (i >= w->end) {
			*bad |= walk_on(q, w, i);
			inverse = CODEC == CODEC_FLOAT8 ? float8_inverse(w->scale) : 0;
		}
		if (CODEC == CODEC_FLOAT8 && inverse > 0 && !any_special(e4m3, quad)) {
			float8_ratios(e4m3, quad, y);
			for (uint32_t k = 0; k < 4; k++)
				y[k] = divide_float8(y[k], w->scale, inverse);
		} else {
			for (uint32_t k = 0; k < 4; k++)
				*bad |= walk_code<CODEC>(q, *w, __byte_perm(quad, 0, 0x4440 + k), &y[k]);
		}
		if (!to || *bad)
			return;
		if (dtype == CODEC_FLOAT32)
			global((uint4 *)to)[32 * row + lane] = {round_bits(y[0]), round_bits(y[1]), round_bits(y[2]),
								round_bits(y[3])};
		else
			global((uint2 *)to)[32 * row + lane] = halves_of(dtype, y);
	};

	const bool valid = (CODEC != CODEC_TERNARY && CODEC != CODEC_QUANTIZE) || checks_words(q);

	/* if all codes are known to be valid, checking a frame reads only scales */
	for (; !to && valid && WIRE_ROW * (r + 1) <= m; r++)
		*bad |= walk_on(q, w, WIRE_ROW * r + 4 * lane);
	for (; WIRE_ROW * (r + AT_ONCE) <= m; r += AT_ONCE) {
		uint32_t quad[AT_ONCE];

		if (words)
			for (uint32_t k = 0; k < AT_ONCE; k++)
				quad[k] = global((const uint32_t *)w->codes)[32 * (r + k) + lane];
		else
			for (uint32_t k = 0; k < AT_ONCE; k++)
				quad[k] = load_row(r + k);
		if (q.bits && WIRE_ROW * (r + 3 * AT_ONCE) <= m &&
		    lane < AT_ONCE * q.bits / 8) /* prefetch the codes of the rows after the next ones */
			prefetch(w->codes + (uint64_t)WIRE_ROW * (r + 2 * AT_ONCE) * q.bits / 8 + LINE_NBYTES * lane);
		if (CODEC == CODEC_FLOAT8) {
			const uint32_t i = WIRE_ROW * r + 4 * lane;

			if (i >= w->end) {
				*bad |= walk_on(q, w, i);
				inverse = float8_inverse(w->scale);
			}
			if (i + WIRE_ROW * (AT_ONCE - 1) < w->end && inverse > 0 && !*bad) {
				uint8_t *at = to + (dtype == CODEC_FLOAT32 ? 4 : 2) * WIRE_ROW * r;

				if (e4m3 ? store_float8<true, AT_ONCE>(quad, w->scale, inverse, at, dtype, lane)
					 : store_float8<false, AT_ONCE>(quad, w->scale, inverse, at, dtype, lane))
					continue;
			}
			/* rare case: these rows of 128 values have several scales, or NaN or Inf */
#pragma unroll 1
			for (uint32_t k = 0; k < AT_ONCE; k++)
				put_row(r + k, load_row(r + k));
			continue;
		}
#pragma unroll
		for (uint32_t k = 0; k < AT_ONCE; k++)
			put_row(r + k, quad[k]);
	}
	for (; WIRE_ROW * (r + 1) <= m; r++)
		put_row(r, load_row(r));
	return r;
}

/* Decode block b, whose region is at cursor c. scratch: memory for a plane, used if codes are entropy-coded. */
template <int CODEC>
static __device__ codec_status read_rows(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
					 const float *ratio, const codec_sink *sink, uint32_t lane)
{
	const struct row_kind q = kind_of(&j->v);
	const row_place p = row_place_of(j, q, b);
	const uint64_t nscales = row_count(p.part->group_size, p.m) * row_scale_nbytes(q);
	const uint8_t *scales = here(&c);
	const found_codes found = find_codes<CODEC>(j, q, p.m, nscales, c, by, scratch, lane);

	if (found.status != CODEC_OK)
		return found.status;
	row_walk w = walk_rows(q, p.part, scales, found.codes, ratio, sink->unscaled);
	const bool wide = j->v.dtype == CODEC_FLOAT32;
	uint8_t *to = sink->data ? sink->data + (wide ? 4 : 2) * p.first : NULL;
	uint32_t r = 0, bad = 0;

	if (sink->into == CODEC_INTO_STORE && (uint64_t)to % (wide ? 16 : 8) == 0 && w.row % 4 == 0) {
		if ((CODEC == CODEC_TERNARY || CODEC == CODEC_QUANTIZE) && to && !q.affine)
			r = store_whole_rows<CODEC>(q, w, p.m, to, j->v.dtype, &bad, lane);
		if (CODEC == CODEC_FLOAT8)
			r = store_small_rows(q, w, p.m, to, j->v.dtype, &bad, lane);
		r = read_whole_rows<CODEC>(q, &w, r, p.m, to, j->v.dtype, &bad, lane);
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

/* Bytes of scratch memory per warp; the host reads this symbol. */
extern "C" __device__ const uint64_t decode_rows_nbytes[] = {PLANE_ROOM};

/* Kernel: decode the blocks of frames of row codecs. Grid: (CTAs, frames). */
template <int CODEC> __global__ void __launch_bounds__(32 * WARPS, 6) decode_rows(const codec_decoding *decodings)
{
	__shared__ float ratio[256];

	fill_ratios<CODEC>(decodings[blockIdx.y].view, ratio);
	decode_blocks<12>(decodings, 0,
			  [&](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			      uint8_t *mine, uint32_t lane,
			      uint64_t *) { return read_rows<CODEC>(j, b, c, by, mine, ratio, &d.sink, lane); });
}
