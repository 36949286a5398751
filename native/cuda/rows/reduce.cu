/*
 * rows/reduce.cu - kernels that decode frames of one row codec and add them up. The frames must have equal parts and
 * blocks, and codes of fixed width. The warps of a CTA process the same block of all frames, so that sums stay in
 * registers and are written once.
 *
 * Memory traffic of a launch: each frame is read once, and 4 bytes per value are written once.
 */
#include "frame/decode.cuh"
#include "rows/rows.cuh"

#define QUADS 4    /* number of rows of 128 values that a warp adds in one step */
#define TABLED 128 /* maximum number of a block's rows, in all frames together, whose scales fit into shared memory */

/*
 * Check block b's region in one frame: size, padding, last codes. Each lane checks a different frame. Set *c to the
 * region. m: number of values in the block; nscales, ncodes: bytes of its scales and codes.
 */
DEVICE codec_status check_region(struct row_kind q, const codec_decoding *d, uint64_t b, uint64_t nscales,
				 uint64_t ncodes, uint32_t m, cursor *c)
{
	codec_status status = open_region(d->view, d->frame, b, c);
	uint64_t size = nscales + ncodes;
	bool bad = status == CODEC_OK && (left(c) < size || left(c) - size >= WIRE_ALIGN);

	if (status != CODEC_OK || bad)
		return bad ? CODEC_BAD_REGION : status;
	for (uint64_t i = size; i < left(c); i++)
		bad |= here(c)[i] != 0;
	return bad || !allowed_end(q, here(c) + nscales, ncodes, m) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Return lane f's pointer p to all lanes. */
DEVICE const uint8_t *address_of(const uint8_t *p, uint32_t f)
{
	return (const uint8_t *)(uint64_t)__shfl_sync(FULL, (unsigned long long)p, (int)f);
}

/*
 * State of adding up one block of all frames. Lane f holds the address of the block's region in frame f. Bit f of
 * `good` is set if that region is valid.
 */
struct summed {
	const codec_decoding *decodings;
	uint32_t count, good;
	struct row_kind q;
	row_place p;
	uint64_t part, nscales; /* index of the block's part; bytes of the block's scales */
	const uint8_t *region;
	uint32_t dtype;
	float2 *scales;         /* FLOAT8: element f * nrows + i is the scale and float8_inverse of row i of frame f */
	uint32_t nrows, tabled; /* bit f of `tabled` is set if the elements of frame f in `scales` are valid */
};

/* Scale of a row of one frame; wrong: not 0 if the scale is invalid. */
struct summed_row {
	float scale, below;
	uint32_t wrong;
};

DEVICE summed_row open_summed(struct row_kind q, const codec_row_part *part, const uint8_t *scale, bool unscaled)
{
	summed_row s = {unscaled ? 1 : part->scale[0], round_sign_below(part->scale[q.variant == CODEC_SIGN_TWO_MEAN]),
			0};

	if (part->group_size)
		s.wrong = !read_scale(q, part, scale, &s.scale, &s.below);
	return s;
}

/*
 * FLOAT8: read the scales of all rows of a block into shared memory, if they fit. Set s->tabled to the mask of frames
 * whose scales all have an inverse. Return the mask of frames in which this lane has read an invalid scale.
 */
DEVICE uint32_t fill_scales(summed *s, uint32_t lane)
{
	const uint32_t rows = s->nrows * s->count;
	uint32_t unusual = 0, bad = 0;

	s->tabled = 0;
	if (s->nrows > TABLED || rows > TABLED)
		return 0;
	for (uint32_t first = 0; first < rows; first += 32) {
		const uint32_t i = first + lane, f = i < rows ? i / s->nrows : 0;
		const uint8_t *scales = address_of(s->region, f);
		float scale = 1, below;

		if (i < rows && s->good >> f & 1)
			bad |= (uint32_t)!read_scale(s->q, s->p.part, scales + row_scale_nbytes(s->q) * (i % s->nrows),
						     &scale, &below)
			       << f;
		const float inverse = float8_inverse(scale);

		unusual |= (uint32_t)!(inverse > 0) << f;
		if (i < rows)
			s->scales[i] = {scale, inverse};
	}
	__syncwarp();
	s->tabled = ~__reduce_or_sync(FULL, unusual);
	return bad;
}

/*
 * Combine four sums with four decoded values of a frame, by the sink's operation, and return the new sums. sums,
 * values: bits of float32.
 */
DEVICE_CALL uint4 put_four(const codec_sink *sink, uint32_t dtype, uint4 sums, uint4 values, float scale)
{
	uint32_t sum[4] = {sums.x, sums.y, sums.z, sums.w}, y[4] = {values.x, values.y, values.z, values.w};

	for (uint32_t k = 0; k < 4; k++)
		sum[k] = round_bits(
			put_float(sink, round_float(sum[k]), decoded_float(sink, dtype, round_float(y[k])), scale));
	return {sum[0], sum[1], sum[2], sum[3]};
}

/* Return true if the sink only adds values, without maximum, division, scaling or rounding. */
DEVICE bool is_plain(const codec_sink &sink, uint32_t dtype)
{
	return sink.into == CODEC_INTO_ADD && !sink.rescale && !(sink.divide > 0) &&
	       (dtype == CODEC_FLOAT32 || sink.unscaled);
}

/* Return true if add_float8 supports the sink: neither a maximum nor scaling. */
DEVICE bool sets_or_adds(const codec_sink &sink)
{
	return (sink.into == CODEC_INTO_ADD || sink.into == CODEC_INTO_FLOAT32) && !sink.rescale;
}

DEVICE uint4 bits_of_four(const float x[4])
{
	return {round_bits(x[0]), round_bits(x[1]), round_bits(x[2]), round_bits(x[3])};
}

DEVICE void four_of_bits(uint4 u, float x[4])
{
	x[0] = round_float(u.x), x[1] = round_float(u.y), x[2] = round_float(u.z), x[3] = round_float(u.w);
}

/*
 * Divide four float32 values. Not inlined, since division has many instructions and is needed only after the last
 * frame.
 */
DEVICE_CALL uint4 divide_four(uint4 u, float divide)
{
	float x[4];

	four_of_bits(u, x);
	for (uint32_t k = 0; k < 4; k++)
		x[k] = round_div(x[k], divide);
	return bits_of_four(x);
}

/*
 * FLOAT8: combine sums with a frame's values, which must be finite, given their codes. sets_or_adds() must be true, and
 * all scales of the frame must have an inverse. scales: the entry of s.scales for the frame's first row. at: index of
 * the row to which each quad of values belongs.
 */
DEVICE void add_float8(const summed &s, const codec_sink &sink, const float2 *scales, const uint32_t at[QUADS],
		       const uint32_t codes[QUADS], float sum[QUADS][4])
{
	const bool adds = sink.into == CODEC_INTO_ADD, rounds = s.dtype != CODEC_FLOAT32 && !sink.unscaled;
	const float weight = adds ? sink.weight : 1, divide = sink.divide;
	float y[QUADS][4];

#pragma unroll
	for (uint32_t i = 0; i < QUADS; i++) {
		const float2 scale = shared(scales)[at[i]];

		float8_ratios(!s.q.e5m2, codes[i], y[i]);
		for (uint32_t k = 0; k < 4; k++)
			y[i][k] = divide_float8(y[i][k], scale.x, scale.y);
	}
	/* conditions on the sink are tested outside of the loops over values */
	if (rounds)
		for (uint32_t i = 0; i < 4 * QUADS; i++)
			y[i / 4][i % 4] = float_of(s.dtype, bits_of_float(s.dtype, y[i / 4][i % 4]));
	if (weight != 1)
		for (uint32_t i = 0; i < 4 * QUADS; i++)
			y[i / 4][i % 4] = round_mul(weight, y[i / 4][i % 4]);
	if (adds)
		for (uint32_t i = 0; i < 4 * QUADS; i++)
			sum[i / 4][i % 4] = round_add(sum[i / 4][i % 4], y[i / 4][i % 4]);
	else
		for (uint32_t i = 0; i < 4 * QUADS; i++)
			sum[i / 4][i % 4] = y[i / 4][i % 4];
	if (divide > 0)
		for (uint32_t i = 0; i < QUADS; i++)
			four_of_bits(divide_four(bits_of_four(sum[i]), divide), sum[i]);
}

/* FLOAT8: return true if one of QUADS words of four codes has NaN or Inf. */
DEVICE bool any_specials(bool e4m3, const uint32_t codes[QUADS])
{
	bool any = false;

	for (uint32_t i = 0; i < QUADS; i++)
		any |= any_special(e4m3, codes[i]);
	return any;
}

/*
 * Decode values of frame f, and combine them with the sums, as the frame's sink specifies. scales: the block's scales
 * in the frame. Return a mask with bit f set if codes or scales are invalid, else 0.
 */
template <int CODEC>
DEVICE uint32_t add_codes(const summed &s, uint32_t f, const uint8_t *scales, const uint32_t at[QUADS],
			  const uint32_t codes[QUADS], const float *ratio, bool plain, float sum[QUADS][4])
{
	const codec_decoding *of = s.decodings + f;
	const codec_row_part *part = row_parts(of->view, of->memory) + s.part;
	const uint32_t row = s.p.part->group_size, each = (uint32_t)row_scale_nbytes(s.q);
	const float weight = of->sink.weight;
	summed_row go = {0, 0, 0};
	uint32_t bad = 0;

#pragma unroll
	for (uint32_t i = 0; i < QUADS; i++) {
		float y[4];

		if (i == 0 || at[i] != at[i - 1])
			go = open_summed(s.q, part, scales + at[i] * each, of->sink.unscaled);
		const row_walk w = {part, NULL, NULL, ratio, row, 0, go.scale, go.below};
		uint32_t wrong = go.wrong;

		for (uint32_t k = 0; k < 4; k++)
			wrong |= walk_code<CODEC>(s.q, w, __byte_perm(codes[i], 0, 0x4440 + k), &y[k]);
		bad |= wrong << f;
		if (plain)
			for (uint32_t k = 0; k < 4; k++)
				sum[i][k] = round_weighted(sum[i][k], weight, y[k]);
		else
			four_of_bits(
				put_four(&of->sink, s.dtype, bits_of_four(sum[i]), bits_of_four(y), part->scale[0]),
				sum[i]);
	}
	return bad;
}

/*
 * Add up QUADS rows of 128 values of all frames, from row r of the block on; all must exist. The four values of a lane
 * must lie within one row of the codec. Return the mask of frames in which this lane has read invalid codes or scales.
 */
template <int CODEC> DEVICE uint32_t add_quads(const summed &s, uint32_t r, const float *ratio, uint32_t lane)
{
	const uint32_t row = s.p.part->group_size;
	uint4 *to = global((uint4 *)s.decodings->sink.data) + s.p.first / 4 + 32 * r + lane;
	uint32_t at[QUADS], bad = 0;
	float sum[QUADS][4];

	for (uint32_t i = 0; i < QUADS; i++) {
		uint4 w = {0, 0, 0, 0};

		/* CODEC_INTO_FLOAT32 ignores the destination's values; other operations combine with them */
		if (s.decodings->sink.into != CODEC_INTO_FLOAT32)
			w = to[32 * i];
		four_of_bits(w, sum[i]);
		/* at[i]: index of the codec's row that contains the lane's four values; equal in all frames */
		at[i] = row ? (WIRE_ROW * (r + i) + 4 * lane) / row : 0;
	}
	/* number of frames whose codes are being loaded at the same time */
	const uint32_t AHEAD = CODEC == CODEC_FLOAT8 ? 2 : 1;
	uint32_t next[AHEAD][QUADS] = {{0}};
	auto fetch = [&](uint32_t f, uint32_t *to) {
		const uint8_t *codes = address_of(s.region, f) + s.nscales;

		if (!(s.good >> f & 1))
			return;
		if (CODEC == CODEC_FLOAT8 && (uint64_t)codes % 4 == 0)
			for (uint32_t i = 0; i < QUADS; i++)
				to[i] = global((const uint32_t *)codes)[32 * (r + i) + lane];
		else
			for (uint32_t i = 0; i < QUADS; i++)
				to[i] = read_codes<CODEC>(s.q, codes, WIRE_ROW * (r + i) + 4 * lane, 4);
	};

	for (uint32_t f = 0; f < AHEAD && f < s.count; f++)
		fetch(f, next[f]);
	for (uint32_t f = 0; f < s.count; f++) {
		const codec_decoding *of = s.decodings + f;
		const uint8_t *scales = address_of(s.region, f);
		uint32_t codes[QUADS];

		for (uint32_t i = 0; i < QUADS; i++)
			codes[i] = next[0][i], next[0][i] = next[AHEAD - 1][i];
		if (f + AHEAD < s.count)
			fetch(f + AHEAD, next[AHEAD - 1]);
		if (!(s.good >> f & 1))
			continue;
		if (CODEC == CODEC_FLOAT8 && s.tabled >> f & 1 && sets_or_adds(of->sink) &&
		    !any_specials(!s.q.e5m2, codes))
			add_float8(s, of->sink, s.scales + f * s.nrows, at, codes, sum);
		else
			bad |= add_codes<CODEC>(s, f, scales, at, codes, ratio, is_plain(of->sink, s.dtype), sum);
	}
	for (uint32_t i = 0; i < QUADS; i++)
		to[32 * i] = bits_of_four(sum[i]);
	return bad;
}

/*
 * Add up row r (128 values) of the block in all frames. The row may be incomplete and lie in several rows of the codec.
 * Return the mask of frames in which this lane has read invalid codes or scales.
 */
template <int CODEC> DEVICE_CALL uint32_t add_row(const summed &s, uint32_t r, const float *ratio, uint32_t lane)
{
	const uint32_t n = there(r, lane, s.p.m);
	const uint64_t first = s.p.first + WIRE_ROW * r + 4 * lane;
	uint32_t bad = 0;
	float sum[4], y[4];

	load_floats(&s.decodings->sink, first, n, sum);
	for (uint32_t f = 0; f < s.count; f++) {
		const codec_decoding *of = s.decodings + f;
		const uint8_t *scales = address_of(s.region, f);

		if (!(s.good >> f & 1))
			continue;
		row_walk w = walk_rows(s.q, row_parts(of->view, of->memory) + s.part, scales, scales + s.nscales, ratio,
				       of->sink.unscaled);

		if (walk_quad<CODEC>(s.q, &w, WIRE_ROW * r + 4 * lane, n, y))
			bad |= 1u << f;
		for (uint32_t k = 0; k < 4; k++)
			sum[k] =
				put_float(&of->sink, sum[k], decoded_float(&of->sink, s.dtype, y[k]), w.part->scale[0]);
	}
	store_floats(&s.decodings->sink, first, n, sum);
	return bad;
}

/* Add this warp's share of a block's values. Return the mask of frames in which this lane read an invalid code or
 * scale. */
template <int CODEC> DEVICE uint32_t add_up(const summed &s, const float *ratio, uint32_t warp, uint32_t lane)
{
	const bool quads =
		s.p.part->group_size % 4 == 0 && s.p.first % 4 == 0 && (uint64_t)s.decodings->sink.data % 16 == 0;
	const uint32_t whole = quads ? s.p.m / (WIRE_ROW * QUADS) * QUADS : 0;
	uint32_t bad = 0;

	for (uint32_t r = QUADS * warp; r < whole; r += QUADS * WARPS)
		bad |= add_quads<CODEC>(s, r, ratio, lane);
	for (uint32_t r = whole + warp; (uint64_t)WIRE_ROW * r < s.p.m; r += WARPS)
		bad |= add_row<CODEC>(s, r, ratio, lane);
	return bad;
}

/*
 * TERNARY: check the code bytes of this warp's share of the frames. Returns the mask of frames in which this lane has
 * read an invalid byte.
 */
DEVICE uint32_t check_trits(const summed &s, uint64_t ncodes, uint32_t warp, uint32_t lane)
{
	uint32_t bad = 0;

	for (uint32_t f = warp; f < s.count && !s.q.bits; f += WARPS) {
		const uint8_t *codes = address_of(s.region, f) + s.nscales;

		for (uint64_t i = lane; s.good >> f & 1 && i < ncodes; i += 32)
			bad |= (uint32_t)(codes[i] > 242) << f;
	}
	return bad;
}

/*
 * Verify the checksums of block b in this warp's share of the frames. known: mask of frames whose directory entry is
 * valid. size: size in bytes of the region of frame f, in lane f. Returns in lane f CODEC_CHECKSUM if the checksum of
 * frame f is wrong, else `status`.
 */
DEVICE codec_status check_digests(const summed &s, uint64_t b, uint32_t known, uint64_t size, codec_status status,
				  uint32_t warp, uint32_t lane)
{
	for (uint32_t f = warp; f < s.count; f += WARPS) {
		const codec_decoding *of = s.decodings + f;
		const uint8_t *directory = of->frame + of->view->directory_offset;
		const uint8_t *region = address_of(s.region, f);
		const uint64_t nbytes = __shfl_sync(FULL, (unsigned long long)size, (int)f);

		if (!of->checks || !(known >> f & 1))
			continue;
		uint64_t checksum = checksum_of_block(digest_bytes(region, nbytes, WIRE_SEED_REGION, lane), b);

		if (lane == f && load32(directory + WIRE_DIRECTORY_ENTRY * b + 4) != checksum_short(checksum))
			status = CODEC_CHECKSUM;
		if (b % ENTRIES == 0)
			checksum += digest_chunk(directory, WIRE_DIRECTORY_ENTRY * of->view->nblocks,
						 WIRE_SEED_DIRECTORY, b / ENTRIES, lane);
		if (lane == 0)
			atomicAdd(&of->found->checksum, (unsigned long long)checksum);
	}
	return status;
}

/*
 * Kernel: decode `count` frames, at most 32, and add them up, in order, to one destination. Each frame has a
 * codec_decoding, whose sink specifies how its values are combined with the sum. Grid: (CTAs, sums); sum s uses
 * codec_decodings s * count to s * count + count - 1. Errors are reported for each frame as decode_rows reports them.
 */
template <int CODEC>
__global__ void __launch_bounds__(32 * WARPS, 4) reduce_rows(const codec_decoding *decodings, uint32_t count)
{
	decodings += (uint64_t)(count - 1) * blockIdx.y; /* decoding_of adds blockIdx.y */
	const codec_decoding &d = decoding_of(decodings);
	decodings += blockIdx.y;
	__shared__ float ratio[256];
	const job &j = share_job(d.view, d.memory);
	const codec_view &v = j.v;
	const struct row_kind q = kind_for<CODEC>(kind_of(&v));
	const uint32_t lane = threadIdx.x % 32;
	const codec_decoding *mine = decodings + (lane < count ? lane : 0);
	const uint32_t warp = threadIdx.x / 32;

	__shared__ uint32_t wrong; /* mask of frames whose block is invalid */
	__shared__ float2 scales[CODEC == CODEC_FLOAT8 ? WARPS * TABLED : 1];

	fill_ratios<CODEC>(&v, ratio);
	for (uint32_t f = warp; blockIdx.x == 0 && f < count; f += WARPS)
		report_fault(decodings[f].found, 0, check_frame(decodings[f].view, decodings[f].frame, lane), lane);
	for (uint64_t b = blockIdx.x; b < v.nblocks; b += gridDim.x) {
		if (threadIdx.x == 0)
			wrong = 0;
		__syncthreads();
		const row_place p = row_place_of(&j, q, b);
		const uint64_t part = p.part - row_parts(&v, j.memory), ncodes = row_codes_nbytes(q, p.m),
			       nscales = row_count(p.part->group_size, p.m) * row_scale_nbytes(q);
		cursor c = {};
		codec_status status =
			lane < count ? check_region(q, mine, b, nscales, ncodes, p.m, &c) : CODEC_BAD_DIRECTORY;
		const uint32_t known = __ballot_sync(FULL, status != CODEC_BAD_DIRECTORY),
			       good = __ballot_sync(FULL, status == CODEC_OK);
		summed s = {decodings,
			    count,
			    good,
			    q,
			    p,
			    part,
			    nscales,
			    here(&c),
			    v.dtype,
			    scales + (CODEC == CODEC_FLOAT8 ? TABLED * warp : 0),
			    (uint32_t)row_count(p.part->group_size, p.m),
			    0};
		uint32_t bad = check_trits(s, ncodes, warp, lane);

		if (CODEC == CODEC_FLOAT8)
			bad |= fill_scales(&s, lane);
		bad |= add_up<CODEC>(s, ratio, warp, lane);
		bad = __reduce_or_sync(FULL, bad);
		if (lane == 0 && bad)
			atomicOr(&wrong, bad);
		__syncthreads();
		if (wrong >> lane & 1)
			status = CODEC_BAD_REGION;
		/*
		 * one warp reports all faults of a frame, so that a wrong checksum takes precedence over other faults
		 * of a block
		 */
		status = check_digests(s, b, known, left(&c), status, warp, lane);
		if (lane < count && lane % WARPS == warp && status != CODEC_OK)
			report_fault(mine->found, b + 1, status, 0);
		__syncthreads(); /* all warps have read `wrong` */
	}
}
