/*
 * layout_encode.c - encode.c of libcodec_cuda, plus functions that report encode.c's decisions for one tensor to tests.
 */
#include "encode.c"

#include <string.h>

/*
 * Write encode.c's decisions for a call with a single item to `out`; tests/engines/test_cuda_hosts.py names the
 * numbers.
 */
CODEC_API int codec_cuda_encode_decisions(const codec_cuda_encode_item *item, uint64_t *out)
{
	const codec_cuda_plan *p = item->plan;
	const struct places none = {0};
	struct layout l;
	struct encoding e;

	TRY(check_plans(item, 1));
	lay_out(item, 1, &l);
	e = encoding_of(item, &l, &none, 0);
	out[0] = p->bound;
	out[1] = e.nparts;
	out[2] = e.warps;
	out[3] = l.units.each;
	out[4] = l.units.count;
	out[5] = e.scratch.count;
	out[6] = scratch_taken_nbytes(&l.units);
	out[7] = ZEROED_NBYTES(p);
	out[8] = p->made_nbytes;
	out[9] = align16(sizeof p->view) + p->image_nbytes + p->head_nbytes;
	out[10] = sums_nbytes(item);
	return CODEC_OK;
}

/*
 * Write the view, arrays and header that kernels read to `to`. Arrays that kernels fill begin `made` bytes after the
 * view.
 */
CODEC_API void codec_cuda_encode_upload(const codec_cuda_plan *p, uint64_t made, uint64_t stream, uint8_t *to)
{
	const uint64_t memory = align16(sizeof p->view);
	const codec_view v = plan_view(p, memory, made, stream);

	memset(to, 0, memory);
	memcpy(to, &v, sizeof v);
	memcpy(to + memory, p->image, p->image_nbytes);
	memcpy(to + memory + p->image_nbytes, p->head, p->head_nbytes);
}
