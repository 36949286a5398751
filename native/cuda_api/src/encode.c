/* encode.c - encode tensors on a device: workspace, arguments of kernels, launches. */
#include "plan.h"
#include "upload.h"

#define ZEROED_NBYTES(p) (align16(WRITTEN_NBYTES) + align16((p)->choice_nbytes) + align16(8 * (p)->nblocks))

/*
 * Layout of a call's workspace, in this order: arguments; memory that is zeroed before the kernels run; arrays that
 * kernels fill; sums of tensors and residuals; scratch memory. All offsets are in bytes. Zeroed memory begins with the
 * bit mask of the units of scratch memory in use.
 */
struct layout {
	uint64_t arguments, zeroed, made, sums, scratch, end;
	uint64_t encodings, results, preprocessings; /* offsets of the arrays of arguments */
	uint64_t npreprocessings;
	struct scratch units;
	/*
	 * For each group of tensors with the same launches: index of the first struct encoding, their number, and the
	 * sum of their CTAs.
	 */
	uint64_t first[NKERNELS], count[NKERNELS], ctas[NKERNELS];
	uint32_t classes[NKERNELS]; /* bit c is set if the group has a tensor of class c; larger classes come first */
};

/*
 * Return the group of an item. Items of a group have the same launches. A group is named by its encoding kernel, with
 * two exceptions: CLOSE_FRAME for tensors without blocks, for which only that kernel is launched, and the plan's
 * kernel `finish` if it is launched before CLOSE_FRAME.
 */
static uint32_t group_of(const codec_cuda_encode_item *a)
{
	return !a->plan->nblocks                        ? KERNEL_CLOSE_FRAME
	       : a->plan->launch.finish && !a->residual ? a->plan->launch.finish
							: a->plan->launch.encode;
}

static int is_preprocessed(const codec_cuda_encode_item *a)
{
	return a->flags & CODEC_FEEDBACK || a->plan->needs_levels;
}

/*
 * Return the size in bytes of the sums of tensor and residual: as float32, and rounded to the tensor's dtype. 0 if no
 * residual is added.
 */
static uint64_t sums_nbytes(const codec_cuda_encode_item *a)
{
	const codec_cuda_plan *p = a->plan;

	return a->flags & CODEC_FEEDBACK ? align16(4 * p->n) + align16(p->nbytes) : 0;
}

/* Return the number of CTAs that encode a tensor. A block is encoded by one warp, or by all warps of a CTA (TOPK). */
static uint32_t needed_ctas(const codec_cuda_plan *p)
{
	return plan_ctas(p, p->launch.encode);
}

/* Return the number of CTAs of an item's encoding kernel. */
static uint32_t ctas_of(const codec_cuda_encode_item *a, const struct layout *l)
{
	const codec_cuda_plan *p = a->plan;

	return share_ctas(p->device, p->launch.encode, needed_ctas(p), l->ctas[group_of(a)]);
}

/* Return 1 if an item belongs to group `group`, and class_of its number of CTAs is `class`. */
static int is_of(const codec_cuda_encode_item *a, const struct layout *l, int group, int class)
{
	return (int)group_of(a) == group && class_of(ctas_of(a, l)) == class;
}

/* Return the maximum number of units of scratch memory that the warps of an item use. */
static uint64_t units_of(const codec_cuda_encode_item *a, const struct layout *l)
{
	return a->plan->encode_each ? WARPS * ctas_of(a, l) * a->plan->launch.encode_scratch.units : 0;
}

