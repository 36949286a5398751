/*
 * kernels.cc - compile the kernels of native/cuda_api for the CPU; tests/cuda_on_cpu/kernels.cc compiles the kernels of
 * native/cuda.
 */
#include "cuda_on_cpu.h"

#include "kernels/store.cu"
#include "kernels/finish.cu"
#include "kernels/open.cu"

CUDA_ON_CPU_EXPORT(store_bytes, store_bytes)
CUDA_ON_CPU_EXPORT(finish_encode, finish_encode)
CUDA_ON_CPU_EXPORT(open_frames, open_frames)
CUDA_ON_CPU_EXPORT(finish_decode, finish_decode)
