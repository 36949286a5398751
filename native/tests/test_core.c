/*
 * test_core.c - test the C core: lossless round trips between guard pages, stack usage, threads, floating-point
 * environment.
 */
#include <pthread.h>
#include <stdlib.h>

#include "job/api.h"
#include "environment.h"
#include "guard.h"

static const uint32_t ALL_DTYPES[] = {CODEC_FLOAT32, CODEC_FLOAT64, CODEC_BFLOAT16, CODEC_FLOAT16,
				      CODEC_UINT8,   CODEC_INT16,   CODEC_INT32,    CODEC_INT64};

/* Fill p with n values: of few exponents, all zero, or with random bits, as `kind` selects. */
static void fill(uint8_t *p, uint32_t dtype, uint64_t n, int kind)
{
	uint64_t size = codec_dtype_nbytes(dtype);

	for (uint64_t i = 0; i < n; i++) {
		uint64_t x = next_random();
		int e = __builtin_popcountll(next_random()) - 32;

		if (kind == 1 && i % 3 == 0)
			x = 0;
		else if (kind == 2 || (kind == 3 && i % 50 == 0))
			;
		else if (dtype == CODEC_FLOAT32)
			x = (x & 0x807fffff) | (uint64_t)(120 + e / 3) << 23;
		else if (dtype == CODEC_BFLOAT16)
			x = (x & 0x807f) | (uint64_t)(120 + e / 3) << 7;
		else if (dtype == CODEC_FLOAT64)
			x = (x & 0x800fffffffffffffull) | (uint64_t)(1000 + e / 3) << 52;
		else
			x = (x & 7) << 3;
#if CODEC_BIG_ENDIAN
		memcpy(p + size * i, (uint8_t *)&x + 8 - size, size);
#else
		memcpy(p + size * i, &x, size);
#endif
	}
}

static void round_trip(uint32_t dtype, uint64_t n, int kind, uint32_t isa)
{
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, 0};
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa};
	uint64_t size = codec_dtype_nbytes(dtype), shape[2] = {n / 100, 100};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = dtype, .rank = 1, .shape = {n}, .nbytes = n * size};
	struct guarded src, dst, scratch, frame, back;
	size_t bound, need, written, again;
	uint8_t *copy;

	if (n && n % 100 == 0) {
		t.rank = 2;
		memcpy(t.shape, shape, sizeof shape);
	}
	src = guard(t.nbytes);
	back = guard(t.nbytes);
	fill(src.p, dtype, n, kind);
	assert_int_equal(codec_bound(&spec, &t, &bound), CODEC_OK);
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	dst = guard(bound);
	scratch = guard(need);
	t.data = src.p;
	assert_int_equal(codec_encode(&spec, &t, dst.p, bound, &written, NULL, &with, scratch.p, need), CODEC_OK);
	assert_true(written <= bound);
	frame = guard(written);
	memset(frame.p, 0xa5, written);
	/* encode with the exact capacity, then with one byte less, then with scratch that is too small */
	assert_int_equal(codec_encode(&spec, &t, frame.p, written, &again, NULL, &with, scratch.p, need), CODEC_OK);
	assert_int_equal(again, written);
	assert_memory_equal(frame.p, dst.p, written);
	if (written)
		assert_int_equal(
			codec_encode(&spec, &t, frame.p + 1, written - 1, &again, NULL, &with, scratch.p, need),
			CODEC_SHORT_OUTPUT);
	copy = malloc(written);
	memcpy(copy, dst.p, written);
	memcpy(frame.p, copy, written);
	assert_int_equal(codec_encode(&spec, &t, dst.p, bound, &again, NULL, &with, scratch.p, need / 2),
			 CODEC_SHORT_SCRATCH);
	t.data = back.p;
	assert_int_equal(codec_verify(frame.p, written), CODEC_OK);
	assert_int_equal(codec_decode(frame.p, written, &t, &with, scratch.p, need), CODEC_OK);
	assert_memory_equal(back.p, src.p, t.nbytes);
	/* decode truncated frames that end at the guard page */
	for (size_t cut = 1; cut < written; cut += 1 + written / 97) {
		memmove(frame.p + cut, frame.p, written - cut);
		assert_int_not_equal(codec_decode(frame.p + cut, written - cut, &t, &with, scratch.p, need), CODEC_OK);
		memcpy(frame.p, copy, written);
	}
	free(copy);
	unguard(src);
	unguard(dst);
	unguard(scratch);
	unguard(frame);
	unguard(back);
}

