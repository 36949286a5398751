/* subject.h - a frame under test with its properties, and functions that decode it in one of many ways. */
#ifndef FUZZ_SUBJECT_H
#define FUZZ_SUBJECT_H

#include <string.h>

#include "check.h"

#define FRAMES 4 /* maximum number of frames that are reduced together */

static inline int same(float a, float b)
{
	return a == b || (a != a && b != b);
}

static inline int is_float(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 || dtype == CODEC_FLOAT16;
}

/* A way to decode a frame: flags, destination, instruction set, one call or steps. */
struct way {
	uint32_t flags, into, isa; /* isa: isa: 1 + index of the instruction set */
	float weight, divide;
	enum { AT_ONCE, STEPS, CHECKED_STEPS } steps;
};

/* Result of decoding in one way. */
struct result {
	codec_status status;
	codec_fault fault;
	struct exact out;
	int untouched; /* 1: the destination is unchanged */
};

/* A frame under test and its properties. */
struct subject {
	struct given g;
	codec_info info;
	struct source *s;
	struct exact frame;
};

static inline void tensor_like(const codec_info *info, uint32_t dtype, codec_tensor *t)
{
	*t = (codec_tensor){.struct_nbytes = sizeof *t, .dtype = dtype, .rank = info->rank};
	memcpy(t->shape, info->shape, sizeof t->shape);
	t->nbytes = info->n * codec_dtype_nbytes(dtype);
}

/* Fill a destination with moderate float32 values, so that sums with decoded values are finite. */
static inline void fill(uint8_t *p, size_t nbytes)
{
	for (size_t i = 0; i < nbytes; i++)
		p[i] = (uint8_t)(i % 4 == 3 ? 0x3f | (i >> 3 & 0x80) : i * 37);
}

static inline int is_filled(const uint8_t *p, size_t nbytes)
{
	for (size_t i = 0; i < nbytes; i++)
		if (p[i] != (uint8_t)(i % 4 == 3 ? 0x3f | (i >> 3 & 0x80) : i * 37))
			return 0;
	return 1;
}

static inline float filled(uint64_t i)
{
	uint8_t b[4];
	float x;

	for (size_t k = 0; k < 4; k++)
		b[k] = (uint8_t)(k == 3 ? 0x3f | ((4 * i + k) >> 3 & 0x80) : (4 * i + k) * 37);
	memcpy(&x, b, 4);
	return x;
}

static inline codec_context context_of(const struct subject *f, const struct way *w, codec_fault *fault)
{
	return (codec_context){.struct_nbytes = sizeof(codec_context),
			       .flags = w->flags,
			       .isa = w->isa,
			       .into = w->into,
			       .weight = w->weight,
			       .divide = w->divide,
			       .max_nbytes = TENSOR_LIMIT,
			       .codebooks = f->g.book,
			       .ncodebooks = f->g.book != NULL,
			       .metric = f->g.metric,
			       .fault = fault};
}

/*
 * Copy a frame to memory of its exact size, and read its header. Return 0 if the header is rejected or the tensor is
 * too large, after checking that decoding rejects the frame, too.
 */
int subject_open(struct subject *f, const struct given *given, struct source *s);

/* Decode in the way w, and check the properties that hold for every result. The caller frees result.out. */
struct result decode_in(const struct subject *f, struct way w);

/* Decode in the way w with every instruction set, and check that status, fault and bytes are equal. */
struct result decode_everywhere(const struct subject *f, struct way w);

/* Check that reducing up to FRAMES frames equals decoding them to float32 and combining the values in order. */
void check_reduce(const struct subject *f, size_t count);

/*
 * Check that the sums of the codes of up to FRAMES frames equal the sums of the signs of decoded values, and that
 * frames that are not TERNARY or have several scales are rejected. A scale of 0 hides the codes from decoded values.
 */
void check_reduce_codes(const struct subject *f, size_t count);

#endif
