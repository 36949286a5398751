/*
 * frames.c - generate a frame from a seed, with the frame generator in grammar.c, and decode it with libcodec;
 * compare.py loads this as a shared library.
 */
#include <stdlib.h>

#include "grammar.h"

struct frames_one {
	const uint8_t *frame, *ea, *values; /* ea: n exponents of the metric A; NULL: none needed */
	uint64_t nbytes, n, values_nbytes, book_id;
	uint8_t lengths[257];
	uint32_t planted;
	int32_t status;
};

void frames_make(uint64_t seed, uint64_t most, struct frames_one *one);

/* Generate the frame of `seed`, with at most `most` values. *one is valid until the next call. */
__attribute__((visibility("default"))) void frames_make(uint64_t seed, uint64_t most, struct frames_one *one)
{
	static struct grammar g;
	static uint8_t *values;
	codec_info info = {.struct_nbytes = sizeof info};
	codec_tensor t = {.struct_nbytes = sizeof t};
	codec_context with = {.struct_nbytes = sizeof with, .max_nbytes = 1 << 24};
	uint8_t bytes[4];
	void *scratch = NULL;
	size_t need = 0;

	free(values);
	grammar_free(&g);
	for (int i = 0; i < 4; i++)
		bytes[i] = (uint8_t)(seed >> 8 * i);
	grammar_make(&g, bytes, sizeof bytes, most, NULL);
	values = NULL;
	one->status = codec_inspect(g.frame, g.nbytes, &info);
	if (one->status == CODEC_OK && info.tensor_nbytes > with.max_nbytes) {
		one->status = CODEC_LIMIT;
	} else if (one->status == CODEC_OK) {
		t.dtype = info.dtype;
		t.rank = info.rank;
		for (uint32_t i = 0; i < t.rank; i++)
			t.shape[i] = info.shape[i];
		t.nbytes = info.tensor_nbytes;
		t.data = values = malloc(t.nbytes + 1);
		if (codec_scratch(&info.spec, &t, &need) != CODEC_OK || !(scratch = malloc(need)))
			abort();
		with.codebooks = &g.book;
		with.ncodebooks = (uint64_t)g.has_book;
		with.metric = g.has_metric ? g.metric : NULL;
		one->status = codec_decode(g.frame, g.nbytes, &t, &with, scratch, need);
		free(scratch);
	}
	one->frame = g.frame;
	one->nbytes = g.nbytes;
	one->ea = g.ea;
	one->n = g.n;
	one->values = values;
	one->values_nbytes = t.nbytes;
	one->book_id = g.has_book ? g.book.id : 0;
	for (int i = 0; i < 256; i++)
		one->lengths[i] = g.book.length[i];
	one->lengths[256] = g.book.escape_length;
	one->planted = g.planted;
}
