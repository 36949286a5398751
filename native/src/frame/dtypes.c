/* dtypes.c - table of dtypes: element size, form, octave. */
#include "dtype.h"

const struct dtype dtypes[] = {
	[CODEC_FLOAT32] = {4, FORM_FLOAT4, 128},
	[CODEC_FLOAT64] = {8, FORM_FLOAT8, 16},
	[CODEC_BFLOAT16] = {2, FORM_FLOAT2, 128},
	[CODEC_FLOAT16] = {2, FORM_FLOAT2, 1024},
	[CODEC_FLOAT8_E4M3FN] = {1, FORM_E4M3, 2048},
	[CODEC_FLOAT8_E5M2] = {1, FORM_E5M2, 1024},
	[CODEC_FLOAT8_E4M3FNUZ] = {1, FORM_E4M3, 2048},
	[CODEC_FLOAT8_E5M2FNUZ] = {1, FORM_E5M2, 1024},
	[CODEC_FLOAT8_E8M0FNU] = {1, FORM_BYTES1, 0},
	[CODEC_BOOL] = {1, FORM_BYTES1, 0},
	[CODEC_INT8] = {1, FORM_BYTES1, 0},
	[CODEC_INT16] = {2, FORM_BYTES2, 0},
	[CODEC_INT32] = {4, FORM_BYTES4, 0},
	[CODEC_INT64] = {8, FORM_BYTES8, 0},
	[CODEC_UINT8] = {1, FORM_BYTES1, 0},
	[CODEC_UINT16] = {2, FORM_BYTES2, 0},
	[CODEC_UINT32] = {4, FORM_BYTES4, 0},
	[CODEC_UINT64] = {8, FORM_BYTES8, 0},
};

uint32_t codec_dtype_nbytes(uint32_t dtype)
{
	const struct dtype *d = dtype_of(dtype);

	return d ? d->nbytes : 0;
}
