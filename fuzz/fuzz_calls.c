/*
 * fuzz_calls.c - libFuzzer: call functions with wrong arguments. Arguments are sometimes missing, too small, of another
 * kind or out of range, and the steps of a job may be out of order. Every call must return a status and stay within its
 * buffers.
 */
#include <string.h>

#include "check.h"
#include "codec/codec_engine.h"
#include "exact/round.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { NVALUES = 20000, NBYTES = 8 * NVALUES, SCRATCH = 1 << 20 };

/* Buffers for calls, each a separate allocation, so that AddressSanitizer checks accesses past their ends. */
struct memory {
	struct exact values, frame, out, residual, state, scratch, job, work;
};

/* Arguments of the calls that are tested, mostly valid. */
struct arguments {
	codec_spec spec;
	codec_tensor like, to, state;
	codec_context with;
	codec_metric metric, next;
	codec_segment segments[3];
	codec_codebook book;
	const void *frames[3];
	size_t nbytes[3];
	uint64_t counts[256], checksums[3];
	codec_range ranges[4];
};

/* Evaluate to p, or sometimes to NULL. */
#define OR_NULL(s, p) (one_in(s, 24) ? NULL : (p))
/* Evaluate to x, or sometimes to a smaller number. */
#define OR_LESS(s, x) (one_in(s, 12) ? (size_t)below(s, (uint64_t)(x) + 1) : (size_t)(x))
/*
 * Evaluate to the size of a struct, or sometimes to another size: a larger size means a later version of the struct, a
 * smaller size is invalid.
 */
#define STRUCT(s, type) (uint32_t)(one_in(s, 24) ? below(s, 3 * sizeof(type)) : sizeof(type))

static uint32_t odd(struct source *s, uint64_t usual)
{
	return one_in(s, 16) ? (uint32_t)noise(s) : (uint32_t)below(s, usual);
}

static codec_tensor some_tensor(struct source *s, uint32_t dtype, uint64_t n, struct exact *memory)
{
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = dtype, .rank = 1, .shape = {n}, .data = memory->p};

	t.nbytes = n * codec_dtype_nbytes(dtype);
	if (one_in(s, 8)) {
		t.rank = 2;
		t.shape[0] = n / 100;
		t.shape[1] = 100;
		t.nbytes = n / 100 * 100 * codec_dtype_nbytes(dtype);
	}
	switch (below(s, 40)) {
	case 0: t.struct_nbytes = (uint32_t)below(s, sizeof t); break;
	case 1: t.rank = (uint32_t)below(s, 12); break;
	case 2: t.shape[below(s, 8)] = noise(s); break;
	case 3: t.nbytes = below(s, memory->n + 1); break;
	case 4: t.data = NULL; break;
	case 5: t.shape[0] = 0; break;
	case 6: t.dtype = odd(s, 26); break;
	case 7: t.reserved = 1; break;
	default: break;
	}
	return t;
}

static void pick(struct source *s, struct memory *m, struct arguments *a)
{
	uint32_t dtype = one_in(s, 4) ? odd(s, 26) : (uint32_t)(1 + below(s, 4));
	uint64_t n = below(s, one_in(s, 4) ? NVALUES + 1 : 3000);

	memset(a, 0, sizeof *a);
	a->spec = (codec_spec){.struct_nbytes = STRUCT(s, codec_spec), .codec = 1 + odd(s, 7)};
	for (int i = 0; i < 3; i++)
		switch (below(s, 24)) {
		case 0: a->spec.max_code_length = odd(s, 10); break;
		case 1: a->spec.model = odd(s, 4); break;
		case 2:
		case 3:
		case 4: a->spec.variant = odd(s, 5); break;
		case 5:
		case 6: a->spec.options = odd(s, 32); break;
		case 7: a->spec.bits = odd(s, 10); break;
		case 8:
		case 9: a->spec.group_size = one_in(s, 4) ? CODEC_GROUP_SIZE_ROW : odd(s, 20000); break;
		case 10: a->spec.scale = (float)(int64_t)noise(s); break;
		case 11: a->spec.clip = (float)(int64_t)noise(s); break;
		case 12: a->spec.guard = (int32_t)odd(s, 300) - 150; break;
		default: break;
		}
	a->like = some_tensor(s, dtype, n, &m->values);
	a->to = some_tensor(s, one_in(s, 2) ? dtype : CODEC_FLOAT32, n, &m->out);
	a->state = some_tensor(s, CODEC_FLOAT32, n, &m->state);
	a->metric = (codec_metric){.struct_nbytes = STRUCT(s, codec_metric),
				   .theta_dtype = one_in(s, 8) ? odd(s, 26) : 0,
				   .theta_term = 3,
				   .theta = OR_NULL(s, &a->state),
				   .until = one_in(s, 4) ? below(s, n + 2) : 0,
				   .next = one_in(s, 4) ? &a->next : NULL};
	a->next = a->metric;
	a->next.until = 0;
	a->next.theta_v_term = 1;
	a->next.v = one_in(s, 2) ? &a->state : NULL;
	a->with = (codec_context){.struct_nbytes = STRUCT(s, codec_context),
				  .flags = one_in(s, 2) ? 0 : odd(s, 256),
				  .isa = odd(s, 4),
				  .into = one_in(s, 3) ? odd(s, 6) : 0,
				  .divide = one_in(s, 6) ? round_float(odd(s, 3) << 30) : 0,
				  .max_nbytes = one_in(s, 12) ? below(s, 100000) : 0,
				  .metric = one_in(s, 8) ? NULL : &a->metric,
				  .levels = one_in(s, 12) ? m->state.p : NULL,
				  .residual = one_in(s, 3) ? (float *)(void *)m->residual.p : NULL};
	if (one_in(s, 4)) {
		a->with.nsegments = below(s, 4);
		a->with.segments = OR_NULL(s, a->segments);
		for (int i = 0; i < 3; i++)
			a->segments[i] = (codec_segment){.offset = below(s, n + 2),
							 .rank = odd(s, 3),
							 .reserved = one_in(s, 24),
							 .shape = {below(s, n + 2), one_in(s, 12) ? noise(s) : 1}};
	}
	if (one_in(s, 6)) {
		for (int i = 0; i < 256; i++)
			a->counts[i] = noise(s) >> below(s, 64);
		codec_codebook_build(OR_NULL(s, &a->spec), dtype, OR_NULL(s, a->counts), OR_NULL(s, &a->book));
		if (one_in(s, 4))
			((uint8_t *)&a->book)[below(s, sizeof a->book)] ^= (uint8_t)noise(s);
		a->with.ncodebooks = below(s, 3) != 0;
		a->with.codebooks = OR_NULL(s, &a->book);
		codec_codebook_check(a->with.codebooks);
	}
}

