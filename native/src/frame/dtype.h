/* dtype.h - what each dtype is to the coder. */
#ifndef CODEC_DTYPE_H
#define CODEC_DTYPE_H

#include "base.h"

struct dtype {
	uint8_t nbytes;
	uint8_t form;    /* enum form */
	uint16_t octave; /* patterns from one power of two to the next; 0: no exponent, no scale model */
};

/* The first bit of a lowered pattern that is in plane 0. */
static inline int dtype_shift(const struct dtype *d)
{
	return d->form == FORM_FLOAT8 ? FORM_SHIFT64 : FORM_SHIFT;
}

/* The first pattern that takes part in the scale model: below it, plane 0 is 0. */
static inline uint16_t dtype_zero(const struct dtype *d)
{
	return (uint16_t)(1 << dtype_shift(d));
}

extern const struct dtype dtypes[CODEC_UINT64 + 1]; /* of 0 bytes: there is none of this number */

/* NULL: there is none. Small frames ask dozens of times, so this is no call. */
static inline const struct dtype *dtype_of(uint32_t number)
{
	return number < sizeof dtypes / sizeof *dtypes && dtypes[number].nbytes ? dtypes + number : NULL;
}

#endif
