/* check.h - check properties that hold for every frame and every way to decode it; report violations. */
#ifndef FUZZ_CHECK_H
#define FUZZ_CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "codec/codec.h"
#include "source.h"

#define TENSOR_LIMIT (1u << 22) /* in bytes; of frames with larger tensors, only the rejection is checked */

/*
 * Report the violated property `what` and abort; if the environment has FUZZ_GO_ON, print each property once and
 * continue.
 */
void check_failed(const char *file, int line, const char *what, int64_t a, int64_t b);
#define CHECK(good, a, b)                                                                                              \
	do {                                                                                                           \
		if (!(good))                                                                                           \
			check_failed(__FILE__, __LINE__, #good, (int64_t)(a), (int64_t)(b));                           \
	} while (0)

/* A frame and the arguments that decoding it needs; NULL: not needed. */
struct given {
	const uint8_t *frame;
	size_t nbytes;
	const codec_codebook *book;
	const codec_metric *metric;
};

/*
 * Decode a frame in all ways, and check that the results agree, that calls stay within their buffers (each is an
 * allocation) and that codec.h's guarantees hold. Frames `others`, perhaps of the same shape, are reduced together with
 * the frame. Return the status of codec_decode.
 */
codec_status check_frame(const struct given *given, const struct given *others, size_t nothers, struct source *s);

/*
 * Buffer of n bytes that ends where its allocation ends, so that ASan detects overruns, and that begins at an unaligned
 * address. Free it with exact_free.
 */
struct exact {
	uint8_t *p;
	size_t n;
	void *base;
};
struct exact exact(size_t n, struct source *s);
void exact_free(struct exact *e);

/*
 * Return 1 if the instruction set with this index is usable. The environment variable FUZZ_ISAS limits the number of
 * usable sets, slowest first.
 */
int check_usable(uint32_t isa);
uint32_t check_some_isa(struct source *s); /* return 1 + index of a random usable instruction set */

float check_widen(const void *values, uint32_t dtype, uint64_t i);

#endif
