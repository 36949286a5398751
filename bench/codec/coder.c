/*
 * coder.c - speed of lossless coding for each instruction set, without sampling and most checksums; speed of memcpy.
 *
 *   coder [--json] [ROWS COLS]
 *
 * The input is a bfloat16 matrix whose rows and columns have different scales, coded with a scale model. Encoding
 * computes offsets, symbols, mantissas, codes, lane states and words of blocks. It also computes the checksum of the
 * plane of mantissas, which is written with non-temporal stores. Decoding does the reverse for two blocks at a time,
 * with all bounds checks.
 *
 * Prints symbols per second; symbols per second divided by memcpy's bytes per second; and the speed as a fraction of
 * the memory limit, at which the necessary reads and writes run at memcpy's rate.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "frame/frame.h"
#include "job/api.h"
#include "lossless/lossless.h"

#define ROUNDS 15
#define MOST_ISAS 8

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t noise(void)
{
	static uint64_t s = 88172645463325252ull;

	s ^= s << 13;
	s ^= s >> 7;
	s ^= s << 17;
	return (uint32_t)(s >> 32);
}

/* Exponents of normal values are nearly geometrically distributed below the maximum. */
static uint32_t exponent(void)
{
	uint32_t top = noise() % 3, e = 127 - (uint32_t)__builtin_ctz(noise() | 1u << 20);

	return top ? e : e + 1 - noise() % 2;
}

static void fail(const char *what)
{
	fprintf(stderr, "coder: %s\n", what);
	exit(1);
}

struct run {
	codec_spec spec;
	codec_tensor t;
	uint8_t *values, *back, *frame;
	size_t capacity, written, job_nbytes;
	void *job, *memory;
};

/* Return the duration of a pass in seconds. */
static double encode(struct run *r, const struct kernels *k, const codec_context *with)
{
	struct job *j = job_place(r->job);
	uint64_t digest, at;
	codec_plan plan;
	struct source src;
	struct work w;
	double start;

	r->t.data = r->values;
	src = source_of(&r->t, with);
	if (codec_encode_open(&r->spec, &r->t, r->frame, r->capacity, with, r->job, r->job_nbytes, &plan) != CODEC_OK)
		fail("open");
	if (!j->model.nsegments)
		fail("no scale model");
	at = plan.regions_at;
	work_place(&j->h, r->memory, &w);
	start = now();
	for (uint64_t b = 0; b < plan.nblocks; b++) {
		uint64_t nbytes = encode_block(j, k, &src, r->frame, b, &w, &digest);

		memcpy(r->frame + at, w.region, nbytes);
		at += nbytes;
	}
	return now() - start;
}

static double decode(struct run *r, const struct kernels *k, const codec_context *with)
{
	struct job *j = job_place(r->job);
	codec_plan plan;
	struct work w;
	double start;

	r->t.data = r->back;
	if (codec_decode_open(r->frame, r->written, &r->t, with, r->job, r->job_nbytes, &plan) != CODEC_OK)
		fail("open");
	work_place(&j->h, r->memory, &w);
	start = now();
	for (uint64_t b = 0; b < plan.nblocks; b += 2) {
		struct block open[2];
		size_t count = b + 1 < plan.nblocks ? 2 : 1;

		for (size_t i = 0; i < count; i++) {
			uint64_t at, end;

			if (frame_region(r->frame, &j->h, b + i, &at, &end, NULL) != CODEC_OK)
				fail("region");
			block_begin(j, r->frame, b + i, at, end, w.top + i, open + i);
			if (lossless_steps.open(j, open + i, NULL) != CODEC_OK)
				fail("region");
		}
		lossless_steps.ahead(j, open, count, &w.ahead);
		block_decode_top(j, k, open, count, &w.ahead);
		w.ahead.count = 0;
		for (size_t i = 0; i < count; i++)
			if (lossless_steps.close(j, k, with, open + i, (char *)r->back + 2 * (b + i) * j->h.block, 1,
						 &w) != CODEC_OK)
				fail("decode");
	}
	start = now() - start;
	call_leave(call_enter()); /* call_leave waits for non-temporal stores */
	return start;
}

