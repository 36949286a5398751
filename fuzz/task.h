/* task.h - arguments of a call of codec_encode, chosen by a fuzzer's input. */
#ifndef FUZZ_TASK_H
#define FUZZ_TASK_H

#include "check.h"

#define SEGMENTS 8
#define GROUPS 3

/* Arguments of a call of codec_encode. */
struct task {
	struct source s;
	codec_spec spec;
	codec_tensor t, theta, v, m;
	uint64_t n;
	struct exact x, error, levels, state[3]; /* error: input residual */
	codec_segment segments[SEGMENTS];
	codec_metric metric[GROUPS];
	codec_codebook book;
	codec_context with;
	float *a; /* A of each value, which the user-defined metric function returns */
	int nonfinite, scaled;
	codec_status expected; /* status of encoding if known; else UNKNOWN */
	size_t bound, need, job_nbytes, work_nbytes;
};

#define UNKNOWN CODEC_LIMIT

/* Fill p with values around 1, multiplied by a scale per row and per column, in one of several styles. */
void make_values(struct task *k, uint8_t *p, uint32_t dtype, int finite);

/* Pick a spec, mostly a valid one, then dtype and shape. Other functions pick values and the other arguments. */
void pick_spec(struct task *k);
void pick_tensor(struct task *k);
void pick_rest(struct task *k);

#endif