static void test_round_trip_between_guard_pages(void **unused)
{
	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		if (!codec_isa_usable(isa))
			continue;
		for (size_t d = 0; d < sizeof ALL_DTYPES / sizeof *ALL_DTYPES; d++)
			for (int kind = 0; kind < 4; kind++) {
				static const uint64_t SIZES[] = {0,    1,    511,   512,   513,  639,
								 1000, 4096, 16384, 16385, 22500};

				for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
					round_trip(ALL_DTYPES[d], SIZES[i], kind, 1 + isa);
			}
	}
}

/* Decoding damaged frames with CODEC_NO_CHECKSUM accesses no bytes outside the buffers. */
static void test_decode_noise_without_checksum(void **unused)
{
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, 0};
	uint64_t decoded = 0;

	(void)unused;
	for (int round = 0; round < 6000; round++) {
		uint32_t dtype = ALL_DTYPES[(size_t)round % (sizeof ALL_DTYPES / sizeof *ALL_DTYPES)];
		uint64_t n = 512 + next_random() % 20000;
		codec_tensor t = {.struct_nbytes = sizeof t,
				  .dtype = dtype,
				  .rank = 1,
				  .shape = {n},
				  .nbytes = n * codec_dtype_nbytes(dtype)};
		codec_context with = {.struct_nbytes = sizeof with, .flags = CODEC_NO_CHECKSUM};
		struct guarded src = guard(t.nbytes), dst, scratch, frame;
		size_t bound, need, written;
		codec_info info = {.struct_nbytes = sizeof info};

		fill(src.p, dtype, n, round % 4);
		t.data = src.p;
		codec_bound(&spec, &t, &bound);
		codec_scratch(&spec, &t, &need);
		dst = guard(bound);
		scratch = guard(need);
		assert_int_equal(codec_encode(&spec, &t, dst.p, bound, &written, NULL, NULL, scratch.p, need),
				 CODEC_OK);
		frame = guard(written);
		memcpy(frame.p, dst.p, written);
		assert_int_equal(codec_inspect(frame.p, written, &info), CODEC_OK);
		for (int i = 0; i < 1 + round % 8; i++) { /* damage side section, directory or regions */
			uint64_t at = round % 3 ? info.side_offset : info.regions_offset;
			uint64_t room = MIN(written - at, round % 5 ? 200u : written - at);

			if (room)
				frame.p[at + next_random() % room] = (uint8_t)next_random();
		}
		for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
			with.isa = 1 + isa;
			if (codec_isa_usable(isa))
				decoded += codec_decode(frame.p, written, &t, &with, scratch.p, need) == CODEC_OK;
		}
		unguard(src);
		unguard(dst);
		unguard(scratch);
		unguard(frame);
	}
	assert_true(decoded > 100); /* in many rounds, damage must not be detected before blocks are decoded */
}

static void *use_stack(void *unused)
{
	round_trip(CODEC_FLOAT64, 22500, 3, 0);
	round_trip(CODEC_BFLOAT16, 22500, 3, 0);
	return unused;
}

static void *use_no_stack(void *unused)
{
	round_trip(CODEC_FLOAT64, 0, 3, 0);
	return unused;
}

static void test_stack_use_is_limited(void **unused)
{
	(void)unused;
	check_stack_use(use_stack, use_no_stack);
}

static void *mixed_calls(void *seed)
{
	for (int i = 0; i < 40; i++)
		round_trip(ALL_DTYPES[(size_t)((intptr_t)seed + i) % 8], 600 + 100 * (uint64_t)i, i % 4, 0);
	return NULL;
}

static void test_concurrent_calls(void **unused)
{
	pthread_t thread[16];

	(void)unused;
	for (intptr_t i = 0; i < 16; i++)
		assert_int_equal(pthread_create(&thread[i], NULL, mixed_calls, (void *)i), 0);
	for (int i = 0; i < 16; i++)
		pthread_join(thread[i], NULL);
}

static void test_environment_is_restored(void **unused)
{
	fenv_t before, after;

	(void)unused;
	feclearexcept(FE_ALL_EXCEPT);
	before = environment();
	round_trip(CODEC_FLOAT32, 22500, 3, 0);
	round_trip(CODEC_FLOAT64, 22500, 2, 0);
	after = environment();
	assert_memory_equal(&before, &after, sizeof before);
}