int main(int argc, char **argv)
{
	int json = argc > 1 && strcmp(argv[1], "--json") == 0;
	uint64_t rows = argc > 2 + json ? strtoull(argv[1 + json], NULL, 10) : 4096;
	uint64_t cols = argc > 2 + json ? strtoull(argv[2 + json], NULL, 10) : 4096, n = rows * cols;
	struct run r = {.spec = {sizeof r.spec, CODEC_LOSSLESS, 0, CODEC_MODEL_SEPARABLE},
			.t = {.struct_nbytes = sizeof r.t,
			      .dtype = CODEC_BFLOAT16,
			      .rank = 2,
			      .shape = {rows, cols},
			      .nbytes = 2 * n}};
	double copy = 1e9, moved, least, enc[MOST_ISAS] = {0}, dec[MOST_ISAS] = {0};
	size_t scratch, work;

	codec_bound(&r.spec, &r.t, &r.capacity);
	codec_job_nbytes(&r.spec, &r.t, &r.job_nbytes, &work);
	codec_scratch(&r.spec, &r.t, &scratch);
	r.values = malloc(2 * n);
	r.back = malloc(2 * n);
	r.frame = malloc(r.capacity);
	r.job = malloc(r.job_nbytes);
	r.memory = malloc(MAX(work, scratch));
	if (!r.values || !r.back || !r.frame || !r.job || !r.memory)
		fail("no memory");
	memset(r.frame, 1, r.capacity);
	memset(r.back, 1, 2 * n);
	for (uint64_t i = 0; i < rows; i++)
		for (uint64_t c = 0; c < cols; c++) {
			uint32_t x = exponent() - i % 7 - c % 5;

			store16(r.values + 2 * (i * cols + c), x << 7 | (noise() & 0x807f));
		}
	r.t.data = r.values;
	if (codec_encode(&r.spec, &r.t, r.frame, r.capacity, &r.written, NULL, NULL, r.memory, scratch) != CODEC_OK)
		fail("encode");
	moved = 2 * (double)n + (double)r.written;
	for (int round = 0; round < ROUNDS; round++) { /* alternate, so that noise affects all measurements alike */
		double start = now();

		memcpy(r.back, r.values, 2 * n);
		__asm__ volatile("" ::"r"(r.back) : "memory");
		copy = MIN(copy, (now() - start) / 2);
		for (uint32_t isa = 0; codec_isa_name(isa) && isa < MOST_ISAS; isa++) {
			codec_context with = {.struct_nbytes = sizeof with, .isa = isa + 1};
			const struct kernels *k = kernels_for(&with);
			double t;

			if (!k)
				continue;
			memset(r.back, 1, 2 * n);
			t = encode(&r, k, &with);
			enc[isa] = round ? MIN(enc[isa], t) : t;
			t = decode(&r, k, &with);
			dec[isa] = round ? MIN(dec[isa], t) : t;
			if (memcmp(r.back, r.values, 2 * n))
				fail("not the same");
		}
	}
	least = copy * moved / (2 * (double)n); /* copy: seconds of memcpy for one byte per symbol */
	if (json)
		printf("{\"memcpy_gbps\": %.3f, \"isas\": [", (double)n / copy / 1e9);
	else
		printf("%llu symbols; memcpy %.2f GB/s; %.3f bits a value\n%-8s %12s %12s %14s %14s %16s %16s\n",
		       (unsigned long long)n, (double)n / copy / 1e9, 8 * (double)r.written / (double)n, "isa",
		       "encode Gs/s", "decode Gs/s", "encode/memcpy", "decode/memcpy", "encode/roofline",
		       "decode/roofline");
	for (uint32_t isa = 0; isa < MOST_ISAS; isa++) {
		if (enc[isa] == 0)
			continue;
		if (json)
			printf("%s{\"isa\": \"%s\", \"encode_gsps\": %.3f, \"decode_gsps\": %.3f, \"encode\": %.4f, "
			       "\"decode\": %.4f, \"encode_roofline\": %.4f, \"decode_roofline\": %.4f}",
			       isa ? ", " : "", codec_isa_name(isa), (double)n / enc[isa] / 1e9,
			       (double)n / dec[isa] / 1e9, copy / enc[isa], copy / dec[isa], least / enc[isa],
			       least / dec[isa]);
		else
			printf("%-8s %12.2f %12.2f %14.3f %14.3f %15.0f%% %15.0f%%\n", codec_isa_name(isa),
			       (double)n / enc[isa] / 1e9, (double)n / dec[isa] / 1e9, copy / enc[isa], copy / dec[isa],
			       100 * least / enc[isa], 100 * least / dec[isa]);
	}
	if (json)
		printf("]}\n");
	return 0;
}
