/* kernels.cc - the kernels as functions of a shared library: NAME_launch(arguments, grid, threads, shared bytes). */
#include "cuda_on_cpu.h"

#include "before.cu"
#include "choose.cu"
#include "choose_rows.cu"
#include "choose_truncate.cu"
#include "close.cu"
#include "decode.cu"
#include "encode.cu"

CUDA_ON_CPU_EXPORT(add_feedback)
CUDA_ON_CPU_EXPORT(check_levels)
CUDA_ON_CPU_EXPORT(metric_exponents)
CUDA_ON_CPU_EXPORT(value_exponents)
CUDA_ON_CPU_EXPORT(choose_lossless)
CUDA_ON_CPU_EXPORT(choose_rows)
CUDA_ON_CPU_EXPORT(choose_truncate)
CUDA_ON_CPU_EXPORT(close_frame)
CUDA_ON_CPU_EXPORT(decode_lossless1)
CUDA_ON_CPU_EXPORT(decode_lossless2)
CUDA_ON_CPU_EXPORT(decode_lossless4)
CUDA_ON_CPU_EXPORT(decode_lossless8)
CUDA_ON_CPU_EXPORT(decode_stored)
CUDA_ON_CPU_EXPORT(decode_sign)
CUDA_ON_CPU_EXPORT(decode_ternary)
CUDA_ON_CPU_EXPORT(decode_float8)
CUDA_ON_CPU_EXPORT(decode_float4)
CUDA_ON_CPU_EXPORT(decode_quantize)
CUDA_ON_CPU_EXPORT(decode_truncate)
CUDA_ON_CPU_EXPORT(encode_lossless1)
CUDA_ON_CPU_EXPORT(encode_lossless2)
CUDA_ON_CPU_EXPORT(encode_lossless4)
CUDA_ON_CPU_EXPORT(encode_lossless8)
CUDA_ON_CPU_EXPORT(encode_rows)
CUDA_ON_CPU_EXPORT(encode_truncate)
