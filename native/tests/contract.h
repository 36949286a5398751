/* contract.h - tensor, frames and scratch for tests of the C interface. Each test calls fill() first. */
#ifndef CODEC_TESTS_CONTRACT_H
#define CODEC_TESTS_CONTRACT_H

#include <string.h>

#include "codec/codec.h"
#include "codec/codec_engine.h"
#include "guard.h"

enum { N = 40000, SCRATCH = 4 << 20 };

static float x[N], theta[N + 1], residual[N], out[N];
static uint8_t frame[8 * N], other[8 * N], scratch[SCRATCH];

/* Calls of codec_decode and codec_encode whose arguments are local variables of the calling test. */
#define DECODE(n) codec_decode(frame, n, &to, &with, scratch, sizeof scratch)
#define ENCODE(dst, room, r) codec_encode(&spec, &t, dst, room, &written, r, &with, scratch, sizeof scratch)
#define CHECK() codec_decode_check(frame, written, &with, job, &range, work, work_nbytes)
#define DECODE_BLOCKS(to) codec_decode_blocks(frame, written, to, &with, job, &range, work, work_nbytes)

static inline codec_tensor tensor(void *data, uint64_t n)
{
	return (codec_tensor){.struct_nbytes = sizeof(codec_tensor),
			      .dtype = CODEC_FLOAT32,
			      .rank = 1,
			      .shape = {n},
			      .data = data,
			      .nbytes = 4 * n};
}

static inline codec_context context(void)
{
	return (codec_context){.struct_nbytes = sizeof(codec_context)};
}

static inline codec_spec spec_of(uint32_t codec)
{
	return (codec_spec){.struct_nbytes = sizeof(codec_spec), .codec = codec};
}

static inline void fill(void)
{
	for (int i = 0; i < N; i++) {
		x[i] = (float)(int64_t)(next_random() % 2001) - 1000;
		theta[i] = x[i] * 8;
		residual[i] = out[i] = 7;
	}
}

static inline int all_seven(const float *p)
{
	for (int i = 0; i < N; i++)
		if (p[i] != 7)
			return 0;
	return 1;
}

#endif
