/*
 * floats.c - encode a file of float32 values as a frame, or decode a frame: floats encode|decode FROM TO
 *
 * C99; docs/guides/embedding.md has the command that builds this program. After an error TO is unchanged.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <codec/codec.h>

static const uint64_t MOST = (uint64_t)1 << 30; /* upper bound of allocations, in bytes */

static void die(const char *why)
{
	fprintf(stderr, "floats: %s\n", why);
	exit(1);
}

static void check(codec_status status)
{
	if (status != CODEC_OK)
		die(codec_strerror(status));
}

static void *memory(void *old, uint64_t nbytes)
{
	void *p = realloc(old, nbytes ? (size_t)nbytes : 1);

	if (!p)
		die("out of memory");
	return p;
}

/* Extend `bytes`, which holds `have` bytes, to n bytes of the file. */
static uint8_t *read_up_to(FILE *from, uint8_t *bytes, size_t have, size_t n)
{
	bytes = memory(bytes, n);
	if (fread(bytes + have, 1, n - have, from) != n - have)
		die("the file ends too early");
	return bytes;
}

/* Read one frame. codec_inspect reports the number of bytes to read: of the header first, then of the frame. */
static uint8_t *receive(FILE *from, codec_info *info)
{
	uint8_t *frame = NULL;
	size_t have = 0;

	for (;;) {
		codec_status status = codec_inspect(frame, have, info);
		uint64_t n = status == CODEC_TRUNCATED ? info->fault.expected : info->frame_nbytes;

		if (status != CODEC_TRUNCATED)
			check(status);
		if (n == have)
			return frame;
		if (n > MOST)
			die("the frame is larger than we take");
		frame = read_up_to(from, frame, have, (size_t)n);
		have = (size_t)n;
	}
}

static void *encode(FILE *from, size_t *nbytes)
{
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_LOSSLESS};
	codec_tensor x = {.struct_nbytes = sizeof x, .dtype = CODEC_FLOAT32, .rank = 1};
	long end = fseek(from, 0, SEEK_END) ? -1 : ftell(from);
	size_t bound, scratch_nbytes;
	void *frame, *scratch;

	if (end < 0 || end % 4)
		die("not a file of float32");
	rewind(from);
	x.data = read_up_to(from, NULL, 0, (size_t)end);
	x.nbytes = (uint64_t)end;
	x.shape[0] = x.nbytes / 4;
	check(codec_bound(&spec, &x, &bound));
	check(codec_scratch(&spec, &x, &scratch_nbytes));
	frame = memory(NULL, bound);
	scratch = memory(NULL, scratch_nbytes);
	check(codec_encode(&spec, &x, frame, bound, nbytes, NULL, NULL, scratch, scratch_nbytes));
	free(scratch);
	free(x.data);
	return frame;
}

static void *decode(FILE *from, size_t *nbytes)
{
	codec_info info = {.struct_nbytes = sizeof info};
	codec_tensor x = {.struct_nbytes = sizeof x, .dtype = CODEC_FLOAT32};
	uint8_t *frame = receive(from, &info);
	size_t n = (size_t)info.frame_nbytes, scratch_nbytes;
	void *scratch;

	if (getc(from) != EOF || info.tensor_nbytes > MOST)
		die("more than one frame, or a larger tensor than we take");
	check(codec_verify(frame, n)); /* before allocating the tensor */
	x.rank = info.rank;
	memcpy(x.shape, info.shape, sizeof x.shape);
	x.nbytes = info.tensor_nbytes;
	check(codec_scratch(&info.spec, &x, &scratch_nbytes));
	x.data = memory(NULL, x.nbytes);
	scratch = memory(NULL, scratch_nbytes);
	check(codec_decode(frame, n, &x, NULL, scratch, scratch_nbytes)); /* fails unless the dtype is float32 */
	free(scratch);
	free(frame);
	*nbytes = (size_t)x.nbytes;
	return x.data;
}

int main(int argc, char **argv)
{
	int encoding = argc == 4 && !strcmp(argv[1], "encode"), decoding = argc == 4 && !strcmp(argv[1], "decode");
	FILE *from = encoding || decoding ? fopen(argv[2], "rb") : NULL, *to;
	char part[4096];
	size_t nbytes;
	void *bytes;
	int written;

	if (!from)
		die(encoding || decoding ? "cannot read" : "floats encode|decode FROM TO");
	bytes = encoding ? encode(from, &nbytes) : decode(from, &nbytes);
	fclose(from);
	snprintf(part, sizeof part, "%s.part", argv[3]);
	if (!(to = fopen(part, "wb")))
		die("cannot write");
	written = fwrite(bytes, 1, nbytes, to) == nbytes;
	free(bytes);
	if (fclose(to) || !written || rename(part, argv[3])) {
		remove(part);
		die("cannot write");
	}
	return 0;
}
