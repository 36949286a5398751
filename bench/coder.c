/* coder.c - the entropy coder alone: symbols per second over bytes per second of memcpy, for each instruction set.
 *
 * A bfloat16 matrix with scales by row and column, under the scale model. Timed: offsets, values to symbols and
 * mantissas, codes, escapes, state and words into a region; and back, bounds checks included. Not timed: checksum and
 * sampling.
 *
 *   coder [--json] [ROWS COLS]
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "job/api.h"

#define ROUNDS 15

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

/* Exponents of a normal variable are nearly geometric below their top. */
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

int main(int argc, char **argv)
{
	int json = argc > 1 && strcmp(argv[1], "--json") == 0;
	uint64_t rows = argc > 2 + json ? strtoull(argv[1 + json], NULL, 10) : 4096;
	uint64_t cols = argc > 2 + json ? strtoull(argv[2 + json], NULL, 10) : 4096;
	uint64_t n = rows * cols, symbols_total = 0;
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, CODEC_MODEL_SEPARABLE};
	codec_tensor t = {
		.struct_nbytes = sizeof t, .dtype = CODEC_BFLOAT16, .rank = 2, .shape = {rows, cols}, .nbytes = 2 * n};
	uint8_t *values = malloc(2 * n), *mantissa = malloc(n), *back = malloc(2 * n), *regions;
	size_t job_nbytes, work_nbytes_, capacity;
	codec_plan plan;
	double copy = 1e9;
	struct job *j;
	void *job, *memory;

	codec_bound(&spec, &t, &capacity);
	codec_job_nbytes(&spec, &t, &job_nbytes, &work_nbytes_);
	regions = malloc(capacity + n);
	job = malloc(job_nbytes);
	memory = malloc(work_nbytes_);
	if (!values || !mantissa || !back || !regions || !job || !memory)
		fail("no memory");
	memset(regions, 1, capacity + n);
	for (uint64_t r = 0; r < rows; r++)
		for (uint64_t c = 0; c < cols; c++) {
			uint32_t x = exponent() - r % 7 - c % 5;

			store16(values + 2 * (r * cols + c), x << 7 | (noise() & 0x807f));
		}
	t.data = values;
	for (int round = 0; round < ROUNDS; round++) {
		double start = now();

		memcpy(back, values, n);
		__asm__ volatile("" ::"r"(back) : "memory");
		start = now() - start;
		copy = MIN(copy, start);
	}
	if (json)
		printf("{\"memcpy_gbps\": %.3f, \"isas\": [", (double)n / copy / 1e9);
	else
		printf("%llu symbols; memcpy %.2f GB/s\n%-8s %12s %12s %14s %14s %10s\n", (unsigned long long)n,
		       (double)n / copy / 1e9, "isa", "encode Gs/s", "decode Gs/s", "encode/memcpy", "decode/memcpy",
		       "bits/symb");
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = isa + 1};
		const struct kernels *k = kernels_for(&with);
		double enc = 1e9, dec = 1e9;
		uint64_t block = 1u << WIRE_MAX_BLOCK_LOG2, stride;
		book_lookup lookup;
		struct work w;

		if (!k)
			continue;
		if (codec_encode_open(&spec, &t, regions, capacity, &with, job, job_nbytes, &plan) != CODEC_OK)
			fail("open");
		j = job_place(job);
		if (!j->model.nsegments)
			fail("no scale model");
		book_to_lookup(j->books, &lookup);
		work_place(&j->h, memory, &w);
		memset(&w.ahead, 0, sizeof w.ahead);
		stride = block + block / 8;
		for (int round = 0; round < ROUNDS; round++) {
			double start = now();

			symbols_total = 0;
			for (uint64_t b = 0; b * block < n; b++) {
				uint64_t m = MIN(block, n - b * block), size;
				uint8_t *region = regions + b * stride;

				for (uint64_t i = 0; i < m; i += OFFSETS) {
					uint8_t *at[] = {w.plane[0] + i, mantissa + b * block + i};
					uint64_t c = MIN(OFFSETS, m - i);

					model_offsets(j, k, b * block + i, c, w.offset);
					k->split[FORM_FLOAT2](values + 2 * (b * block + i), c, w.offset, at);
				}
				size = encode_plane(j->codes, k, &w, w.plane[0], m,
						    (struct literals){.byte = w.plane[0]}, m, region);
				if (!size)
					fail("a block did not fit");
				symbols_total += size;
			}
			start = now() - start;
			enc = MIN(enc, start);
			start = now();
			for (uint64_t b = 0; b * block < n; b++) {
				uint64_t m = MIN(block, n - b * block);
				struct cursor c = {regions, b * stride, (b + 1) * stride};

				if (decode_plane(&lookup, k, &w, &c, m, w.symbol, NULL) != CODEC_OK)
					fail("decode");
				if (read_literals(w.top[0].escaped, &c, w.symbol, m, NULL) != CODEC_OK)
					fail("literals");
				for (uint64_t i = 0; i < m; i += OFFSETS) {
					const uint8_t *at[] = {w.symbol + i, mantissa + b * block + i};
					uint64_t some = MIN(OFFSETS, m - i);

					model_offsets(j, k, b * block + i, some, w.offset);
					k->merge[FORM_FLOAT2](at, some, w.offset, back + 2 * (b * block + i), 0);
				}
			}
			start = now() - start;
			dec = MIN(dec, start);
		}
		if (memcmp(back, values, 2 * n))
			fail("not the same");
		if (json)
			printf("%s{\"isa\": \"%s\", \"encode_gsps\": %.3f, \"decode_gsps\": %.3f, \"encode\": %.4f, "
			       "\"decode\": %.4f}",
			       isa ? ", " : "", k->name, (double)n / enc / 1e9, (double)n / dec / 1e9, copy / enc,
			       copy / dec);
		else
			printf("%-8s %12.2f %12.2f %14.3f %14.3f %10.3f\n", k->name, (double)n / enc / 1e9,
			       (double)n / dec / 1e9, copy / enc, copy / dec, 8 * (double)symbols_total / (double)n);
	}
	if (json)
		printf("]}\n");
	return 0;
}