static codec_status said(codec_status status)
{
	CHECK(codec_strerror(status) && *codec_strerror(status), status, 0);
	return status;
}

/* Call the functions that encode or decode in one call. Return the size of the encoded frame, or 0. */
static size_t whole(struct source *s, struct memory *m, struct arguments *a)
{
	codec_info info = {.struct_nbytes = STRUCT(s, codec_info)};
	size_t need = 0, written = 77, bytes;
	codec_status status;

	said(codec_bound(OR_NULL(s, &a->spec), OR_NULL(s, &a->like), OR_NULL(s, &need)));
	said(codec_bound_segments(OR_NULL(s, &a->spec), OR_NULL(s, &a->like), OR_NULL(s, a->segments), below(s, 4),
				  OR_NULL(s, &need)));
	said(codec_scratch(OR_NULL(s, &a->spec), OR_NULL(s, &a->like), OR_NULL(s, &need)));
	said(codec_count(OR_NULL(s, &a->spec), OR_NULL(s, &a->like), OR_NULL(s, a->counts), OR_NULL(s, &a->with),
			 OR_NULL(s, m->scratch.p), OR_LESS(s, SCRATCH)));
	bytes = OR_LESS(s, m->frame.n);
	status = codec_encode(OR_NULL(s, &a->spec), OR_NULL(s, &a->like), OR_NULL(s, m->frame.p), bytes,
			      OR_NULL(s, &written), NULL, OR_NULL(s, &a->with), OR_NULL(s, m->scratch.p),
			      OR_LESS(s, SCRATCH));
	CHECK(said(status) == CODEC_OK ? written <= bytes : written == 0 || written == 77, status, written);
	if (status != CODEC_OK)
		return 0;
	bytes = OR_LESS(s, written);
	codec_inspect(OR_NULL(s, m->frame.p), bytes, one_in(s, 24) ? NULL : &info);
	if (one_in(s, 8) && bytes > 8)
		m->frame.p[below(s, bytes)] ^= (uint8_t)(1 << below(s, 8));
	codec_verify(OR_NULL(s, m->frame.p), bytes);
	said(codec_decode(OR_NULL(s, m->frame.p), bytes, OR_NULL(s, &a->to), OR_NULL(s, &a->with),
			  OR_NULL(s, m->scratch.p), OR_LESS(s, SCRATCH)));
	said(codec_accumulate(OR_NULL(s, m->frame.p), bytes, 2, OR_NULL(s, &a->to), OR_NULL(s, &a->with),
			      OR_NULL(s, m->scratch.p), OR_LESS(s, SCRATCH)));
	for (int i = 0; i < 3; i++) {
		a->frames[i] = OR_NULL(s, m->frame.p);
		a->nbytes[i] = OR_LESS(s, bytes);
	}
	bytes = below(s, 4);
	said(codec_reduce_scratch(OR_NULL(s, a->frames), OR_NULL(s, a->nbytes), bytes, OR_NULL(s, &need)));
	said(codec_reduce(OR_NULL(s, a->frames), OR_NULL(s, a->nbytes), bytes, odd(s, 4), OR_NULL(s, &a->to),
			  OR_NULL(s, &a->with), OR_NULL(s, m->scratch.p), OR_LESS(s, SCRATCH)));
	return written;
}

