/*
 * layout_decode.c - decode.c of libcodec_cuda, plus a function that reports decode.c's decisions for one frame to
 * tests.
 */
#include "decode.c"

/*
 * Write decode.c's decisions for a call with a single item to `out`; tests/engines/test_cuda_hosts.py names the
 * numbers.
 */
CODEC_API int codec_cuda_decode_decisions(const codec_cuda_decode_item *item, uint64_t *out)
{
	struct layout l;

	TRY(check_plans(item, 1));
	lay_out(item, 1, &l);
	out[0] = l.units.each;
	out[1] = l.units.count;
	return CODEC_OK;
}
