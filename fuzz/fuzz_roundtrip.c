/* fuzz_roundtrip.c - libFuzzer: any values under any spec. Every instruction set writes the same frame, which fits the
 * bound, and reads the same values from it; lossless ones are those that went in, and residuals are what is missing.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static float widened(const uint8_t *p, uint32_t dtype, uint64_t i)
{
	codec_tensor half = {.struct_nbytes = sizeof half, .dtype = dtype, .rank = 1, .shape = {1}, .nbytes = 2},
		     one = half;
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, 0};
	codec_context with = {.struct_nbytes = sizeof with, .into = CODEC_INTO_FLOAT32};
	static uint8_t scratch[1 << 20];
	uint8_t frame[128];
	size_t written;
	float x;

	if (dtype == CODEC_FLOAT32) {
		memcpy(&x, p + 4 * i, 4);
		return x;
	}
	half.data = (void *)(p + 2 * i);
	one.dtype = CODEC_FLOAT32;
	one.nbytes = 4;
	one.data = &x;
	if (codec_encode(&spec, &half, frame, sizeof frame, &written, NULL, NULL, scratch, sizeof scratch) !=
		    CODEC_OK ||
	    codec_decode(frame, written, &one, &with, scratch, sizeof scratch) != CODEC_OK)
		abort();
	return x;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
	codec_spec spec = {.struct_nbytes = sizeof spec};
	codec_tensor t = {.struct_nbytes = sizeof t, .rank = 2}, theta, out;
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 100, .theta = &theta};
	uint8_t *frame[2] = {0}, *back[2] = {0}, *scratch;
	codec_status first = CODEC_OK;
	size_t bound, need, written[2] = {0};
	float *residual;
	int done = 0;

	if (size < 12)
		return 0;
	spec.codec = 1 + data[0] % 7;
	spec.variant = data[1] & 3;
	spec.options = data[2] & 31;
	spec.bits = data[3] % 9;
	spec.row = data[4] == 255 ? CODEC_ROW_LAST : data[4] > 200 ? data[4] * 100u : data[4];
	spec.scale = data[5] > 200 ? (float)data[5] : 0;
	spec.clip = data[6] > 200 ? 2.5f : 0;
	spec.guard = (int8_t)data[7];
	t.dtype = DTYPES[data[8] % 3];
	t.shape[1] = 1 + data[9];
	data += 12;
	size -= 12;
	t.shape[0] = size / codec_dtype_nbytes(t.dtype) / t.shape[1];
	t.nbytes = t.shape[0] * t.shape[1] * codec_dtype_nbytes(t.dtype);
	if (codec_bound(&spec, &t, &bound) != CODEC_OK)
		return 0;
	if (codec_scratch(&spec, &t, &need) != CODEC_OK)
		abort();
	theta = out = t;
	theta.dtype = CODEC_FLOAT32;
	theta.nbytes = 4 * t.shape[0] * t.shape[1];
	theta.data = malloc(theta.nbytes + 4);
	for (uint64_t i = 0; i < theta.nbytes / 4; i++)
		((float *)theta.data)[i] = (float)(int)(i * 2654435761u) / 1e10f;
	residual = malloc(theta.nbytes + 4);
	scratch = malloc(need);
	t.data = malloc(t.nbytes + 1);
	memcpy(t.data, data, t.nbytes);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = isa + 1, .stream = 3, .metric = &metric};
		codec_status status;
		int i = done ? 1 : 0;

		if (!codec_isa_usable(isa))
			continue;
		frame[i] = frame[i] ? frame[i] : malloc(bound);
		back[i] = back[i] ? back[i] : malloc(t.nbytes + 1);
		status = codec_encode(&spec, &t, frame[i], bound, written + i, residual, &with, scratch, need);
		if (status == CODEC_SHORT_OUTPUT || status == CODEC_SHORT_SCRATCH || (done && status != first))
			abort();
		first = status;
		done = 1;
		if (status != CODEC_OK)
			continue;
		out.data = back[i];
		if (codec_verify(frame[i], written[i]) != CODEC_OK ||
		    codec_decode(frame[i], written[i], &out, &with, scratch, need) != CODEC_OK)
			abort();
		if (i && (written[0] != written[1] || memcmp(frame[0], frame[1], written[0]) ||
			  memcmp(back[0], back[1], t.nbytes)))
			abort();
		if (spec.codec == CODEC_LOSSLESS && memcmp(back[i], data, t.nbytes))
			abort();
		for (uint64_t v = 0; v < theta.nbytes / 4; v += 1 + theta.nbytes / 256) {
			float left = spec.codec == CODEC_LOSSLESS
					     ? 0
					     : widened(data, t.dtype, v) - widened(back[i], t.dtype, v);

			if (left != residual[v] && left == left)
				abort();
		}
	}
	free(theta.data);
	free(residual);
	free(scratch);
	free(t.data);
	for (int i = 0; i < 2; i++) {
		free(frame[i]);
		free(back[i]);
	}
	return 0;
}
