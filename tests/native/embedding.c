/* embedding.c - test threads.h, and the C code of embedding.md, which test_embedding.py copies to page.h. */
#include "page.h"
#include "threads.h"

#include <assert.h>

enum { ROWS = 300, COLUMNS = 200, N = ROWS * COLUMNS };

static float values[N], out[N], residual[N], scratch[1 << 19];

static codec_tensor tensor(float *data)
{
	return (codec_tensor){.struct_nbytes = sizeof(codec_tensor),
			      .dtype = CODEC_FLOAT32,
			      .rank = 2,
			      .shape = {ROWS, COLUMNS},
			      .data = data,
			      .nbytes = 4 * N};
}

/* Write two frames and the first `rest` bytes of a third one to a stream. next_frame() must return the two. */
static void stream(const void *frame, size_t nbytes, size_t rest)
{
	FILE *f = tmpfile();
	codec_info info;

	assert(f && fwrite(frame, 1, nbytes, f) == nbytes && fwrite(frame, 1, nbytes, f) == nbytes);
	assert(fwrite(frame, 1, rest, f) == rest && fflush(f) == 0 && lseek(fileno(f), 0, SEEK_SET) == 0);
	for (int i = 0; i < 2; i++) {
		uint8_t *got = next_frame(fileno(f), 1 << 20, &info);

		assert(got && info.frame_nbytes == nbytes && memcmp(got, frame, nbytes) == 0);
		free(got);
	}
	assert(!next_frame(fileno(f), 1 << 20, &info));
	lseek(fileno(f), 0, SEEK_SET);
	assert(!next_frame(fileno(f), 4 * N - 1, &info)); /* the decoded tensor exceeds max_nbytes */
	fclose(f);
}

int main(void)
{
	codec_tensor x = tensor(values), to = tensor(out);
	codec_info info = {.struct_nbytes = sizeof info};
	codec_codebook book, theirs;
	codec_context with = {.struct_nbytes = sizeof with, .codebooks = &book, .ncodebooks = 1};
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_LOSSLESS};
	uint8_t packed[CODEC_CODEBOOK_NBYTES], small[5 * N];
	size_t nbytes, small_nbytes, sizes[2];
	const void *frames[2];
	void *frame;

	for (int i = 0; i < N; i++)
		values[i] = (float)((i * 2654435761u >> 8) % 2001) / 1000 - 1;
	assert(late_enough());
	assert(frame_of(values, ROWS, COLUMNS, &frame, &nbytes) == CODEC_OK);
	for (size_t rest = 0; rest < 70; rest++)
		stream(frame, nbytes, rest);

	assert(values_of(frame, nbytes, &to, scratch, sizeof scratch) == CODEC_OK);
	assert(memcmp(out, values, sizeof out) == 0);
	assert(codec_inspect(frame, nbytes, &info) == CODEC_OK && info.nblocks > 3);
	memset(out, 0, sizeof out);
	assert(decode_by_four(frame, &info, &to) == CODEC_OK && memcmp(out, values, sizeof out) == 0);

	((uint8_t *)frame)[nbytes - 9] ^= 1;
	memset(out, 1, sizeof out);
	memset(residual, 1, sizeof residual);
	assert(values_of(frame, nbytes, &to, scratch, sizeof scratch) == CODEC_CHECKSUM);
	assert(memcmp(out, residual, sizeof out) == 0);
	assert(decode_by_four(frame, &info, &to) == CODEC_CHECKSUM);
	((uint8_t *)frame)[nbytes - 9] ^= 1;

	memset(residual, 0, sizeof residual);
	memset(out, 0, sizeof out);
	for (uint64_t step = 0; step < 2; step++) { /* sent values + residual = gradients */
		assert(one_bit(&x, residual, step, small, sizeof small, &small_nbytes, scratch, sizeof scratch) ==
		       CODEC_OK);
		assert(codec_accumulate(small, small_nbytes, 1, &to, NULL, scratch, sizeof scratch) == CODEC_OK);
	}
	for (int i = 0; i < N; i++)
		assert(out[i] + residual[i] - 2 * values[i] < 1e-5f && 2 * values[i] - out[i] - residual[i] < 1e-5f);

	frames[0] = frames[1] = frame;
	sizes[0] = sizes[1] = nbytes;
	assert(mean_of(frames, sizes, 2, &to) == CODEC_OK && memcmp(out, values, sizeof out) == 0);

	assert(agree_on(&x, &book, packed, &small_nbytes, scratch, sizeof scratch) == CODEC_OK);
	assert(codec_codebook_unpack(packed, small_nbytes, &theirs) == CODEC_OK);
	assert(codec_encode(&spec, &x, small, sizeof small, &small_nbytes, NULL, &with, scratch, sizeof scratch) ==
	       CODEC_OK);
	assert(codec_inspect(small, small_nbytes, &info) == CODEC_OK && info.codebook_id == theirs.id);
	assert(values_of(small, small_nbytes, &to, scratch, sizeof scratch) == CODEC_UNKNOWN_CODEBOOK);
	with.codebooks = &theirs;
	memset(out, 0, sizeof out);
	assert(codec_decode(small, small_nbytes, &to, &with, scratch, sizeof scratch) == CODEC_OK);
	assert(memcmp(out, values, sizeof out) == 0);
	free(frame);
	return 0;
}
