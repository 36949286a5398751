/*
 * decode.c - decode frames on a device: workspace, arguments of kernels, launches.
 *
 * The kernel open_frames reads headers, and writes the arguments of the kernels that decode. The host does not know a
 * frame's contents, so it launches all kernels that the frame may need: the kernel of its codec, decode_lossless_fast
 * for LOSSLESS floats, and decode_stored. open_frames sets the number of warps to 0 in the arguments of kernels that
 * the frame does not need.
 */
#include <float.h>

#include "plan.h"
#include "upload.h"

#define DECODE_FLAGS (CODEC_ALLOW_SLACK | CODEC_VERIFY_FIRST)

/*
 * Layout of a call's workspace: offsets in bytes from its beginning. decodings: 2 * NDECODERS arrays of `count` struct
 * decoding; the first NDECODERS arrays are for launches that only check, the others for launches that decode. In each
 * array, items are sorted by the kernel of their plan. taken: bit mask of the units of scratch memory in use.
 */
struct layout {
	uint64_t openings, decodings, views, found, opened, memory, taken, scratch, end;
	struct scratch units;
	uint64_t first[NKERNELS], count[NKERNELS],
		ctas[NKERNELS]; /* per decoding kernel: first item, items, their CTAs */
	/* items per decoding kernel and class_of(CTAs); larger classes are launched first */
	uint64_t count_of[NKERNELS][NCLASSES];
};

/*
 * Return the number of CTAs of an item's decoding kernel, if the frame has as many blocks as this library's encoder
 * makes.
 */
static uint32_t needed_ctas(const codec_cuda_plan *p)
{
	return plan_ctas(p, p->launch.decode);
}

static uint32_t ctas_of(const codec_cuda_plan *p, const struct layout *l)
{
	return share_ctas(p->device, p->launch.decode, needed_ctas(p), l->ctas[p->launch.decode]);
}

/* Return 1 if decode_lossless_fast may be able to decode the item, which depends on the frame's contents. */
static int may_be_fast(const codec_cuda_decode_item *a)
{
	const codec_cuda_plan *p = a->plan;

	return p->launch.decode_fast && a->into == CODEC_INTO_STORE && (uint64_t)a->tensor % (4 * p->itemsize) == 0;
}

/*
 * Return the number of CTAs of decode_lossless_fast for an item: at most as many as the item's other kernel has, and at
 * most the item's share of the resident CTAs.
 */
static uint32_t fast_ctas(const codec_cuda_plan *p, const struct layout *l)
{
	const uint64_t resident = resident_ctas(p->device, p->launch.decode), all = l->ctas[p->launch.decode];

	return share_ctas(p->device, p->launch.decode_fast, ctas_of(p, l), all < resident ? all : resident);
}

static int class_of_item(const codec_cuda_plan *p, const struct layout *l)
{
	return class_of(ctas_of(p, l));
}

/* Return the number of CTAs that decode an item if its tensor is stored uncompressed. */
static uint32_t stored_ctas(const codec_cuda_plan *p, size_t count)
{
	uint64_t most = ELEMENTWISE_BLOCKS * (uint64_t)p->device->processors / count + 1;
	uint32_t ctas = elementwise_ctas(p->device, p->n);

	return ctas < most ? ctas : (uint32_t)most;
}

