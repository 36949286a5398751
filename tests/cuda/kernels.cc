/* kernels.cc - the kernels as functions of a shared library: NAME_launch(arguments, grid, threads, shared bytes). */
#include "cuda_on_cpu.h"

#include "before.cu"
#include "choose_lossless.cu"
#include "choose_rows.cu"
#include "choose_truncate.cu"
#include "close.cu"
#include "decode_lossless.cu"
#include "decode_rows.cu"
#include "decode_stored.cu"
#include "decode_truncate.cu"
#include "encode_lossless.cu"
#include "encode_rows.cu"
#include "encode_truncate.cu"
#include "gather.cu"

#define EXPORT(kernel) CUDA_ON_CPU_EXPORT(kernel, kernel)
#define EXPORT_SIZES(kernel)                                                                                           \
	CUDA_ON_CPU_EXPORT(kernel##_1, kernel<1>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_2, kernel<2>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_4, kernel<4>)                                                                      \
	CUDA_ON_CPU_EXPORT(kernel##_8, kernel<8>)
EXPORT(before)
EXPORT(gather)
EXPORT(choose_lossless)
EXPORT(choose_rows)
EXPORT(choose_truncate)
EXPORT(close_frame)
EXPORT_SIZES(decode_lossless)
CUDA_ON_CPU_EXPORT(decode_rows_2, decode_rows<2>)
CUDA_ON_CPU_EXPORT(decode_rows_3, decode_rows<3>)
CUDA_ON_CPU_EXPORT(decode_rows_4, decode_rows<4>)
CUDA_ON_CPU_EXPORT(decode_rows_5, decode_rows<5>)
CUDA_ON_CPU_EXPORT(decode_rows_6, decode_rows<6>)
EXPORT(decode_stored)
EXPORT(decode_truncate)
EXPORT_SIZES(encode_lossless)
EXPORT(encode_rows)
EXPORT(encode_truncate)
