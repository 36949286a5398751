/*
 * rows/encode.cuh - encode blocks of sign, ternary, float8, float4 and quantize, one block per warp.
 * docs/spec/encoder.md, section 7.
 */
#ifndef CODEC_CUDA_ROWS_ENCODE_CUH
#define CODEC_CUDA_ROWS_ENCODE_CUH

#include "coder/encode.cuh"
#include "frame/encode.cuh"
#include "rows/float8.cuh"
#include "rows/levels.cuh"
#include "rows/ternary.cuh"

/*
 * Record in out->fault that the tensor cannot be encoded. Any other status replaces CODEC_BAD_SCALE, so that NaN or Inf
 * anywhere takes precedence over a scale that is too small.
 */
DEVICE void set_fault(codec_written *out, codec_status status)
{
	uint32_t old = atomicCAS(&out->fault, 0u, (uint32_t)status);

	if (old == CODEC_BAD_SCALE)
		atomicCAS(&out->fault, old, (uint32_t)status);
}

/*
 * Return true if the scales of parts are computed after the blocks are encoded, which is possible for SIGN, whose codes
 * do not depend on scales: encode_rows writes sums, from which scale_rows computes the scale, and the tensor is read
 * only once. Not with a residual, which depends on the scale.
 */
DEVICE bool scaled_last(const codec_view *v, const codec_source *source)
{
	return v->codec == CODEC_SIGN && v->row_sums.count && !source->residual;
}

/* SIGN: write the residuals of n values. scale, below: decoded values of positive and of negative numbers. */
DEVICE void put_sign_residuals(const row_job &r, uint64_t first, uint32_t n, float scale, float below, uint32_t lane)
{
	const uint32_t dtype = r.v->dtype;
	float *residual = global(r.source.residual) + first;

	scale = float_of(dtype, bits_of_float(dtype, scale));
	below = float_of(dtype, bits_of_float(dtype, below));
	auto put = [&](uint32_t i, float x) {
		residual[i] = round_minus(x, round_bits(x) <= ROUND_ABS ? scale : below);
	};
	uint32_t i = lane;

	for (; i + 3 * 32 < n; i += 4 * 32) {
		float x[4];

		values_each_32<4>(dtype, &r.source, first + i, x);
		for (uint32_t k = 0; k < 4; k++)
			put(i + 32 * k, x[k]);
	}
	for (; i < n; i += 32)
		put(i, value_at(dtype, &r.source, first + i));
}

/* SIGN: encode a block whose rows are multiples of 32 values: write codes, and scales or sums of pieces. */
DEVICE codec_status put_signs(const row_job &r, uint8_t *memory, uint8_t *scales, uint32_t *words, uint32_t lane)
{
	const codec_view *v = r.v;
	const codec_row_part *part = r.p.part;
	const uint32_t row = part->group_size, each = row ? row : WIRE_TREE;
	codec_row_sums *sums =
		(codec_row_sums *)(memory + v->row_sums.at) + part->first_sum + (r.p.first - part->start) / WIRE_TREE;
	scaled s = {CODEC_OK, part->scale[0], round_sign_below(part->scale[r.q.variant == CODEC_SIGN_TWO_MEAN])};

	for (uint32_t i = 0, n; i < r.p.m; i += n) {
		n = r.p.m - i < each ? r.p.m - i : each;
		if (row) {
			s = put_sign_row(v, r.q, &r.source, r.p.first + i, n, scales, words + i / 32, lane);
			scales += row_scale_nbytes(r.q);
		} else {
			const uint64_t first = r.p.first + i;
			const bool plain = summing_of(v) == SUM_ABS; /* inlined for speed, see put_scale_here */
			const codec_row_sums some =
				plain ? sums_how<SUM_ABS, true>(v->dtype, &r.source, first, n, words + i / 32, lane)
				      : sums_of<true>(v, &r.source, first, n, words + i / 32, lane);

			s.status = some.max >= ROUND_INF ? CODEC_NONFINITE : CODEC_OK;
			if (lane == 0)
				sums[i / WIRE_TREE] = some;
		}
		if (s.status != CODEC_OK)
			return s.status;
		if (r.source.residual)
			put_sign_residuals(r, r.p.first + i, n, s.scale, s.below, lane);
	}
	__syncwarp();
	return CODEC_OK;
}

/* TERNARY: return true if the spec gives the scale, and no magnitude may exceed that scale. */
DEVICE bool scale_is_given(const codec_view *v, const codec_row_part *part)
{
	return v->scale > 0 && !(v->clip > 0) && part->scale[0] > 0;
}

/*
 * TERNARY: check that the spec's scale, if there is one, is at least the largest magnitude. most: largest magnitude of
 * this lane's values, as bits of float32.
 */
