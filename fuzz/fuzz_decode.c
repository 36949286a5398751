/*
 * fuzz_decode.c - libFuzzer: decode arbitrary bytes in all ways, first unchanged, then with checksums recomputed, as an
 * attacker can do.
 */
#include <string.h>

#include "check.h"
#include "grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/*
 * Decode a DELTA frame in place. The frame's digest of the base is first set to the digest of a random base, and
 * checksums are recomputed, so that the blocks are read. Check that an error leaves the base unchanged.
 */
static void decode_delta(uint8_t *frame, size_t size, const codec_info *info, struct source *s)
{
	codec_context with = {.struct_nbytes = sizeof with, .flags = CODEC_VERIFY_FIRST};
	struct exact base = exact(info->tensor_nbytes, s), before = exact(info->tensor_nbytes, s), scratch;
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = info->dtype, .rank = info->rank, .nbytes = base.n};
	uint64_t digest = 0;
	size_t need = 0;

	for (size_t i = 0; i < base.n; i++)
		base.p[i] = (uint8_t)(i % 2 ? 0x3c + noise(s) % 8 : noise(s));
	if (base.n)
		memcpy(before.p, base.p, base.n);
	memcpy(t.shape, info->shape, sizeof t.shape);
	t.data = base.p;
	with.base = &t;
	CHECK(codec_digest(&t, 0, UINT64_MAX, &digest) == CODEC_OK, 0, 0);
	for (int i = 0; i < 8 && info->side_offset + 8 <= size; i++)
		frame[info->side_offset + (uint64_t)i] = (uint8_t)(digest >> 8 * i);
	grammar_recompute_checksums(frame, size);
	CHECK(codec_scratch(&info->spec, &t, &need) == CODEC_OK, 0, 0);
	scratch = exact(need, s);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_status status;

		if (!check_usable(isa))
			continue;
		with.isa = isa + 1;
		status = codec_decode(frame, size, &t, &with, scratch.p, need);
		if (base.n && status != CODEC_OK)
			CHECK(memcmp(base.p, before.p, base.n) == 0, status, isa);
		if (base.n)
			memcpy(base.p, before.p, base.n);
	}
	exact_free(&base);
	exact_free(&before);
	exact_free(&scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct source s = source_open(data, size);
	codec_info info = {.struct_nbytes = sizeof info};
	codec_tensor theta = {.struct_nbytes = sizeof theta, .dtype = CODEC_FLOAT32};
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &theta};
	struct given given = {.nbytes = size, .metric = &metric};
	uint8_t *frame = malloc(size + 1);

	s.p = s.end;
	memcpy(frame, data, size);
	given.frame = frame;
	if (codec_inspect(data, size, &info) == CODEC_OK && info.tensor_nbytes <= TENSOR_LIMIT) {
		theta.nbytes = 4 * info.n;
		theta.data = malloc(theta.nbytes + 4);
		for (uint64_t i = 0; i < info.n; i++)
			((float *)theta.data)[i] = (float)(int)(i * 2654435761u) / 1e10f;
	} else {
		given.metric = NULL;
	}
	check_frame(&given, NULL, 0, &s);
	grammar_recompute_checksums(frame, size);
	check_frame(&given, NULL, 0, &s);
	if (info.frame_nbytes == size && info.spec.codec == CODEC_DELTA && info.tensor_nbytes <= TENSOR_LIMIT &&
	    codec_inspect(frame, size, &info) == CODEC_OK)
		decode_delta(frame, size, &info, &s);
	free(theta.data);
	free(frame);
	return 0;
}
