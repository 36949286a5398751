/* codecs.c - check and convert a codec's parameters, using the table of codecs in exact/wire.h. */
#include "family.h"

#define ENTRY(name, family, ...) [CODEC_##name] = {&family##_family, __VA_ARGS__},
const struct codec codecs[] = {WIRE_CODECS(ENTRY)};

int codec_takes(uint32_t id, uint32_t dtype)
{
	const struct codec *c = codec_of(id);

	return c && dtype_of(dtype) && (c->dtypes == WIRE_DTYPES_ALL || c->dtypes >> dtype & 1);
}

int params_fault(const struct header *h)
{
	const struct codec *c = codec_of(h->codec);

	if (h->variant >= c->nvariants)
		return WIRE_PARAM_VARIANT;
	if (h->options & ~c->options)
		return WIRE_PARAM_OPTIONS;
	if (h->bits > c->max_bits)
		return WIRE_PARAM_BITS;
	if (h->max_code_length < c->least_max_code_length ||
	    h->max_code_length > (c->least_max_code_length ? WIRE_MAX_CODE_LENGTH : 0))
		return WIRE_PARAM_MAX_CODE_LENGTH;
	return c->family->params_fault ? c->family->params_fault(h) : -1;
}

uint32_t header_traits(const struct header *h)
{
	const struct family *family = family_of(h);
	const int entropy = family->symbols || header_kind(h).entropy, lossless = !family->leave;
	const int numbers = !lossless && h->codec != CODEC_TRUNCATE && !(h->options & CODEC_OPTION_PROPAGATE);

	return (family->is_rows ? CODEC_TRAIT_ROWS | (entropy ? 0 : CODEC_TRAIT_FIXED_RATE) : 0) |
	       (entropy ? CODEC_TRAIT_ENTROPY : 0) | (lossless ? CODEC_TRAIT_LOSSLESS : 0) |
	       (numbers ? CODEC_TRAIT_FINITE : 0) | (family->is_delta ? CODEC_TRAIT_BASE : 0) |
	       (h->codec == CODEC_TERNARY ? CODEC_TRAIT_SUMS : 0);
}

/* DELTA: return the number of values per block; 0 if the frame has no blocks or is invalid. */
static uint32_t delta_group_size(const struct header *h)
{
	return h->block_log2 && h->block_log2 <= WIRE_DELTA_MAX_BLOCK_LOG2 ? 1u << h->block_log2 : 0;
}

/* TOPK: return the number of values per chunk; 0 if the frame is stored or invalid. */
static uint32_t topk_group_size(const struct header *h)
{
	uint32_t log2 = h->group_size >> WIRE_TOPK_CHUNK_AT;

	return log2 && log2 <= WIRE_TOPK_MAX_BLOCK_LOG2 ? 1u << log2 : 0;
}

/*
 * Convert a header to the spec that it records. The header may be invalid: a block size that is out of range becomes 0,
 * and the guard is clamped to the range of a spec.
 */
void params_spec(const struct header *h, codec_spec *s)
{
	int lossless = h->codec == CODEC_LOSSLESS, delta = h->codec == CODEC_DELTA, topk = h->codec == CODEC_TOPK;

	*s = (codec_spec){.struct_nbytes = sizeof *s,
			  .codec = h->codec,
			  .max_code_length = h->max_code_length,
			  .model = lossless ? h->variant : 0,
			  .variant = lossless ? 0 : h->variant,
			  .options = h->options & ~WIRE_OPTION_CLIPPED,
			  .bits = h->bits,
			  .group_size = delta  ? delta_group_size(h)
					: topk ? topk_group_size(h)
					       : h->group_size,
			  .kept = topk ? h->group_size & WIRE_TOPK_KEPT : 0};
	/*
	 * The header's guard includes a correction for dtypes (truncate/params.c), so it can exceed the range of a
	 * spec's guard: clamp it.
	 */
	s->guard = h->guard - (h->options & CODEC_OPTION_CUT && h->variant != CODEC_LEVEL_CODING_FIXED);
	s->guard = MIN(MAX(s->guard, LEAST_GUARD), MOST_GUARD);
}
