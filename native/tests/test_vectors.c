/*
 * test_vectors.c - decode golden frames on this machine, also to float32, and encode the decoded values again.
 *
 * usage: test_vectors DIRECTORY. Uses no test library, so that it runs under an emulator of another CPU. The original
 * tensors of golden frames are not available here, so decoded values are encoded again; for lossless frames this must
 * give equal bytes.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

static uint8_t *read_file(const char *path, size_t *nbytes)
{
	FILE *f = fopen(path, "rb");
	uint8_t *p = malloc(1 << 22);

	*nbytes = f && p ? fread(p, 1, 1 << 22, f) : 0;
	if (f)
		fclose(f);
	return p;
}

static float widened(uint32_t dtype, const uint8_t *p, uint64_t i)
{
	uint32_t bits;
	uint16_t half;
	float x;

	if (dtype == CODEC_FLOAT32) {
		memcpy(&x, p + 4 * i, 4);
		return x;
	}
	memcpy(&half, p + 2 * i, 2);
	bits = (uint32_t)half << 16;
	memcpy(&x, &bits, 4);
	return x;
}

/*
 * Check a golden frame with an instruction set, as in codec_context. Return 1 if it passes, 0 if it fails, -1 if
 * checking it needs other inputs, such as a base.
 */
static int check(const uint8_t *frame, size_t nbytes, uint32_t isa)
{
	codec_info info = {.struct_nbytes = sizeof info};
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa};
	codec_tensor t = {.struct_nbytes = sizeof t}, wide;
	size_t scratch_nbytes, bound, written;
	uint8_t *scratch, *again;
	int same = 1;

	if (codec_verify(frame, nbytes) != CODEC_OK || codec_inspect(frame, nbytes, &info) != CODEC_OK)
		return 0;
	if (info.codebook_id || info.spec.codec == CODEC_DELTA ||
	    (info.spec.codec == CODEC_TRUNCATE && info.spec.variant == CODEC_LEVEL_CODING_SHARED))
		return -1;
	t.dtype = info.dtype;
	t.rank = info.rank;
	memcpy(t.shape, info.shape, sizeof t.shape);
	t.nbytes = info.tensor_nbytes;
	t.data = malloc(t.nbytes + 1);
	codec_scratch(&info.spec, &t, &scratch_nbytes);
	scratch = malloc(scratch_nbytes);
	if (codec_decode(frame, nbytes, &t, &with, scratch, scratch_nbytes) != CODEC_OK)
		return 0;
	if (info.dtype == CODEC_FLOAT32 || info.dtype == CODEC_BFLOAT16) {
		wide = t;
		wide.dtype = CODEC_FLOAT32;
		wide.nbytes = 4 * info.n;
		wide.data = calloc(info.n + 1, 4);
		with.into = CODEC_INTO_FLOAT32;
		if (codec_decode(frame, nbytes, &wide, &with, scratch, scratch_nbytes) != CODEC_OK)
			return 0;
		for (uint64_t i = 0; i < info.n; i++) {
			float x = widened(info.dtype, t.data, i), y = ((float *)wide.data)[i];

			same &= x == y || (x != x && y != y);
		}
		free(wide.data);
		with.into = CODEC_INTO_STORE;
	}
	if (info.spec.codec == CODEC_LOSSLESS && !info.nsegments) {
		codec_bound(&info.spec, &t, &bound);
		again = malloc(bound);
		same &= codec_encode(&info.spec, &t, again, bound, &written, NULL, &with, scratch, scratch_nbytes) ==
				CODEC_OK &&
			written == nbytes && memcmp(again, frame, nbytes) == 0;
		free(again);
	}
	free(t.data);
	free(scratch);
	return same;
}

int main(int argc, char **argv)
{
	DIR *dir = argc == 2 ? opendir(argv[1]) : NULL;
	int count[3] = {0};

	if (!dir)
		return 2;
	for (struct dirent *e; (e = readdir(dir));) {
		char path[4096];
		uint8_t *frame;
		size_t nbytes;
		int is = 1;

		if (!strstr(e->d_name, ".codec"))
			continue;
		snprintf(path, sizeof path, "%s/%s", argv[1], e->d_name);
		frame = read_file(path, &nbytes);
		for (uint32_t isa = 0; is == 1 && codec_isa_name(isa); isa++) {
			if (!codec_isa_usable(isa))
				continue;
			is = check(frame, nbytes, 1 + isa);
			if (!is)
				printf("%s: wrong with %s\n", e->d_name, codec_isa_name(isa));
		}
		count[is + 1]++;
		free(frame);
	}
	closedir(dir);
	printf("%d right, %d wrong, %d skipped: they need a base or state that the file does not contain\n", count[2],
	       count[1], count[0]);
	return count[1] || count[2] < 40;
}
