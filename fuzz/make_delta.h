/* make_delta.h - frames of DELTA with their bases, including those that no encoder writes: format.md, section 10.
 */
#ifndef FUZZ_MAKE_DELTA_H
#define FUZZ_MAKE_DELTA_H

#include <stddef.h>
#include <stdint.h>

#include "source.h"

/* Fault of a frame or of its base. */
enum delta_fault {
	DELTA_RIGHT,       /* decoders must accept the frame, and give `result` */
	DELTA_WRONG_CODE,  /* a code, count or field of a region is another one */
	DELTA_WRONG_BYTES, /* bytes are changed, checksums recomputed */
	DELTA_WRONG_BASE,  /* the base is another one: CODEC_OTHER_BASE or CODEC_ALREADY_APPLIED */
	DELTA_CUT,         /* the end is missing */
	DELTA_FAULTS
};

/* A frame; each array is an allocation of its size. */
struct delta_case {
	uint32_t dtype, item;
	uint64_t n;
	uint8_t *base, *result, *frame;
	size_t nbytes;
	enum delta_fault fault;
};

void delta_make(struct delta_case *c, struct source *s);
void delta_free(struct delta_case *c);

#endif