DEVICE codec_status check_above(const codec_view *v, const codec_row_part *part, uint32_t most)
{
	if (!__any_sync(FULL, scale_is_given(v, part) && most > round_bits(part->scale[0])))
		return CODEC_OK;
	return __any_sync(FULL, most >= ROUND_INF) ? CODEC_NONFINITE : CODEC_BAD_SCALE;
}

/*
 * Write the scales of a block to `scales`, and ncodes bytes of packed codes to `to`. chunk: scratch memory of
 * TRITS_CHUNK bytes.
 */
template <int CODEC>
DEVICE codec_status put_rows(const row_job &r, uint8_t *memory, uint8_t *scales, const float *ratio, uint8_t *to,
			     uint32_t ncodes, uint8_t *chunk, uint32_t lane)
{
	groups_put put = {0, 0, CODEC_OK};

	if (CODEC == CODEC_SIGN && r.p.part->group_size % 32 == 0)
		return put_signs(r, memory, scales, (uint32_t *)to, lane);
	if (CODEC == CODEC_FLOAT8)
		put = put_float8_rows(r, scales, to, lane);
	if (CODEC == CODEC_QUANTIZE)
		put = put_level_rows(r, scales, to, lane);
	if (CODEC == CODEC_TERNARY)
		put = put_ternary_steps(r, to, scale_is_given(r.v, r.p.part), lane);
	if (CODEC != CODEC_SIGN && put.status == CODEC_OK && !put.done)
		put = put_groups<CODEC>(r, scales, ratio, to, chunk, lane);
	if (put.status == CODEC_OK && put.done < r.p.m) {
		put.status = put_scales<CODEC>(r.v, r.q, r.p, &r.source, scales, put.done, 0, 1, lane);
		if (put.status != CODEC_OK)
			return put.status;
		uint32_t most = put_codes<CODEC>(r, scales, ratio, to, ncodes, put.done, 0, 1, lane);

		put.most = most > put.most ? most : put.most;
	}
	__syncwarp();
	if (CODEC != CODEC_TERNARY || put.status != CODEC_OK)
		return put.status;
	return check_above(r.v, r.p.part, put.most);
}

/*
 * Entropy stage: encode ncodes bytes of codes as a plane, and write the plane's mode and the plane to `out`. Return the
 * number of bytes written. scratch: the codes, in a buffer of two planes and WORDS_ROOM words.
 */
DEVICE_CALL uint32_t code_plane(const job *j, uint8_t *scratch, uint32_t ncodes, uint8_t *out, uint32_t lane)
{
	const uint32_t *bytes = (const uint32_t *)scratch, rows = (ncodes + WIRE_ROW - 1) / WIRE_ROW;
	uint32_t got = 0, differ = 0;

	for (uint32_t r = 0; r < rows; r++)
		differ |= keep_bytes(bytes[32 * r + lane] ^ scratch[0] * ONES, there(r, lane, ncodes));
	bool constant = !__any_sync(FULL, differ != 0);

	if (!constant && ncodes >= WIRE_MIN_CODED)
		got = encode_plane(j, 0, bytes, ncodes, ncodes - 1, (uint32_t *)(scratch + 2 * PLANE_ROOM),
				   scratch + PLANE_ROOM, false, out + 4, lane);
	put32(out, constant ? WIRE_MODE_CONSTANT : got ? WIRE_MODE_CODED : WIRE_MODE_RAW, lane);
	if (!got)
		copy_bytes(out + 4, scratch, constant ? 1 : ncodes, lane);
	return 4 + (constant ? 1 : got ? got : ncodes);
}

/*
 * Encode a block to `region`, and set *size to the region's size in bytes. scratch: memory for two planes and
 * WORDS_ROOM words with an entropy stage, for TRITS_CHUNK bytes with ternary codes packed five per byte; else unused.
 */
template <int CODEC>
DEVICE codec_status write_rows(const job *j, uint8_t *memory, const row_job &r, const float *ratio, uint8_t *scratch,
			       uint8_t *region, uint32_t *size, uint32_t lane)
{
	const row_place &p = r.p;
	const bool entropy = is_entropy_coded<CODEC>(r.q);
	const uint32_t nscales = (uint32_t)(row_count(p.part->group_size, p.m) * row_scale_nbytes(r.q));
	uint32_t ncodes = (uint32_t)row_codes_nbytes(r.q, p.m);
	uint8_t *to = region + nscales;
	codec_status status = put_rows<CODEC>(r, memory, region, ratio, entropy ? scratch : to, ncodes,
					      entropy ? scratch + PLANE_ROOM : scratch, lane);

	if (status != CODEC_OK)
		return status;
	if (entropy)
		ncodes = code_plane(j, scratch, ncodes, to, lane);
	*size = end_region(region, nscales + ncodes, lane);
	return CODEC_OK;
}

#endif
