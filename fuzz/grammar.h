/*
 * grammar.h - frame generator: frames that follow the grammar of docs/spec/format.md, or violate one rule of it.
 * Includes valid frames that no encoder writes.
 */
#ifndef FUZZ_GRAMMAR_H
#define FUZZ_GRAMMAR_H

#include <stddef.h>
#include <stdint.h>

#include "codec/codec.h"

/* A generated frame and the arguments that decoding it needs. */
struct grammar {
	uint8_t *frame;
	size_t nbytes;
	uint32_t planted; /* number of faults; 0: decoders must accept the frame */
	uint32_t codec, dtype, rank;
	uint8_t params[8];
	uint64_t shape[CODEC_MAX_RANK], n;
	int has_book, has_metric;
	codec_codebook book;
	uint8_t *ea; /* shared levels: exponents of the metric A */
	codec_metric metric[3];
	codec_tensor theta, v, m;
	float *a; /* A of each value, which the user-defined metric function returns */
};

/*
 * Generate a frame of at most `most` values (100,000 suffice to reach every rule of the format). data[0, size) controls
 * the decisions. If `like` is not NULL, the frame has the shape of `like`, and perhaps its dtype and codec. Free with
 * grammar_free.
 */
void grammar_make(struct grammar *g, const uint8_t *data, size_t size, uint64_t most, const struct grammar *like);
void grammar_free(struct grammar *g);

/*
 * Recompute all checksums, as an attacker can. The header may be invalid: the function stops at the first section that
 * extends past the frame's end.
 */
void grammar_recompute_checksums(uint8_t *frame, size_t nbytes);

#endif
