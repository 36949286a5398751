/* fuzz_decode.c - libFuzzer: any bytes as a frame, decoded by every instruction set, which must agree.
 *
 * Checksums are skipped, as an attacker would compute them; everything else must hold by itself. Build and run:
 *   make fuzz SECONDS=60
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

#define LIMIT (1u << 22)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	codec_info info = {.struct_nbytes = sizeof info};
	codec_tensor t = {.struct_nbytes = sizeof t};
	codec_status first = CODEC_OK;
	uint8_t *out[2], *frame;
	codec_tensor theta = {.struct_nbytes = sizeof theta, .dtype = CODEC_FLOAT32};
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &theta};
	codec_codebook book;
	uint64_t counts[256];
	size_t need;
	int decoded = 0;

	codec_verify(data, size);
	if (codec_inspect(data, size, &info) != CODEC_OK || info.tensor_nbytes > LIMIT)
		return 0;
	t.dtype = info.dtype;
	t.rank = info.rank;
	memcpy(t.shape, info.shape, sizeof t.shape);
	t.nbytes = info.tensor_nbytes;
	if (codec_scratch(&info.spec, &t, &need) != CODEC_OK)
		abort();
	for (int i = 0; i < 256; i++)
		counts[i] = (uint64_t)(i % 23);
	codec_codebook_build(counts, 8, &book);
	if (info.codebook_id)
		book.id = info.codebook_id;
	theta.nbytes = 4 * info.n;
	theta.data = malloc(theta.nbytes + 4);
	for (uint64_t i = 0; i < info.n; i++)
		((float *)theta.data)[i] = (float)(int)(i * 2654435761u) / 1e10f;
	frame = malloc(size); /* its end is where AddressSanitizer looks */
	memcpy(frame, data, size);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with,
				      .flags = CODEC_NO_CHECKSUM,
				      .isa = isa + 1,
				      .max_nbytes = LIMIT,
				      .codebooks = &book,
				      .ncodebooks = 1,
				      .metric = &metric};
		uint8_t *scratch;
		codec_status status;

		if (!codec_isa_usable(isa))
			continue;
		out[decoded] = malloc(t.nbytes ? t.nbytes : 1);
		scratch = malloc(need);
		t.data = out[decoded];
		status = codec_decode(frame, size, &t, &with, scratch, need);
		free(scratch);
		if (!decoded) {
			first = status;
			decoded = 1;
			continue;
		}
		if (status != first || (status == CODEC_OK && memcmp(out[0], out[1], t.nbytes)))
			abort();
		free(out[1]);
	}
	free(out[0]);
	free(theta.data);
	free(frame);
	return 0;
}
