/* test_frame_contract.c - test codec.h: errors for damaged and truncated frames, and for calls with wrong arguments. */
#include <math.h>

#include "contract.h"

/* codec_reduce_scratch requires whole frames, because a header alone, of 56 bytes, may claim any size. */
static void test_reduce_scratch_needs_whole_frames(void **unused)
{
	codec_spec spec = spec_of(CODEC_LOSSLESS);
	codec_tensor t = tensor(x, 1), to = tensor(out, 1);
	const void *frames[1024];
	size_t nbytes[1024], written, need;
	uint64_t n = 1ull << 57, frame_nbytes = 56 + (n << 2);

	(void)unused;
	fill();
	assert_int_equal(codec_encode(&spec, &t, frame, sizeof frame, &written, NULL, NULL, scratch, sizeof scratch),
			 CODEC_OK);
	memcpy(other, frame, written);
	memcpy(other + 48, &n, 8);
	memcpy(other + 16, &frame_nbytes, 8);
	for (int i = 0; i < 1024; i++) {
		frames[i] = other;
		nbytes[i] = 56;
	}
	assert_int_equal(codec_reduce_scratch(frames, nbytes, 1024, &need), CODEC_TRUNCATED);
	assert_int_equal(codec_reduce_scratch(frames, nbytes, 0, &need), CODEC_BAD_ARGUMENT);
	frames[0] = NULL;
	assert_int_equal(codec_reduce_scratch(frames, nbytes, 1, &need), CODEC_BAD_ARGUMENT);
	frames[0] = frames[1] = frame;
	nbytes[0] = nbytes[1] = written;
	assert_int_equal(codec_reduce_scratch(frames, nbytes, 2, &need), CODEC_OK);
	assert_int_equal(codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, &to, NULL, scratch + 1, need),
			 CODEC_OK); /* at an unaligned address */
	assert_true(out[0] == 2 * x[0]);
	assert_int_equal(codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, &to, NULL, scratch, need - 1),
			 CODEC_SHORT_SCRATCH);
	assert_int_equal(codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, NULL, NULL, scratch, need),
			 CODEC_BAD_ARGUMENT);
	to.struct_nbytes = 0;
	assert_int_equal(codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, &to, NULL, scratch, need),
			 CODEC_BAD_ARGUMENT);
}

/* Sum, mean and maximum of a single frame are bit-identical to its decoded values, including signalling NaN and -0. */
static void test_reduce_of_one_frame_is_exact(void **unused)
{
	const void *frames[] = {frame};
	codec_tensor t = tensor(x, N), to = tensor(out, N);
	codec_context with = context();
	static float plain[N];
	size_t written;

	(void)unused;
	for (uint32_t codec = CODEC_LOSSLESS; codec <= CODEC_TERNARY; codec += 2) {
		codec_spec spec = spec_of(codec);
		uint32_t odd[] = {0x7f800001, 0xff812345, 0x80000000, 1, 0x7f800000};

		fill();
		if (codec == CODEC_LOSSLESS)
			memcpy(x, odd, sizeof odd);
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		assert_int_equal(DECODE(written), CODEC_OK);
		memcpy(plain, out, sizeof plain);
		for (uint32_t op = CODEC_REDUCE_SUM; op <= CODEC_REDUCE_MAX; op++) {
			memset(out, 0xee, sizeof out);
			assert_int_equal(codec_reduce(frames, &written, 1, op, &to, &with, scratch, sizeof scratch),
					 CODEC_OK);
			assert_memory_equal(out, plain, sizeof plain);
		}
	}
}

/* A header's number of blocks limits its number of values, before a caller allocates memory for them. */
static void test_blocks_limit_number_of_values(void **unused)
{
	codec_tensor t = tensor(x, 3000);
	codec_context with = context();
	codec_info info = {.struct_nbytes = sizeof info};
	size_t written;

	(void)unused;
	fill();
	for (int i = 0; i < 2; i++) {
		codec_spec spec = spec_of(i ? CODEC_FLOAT8 : CODEC_TERNARY);
		uint64_t block = i ? 16384 : 81920;

		spec.variant = i ? 0 : CODEC_TERNARY_ENTROPY;
		spec.options = i ? CODEC_OPTION_ENTROPY : 0;
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		assert_int_equal(codec_inspect(frame, written, &info), CODEC_OK);
		assert_int_equal(info.nblocks, 1);
		for (uint64_t n = 2 * block - 1; n <= 2 * block; n++) {
			memcpy(frame + 48, &n, 8);
			assert_int_equal(codec_inspect(frame, written, &info),
					 n < 2 * block ? CODEC_OK : CODEC_BAD_HEADER);
		}
	}
}

/*
 * Decoding sets codec_context.fault if the error is at a position in the frame; otherwise it leaves the fault
 * unchanged.
 */
