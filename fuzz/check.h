/* check.h - what must hold of any frame, however it is decoded; and how a fuzzer says that it does not. */
#ifndef FUZZ_CHECK_H
#define FUZZ_CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "codec/codec.h"
#include "source.h"

#define TENSOR_LIMIT (1u << 22) /* bytes: larger ones are refused, and that is all that is looked at */

/* Abort, or with FUZZ_GO_ON in the environment print each broken promise once. */
void check_failed(const char *file, int line, const char *what, int64_t a, int64_t b);
#define CHECK(good, a, b)                                                                                              \
	do {                                                                                                           \
		if (!(good))                                                                                           \
			check_failed(__FILE__, __LINE__, #good, (int64_t)(a), (int64_t)(b));                           \
	} while (0)

/* A frame with what decoding it needs: NULL for what is not there. */
struct given {
	const uint8_t *frame;
	size_t nbytes;
	const codec_codebook *book;
	const codec_metric *metric;
};

/*
 * Decode in every way that there is; they must agree, stay within their buffers (whose ends are those of allocations)
 * and keep their promises. `others`, frames perhaps of the same shape, are added up with it. Returns the status of
 * plain decoding.
 */
codec_status check_frame(const struct given *given, const struct given *others, size_t nothers, struct source *s);

/* n bytes that end where an allocation ends, at any address. To be freed by exact_free. */
struct exact {
	uint8_t *p;
	size_t n;
	void *base;
};
struct exact exact(size_t n, struct source *s);
void exact_free(struct exact *e);

/* Is there an instruction set of this index here? FUZZ_ISAS in the environment: only so many of them, slowest first. */
int check_usable(uint32_t isa);
uint32_t check_some_isa(struct source *s); /* 1 + its index */

float check_widen(const void *values, uint32_t dtype, uint64_t i);

#endif
