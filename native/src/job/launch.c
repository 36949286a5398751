/* launch.c - choose the kernels of native/cuda for a job, and their scratch memory. */
#include "launch.h"

#include "api.h"

#define WARPS 4 /* warps per CTA of kernels that encode or decode blocks: WARPS of native/cuda/frame/encode.cuh */

static const codec_kernel kernels[] = {
#define X(identifier, name, file, threads, resident, blocks, sizes)                                                    \
	[KERNEL_##identifier] = {name, file, sizes, threads, resident, blocks, (blocks) == 1 ? WARPS : (threads) / 32},
	KERNELS(X)
#undef X
};

const codec_kernel *codec_kernel_at(uint32_t number)
{
	return number > KERNEL_NONE && number < NKERNELS ? kernels + number : NULL;
}

/* Return scratch memory of `units` units per warp, each `times` times as large as the kernel's size `index`. */
static codec_scratch_units scratch_of(uint32_t index, uint64_t times, uint32_t units)
{
	return (codec_scratch_units){.index = index, .units = units, .most = units, .times = times};
}

static int is_half(uint32_t dtype)
{
	return dtype == CODEC_BFLOAT16 || dtype == CODEC_FLOAT16;
}

/* LOSSLESS. A frame's planes determine which decoder can decode it, and how many planes its scratch memory holds. */
static void launch_lossless(const struct header *h, int encoding, uint32_t log2, codec_launch *l)
{
	const int is_fast = is_half(h->dtype) || h->dtype == CODEC_FLOAT32;
	const int plain = WIRE_ONLY_PLANE_0(h->fixed, h->halved, 1 << log2);

	l->choose = KERNEL_CHOOSE_LOSSLESS;
	l->encode = !is_fast ? KERNEL_ENCODE_LOSSLESS_1 + log2
			     : (is_half(h->dtype) ? KERNEL_ENCODE_LOSSLESS_FAST_2 : KERNEL_ENCODE_LOSSLESS_FAST_4);
	l->encode_scratch = scratch_of(0, 1, is_fast ? 1 : 2);
	l->encode_scratch.most = (1 << log2) + 1;
	l->decode = KERNEL_DECODE_LOSSLESS_1 + log2;
	if (is_fast && (encoding || (h->nblocks && h->coded & 1 && plain)))
		l->decode_fast = is_half(h->dtype) ? KERNEL_DECODE_LOSSLESS_FAST_2 : KERNEL_DECODE_LOSSLESS_FAST_4;
	if (encoding)
		l->decode_scratch = scratch_of(0, 1, 1 << log2);
	else if (!plain && h->coded)
		l->decode_scratch = scratch_of(0, 1, (uint32_t)__builtin_popcount(h->coded));
}

static void launch_rows(const struct header *h, int encoding, codec_launch *l, const struct job *j)
{
	const struct row_kind q = header_kind(h);
	const uint32_t number = h->codec - CODEC_SIGN;

	l->choose = KERNEL_CHOOSE_ROWS;
	l->encode = q.affine ? KERNEL_ENCODE_ROWS_22 : KERNEL_ENCODE_ROWS_2 + number;
	l->decode = KERNEL_DECODE_ROWS_2 + number;
	if (h->codec == CODEC_SIGN && encoding && j->nscans)
		l->finish = KERNEL_SCALE_ROWS;
	if (q.entropy) {
		l->encode_scratch = scratch_of(0, 1, 1);
		l->encode_scratch.more = (j->plan.region_bound + 63) / 64 * 64;
		l->decode_scratch = scratch_of(0, 1, 1);
		return;
	}
	if (!q.bits) /* five codes per byte */
		l->encode_scratch = scratch_of(1, 1, 1);
	l->reduce = q.affine ? KERNEL_REDUCE_ROWS_22 : KERNEL_REDUCE_ROWS_2 + number;
}

static void launch_blocks(const struct header *h, int encoding, codec_launch *l, const struct job *j)
{
	const uint32_t log2 = (uint32_t)__builtin_ctz(dtype_of(h->dtype)->nbytes);

	if (codec_is_rows(h->codec)) {
		launch_rows(h, encoding, l, j);
	} else if (codec_is_delta(h->codec)) {
		l->encode = KERNEL_ENCODE_DELTA_1 + log2;
		l->encode_scratch = scratch_of(log2, 1, 1);
		l->decode = KERNEL_DECODE_DELTA_1 + log2;
		if (h->nblocks) /* per group of 1,024 values of a block */
			l->decode_scratch = scratch_of(log2, (MIN(h->block, h->n) + 1023) / 1024, 1);
	} else if (h->codec == CODEC_TRUNCATE) {
		l->choose = KERNEL_CHOOSE_TRUNCATE;
		l->encode = KERNEL_ENCODE_TRUNCATE;
		l->encode_scratch = scratch_of(h->variant == CODEC_LEVEL_CODING_CODED, 1, 1);
		l->decode = KERNEL_DECODE_TRUNCATE;
		l->decode_scratch = scratch_of(0, 1, 1);
	} else if (h->codec == CODEC_TOPK) {
		l->choose = j->nscans ? KERNEL_CHOOSE_TOPK : KERNEL_NONE;
		l->encode = KERNEL_ENCODE_TOPK;
		l->encode_scratch = scratch_of(0, 0, 1);
		l->encode_scratch.more = (j->plan.region_bound + 63) / 64 * 64; /* a buffer for one coded block */
		l->decode = KERNEL_DECODE_TOPK;
	} else {
		launch_lossless(h, encoding, log2, l);
	}
}

codec_status codec_job_launch(const void *job, codec_launch *launch)
{
	const struct job *j = any_job(job);
	codec_launch l;
	int encoding;

	if (!j || !launch || launch->struct_nbytes < sizeof(uint32_t))
		return CODEC_BAD_ARGUMENT;
	memset(&l, 0, sizeof l);
	l.struct_nbytes = launch->struct_nbytes;
	encoding = j->kind == JOB_ENCODE;
	if (!encoding && j->h.layout == WIRE_LAYOUT_STORED)
		l.decode = KERNEL_DECODE_STORED;
	else
		launch_blocks(&j->h, encoding, &l, j);
	if (!encoding)
		l.choose = l.encode = l.finish = KERNEL_NONE;
	if (!encoding || !j->h.nblocks)
		l.encode_scratch = (codec_scratch_units){0};
	memcpy(launch, &l, MIN(launch->struct_nbytes, sizeof l));
	return CODEC_OK;
}
