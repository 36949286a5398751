/* dtype.h - properties of dtypes that the coder needs. */
#ifndef CODEC_DTYPE_H
#define CODEC_DTYPE_H

#include "base.h"

struct dtype {
	uint8_t nbytes;
	uint8_t form;    /* enum form */
	uint16_t octave; /* number of patterns per octave (power of two to the next); 0: the dtype has no exponent */
};

/* Return 1 for floats of 8 bits with a pattern. Their only plane has sign and pattern. */
static inline int dtype_is_float8(const struct dtype *d)
{
	return d->octave && d->nbytes == 1;
}

/* Return 1 if plane 0 has bits of the pattern only. It may have an agreed codebook, and blocks omit values +0. */
static inline int dtype_has_top(const struct dtype *d)
{
	return d->octave && d->nbytes > 1;
}

/* Return s if symbols of a value's pattern are its bits s to s + 7, after its offset is subtracted. */
static inline int dtype_shift(const struct dtype *d)
{
	return d->form == FORM_FLOAT8 ? FORM_SHIFT64 : dtype_is_float8(d) ? FORM_SHIFT8 : FORM_SHIFT;
}

/*
 * Return the smallest pattern that the scale model applies to. Plane 0 of smaller patterns is 0, except for float8,
 * whose subnormal numbers are not changed.
 */
static inline uint16_t dtype_zero(const struct dtype *d)
{
	return dtype_is_float8(d) ? d->octave : (uint16_t)(1 << dtype_shift(d));
}

/* Return the largest shift of offsets. */
static inline int dtype_most_shift(const struct dtype *d)
{
	return dtype_is_float8(d) ? WIRE_MAX_SHIFT8 : WIRE_MAX_SHIFT;
}

extern const struct dtype dtypes[CODEC_UINT64 + 1]; /* nbytes is 0 for numbers that are not dtypes */

/*
 * Return the entry of a dtype, or NULL if `number` is not a dtype. Inline, because encoding a small frame calls it
 * dozens of times.
 */
static inline const struct dtype *dtype_of(uint32_t number)
{
	return number < sizeof dtypes / sizeof *dtypes && dtypes[number].nbytes ? dtypes + number : NULL;
}

#endif