/* Compute the layout of the workspace. The items' plans must have been checked. */
static void lay_out(const codec_cuda_encode_item *items, size_t count, struct layout *l)
{
	uint64_t zeroed = 0, made = 0, sums = 0, arguments = 0, units[NKERNELS] = {0}, wanted = 0;

	*l = (struct layout){0};
	for (size_t i = 0; i < count; i++) {
		const codec_cuda_plan *p = items[i].plan;

		l->count[group_of(items + i)]++;
		l->ctas[group_of(items + i)] += needed_ctas(p);
		l->npreprocessings += is_preprocessed(items + i);
		zeroed += ZEROED_NBYTES(p);
		made += p->made_nbytes;
		sums += sums_nbytes(items + i);
		arguments += align16(sizeof p->view) + p->image_nbytes + p->head_nbytes;
		scratch_need(&l->units, p->encode_each, p->launch.encode_scratch.most);
	}
	for (int k = 1; k < NKERNELS; k++)
		l->first[k] = l->first[k - 1] + l->count[k - 1];
	l->results = sizeof(struct encoding) * count;
	l->preprocessings = l->results + sizeof(struct written_result) * count;
	l->arguments = l->preprocessings + align16(sizeof(struct preprocessing)) * l->npreprocessings;
	l->zeroed = l->arguments + arguments;
	for (size_t i = 0; i < count; i++) { /* groups run one after the other, so they share scratch memory */
		uint64_t *of_group = units + group_of(items + i);

		l->classes[group_of(items + i)] |= 1u << class_of(ctas_of(items + i, l));
		*of_group += units_of(items + i, l);
		wanted = *of_group > wanted ? *of_group : wanted;
	}
	scratch_limit(&l->units, wanted);
	l->made = l->zeroed + scratch_taken_nbytes(&l->units) + zeroed;
	l->sums = l->made + made;
	l->scratch = (l->sums + sums + 255) / 256 * 256;
	l->end = l->scratch + l->units.count * l->units.each;
}

/* Offsets in the workspace of one item's data. */
struct places {
	uint64_t arguments, zeroed, made, sums;
};

/* Return CODEC_OK if the arguments of an item are valid, else a status. */
static int check_item(const codec_cuda_encode_item *a)
{
	const codec_cuda_plan *p = a->plan;

	if ((p->n && !a->tensor) || (uint64_t)a->tensor % p->itemsize || !a->frame || (uint64_t)a->frame % 8 ||
	    !a->result || (uint64_t)a->result % 8 || (uint64_t)a->residual % 4)
		return CODEC_BAD_ARGUMENT;
	if (a->flags & CODEC_FEEDBACK && (!a->residual || p->codec == CODEC_LOSSLESS))
		return CODEC_BAD_ARGUMENT;
	if (p->codec == CODEC_DELTA && (a->residual || (uint64_t)a->base % p->itemsize))
		return CODEC_BAD_ARGUMENT;
	if (p->codec == CODEC_DELTA && p->n && !a->base)
		return CODEC_MISSING_BASE;
	if (a->residual && a->residual == a->tensor)
		return CODEC_BAD_ARGUMENT; /* the residual may not be the tensor, which warps still read */
	if (p->needs_levels && p->n && !a->levels)
		return CODEC_MISSING_STATE;
	return a->residual && a->capacity < p->bound ? CODEC_SHORT_OUTPUT : CODEC_OK;
}