static void test_fault_set_only_for_places_in_frame(void **unused)
{
	codec_fault fault = {7, 7, 7};
	codec_spec spec = spec_of(CODEC_TRUNCATE);
	codec_tensor t = tensor(x, N), state = tensor(theta, N), to = tensor(out, N);
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &state};
	codec_context with = context();
	size_t written;

	(void)unused;
	fill();
	spec.variant = CODEC_LEVEL_CODING_SHARED;
	with.metric = &metric;
	with.fault = &fault;
	assert_int_equal(ENCODE(frame, 8, NULL), CODEC_SHORT_OUTPUT);
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	with.metric = NULL;
	assert_int_equal(DECODE(written), CODEC_MISSING_STATE);
	assert_true(fault.offset == 7 && fault.found == 7 && fault.expected == 7);
	with.metric = &metric;
	to.shape[0] = N - 1;
	assert_int_equal(DECODE(written), CODEC_SHAPE_MISMATCH);
	assert_true(fault.offset == 48 && fault.found == N && fault.expected == N - 1);
	to.shape[0] = N;
	metric.theta_term = 48;
	assert_int_equal(DECODE(written), CODEC_OTHER_STATE);
	assert_true(fault.offset > 48 && fault.found != fault.expected);
	with.max_nbytes = 4 * N - 1;
	assert_int_equal(DECODE(written), CODEC_LIMIT);
	assert_true(fault.offset == 48 && fault.found == 4 * N && fault.expected == 4 * N - 1);
}

/* Inspect, verify and decode every prefix of a frame, followed by a guard page. */
static void check_prefixes(size_t written, size_t header)
{
	codec_tensor to = tensor(out, 1);
	codec_fault fault;
	codec_context with = context();

	with.fault = &fault;
	for (size_t n = 0; n <= written; n++) {
		struct guarded g = guard(n);
		codec_info info = {.struct_nbytes = sizeof info};
		codec_status status;

		memcpy(g.p, frame, n);
		status = codec_inspect(g.p, n, &info);
		if (n < header) {
			assert_int_equal(status, CODEC_TRUNCATED);
			assert_int_equal(info.fault.found, n);
			assert_true(info.fault.expected > n && info.fault.expected <= header);
		} else {
			assert_int_equal(status, CODEC_OK);
			assert_int_equal(info.side_offset, header);
			assert_int_equal(info.frame_nbytes, written);
		}
		if (n < written) {
			assert_int_equal(codec_verify(g.p, n), CODEC_TRUNCATED);
			assert_int_equal(codec_decode(g.p, n, &to, &with, scratch, sizeof scratch), CODEC_TRUNCATED);
			assert_int_equal(fault.found, n);
			assert_int_equal(fault.expected, n < header ? info.fault.expected : written);
		} else {
			assert_int_equal(codec_verify(g.p, n), CODEC_OK);
		}
		unguard(g);
	}
}

/*
 * Division and rescaling require a float32 destination, because a destination of the frame's dtype may be half as
 * large.
 */
static void test_divide_and_rescale_need_float32(void **unused)
{
	static const uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
	static const float WRONG[] = {-1, INFINITY, -INFINITY, NAN};
	static const uint32_t INTO[] = {CODEC_INTO_STORE, CODEC_INTO_CODES, CODEC_INTO_ADD_CODES};
	const void *frames[] = {frame};

	(void)unused;
	for (int i = 0; i < 9; i++) {
		codec_spec spec = spec_of(CODEC_LOSSLESS + (uint32_t)i / 3);
		codec_tensor t = tensor(x, 600), to, sum = tensor(out, 600);
		codec_context with = context();
		struct guarded g;
		size_t written;

		fill();
		memset(x, 0, sizeof x);
		t.dtype = DTYPES[i % 3];
		t.nbytes = 600 * codec_dtype_nbytes(t.dtype);
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		g = guard(t.nbytes);
		to = t;
		to.data = g.p;
		for (int steps = 0; steps < 2; steps++)
			for (int how = 0; how < 3; how++) {
				with.divide = 2;
				with.into = INTO[how];
				memset(g.p, 7, t.nbytes);
				assert_int_equal(
					steps ? codec_decode_open(frame, written, &to, &with, scratch, sizeof scratch,
								  NULL)
					      : codec_decode(frame, written, &to, &with, scratch, sizeof scratch),
					CODEC_BAD_ARGUMENT);
				for (size_t k = 0; k < t.nbytes; k++)
					assert_true(g.p[k] == 7);
			}
		unguard(g);
		/* codec_accumulate and codec_reduce set `into` themselves, so `divide` is accepted */
		with.divide = 2;
		assert_int_equal(codec_accumulate(frame, written, 1, &sum, &with, scratch, sizeof scratch), CODEC_OK);
		assert_true(out[0] == 3.5f);
		assert_int_equal(
			codec_reduce(frames, &written, 1, CODEC_REDUCE_SUM, &sum, &with, scratch, sizeof scratch),
			CODEC_OK);
		with.into = CODEC_INTO_FLOAT32;
		for (int k = 0; k < 4; k++) {
			with.divide = WRONG[k];
			assert_int_equal(codec_decode(frame, written, &sum, &with, scratch, sizeof scratch),
					 CODEC_BAD_ARGUMENT);
		}
	}
}

