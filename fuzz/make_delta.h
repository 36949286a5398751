/* make_delta.h - generate DELTA frames with their bases, including frames that no encoder writes: format.md, section
 * 10.
 */
#ifndef FUZZ_MAKE_DELTA_H
#define FUZZ_MAKE_DELTA_H

#include <stddef.h>
#include <stdint.h>

#include "source.h"

/* Fault of a frame or of its base. */
enum delta_fault {
	DELTA_RIGHT,       /* decoders must accept the frame, and give `result` */
	DELTA_WRONG_CODE,  /* a code, count or field of a region has another value */
	DELTA_WRONG_BYTES, /* bytes of the frame are changed, and checksums recomputed */
	DELTA_WRONG_BASE,  /* decoded against another base: CODEC_OTHER_BASE or CODEC_ALREADY_APPLIED */
	DELTA_CUT,         /* the end of the frame is missing */
	DELTA_FAULTS
};

/* A DELTA frame with its base and result, each in an allocation of its exact size. */
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
