/* truncate/cut.cuh - drop mantissa bits of values. docs/spec/encoder.md, section 8. */
#ifndef CODEC_CUDA_TRUNCATE_CUT_CUH
#define CODEC_CUDA_TRUNCATE_CUT_CUH

#include "frame/encode.cuh"
#include "truncate/truncate.cuh"

/*
 * Parameters of dropping bits of a tensor's values. The "cut" of a value is its level or, with per-bit granularity, its
 * number of dropped bits.
 */
struct cutter {
	cut_kind q;
	uint32_t dtype, fixed;
	bool nearest, by_bit, shares;
	bool joint, model; /* joint: levels are coded together with exponents; model: exponents have offsets */
	int guard;
	const uint8_t *values;             /* the tensor */
	const uint8_t *exponents, *levels; /* exponents of the metric A; levels from the caller; NULL if not used */
};

/* Return the cutter of a job. dtype: v->dtype, passed separately so that it can be a compile-time constant. */
DEVICE cutter cutter_of(const codec_view *v, const codec_source *source, const codec_cuts &by, uint32_t dtype)
{
	const cut_kind q = cut_kind_of(dtype);
	const bool given = v->variant == CODEC_LEVEL_CODING_FIXED || by.levels;

	return {q,
		dtype,
		v->bits & 3,
		!(v->options & CODEC_OPTION_CUT),
		(v->options & CODEC_OPTION_BITS) != 0,
		v->variant == CODEC_LEVEL_CODING_SHARED,
		v->variant == CODEC_LEVEL_CODING_CODED,
		v->model_parts.count > 0,
		guard_of(q, *v),
		global(source->values),
		given ? NULL : by.exponents,
		by.levels};
}

/*
 * A lane's four values after bits were dropped: their bits, exponents, and cuts (level or, with per-bit granularity,
 * number of dropped bits).
 */
struct cut_quad {
	uint32_t x[4], e[4], cuts[4];
};

/* Compute the cuts (levels, or numbers of dropped bits) of values i to i + n - 1. e: exponents of these values. */
DEVICE void cuts_asked(const cutter &c, uint64_t i, uint32_t n, const uint32_t e[4], uint32_t cuts[4])
{
	if (c.exponents)
		return shared_cuts(c.q, c.by_bit, c.guard, e, load_bytes(c.exponents + i, n), cuts);
	uint32_t levels = c.levels ? load_bytes(c.levels + i, n) : c.fixed * ONES;

	for (uint32_t k = 0; k < 4; k++)
		cuts[k] = e[k] == c.q.last ? 0 : byte_of(levels, k) & 3;
}

/* Drop bits of n <= 4 values from value i on. */
DEVICE cut_quad cut_values(const cutter &c, uint64_t i, uint32_t n)
{
	cut_quad cut;
	uint64_t wide[4];
	uint32_t carried = 0;

	if (c.dtype == CODEC_FLOAT32)
		load_quad<4>(global(c.values) + 4 * i, n, wide);
	else
		load_quad<2>(global(c.values) + 2 * i, n, wide);
	for (uint32_t k = 0; k < 4; k++) {
		cut.x[k] = (uint32_t)wide[k];
		cut.e[k] = cut.x[k] >> c.q.mbits & c.q.last;
	}
	cuts_asked(c, i, n, cut.e, cut.cuts);
	for (uint32_t k = 0; k < 4; k++) {
		uint32_t drop = c.by_bit ? cut.cuts[k] : drop_of(c.q, cut.cuts[k]), e = cut.e[k];

		cut.x[k] = round_truncate(cut.x[k], drop, c.nearest, c.q.mbits, c.q.last);
		cut.e[k] = cut.x[k] >> c.q.mbits & c.q.last;
		carried |= e ^ cut.e[k];
	}
	/* With shared levels, decoders compute the cuts from the exponents after rounding, so compute them again. */
	if (c.shares && carried)
		cuts_asked(c, i, n, cut.e, cut.cuts);
	return cut;
}

#endif
