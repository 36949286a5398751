/*
 * grammar.h - frames from the grammar of docs/spec/format.md, including those that no encoder writes but a decoder must
 * accept or reject.
 */
#ifndef FUZZ_GRAMMAR_H
#define FUZZ_GRAMMAR_H

#include <stddef.h>
#include <stdint.h>

#include "codec/codec.h"

/* A frame and what decoding it needs. */
struct grammar {
	uint8_t *frame;
	size_t nbytes;
	uint32_t planted; /* number of faults; 0: decoders must accept the frame */
	uint32_t codec, dtype, rank;
	uint8_t params[8];
	uint64_t shape[CODEC_MAX_RANK], n;
	int has_book, has_metric;
	codec_codebook book;
	uint8_t *ea; /* shared levels: exponents of A */
	codec_metric metric[3];
	codec_tensor theta, v, m;
	float *a; /* values that the metric's function returns */
};

/*
 * Make a frame of at most `most` values (100,000 covers everything), from the decisions in data[0, size). `like`,
 * unless NULL: make a frame of the same shape, and perhaps the same dtype and codec. Free with grammar_free.
 */
void grammar_make(struct grammar *g, const uint8_t *data, size_t size, uint64_t most, const struct grammar *like);
void grammar_free(struct grammar *g);

/*
 * Recompute all checksums, as an attacker can forge them, for any header and as far as its sections lie within the
 * frame.
 */
void grammar_recompute_checksums(uint8_t *frame, size_t nbytes);

#endif