/* Return a random range of blocks, mostly of blocks that the job has. */
static codec_range some_range(struct source *s, const codec_plan *plan)
{
	uint64_t first = below(s, plan->nblocks + 1), count = below(s, plan->nblocks - first + 2);

	return (codec_range){.first = first,
			     .count = count,
			     .at = plan->regions_at + (one_in(s, 12) ? below(s, 64) : first * plan->region_bound)};
}

/* Call the steps of codec_engine.h in any order, with any ranges. */
static void steps(struct source *s, struct memory *m, struct arguments *a, size_t written)
{
	codec_plan plan = {0};

	for (int i = 0; i < 12; i++) {
		const void *jobs[2] = {m->job.p, m->job.p};
		codec_range range = some_range(s, &plan);
		codec_reduction reduction;
		size_t room = OR_LESS(s, m->frame.n), job_nbytes = OR_LESS(s, m->job.n), need;
		void *job = OR_NULL(s, m->job.p), *work = OR_NULL(s, m->work.p), *frame = OR_NULL(s, m->frame.p);
		codec_tensor *like = OR_NULL(s, &a->like), *to = OR_NULL(s, &a->to);
		codec_context *with = OR_NULL(s, &a->with);

		switch (below(s, 13)) {
		case 0:
		case 1:
			said(codec_job_nbytes(OR_NULL(s, &a->spec), like, OR_NULL(s, &need), &need));
			said(codec_encode_open(OR_NULL(s, &a->spec), like, frame, room, with, job, job_nbytes, &plan));
			break;
		case 2: said(codec_encode_scan(like, with, job, below(s, plan.nscans + 1), below(s, 9))); break;
		case 3:
			said(codec_encode_scan(like, with, job, 0, plan.nscans));
			said(codec_encode_start(like, frame, room, with, job, OR_NULL(s, &plan)));
			break;
		case 4:
		case 5:
			said(codec_encode_blocks(like, frame, room, with, job, OR_NULL(s, &range), work,
						 OR_LESS(s, m->work.n)));
			break;
		case 6:
			for (int k = 0; k < 4; k++) {
				codec_range *r = a->ranges + k;

				r->first = one_in(s, 24) ? below(s, plan.nblocks + 2)
					   : k           ? r[-1].first + r[-1].count
							 : 0;
				r->count = below(s, plan.nblocks + 2);
				r->at = plan.regions_at + (k ? below(s, 9000) : 0);
			}
			said(codec_encode_close(like, frame, room, with, job, OR_NULL(s, a->ranges), below(s, 5),
						OR_NULL(s, &need)));
			break;
		case 11:
			said(codec_encode_move(job, frame, room, OR_NULL(s, &range),
					       one_in(s, 2) ? plan.regions_at : range.at - below(s, 64)));
			break;
		case 7:
		case 8: said(codec_decode_open(frame, OR_LESS(s, written), to, with, job, job_nbytes, &plan)); break;
		case 9:
			said(codec_decode_check(frame, OR_LESS(s, written), with, job, OR_NULL(s, &range), work,
						OR_LESS(s, m->work.n)));
			break;
		case 10:
			said(codec_decode_blocks(frame, OR_LESS(s, written), to, with, job, OR_NULL(s, &range), work,
						 OR_LESS(s, m->work.n)));
			said(codec_decode_close(with, job, range.checksum));
			break;
		default:
			a->frames[0] = a->frames[1] = m->frame.p;
			a->nbytes[0] = a->nbytes[1] = OR_LESS(s, written);
			jobs[below(s, 2)] = job;
			reduction = (codec_reduction){OR_NULL(s, a->frames), OR_NULL(s, a->nbytes), OR_NULL(s, jobs),
						      below(s, 3), odd(s, 4)};
			range.count = one_in(s, 12) ? noise(s) : below(s, 3);
			said(codec_reduce_blocks(OR_NULL(s, &reduction), to, with, OR_NULL(s, &range),
						 OR_NULL(s, a->checksums), work, OR_LESS(s, m->work.n)));
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct source s = source_open(data, size);
	struct arguments a;
	struct memory m;
	size_t written;

	m.values = exact(NBYTES, &s);
	m.frame = exact(2 * NBYTES, &s);
	m.out = exact(NBYTES, &s);
	m.residual = exact(4 * NVALUES, &s);
	m.state = exact(4 * NVALUES, &s);
	m.scratch = exact(SCRATCH, &s);
	m.job = exact(SCRATCH / 2, &s);
	m.work = exact(SCRATCH, &s);
	for (size_t i = 0; i < NVALUES; i++)
		((float *)(void *)m.values.base)[i] = (float)(int)noise(&s);
	memset(m.state.p, 1, m.state.n);
	memset(m.frame.p, 0, m.frame.n);
	memset(m.job.p, 0, m.job.n);
	codec_strerror((codec_status)below(&s, 99));
	CHECK(codec_abi_version() == CODEC_ABI_VERSION, 0, 0);
	pick(&s, &m, &a);
	written = whole(&s, &m, &a);
	steps(&s, &m, &a, written);
	exact_free(&m.values);
	exact_free(&m.frame);
	exact_free(&m.out);
	exact_free(&m.residual);
	exact_free(&m.state);
	exact_free(&m.scratch);
	exact_free(&m.job);
	exact_free(&m.work);
	return 0;
}