static void lay_out(const codec_cuda_decode_item *items, size_t count, struct layout *l)
{
	uint64_t memory = 0, units[NKERNELS] = {0}, wanted = 0;

	*l = (struct layout){0};
	for (size_t i = 0; i < count; i++) {
		const codec_cuda_plan *p = items[i].plan;

		l->count[p->launch.decode]++;
		l->ctas[p->launch.decode] += needed_ctas(p);
		memory += p->memory_nbytes;
		scratch_need(&l->units, p->decode_each, p->launch.decode_scratch.units);
	}
	for (int k = 1; k < NKERNELS; k++)
		l->first[k] = l->first[k - 1] + l->count[k - 1];
	l->decodings = upload_nbytes(sizeof(struct opening)) * count;
	l->views = l->decodings + align16(2 * NDECODERS * sizeof(struct decoding) * count);
	l->found = l->views + align16(sizeof(codec_view)) * count;
	l->opened = l->found + align16(sizeof(struct found)) * count;
	l->memory = l->opened + align16(sizeof(struct opened)) * count;
	for (size_t i = 0; i < count; i++) { /* kernels run one after the other, so they share scratch memory */
		const codec_cuda_plan *p = items[i].plan;

		l->count_of[p->launch.decode][class_of_item(p, l)]++;
		units[p->launch.decode] += p->decode_each ? WARPS * ctas_of(p, l) * p->launch.decode_scratch.units : 0;
		wanted = units[p->launch.decode] > wanted ? units[p->launch.decode] : wanted;
	}
	scratch_limit(&l->units, wanted);
	l->taken = l->memory + memory;
	l->scratch = (l->taken + scratch_taken_nbytes(&l->units) + 255) / 256 * 256;
	l->end = l->scratch + l->units.count * l->units.each;
}