/* Return CODEC_OK if the items' plans can be used in one call (same device), else a status. */
static int check_plans(const codec_cuda_encode_item *items, size_t count)
{
	if (!items && count)
		return CODEC_BAD_ARGUMENT;
	for (size_t i = 0; i < count; i++)
		if (items[i].struct_nbytes < sizeof *items || !items[i].plan || items[i].flags & ~CODEC_FEEDBACK ||
		    items[i].plan->device != items[0].plan->device)
			return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

int codec_cuda_encode_workspace(const codec_cuda_encode_item *items, size_t count, uint64_t *nbytes)
{
	struct layout l;

	if (!nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(check_plans(items, count));
	lay_out(items, count, &l);
	*nbytes = l.end;
	return CODEC_OK;
}

/* Return the offsets of item `a` in the workspace, and advance *next to the offsets of the following item. */
static struct places take_places(const codec_cuda_encode_item *a, struct places *next)
{
	const codec_cuda_plan *p = a->plan;
	struct places here = *next;

	next->arguments += align16(sizeof p->view) + p->image_nbytes + p->head_nbytes;
	next->zeroed += ZEROED_NBYTES(p);
	next->made += p->made_nbytes;
	next->sums += sums_nbytes(a);
	return here;
}

/* Return the units of scratch memory to pass to the kernels of an item. */
static struct units scratch_of(const codec_cuda_encode_item *a, const struct layout *l, uint64_t workspace)
{
	if (!units_of(a, l))
		return (struct units){0};
	return (struct units){workspace + l->zeroed, workspace + l->scratch, l->units.each, (uint32_t)l->units.count,
			      0};
}

static struct encoding encoding_of(const codec_cuda_encode_item *a, const struct layout *l, const struct places *at,
				   uint64_t workspace)
{
	const codec_cuda_plan *p = a->plan;
	const int feedback = (a->flags & CODEC_FEEDBACK) != 0;

	return (struct encoding){
		.view = at->arguments,
		.memory = at->arguments + align16(sizeof p->view),
		.values = feedback ? at->sums + align16(4 * p->n) : (uint64_t)a->tensor,
		.sums = feedback ? at->sums : 0,
		.residual = (uint64_t)a->residual,
		.frame = (uint64_t)a->frame,
		.capacity = a->capacity,
		.scratch = scratch_of(a, l, workspace),
		.found = at->zeroed + align16(WRITTEN_NBYTES),
		.head = at->arguments + align16(sizeof p->view) + p->image_nbytes,
		.places = at->zeroed + align16(WRITTEN_NBYTES) + align16(p->choice_nbytes),
		.out = at->zeroed,
		.exponents = p->codec == CODEC_DELTA ? (uint64_t)a->base : 0,
		.levels = p->needs_levels ? (uint64_t)a->levels : 0,
		.nparts = (uint32_t)p->nparts,
		.warps = WARPS * ctas_of(a, l),
	};
}

static struct preprocessing preprocessing_of(const codec_cuda_encode_item *a, const struct encoding *e)
{
	const int feedback = (a->flags & CODEC_FEEDBACK) != 0;

	return (struct preprocessing){
		.n = a->plan->n,
		.values = feedback ? (uint64_t)a->tensor : 0,
		.residual = feedback ? e->residual : 0,
		.sums = e->sums,
		.rounded = feedback ? e->values : 0,
		.levels = e->levels,
		.dtype = a->plan->dtype,
		.out = e->out,
	};
}

static struct places first_places(const struct layout *l, uint64_t workspace)
{
	return (struct places){workspace + l->arguments, workspace + l->zeroed + scratch_taken_nbytes(&l->units),
			       workspace + l->made, workspace + l->sums};
}

/* Upload the struct encoding of the items that belong to a group and to a class. */
static int upload_encodings(const codec_cuda_encode_item *items, size_t count, const struct layout *l, struct upload *u,
			    uint64_t workspace, int group, int class)
{
	struct places next = first_places(l, workspace);

	for (size_t i = 0; i < count; i++) {
		struct places at = take_places(items + i, &next);
		struct encoding e;

		if (!is_of(items + i, l, group, class))
			continue;
		e = encoding_of(items + i, l, &at, workspace);
		TRY(upload_add(u, &e, sizeof e));
	}
	return CODEC_OK;
}

/*
 * Upload the arguments of all kernels. The structs encoding are sorted by group, and within a group by descending
 * class.
 */
static int upload_arguments(const codec_cuda_encode_item *items, size_t count, const struct layout *l, struct upload *u,
			    uint64_t workspace)
{
	struct places next;

	for (int group = 0; group < NKERNELS; group++)
		for (int class = NCLASSES - 1; class >= 0; class--)
			if (l->classes[group] >> class & 1)
				TRY(upload_encodings(items, count, l, u, workspace, group, class));
	next = first_places(l, workspace);
	for (size_t i = 0; i < count; i++) {
		struct places at = take_places(items + i, &next);
		struct written_result r = {at.zeroed, (uint64_t)items[i].result};

		TRY(upload_add(u, &r, sizeof r));
	}
	next = first_places(l, workspace);
	for (size_t i = 0; i < count; i++) {
		struct places at = take_places(items + i, &next);
		struct encoding e = encoding_of(items + i, l, &at, workspace);
		struct preprocessing b = preprocessing_of(items + i, &e);

		if (is_preprocessed(items + i))
			TRY(upload_add(u, &b, sizeof b));
	}
	next = first_places(l, workspace);
	for (size_t i = 0; i < count; i++) {
		const codec_cuda_plan *p = items[i].plan;
		struct places at = take_places(items + i, &next);
		codec_view v = plan_view(p, at.arguments + align16(sizeof v), at.made, items[i].stream);

		TRY(upload_add(u, &v, sizeof v));
		TRY(upload_add(u, p->image, p->image_nbytes));
		TRY(upload_add(u, p->head, p->head_nbytes));
	}
	return upload_end(u);
}

/*
 * Return the number of CTAs of an item's other kernels: of the kernels that choose how the item is encoded, and of the
 * kernels that write header, side section and directory.
 */
static uint32_t other_ctas_of(const codec_cuda_encode_item *a, const struct layout *l)
{
	uint32_t most = OTHER_BLOCKS * a->plan->device->processors, ctas = WARPS * ctas_of(a, l);

	return ctas < most ? ctas : most;
}

/* Launch a kernel for the items of a group, whose struct encoding begin at device address `at`. */
static int launch_kernel(const codec_cuda_encode_item *items, size_t count, const struct layout *l, int group,
			 uint32_t k, uint64_t at, CUstream stream)
{
	struct run r = {items[0].plan->device, k, sizeof(struct encoding), stream, at, 0, 0, 0};

	for (int class = NCLASSES - 1; class >= 0; class--)
		for (size_t i = 0; l->classes[group] >> class & 1 && i < count; i++)
			if (is_of(items + i, l, group, class))
				TRY(run_add(&r, k == items[i].plan->launch.encode ? ctas_of(items + i, l)
										  : other_ctas_of(items + i, l)));
	return run_end(&r);
}

/* Launch the kernels of a group, which are the same for all its items. */
static int launch_group(const codec_cuda_encode_item *items, size_t count, const struct layout *l, int group,
			uint64_t at, CUstream stream)
{
	const codec_cuda_plan *p = items[0].plan;

	for (size_t i = 1; i < count && (int)group_of(items + i - 1) != group; i++)
		p = items[i].plan;
	if (group != KERNEL_CLOSE_FRAME) {
		if (p->launch.choose)
			TRY(launch_kernel(items, count, l, group, p->launch.choose, at, stream));
		TRY(launch_kernel(items, count, l, group, p->launch.encode, at, stream));
	}
	if (group == (int)p->launch.finish)
		TRY(launch_kernel(items, count, l, group, p->launch.finish, at, stream));
	return launch_kernel(items, count, l, group, KERNEL_CLOSE_FRAME, at, stream);
}

static int launch_preprocessing(const codec_cuda_encode_item *items, size_t count, uint64_t at, CUstream stream)
{
	const codec_cuda_device *d = items[0].plan->device;
	struct run r = {d, KERNEL_PREPROCESS, sizeof(struct preprocessing), stream, at, 0, 0, 0};

	for (size_t i = 0; i < count; i++)
		if (is_preprocessed(items + i))
			TRY(run_add(&r, elementwise_ctas(d, items[i].plan->n)));
	return run_end(&r);
}

static int launch(const codec_cuda_encode_item *items, size_t count, const struct layout *l, uint64_t workspace,
		  CUstream stream)
{
	const codec_cuda_device *d = items[0].plan->device;
	uint64_t results = workspace + l->results, number = count;
	void *args[] = {&results, &number};

	TRY(launch_preprocessing(items, count, workspace + l->preprocessings, stream));
	for (int group = 0; group < NKERNELS; group++)
		if (l->count[group])
			TRY(launch_group(items, count, l, group, workspace + sizeof(struct encoding) * l->first[group],
					 stream));
	return device_launch(d, KERNEL_FINISH_ENCODE, (uint32_t)((count + 127) / 128), 1, args, stream);
}

int codec_cuda_encode(const codec_cuda_encode_item *items, size_t count, void *workspace, uint64_t workspace_nbytes,
		      CUstream stream)
{
	const uint64_t at = (uint64_t)workspace;
	const codec_cuda_device *d;
	struct upload u;
	struct layout l;
	CUcontext before;
	int status;

	TRY(check_plans(items, count));
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
	upload_begin(&u, d, stream, at);
	status = driver_check(d->driver->fill(at + l.zeroed, 0, l.made - l.zeroed, stream));
	if (!status)
		status = upload_arguments(items, count, &l, &u, at);
	if (!status)
		status = launch(items, count, &l, at, stream);
	d->driver->context_pop(&before);
	return status;
}
