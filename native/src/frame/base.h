/* base.h - macros and helpers for all layers above the kernels. */
#ifndef CODEC_BASE_H
#define CODEC_BASE_H

#include "codec/codec.h"
#include "isa/kernels.h"

#define ALIGN8(x) (((uint64_t)(x) + 7) & ~(uint64_t)7)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		codec_status status_ = (call);                                                                         \
		if (status_ != CODEC_OK)                                                                               \
			return status_;                                                                                \
	} while (0)

#if CODEC_BIG_ENDIAN
static inline void swap_bytes(uint8_t *p, uint64_t nbytes, uint64_t size)
{
	for (; nbytes; p += size, nbytes -= size)
		for (uint64_t a = 0, b = size - 1; a < b; a++, b--) {
			uint8_t t = p[a];

			p[a] = p[b];
			p[b] = t;
		}
}
#endif

/* Record in *f where and why a frame is rejected. Return `status`. */
static inline codec_status fault(codec_fault *f, codec_status status, uint64_t offset, uint64_t found,
				 uint64_t expected)
{
	if (f)
		*f = (codec_fault){offset, found, expected};
	return status;
}

/* Return 1 if two spans share a byte. */
static inline int spans_overlap(const void *a, uint64_t a_nbytes, const void *b, uint64_t b_nbytes)
{
	uintptr_t p = (uintptr_t)a, q = (uintptr_t)b;

	return a_nbytes && b_nbytes && (p < q ? q - p < a_nbytes : p - q < b_nbytes);
}

#endif
