/* grammar.h - frames from the grammar of docs/format.md: what no encoder writes but a decoder must take or refuse. */
#ifndef FUZZ_GRAMMAR_H
#define FUZZ_GRAMMAR_H

#include <stddef.h>
#include <stdint.h>

#include "codec/codec.h"

/* A frame, and what decoding it needs. */
struct grammar {
	uint8_t *frame;
	size_t nbytes;
	uint32_t planted; /* places where it says something else than the grammar does: 0: decoders must accept it */
	uint32_t codec, dtype, rank;
	uint8_t params[8];
	uint64_t shape[CODEC_MAX_RANK], n;
	int has_book, has_metric;
	codec_codebook book;
	uint8_t *ea; /* shared levels: exponents of A */
	codec_metric metric[3];
	codec_tensor theta, v, m;
	float *a; /* of the metric's values that a function gives */
};

/*
 * A frame of at most `most` values (100,000 reaches everything), decided by data[0, size).
 * `like`, unless NULL: a frame of the same shape, and perhaps dtype and codec. To be freed by grammar_free.
 */
void grammar_make(struct grammar *g, const uint8_t *data, size_t size, uint64_t most, const struct grammar *like);
void grammar_free(struct grammar *g);

/* Checksums as an attacker would compute them: of whatever the header says, as far as it lies within the frame. */
void grammar_seal(uint8_t *frame, size_t nbytes);

#endif