static int check_plans(const codec_cuda_decode_item *items, size_t count)
{
	if (!items && count)
		return CODEC_BAD_ARGUMENT;
	for (size_t i = 0; i < count; i++)
		if (items[i].struct_nbytes < sizeof *items || !items[i].plan ||
		    items[i].plan->device != items[0].plan->device)
			return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

/* Return CODEC_OK if the arguments of an item are valid, else a status. */
static int check_item(const codec_cuda_decode_item *a)
{
	const codec_cuda_plan *p = a->plan;
	const uint64_t size = a->into == CODEC_INTO_STORE ? p->itemsize : sizeof(float);

	if ((p->n && !a->tensor) || (uint64_t)a->tensor % size || !a->frame || (uint64_t)a->frame % 8 || !a->result ||
	    (uint64_t)a->result % 8 || (uint64_t)a->frame_nbytes_at % 8 || a->into > CODEC_INTO_FLOAT32)
		return CODEC_BAD_ARGUMENT;
	if (p->codec == CODEC_DELTA && (a->into != CODEC_INTO_STORE || (uint64_t)a->base % p->itemsize))
		return CODEC_BAD_ARGUMENT;
	if (p->codec == CODEC_DELTA && p->n && !a->base)
		return CODEC_MISSING_BASE;
	if (!(a->divide >= 0 && a->divide <= FLT_MAX) || (a->divide > 0 && a->into == CODEC_INTO_STORE))
		return CODEC_BAD_ARGUMENT;
	return a->into != CODEC_INTO_STORE && p->dtype != CODEC_FLOAT32 && p->dtype != CODEC_BFLOAT16 &&
			       p->dtype != CODEC_FLOAT16
		       ? CODEC_BAD_DTYPE
		       : CODEC_OK;
}

int codec_cuda_decode_workspace(const codec_cuda_decode_item *items, size_t count, uint64_t *nbytes)
{
	struct layout l;

	if (!nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(check_plans(items, count));
	lay_out(items, count, &l);
	*nbytes = l.end;
	return CODEC_OK;
}

/* Offsets in the workspace of the next item's data, and indices of its array entries; advanced for each item. */
struct places {
	uint64_t memory, rank[NKERNELS][NCLASSES]; /* rank: index of the next item in the arrays of decodings */
};

static struct places first_places(const struct layout *l, uint64_t workspace)
{
	struct places first = {.memory = workspace + l->memory};

	for (int k = 0; k < NKERNELS; k++) {
		uint64_t rank = l->first[k];

		for (int class = NCLASSES - 1; class >= 0; class--) {
			first.rank[k][class] = rank;
			rank += l->count_of[k][class];
		}
	}
	return first;
}

/* Return the arguments of open_frames for item i, and advance *next past the workspace of the item. */
static struct opening opening_of(const codec_cuda_decode_item *items, size_t count, size_t i, uint32_t flags,
				 const struct layout *l, uint64_t workspace, struct places *next)
{
	const codec_cuda_decode_item *a = items + i;
	const codec_cuda_plan *p = a->plan;
	const uint64_t each = sizeof(struct decoding), array = each * count,
		       at = workspace + l->decodings + each * next->rank[p->launch.decode][class_of_item(p, l)]++;
	struct opening o = {
		.frame = (uint64_t)a->frame,
		.frame_nbytes = a->frame_nbytes,
		.frame_nbytes_at = (uint64_t)a->frame_nbytes_at,
		.tensor = (uint64_t)a->tensor,
		.result = (uint64_t)a->result,
		.view = workspace + l->views + align16(sizeof(codec_view)) * i,
		.memory = next->memory,
		.found = workspace + l->found + align16(sizeof(struct found)) * i,
		.opened = workspace + l->opened + align16(sizeof(struct opened)) * i,
		.codec = p->codec,
		.dtype = p->dtype,
		.rank = p->rank,
		.entropy = (uint32_t)p->entropy,
		.flags = flags,
		.into = a->into,
		.weight = a->weight,
		.divide = a->divide,
		.warps = {WARPS * ctas_of(p, l),
			  may_be_fast(a) ? codec_kernel_at(p->launch.decode_fast)->warps * fast_ctas(p, l) : 0,
			  WARPS * stored_ctas(p, count)},
		.base = p->codec == CODEC_DELTA ? (uint64_t)a->base : 0,
		.block_nvalues = p->view.block_nvalues,
	};

	if (p->decode_each)
		o.scratch = (struct units){workspace + l->taken, workspace + l->scratch, l->units.each,
					   (uint32_t)l->units.count, 0};
	for (int k = 0; k < NDECODERS; k++) {
		o.checking[k] = flags & CODEC_VERIFY_FIRST ? at + k * array : 0;
		o.decoding[k] = at + (NDECODERS + k) * array;
	}
	for (uint32_t k = 0; k < p->rank; k++)
		o.shape[k] = p->shape[k];
	next->memory += p->memory_nbytes;
	return o;
}

static int upload_openings(const codec_cuda_decode_item *items, size_t count, uint32_t flags, const struct layout *l,
			   struct upload *u, uint64_t workspace)
{
	struct places next = first_places(l, workspace);

	for (size_t i = 0; i < count; i++) {
		struct opening o = opening_of(items, count, i, flags, l, workspace, &next);

		TRY(upload_add(u, &o, sizeof o));
	}
	return upload_end(u);
}

/* Launch decoding kernel k for all items whose plans use it. `at`: device address of the array of struct decoding. */
static int launch_blocks(const codec_cuda_decode_item *items, size_t count, const struct layout *l, uint32_t k,
			 uint64_t at, CUstream stream)
{
	const uint64_t each = sizeof(struct decoding);
	struct run r = {items[0].plan->device, k, each, stream, at + each * l->first[k], 0, 0, 0};

	for (int class = NCLASSES - 1; class >= 0; class--)
		for (size_t i = 0; l->count_of[k][class] && i < count; i++)
			if (items[i].plan->launch.decode == k && class_of_item(items[i].plan, l) == class)
				TRY(run_add(&r, ctas_of(items[i].plan, l)));
	return run_end(&r);
}

/*
 * Launch decode_lossless_fast for the items of kernel k, if one of them may need it. Items that do not need it have 0
 * warps in their arguments.
 */
static int launch_fast(const codec_cuda_decode_item *items, size_t count, const struct layout *l, uint32_t k,
		       uint64_t at, CUstream stream)
{
	const uint64_t each = sizeof(struct decoding);
	struct run r = {items[0].plan->device, k, each, stream, at + each * l->first[k], 0, 0, 0};

	for (size_t i = 0; r.kernel == k && i < count; i++)
		if (items[i].plan->launch.decode == k && may_be_fast(items + i))
			r.kernel = items[i].plan->launch.decode_fast;
	for (int class = NCLASSES - 1; r.kernel != k && class >= 0; class--)
		for (size_t i = 0; l->count_of[k][class] && i < count; i++)
			if (items[i].plan->launch.decode == k && class_of_item(items[i].plan, l) == class)
				TRY(run_add(&r, fast_ctas(items[i].plan, l)));
	return run_end(&r);
}

/*
 * Launch decode_stored for all items, with few CTAs each. `at`: device address of the array of struct decoding, sorted
 * by kernel and class.
 */
static int launch_stored(const codec_cuda_decode_item *items, size_t count, uint64_t at, CUstream stream)
{
	struct run r = {items[0].plan->device, KERNEL_DECODE_STORED, sizeof(struct decoding), stream, at, 0, 0, 0};
	uint32_t most = 0;

	for (size_t i = 0; i < count; i++) {
		uint32_t ctas = stored_ctas(items[i].plan, count);

		most = ctas > most ? ctas : most;
	}
	for (size_t i = 0; i < count; i++)
		TRY(run_add(&r, most));
	return run_end(&r);
}

/*
 * Launch the kernels that read the arrays of struct decoding at device address `at`: first those that decode blocks,
 * then decode_stored.
 */
static int launch_decodings(const codec_cuda_decode_item *items, size_t count, const struct layout *l, uint64_t at,
			    CUstream stream)
{
	const uint64_t array = sizeof(struct decoding) * count;

	for (int k = 0; k < NKERNELS; k++)
		if (l->count[k])
			TRY(launch_blocks(items, count, l, (uint32_t)k, at, stream));
	for (int k = KERNEL_DECODE_LOSSLESS_2; k <= KERNEL_DECODE_LOSSLESS_4; k++)
		if (l->count[k])
			TRY(launch_fast(items, count, l, (uint32_t)k, at + FAST_BLOCKS * array, stream));
	return launch_stored(items, count, at + STORED * array, stream);
}

static int launch_openings(const codec_cuda_decode_item *items, size_t count, uint64_t at, CUstream stream)
{
	struct run r = {
		items[0].plan->device, KERNEL_OPEN_FRAMES, upload_nbytes(sizeof(struct opening)), stream, at, 0, 0, 0};

	for (size_t i = 0; i < count; i++)
		TRY(run_add(&r, 1));
	return run_end(&r);
}

static int launch(const codec_cuda_decode_item *items, size_t count, uint32_t flags, const struct layout *l,
		  uint64_t workspace, CUstream stream)
{
	const codec_cuda_device *d = items[0].plan->device;
	const uint64_t decodings = workspace + l->decodings;
	uint64_t openings = workspace + l->openings, number = count;
	uint32_t checked = 1;
	void *args[] = {&openings, &number, &checked};

	TRY(launch_openings(items, count, openings, stream));
	if (flags & CODEC_VERIFY_FIRST) {
		TRY(launch_decodings(items, count, l, decodings, stream));
		TRY(device_launch(d, KERNEL_FINISH_DECODE, (uint32_t)((count + 127) / 128), 1, args, stream));
	}
	TRY(launch_decodings(items, count, l, decodings + NDECODERS * sizeof(struct decoding) * count, stream));
	checked = 0;
	return device_launch(d, KERNEL_FINISH_DECODE, (uint32_t)((count + 127) / 128), 1, args, stream);
}

int codec_cuda_decode(const codec_cuda_decode_item *items, size_t count, uint32_t flags, void *workspace,
		      uint64_t workspace_nbytes, CUstream stream)
{
	const uint64_t at = (uint64_t)workspace;
	const codec_cuda_device *d;
	struct upload u;
	struct layout l;
	CUcontext before;
	int status;

	TRY(check_plans(items, count));
	if (flags & ~DECODE_FLAGS)
		return CODEC_BAD_ARGUMENT;
	for (size_t i = 0; i < count; i++)
		TRY(check_item(items + i));
	if (!count)
		return CODEC_OK;
	lay_out(items, count, &l);
	if (!workspace || at % 256)
		return CODEC_BAD_ARGUMENT;
	if (workspace_nbytes < l.end)
		return CODEC_SHORT_SCRATCH;
	d = items[0].plan->device;
	TRY(driver_check(d->driver->context_push(d->context)));
	upload_begin(&u, d, stream, at + l.openings);
	status = l.units.count ? driver_check(d->driver->fill(at + l.taken, 0, l.scratch - l.taken, stream)) : CODEC_OK;
	if (!status)
		status = upload_openings(items, count, flags, &l, &u, at);
	if (!status)
		status = launch(items, count, flags, &l, at, stream);
	d->driver->context_pop(&before);
	return status;
}