static void test_rejects_wrong_arguments(void **unused)
{
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, 0};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {0}};
	uint8_t frame[128], scratch[200000];
	size_t n;

	(void)unused;
	for (int i = -3; i < 300; i++)
		assert_non_null(codec_strerror((codec_status)i));
	assert_int_equal(codec_abi_version(), CODEC_ABI_VERSION);
	assert_int_equal(codec_bound(NULL, &t, &n), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_bound(&spec, NULL, &n), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_bound(&spec, &t, NULL), CODEC_BAD_ARGUMENT);
	/* NULL with size 0 is valid */
	assert_int_equal(codec_encode(&spec, &t, frame, sizeof frame, &n, NULL, NULL, scratch, sizeof scratch),
			 CODEC_OK);
	assert_int_equal(n, 56);
	assert_int_equal(codec_decode(frame, n, &t, NULL, scratch, sizeof scratch), CODEC_OK);
	assert_int_equal(codec_encode(&spec, &t, NULL, 0, &n, NULL, NULL, scratch, sizeof scratch), CODEC_SHORT_OUTPUT);
	assert_int_equal(codec_verify(NULL, 0), CODEC_TRUNCATED);
	assert_int_equal(codec_verify(NULL, 1), CODEC_BAD_ARGUMENT);
	t.shape[0] = 1ull << 61;
	assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_SHAPE);
	t.rank = 9;
	assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_SHAPE);
	t.rank = 3;
	t.shape[0] = 1ull << 19;
	t.shape[1] = 1ull << 40;
	t.shape[2] = 0;
	assert_int_equal(codec_bound(&spec, &t, &n), CODEC_OK);
	t.shape[0] = 1ull << 20; /* the product of the other dimensions overflows */
	assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_SHAPE);
	t.dtype = 15;
	assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_DTYPE);
	assert_int_equal(codec_bound(&(codec_spec){sizeof spec, 99, 0, 0}, &t, &n), CODEC_BAD_SPEC);
	assert_int_equal(codec_bound(&(codec_spec){sizeof spec, CODEC_LOSSLESS, 9, 0}, &t, &n), CODEC_BAD_SPEC);
}

/* Each step receives the tensor and the frame, and rejects a tensor or frame other than the job's. */
static void test_steps_reject_other_tensors(void **unused)
{
	enum { N = 40000 };
	const codec_spec spec = {sizeof spec, CODEC_LOSSLESS, 0, 0};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {N}, .nbytes = 4 * N};
	codec_tensor other = t;
	size_t bound, job_nbytes, work_nbytes_, written, whole;
	codec_range range, behind;
	uint8_t *frame, *again, *job, *work;
	codec_plan plan;

	(void)unused;
	t.data = malloc(t.nbytes);
	fill(t.data, t.dtype, N, 0);
	codec_bound(&spec, &t, &bound);
	codec_job_nbytes(&spec, &t, &job_nbytes, &work_nbytes_);
	frame = malloc(bound);
	again = malloc(bound);
	job = malloc(job_nbytes + work_nbytes_);
	work = job + job_nbytes;
	assert_int_equal(codec_encode(&spec, &t, again, bound, &whole, NULL, NULL, job, job_nbytes + work_nbytes_),
			 CODEC_OK);
	assert_int_equal(codec_encode_open(&spec, &t, frame, bound, NULL, job, job_nbytes, &plan), CODEC_OK);
	range = (codec_range){.count = plan.nblocks, .at = plan.regions_at};
	behind = (codec_range){.first = 1, .count = plan.nblocks, .at = plan.regions_at};
	assert_int_equal(plan.nblocks, 3);

	other.data = t.data;
	other.nbytes = 4 * N - 4;
	other.shape[0] = N - 1;
	assert_int_equal(codec_encode_blocks(&other, frame, bound, NULL, job, &range, work, work_nbytes_),
			 CODEC_BAD_ARGUMENT);
	other = t;
	other.dtype = CODEC_INT32;
	assert_int_equal(codec_encode_blocks(&other, frame, bound, NULL, job, &range, work, work_nbytes_),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_blocks(&t, frame, range.at - 8, NULL, job, &range, work, work_nbytes_),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_blocks(&t, frame, bound, NULL, job, &behind, work, work_nbytes_),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_blocks(&t, frame, bound, NULL, job, &range, work, work_nbytes_ - 1),
			 CODEC_SHORT_SCRATCH);
	assert_int_equal(codec_encode_blocks(&t, frame, bound, NULL, job, &range, work, work_nbytes_), CODEC_OK);
	assert_int_equal(codec_encode_close(&t, frame, range.at - 8, NULL, job, &range, 1, &written),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_close(&t, frame, bound, NULL, job, &range, 1, &written), CODEC_OK);
	assert_int_equal(written, whole);
	assert_memory_equal(frame, again, whole);
	free(t.data);
	free(frame);
	free(again);
	free(job);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip_between_guard_pages),
		cmocka_unit_test(test_decode_noise_without_checksum),
		cmocka_unit_test(test_stack_use_is_limited),
		cmocka_unit_test(test_concurrent_calls),
		cmocka_unit_test(test_environment_is_restored),
		cmocka_unit_test(test_rejects_wrong_arguments),
		cmocka_unit_test(test_steps_reject_other_tensors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
