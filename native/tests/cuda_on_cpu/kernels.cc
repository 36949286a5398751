/* kernels.cc - export all kernels from a shared library: NAME_launch(arguments, grid, threads, shared bytes). */
#include "cuda_on_cpu.h"

#include "frame/preprocess.cu"
#include "lossless/choose.cu"
#include "rows/choose.cu"
#include "truncate/choose.cu"
#include "frame/close.cu"
#include "lossless/decode.cu"
#include "lossless/decode_fast2.cu"
#include "lossless/decode_fast4.cu"
#include "rows/decode.cu"
#include "frame/decode_stored.cu"
#include "truncate/decode.cu"
#include "lossless/encode.cu"
#include "lossless/encode_fast.cu"
#include "rows/encode.cu"
#include "truncate/encode.cu"
#include "delta/decode.cu"
#include "delta/encode.cu"
#include "topk/decode.cu"
#include "topk/encode.cu"
#include "frame/check_finite.cu"
#include "frame/gather.cu"
#include "rows/reduce.cu"

#define EXPORT(kernel) CUDA_ON_CPU_EXPORT(kernel, kernel)
#define EXPORT_SIZES(kernel)                                                                                           \
	CUDA_ON_CPU_EXPORT(kernel##_1, kernel<1>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_2, kernel<2>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_4, kernel<4>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_8, kernel<8>)
#define EXPORT_FAST(kernel)                                                                                            \
	CUDA_ON_CPU_EXPORT(kernel##_2, kernel<2>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_4, kernel<4>)
#define EXPORT_ROWS(kernel)                                                                                            \
	CUDA_ON_CPU_EXPORT(kernel##_2, kernel<2>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_3, kernel<3>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_4, kernel<4>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_5, kernel<5>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_6, kernel<6>)
EXPORT(preprocess)
EXPORT(gather)
EXPORT(check_finite)
EXPORT(choose_lossless)
EXPORT(choose_rows)
EXPORT(scale_rows)
EXPORT(choose_truncate)
EXPORT(close_frame)
EXPORT_SIZES(decode_lossless)
EXPORT_FAST(decode_lossless_fast)
EXPORT_ROWS(decode_rows)
EXPORT(decode_stored)
EXPORT(decode_truncate)
EXPORT_SIZES(encode_lossless)
EXPORT_FAST(encode_lossless_fast)
EXPORT_ROWS(reduce_rows)
CUDA_ON_CPU_EXPORT(reduce_rows_22, reduce_rows<22>)
EXPORT_ROWS(encode_rows)
CUDA_ON_CPU_EXPORT(encode_rows_22, encode_rows<22>)
EXPORT(encode_truncate)
EXPORT_SIZES(decode_delta)
EXPORT_SIZES(encode_delta)
EXPORT(decode_topk)
EXPORT(choose_topk)
EXPORT(encode_topk)