/* A fault names the first wrong byte, the value found and the largest valid value. */
static void test_fault_names_first_wrong_byte(void **unused)
{
	static const struct {
		uint32_t codec, variant, dtype, byte, value, found, most;
	} CASES[] = {
		{CODEC_TERNARY, CODEC_TERNARY_BASE3, CODEC_FLOAT32, 1234, 250, 250, 242},
		{CODEC_TERNARY, CODEC_TERNARY_2BIT, CODEC_FLOAT32, 2345, 0x30, 3, 2},
		{CODEC_TERNARY, CODEC_TERNARY_2BIT, CODEC_FLOAT16, 0, 0xff, 3, 2},
		{CODEC_TRUNCATE, CODEC_LEVEL_CODING_FIXED, CODEC_FLOAT16, 4, 33, 33, 31},
		{CODEC_TRUNCATE, CODEC_LEVEL_CODING_CODED, CODEC_FLOAT32, 4, 2, 2, 4},
		{CODEC_TRUNCATE, CODEC_LEVEL_CODING_CODED, CODEC_FLOAT16, 4, 200, 200, 4 * 31 + 3},
	};
	static uint8_t levels[N];
	codec_fault fault;

	(void)unused;
	for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
		codec_spec spec = spec_of(CASES[i].codec);
		codec_tensor t = tensor(x, N), to = tensor(out, N);
		codec_context with = context();
		codec_info info = {.struct_nbytes = sizeof info};
		size_t written;

		memset(x, 0, sizeof x); /* all values have the same symbol */
		spec.variant = CASES[i].variant;
		t.dtype = to.dtype = CASES[i].dtype;
		t.nbytes = to.nbytes = N * codec_dtype_nbytes(t.dtype);
		with.levels = spec.variant == CODEC_LEVEL_CODING_CODED && spec.codec == CODEC_TRUNCATE ? levels : NULL;
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		assert_int_equal(codec_inspect(frame, written, &info), CODEC_OK);
		frame[info.regions_offset + CASES[i].byte] = (uint8_t)CASES[i].value;
		frame[info.regions_offset + CASES[i].byte + 1] |= spec.codec == CODEC_TERNARY ? 243 : 0;
		with.flags = CODEC_NO_CHECKSUM;
		with.fault = &fault;
		for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
			if (!codec_isa_usable(isa))
				continue;
			with.isa = isa + 1;
			assert_int_equal(DECODE(written), CODEC_BAD_REGION);
			assert_int_equal(fault.offset, info.regions_offset + CASES[i].byte);
			assert_int_equal(fault.found, CASES[i].found);
			assert_int_equal(fault.expected, CASES[i].most);
		}
	}
}

/* codec_inspect of a partial frame returns the number of bytes needed to continue. */
static void test_inspect_partial_frames(void **unused)
{
	static const uint32_t RANKS[] = {0, 1, CODEC_MAX_RANK};

	(void)unused;
	fill();
	for (uint32_t codec = CODEC_LOSSLESS; codec <= CODEC_TRUNCATE; codec++)
		for (int i = 0; i < 3; i++) {
			uint32_t rank = RANKS[i];
			codec_spec spec = spec_of(codec);
			codec_tensor t = tensor(x, rank ? 600 : 1);
			codec_info info = {.struct_nbytes = sizeof info};
			size_t written, need = 0, asked = 0;

			t.rank = rank;
			for (uint32_t d = 0; d < rank; d++)
				t.shape[d] = d + 1 == rank ? 600 : 1;
			if (codec == CODEC_TRUNCATE)
				spec.variant = CODEC_LEVEL_CODING_FIXED;
			assert_int_equal(codec_encode(&spec, &t, frame, sizeof frame, &written, NULL, NULL, scratch,
						      sizeof scratch),
					 CODEC_OK);
			check_prefixes(written, 48 + 8 * rank);
			for (; codec_inspect(frame, need, &info) == CODEC_TRUNCATED; asked++)
				need = info.fault.expected;
			assert_int_equal(need, 48 + 8 * rank);
			assert_true(need <= CODEC_HEADER_NBYTES && asked <= 2);
			frame[3] ^= 1; /* a wrong magic number is reported as soon as all its bytes have arrived */
			assert_int_equal(codec_inspect(frame, 3, &info), CODEC_TRUNCATED);
			assert_int_equal(codec_inspect(frame, 4, &info), CODEC_BAD_MAGIC);
		}
	assert_true(all_seven(out));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_reduce_scratch_needs_whole_frames),
		cmocka_unit_test(test_inspect_partial_frames),
		cmocka_unit_test(test_divide_and_rescale_need_float32),
		cmocka_unit_test(test_fault_names_first_wrong_byte),
		cmocka_unit_test(test_reduce_of_one_frame_is_exact),
		cmocka_unit_test(test_fault_set_only_for_places_in_frame),
		cmocka_unit_test(test_blocks_limit_number_of_values),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
