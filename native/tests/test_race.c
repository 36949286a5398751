/*
 * test_race.c - test thread safety of codec.h and codec_engine.h, with TSan, and inputs that change during calls, with
 * ASan.
 *
 *   - test_race [SECONDS]: 4 threads process the steps of one job; the results must equal those of the one-call
 *     functions
 *   - test_race hostile [SECONDS]: another thread rewrites tensor, base, state, levels and frames during calls;
 * results are unspecified, but no byte outside of the buffers is accessed
 *
 * Without SECONDS: each codec once.
 *
 * One file: both modes make the same calls, for the same tensors.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples.h"
#include "codec/codec.h"
#include "codec/codec_engine.h"

#define THREADS 4
#define N 80001
#define ROW 65 /* values per row; so short that the segment has many rows, whose offsets the threads compute */
#define NROWS 1100
#define FRAMES 3
#define SLICES 7

#define MUST(good)                                                                                                     \
	do {                                                                                                           \
		if (!(good)) {                                                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #good);                                     \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static const codec_spec SPECS[] = {EXAMPLES(EXAMPLE_SPEC)};
#define NSPECS (sizeof SPECS / sizeof *SPECS)

/* A spec and a dtype: all examples, and for exact codecs more dtypes. */
struct kind {
	uint32_t dtype;
	codec_spec spec;
};

/* Return kind i of spec s; dtype 0: there are no more. */
static struct kind kind_of(size_t s, size_t i)
{
	static const uint32_t EXACT[] = {CODEC_FLOAT32, CODEC_FLOAT64,       CODEC_BFLOAT16,
					 CODEC_INT32,   CODEC_FLOAT8_E4M3FN, CODEC_FLOAT8_E5M2};
	static const uint32_t LOSSY[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
	const size_t nexact = sizeof EXACT / sizeof *EXACT;

	if (example_has(SPECS + s, CODEC_TRAIT_LOSSLESS))
		return (struct kind){i < nexact ? EXACT[i] : 0, SPECS[s]};
	return (struct kind){i ? 0 : LOSSY[s % 3], SPECS[s]};
}

/* A tensor, a spec and buffers. Every buffer is a separate allocation, so that ASan detects accesses past its end. */
struct task {
	codec_spec spec;
	codec_tensor x, out, sum, theta, base;
	codec_metric metric;
	codec_segment segment;
	codec_context with;
	uint8_t *frame[FRAMES], *made, *levels;
	size_t nbytes[FRAMES], bound, need, job_nbytes, work_nbytes;
	size_t keep; /* memory with which a check of frame 0 keeps symbols */
	float *residual;
};

static uint64_t seed = 88172645463325252ull;

static uint64_t next_random(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	return *s ^= *s << 17;
}

static void *room(size_t n)
{
	void *p = malloc(n);

	MUST(p);
	return p;
}

static void fill(codec_tensor *t, uint64_t *s)
{
	uint32_t size = codec_dtype_nbytes(t->dtype);

	for (uint64_t i = 0; i < N; i++) {
		uint64_t x = next_random(s);
		double wide = (double)((int64_t)x >> 20) * 0x1p-43 * (double)(1 + i / ROW % 100);
		float y = (float)wide;
		uint64_t u = 0;

		memcpy(&u, &y, 4);
		if (t->dtype == CODEC_FLOAT64)
			memcpy(&u, &wide, 8);
		else if (t->dtype == CODEC_BFLOAT16)
			u >>= 16;
		else if (t->dtype == CODEC_FLOAT16)
			u = (x & 0x83ff) | (12 + (x >> 50 & 3)) << 10;
		else if (t->dtype == CODEC_INT32)
			u = x >> 50;
		else if (size == 1)
			u >>= 20;
		u = i / 128 % 6 == 3 ? 0 : u; /* quad rows of zeros, which LOSSLESS and TRUNCATE leave out */
		memcpy((char *)t->data + i * size, &u, size);
	}
}

static void tensor(codec_tensor *t, uint32_t dtype)
{
	*t = (codec_tensor){.struct_nbytes = sizeof *t, .dtype = dtype, .rank = 2, .shape = {N / 3, 3}};
	t->nbytes = (uint64_t)N * codec_dtype_nbytes(dtype);
	t->data = room(t->nbytes);
	fill(t, &seed);
}

static int is_delta(const struct task *k)
{
	return k->spec.codec == CODEC_DELTA;
}

/*
 * Fill the task's tensor. For DELTA the tensor is a copy of the base in which one value in 8, 64 or 512 is changed, by
 * steps of all sizes.
 */
static void fill_tensor(struct task *k, int i)
{
	uint32_t size = codec_dtype_nbytes(k->x.dtype);

	if (!is_delta(k)) {
		fill(&k->x, &seed);
		return;
	}
	memcpy(k->x.data, k->base.data, k->x.nbytes);
	for (uint64_t v = 0; v < N; v += 1 + next_random(&seed) % (16u << 3 * i)) {
		uint64_t r = next_random(&seed);

		((uint8_t *)k->x.data)[v * size + (r & 7 ? 0 : (r >> 3) % size)] += (uint8_t)(r >> 32 | 1);
	}
}

static void task_open(struct task *k, const struct kind *kind)
{
	codec_info info = {.struct_nbytes = sizeof info};
	void *scratch;

	memset(k, 0, sizeof *k);
	k->spec = kind->spec;
	k->spec.struct_nbytes = sizeof k->spec;
	tensor(&k->x, kind->dtype);
	tensor(&k->out, kind->dtype);
	tensor(&k->sum, CODEC_FLOAT32);
	tensor(&k->theta, CODEC_FLOAT32);
	tensor(&k->base, kind->dtype);
	k->metric = (codec_metric){.struct_nbytes = sizeof k->metric, .theta_term = 100, .theta = &k->theta};
	k->with = (codec_context){.struct_nbytes = sizeof k->with, .metric = &k->metric};
	if (is_delta(k))
		k->with.base = &k->base;
	k->segment = (codec_segment){.offset = 1, .rank = 2, .shape = {NROWS, ROW}};
	if (kind->spec.codec == CODEC_LOSSLESS || kind->spec.codec == CODEC_TRUNCATE) {
		k->with.segments = &k->segment;
		k->with.nsegments = 1;
	}
	k->levels = room(N);
	for (size_t i = 0; i < N; i++)
		k->levels[i] = i & 3;
	k->residual = room(sizeof(float) * N);
	MUST(codec_bound(&k->spec, &k->x, &k->bound) == CODEC_OK);
	MUST(codec_scratch(&k->spec, &k->x, &k->need) == CODEC_OK);
	MUST(codec_job_nbytes(&k->spec, &k->x, &k->job_nbytes, &k->work_nbytes) == CODEC_OK);
	k->made = room(2 * k->bound + 65536);
	scratch = room(k->need);
	for (int i = 0; i < FRAMES; i++) {
		uint8_t *frame = room(k->bound);

		fill_tensor(k, i);
		k->with.stream = (uint64_t)i;
		MUST(codec_encode(&k->spec, &k->x, frame, k->bound, k->nbytes + i, NULL, &k->with, scratch, k->need) ==
		     CODEC_OK);
		k->frame[i] = room(k->nbytes[i]);
		memcpy(k->frame[i], frame, k->nbytes[i]);
		free(frame);
	}
	free(scratch);
	MUST(codec_inspect(k->frame[0], k->nbytes[0], &info) == CODEC_OK);
	MUST(codec_keep_nbytes(&info, &k->keep) == CODEC_OK);
}

static void task_close(struct task *k)
{
	free(k->x.data);
	free(k->out.data);
	free(k->sum.data);
	free(k->theta.data);
	free(k->base.data);
	free(k->made);
	free(k->levels);
	free(k->residual);
	for (int i = 0; i < FRAMES; i++)
		free(k->frame[i]);
}

/* Work that threads share: f(context, i) is called once for each i below count. */
struct tasks {
	void (*f)(void *context, uint64_t i);
	void *context;
	atomic_uint_fast64_t next;
	uint64_t count;
};

static void *run_tasks(void *p)
{
	struct tasks *c = p;
	uint64_t i;

	while ((i = atomic_fetch_add(&c->next, 1)) < c->count)
		c->f(c->context, i);
	return NULL;
}

static void run_all(void (*f)(void *, uint64_t), void *context, uint64_t count)
{
	struct tasks c = {.f = f, .context = context, .count = count};
	pthread_t thread[THREADS];

	for (int i = 0; i < THREADS; i++)
		MUST(pthread_create(thread + i, NULL, run_tasks, &c) == 0);
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
}

/* State that threads share while they process the steps of one job. */
struct steps {
	struct task *k;
	void *job[FRAMES];
	codec_plan plan;
	codec_context with;
	codec_range ranges[SLICES];
	uint64_t checksums[SLICES][FRAMES]; /* reduce: per range and frame */
	codec_status status[SLICES];
	uint32_t op;
	/*
	 * encode: after each range, a thread moves the regions of finished ranges together, unless another thread is
	 * doing so. Every second range is encoded to a buffer.
	 */
	void *buffers[SLICES];
	atomic_int done[SLICES];
	pthread_mutex_t moving;
	uint64_t moved, to;
};

/* Return range i of the SLICES ranges into which a job's blocks are divided. */
static codec_range slice(const struct steps *s, uint64_t i)
{
	uint64_t first = s->plan.nblocks * i / SLICES, end = s->plan.nblocks * (i + 1) / SLICES;

	return (codec_range){
		.first = first, .count = end - first, .at = s->plan.regions_at + first * s->plan.region_bound};
}

static void scan(void *p, uint64_t i)
{
	struct steps *s = p;
	uint64_t from = s->plan.nscans * i / SLICES, to = s->plan.nscans * (i + 1) / SLICES;

	s->status[i] = codec_encode_scan(&s->k->x, &s->k->with, s->job[0], from, to - from);
}

static void encode(void *p, uint64_t i)
{
	struct steps *s = p;
	void *work = room(s->plan.work_nbytes);

	codec_range *own = s->ranges + i;
	uint64_t nbytes;

	*own = slice(s, i);
	nbytes = own->count * s->plan.region_bound;
	if (i % 2)
		own->buffer = s->buffers[i] = room(nbytes);
	s->status[i] = codec_encode_blocks(&s->k->x, s->k->made, own->at + nbytes, &s->k->with, s->job[0], own, work,
					   s->plan.work_nbytes);
	free(work);
	atomic_store(s->done + i, s->status[i] == CODEC_OK);
	if (pthread_mutex_trylock(&s->moving))
		return;
	for (; s->moved < SLICES && atomic_load(s->done + s->moved); s->moved++) {
		codec_range *next = s->ranges + s->moved;

		if (!next->count)
			continue;
		MUST(codec_encode_move(s->job[0], s->k->made, 2 * s->k->bound + 65536, next, s->to) == CODEC_OK);
		s->to = next->end;
	}
	pthread_mutex_unlock(&s->moving);
}

static void decode(void *p, uint64_t i)
{
	struct steps *s = p;
	void *work = room(s->plan.work_nbytes);

	s->ranges[i] = slice(s, i);
	s->status[i] = codec_decode_blocks(s->k->frame[0], s->k->nbytes[0],
					   s->with.into == CODEC_INTO_ADD ? &s->k->sum : &s->k->out, &s->with,
					   s->job[0], s->ranges + i, work, s->plan.work_nbytes);
	free(work);
}

static void check(void *p, uint64_t i)
{
	struct steps *s = p;
	void *work = room(s->plan.work_nbytes);

	s->ranges[i] = slice(s, i);
	s->status[i] = codec_decode_check(s->k->frame[0], s->k->nbytes[0], &s->with, s->job[0], s->ranges + i, work,
					  s->plan.work_nbytes);
	free(work);
}

static void reduce(void *p, uint64_t i)
{
	struct steps *s = p;
	const codec_reduction frames = {(const void *const *)s->k->frame, s->k->nbytes, (const void *const *)s->job,
					FRAMES, s->op};
	void *work = room(s->plan.work_nbytes);

	s->ranges[i] = slice(s, i);
	s->status[i] = codec_reduce_blocks(&frames, &s->k->sum, &s->k->with, s->ranges + i, s->checksums[i], work,
					   s->plan.work_nbytes);
	free(work);
}

static codec_status status_of(const struct steps *s)
{
	for (int i = 0; i < SLICES; i++)
		if (s->status[i] != CODEC_OK)
			return s->status[i];
	return CODEC_OK;
}

static uint64_t checksum_of(const struct steps *s)
{
	uint64_t total = 0;

	for (int i = 0; i < SLICES; i++)
		total += s->ranges[i].checksum;
	return total;
}

/* Return the sum of a frame's checksums over all ranges of a reduction. */
static uint64_t reduced_checksum_of(const struct steps *s, int frame)
{
	uint64_t total = 0;

	for (int i = 0; i < SLICES; i++)
		total += s->checksums[i][frame];
	return total;
}

#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		if (status == CODEC_OK)                                                                                \
			status = (call);                                                                               \
	} while (0)

static codec_status encode_steps(struct task *k, size_t *written)
{
	struct steps s = {.k = k, .job = {room(k->job_nbytes)}};
	size_t capacity = 2 * k->bound + 65536;
	codec_status status = CODEC_OK;
	uint64_t blocks = 0;

	TRY(codec_encode_open(&k->spec, &k->x, k->made, capacity, &k->with, s.job[0], k->job_nbytes, &s.plan));
	if (status == CODEC_OK && s.plan.nscans) {
		run_all(scan, &s, SLICES);
		TRY(status_of(&s));
		TRY(codec_encode_start(&k->x, k->made, capacity, &k->with, s.job[0], &s.plan));
	}
	blocks = s.plan.nblocks;
	s.to = s.plan.regions_at;
	pthread_mutex_init(&s.moving, NULL);
	if (status == CODEC_OK && blocks) {
		run_all(encode, &s, SLICES);
		TRY(status_of(&s));
	}
	TRY(codec_encode_close(&k->x, k->made, capacity, &k->with, s.job[0], s.ranges, blocks ? SLICES : 0, written));
	pthread_mutex_destroy(&s.moving);
	for (int i = 0; i < SLICES; i++)
		free(s.buffers[i]);
	free(s.job[0]);
	return status;
}

/*
 * Decode frame 0 to k->out, or add it to k->sum. `checked`: check all blocks before the first one is decoded, and keep
 * their symbols.
 */
static codec_status decode_steps(struct task *k, int add, int checked)
{
	size_t job_nbytes = k->job_nbytes + (checked ? k->keep : 0);
	struct steps s = {.k = k, .job = {room(job_nbytes)}, .with = k->with};
	codec_status status = CODEC_OK;

	s.with.into = add ? CODEC_INTO_ADD : CODEC_INTO_STORE;
	s.with.weight = 0.5f;
	TRY(codec_decode_open(k->frame[0], k->nbytes[0], add ? &k->sum : &k->out, &s.with, s.job[0], job_nbytes,
			      &s.plan));
	if (status == CODEC_OK && s.plan.nblocks) {
		run_all(checked ? check : decode, &s, SLICES);
		TRY(status_of(&s));
		TRY(codec_decode_close(&s.with, s.job[0], checksum_of(&s)));
	}
	if (status == CODEC_OK && s.plan.nblocks && checked) {
		s.with.flags |= CODEC_NO_CHECKSUM;
		run_all(decode, &s, SLICES);
		TRY(status_of(&s));
	}
	free(s.job[0]);
	return status;
}

static codec_status reduce_steps(struct task *k, uint32_t op)
{
	struct steps s = {.k = k, .op = op};
	codec_context with = k->with;
	codec_status status = CODEC_OK;

	with.into = CODEC_INTO_FLOAT32;
	for (int i = 0; i < FRAMES; i++) {
		s.job[i] = room(k->job_nbytes);
		TRY(codec_decode_open(k->frame[i], k->nbytes[i], &k->sum, &with, s.job[i], k->job_nbytes, &s.plan));
	}
	if (status == CODEC_OK && s.plan.nblocks) {
		run_all(reduce, &s, SLICES);
		TRY(status_of(&s));
	}
	for (int i = 0; i < FRAMES; i++) {
		if (s.plan.nblocks)
			TRY(codec_decode_close(&with, s.job[i], reduced_checksum_of(&s, i)));
		free(s.job[i]);
	}
	return status;
}

/* Decode the second block of a DELTA frame with codec_decode_part. */
static codec_status decode_part(struct task *k, const codec_context *with, void *scratch)
{
	uint64_t size = k->spec.group_size ? k->spec.group_size * codec_dtype_nbytes(k->x.dtype) : 0;
	const char *base = (const char *)k->base.data + size;

	return codec_decode_part(k->frame[0], k->nbytes[0], 1, size > 0, base, (char *)k->out.data + size, size, with,
				 scratch, k->need);
}

static codec_status at_once(struct task *k, int what, size_t *written)
{
	size_t need = k->need;
	codec_context with = k->with;
	codec_status status;
	void *scratch;

	if (what == 1)
		need += k->keep;
	if (what == 3 && !is_delta(k)) {
		status = codec_reduce_scratch((const void *const *)k->frame, k->nbytes, FRAMES, &need);
		if (status != CODEC_OK || need > 64 << 20) /* the sizes come from a rewritten header */
			return status;
	}
	scratch = room(need);
	switch (what) {
	case 0:
		status = codec_encode(&k->spec, &k->x, k->made, k->bound, written, is_delta(k) ? NULL : k->residual,
				      &with, scratch, need);
		break;
	case 1: status = codec_decode(k->frame[0], k->nbytes[0], &k->out, &with, scratch, need); break;
	case 2: status = codec_accumulate(k->frame[0], k->nbytes[0], 0.5f, &k->sum, &with, scratch, need); break;
	default:
		if (is_delta(k)) {
			status = decode_part(k, &with, scratch);
			break;
		}
		with.flags |= CODEC_NONTEMPORAL; /* makes codec_reduce use its tile, whose size is read from a header */
		status = codec_reduce((const void *const *)k->frame, k->nbytes, FRAMES, CODEC_REDUCE_MEAN, &k->sum,
				      &with, scratch, need);
	}
	free(scratch);
	return status;
}

/* Return 1 if frames of this kind can be reduced to a sum. */
static int is_summed(const struct kind *kind)
{
	return kind->spec.codec != CODEC_DELTA &&
	       (kind->dtype == CODEC_FLOAT32 || kind->dtype == CODEC_BFLOAT16 || kind->dtype == CODEC_FLOAT16);
}

/* Replace the base and the destination by a single tensor, to decode in place; a second call restores both. */
static void swap_in_place(struct task *k, void **kept)
{
	void *own = k->out.data;

	k->out.data = *kept ? *kept : k->base.data;
	*kept = *kept ? NULL : own;
}

/* Check that four threads that process a job's steps produce the same bytes as the one-call functions. */
static void check_steps(const struct kind *kind)
{
	struct task k;
	codec_tensor once;
	size_t written;

	task_open(&k, kind);
	MUST(encode_steps(&k, &written) == CODEC_OK);
	MUST(written == k.nbytes[FRAMES - 1] && !memcmp(k.made, k.frame[FRAMES - 1], written));
	MUST(at_once(&k, 1, NULL) == CODEC_OK);
	once = k.out;
	tensor(&k.out, kind->dtype);
	for (int checked = 0; checked < 2; checked++) {
		memset(k.out.data, 0x5a, k.out.nbytes);
		MUST(decode_steps(&k, 0, checked) == CODEC_OK && !memcmp(once.data, k.out.data, k.out.nbytes));
	}
	if (is_delta(&k)) {
		void *kept = NULL;

		swap_in_place(&k, &kept);
		MUST(decode_steps(&k, 0, 1) == CODEC_OK && !memcmp(once.data, k.base.data, k.base.nbytes));
		swap_in_place(&k, &kept);
	}
	free(once.data);
	if (is_summed(kind)) {
		once = k.sum;
		once.data = room(once.nbytes);
		memcpy(once.data, k.sum.data, once.nbytes);
		MUST(at_once(&k, 2, NULL) == CODEC_OK);
		{
			void *t = k.sum.data;

			k.sum.data = once.data;
			once.data = t;
		}
		MUST(decode_steps(&k, 1, 1) == CODEC_OK && !memcmp(once.data, k.sum.data, once.nbytes));
		MUST(at_once(&k, 3, NULL) == CODEC_OK);
		memcpy(once.data, k.sum.data, once.nbytes);
		MUST(reduce_steps(&k, CODEC_REDUCE_MEAN) == CODEC_OK && !memcmp(once.data, k.sum.data, once.nbytes));
		free(once.data);
	}
	task_close(&k);
}

/* State of the thread that rewrites the task's inputs until `stop` is set, and restores parts of the frames. */
struct rewriter {
	struct task *k;
	const uint8_t *good[FRAMES];
	uint8_t larger[64]; /* header with 8 times the frame's values; valid: constant blocks can hold that many */
	atomic_int stop, headers;
};

static void flip_bit(void *p, size_t n, uint64_t x)
{
	((volatile uint8_t *)p)[(x >> 8) % n] ^= (uint8_t)(1 << (x & 7));
}

static void *rewrite(void *p)
{
	struct rewriter *e = p;
	struct task *k = e->k;
	uint64_t s = 0x9e3779b97f4a7c15ull;

	while (!atomic_load(&e->stop)) {
		uint64_t x = next_random(&s);
		size_t i = (x >> 40) % FRAMES, from = x >> 41 & 1 ? 0 : (x >> 16) % k->nbytes[i], n;

		if (atomic_load(&e->headers)) {
			memcpy(k->frame[i], x >> 63 ? e->good[i] : e->larger, 64);
			continue;
		}
		switch (x >> 60) {
		case 0:
		case 1:
		case 2: flip_bit(k->x.data, k->x.nbytes, x); break;
		case 3: flip_bit(k->theta.data, k->theta.nbytes, x); break;
		case 4: flip_bit(k->levels, N, x); break;
		case 10: flip_bit(k->base.data, k->base.nbytes, x); break;
		case 5:
		case 6:
		case 7: flip_bit(k->frame[i], k->nbytes[i] < 120 ? k->nbytes[i] : 120, x); break;
		case 8:
		case 9: flip_bit(k->frame[i], k->nbytes[i], x); break;
		default:
			n = k->nbytes[i] - from < 2000 ? k->nbytes[i] - from : 2000;
			memcpy(k->frame[i] + from, e->good[i] + from, n);
		}
	}
	return NULL;
}

static void check_rewriting(const struct kind *kind, int rounds)
{
	struct rewriter e = {0};
	pthread_t thread;
	struct task k;
	size_t written;

	task_open(&k, kind);
	e.k = &k;
	for (int i = 0; i < FRAMES; i++) {
		uint8_t *good = room(k.nbytes[i]);

		memcpy(good, k.frame[i], k.nbytes[i]);
		e.good[i] = good;
	}
	memcpy(e.larger, e.good[0], sizeof e.larger);
	memcpy(e.larger + 48, &(uint64_t){8 * (N / 3)}, 8);
	if (kind->spec.codec == CODEC_LOSSLESS || kind->spec.codec == CODEC_TRUNCATE ||
	    kind->spec.codec == CODEC_TOPK || kind->spec.codec == CODEC_DELTA)
		memcpy(e.larger + 44, &(uint32_t){(8 * N + (1u << e.good[0][9]) - 1) >> e.good[0][9]}, 4);
	MUST(pthread_create(&thread, NULL, rewrite, &e) == 0);
	for (int i = 0; i < rounds; i++) {
		k.with.levels = i & 1 && kind->spec.variant != CODEC_LEVEL_CODING_SHARED ? k.levels : NULL;
		k.with.flags = i % 3 == 2 ? CODEC_NO_CHECKSUM : i % 3 ? CODEC_VERIFY_FIRST : 0;
		for (int what = 0; what < 4; what++)
			at_once(&k, what, &written);
		k.with.flags &= ~CODEC_VERIFY_FIRST;
		encode_steps(&k, &written);
		decode_steps(&k, 0, i > 0);
		if (is_delta(&k)) {
			void *kept = NULL;

			swap_in_place(&k, &kept);
			decode_steps(&k, 0, i > 0);
			at_once(&k, 1, &written);
			swap_in_place(&k, &kept);
		}
		if (is_summed(kind)) {
			decode_steps(&k, 1, i > 0);
			reduce_steps(&k, CODEC_REDUCE_SUM);
		}
	}
	atomic_store(&e.headers, 1);
	for (int i = 0; i < 200 * rounds && is_summed(kind); i++)
		at_once(&k, 3, &written);
	atomic_store(&e.stop, 1);
	pthread_join(thread, NULL);
	for (int i = 0; i < FRAMES; i++)
		free((void *)e.good[i]);
	task_close(&k);
}

int main(int argc, char **argv)
{
	int is_hostile = argc > 1 && !strcmp(argv[1], "hostile");
	double seconds = argc > 1 + is_hostile ? atof(argv[1 + is_hostile]) : 0;
	time_t begin = time(NULL);
	int rounds = 0;

	do {
		for (size_t s = 0; s < NSPECS; s++)
			for (size_t i = 0; kind_of(s, i).dtype; i++) {
				const struct kind kind = kind_of(s, i);

				if (is_hostile)
					check_rewriting(&kind, 3);
				else
					check_steps(&kind);
			}
		rounds++;
	} while (difftime(time(NULL), begin) < seconds);
	printf("test_race: %d rounds of %zu specs, %s\n", rounds, NSPECS,
	       is_hostile ? "memory rewritten during calls" : "same bytes");
	return 0;
}
