/*
 * fuzz_decode.c - libFuzzer: any bytes as a frame, unchanged and with recomputed checksums as an attacker can forge
 * them, decoded in all ways.
 */
#include <string.h>

#include "check.h"
#include "grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
	free(theta.data);
	free(frame);
	return 0;
}
