/*
 * kernels.cc - compile the kernels of native/cuda_api for the CPU, and compare the structs of layout.h with those of
 * .cu files; tests/cuda_on_cpu/kernels.cc compiles the kernels of native/cuda.
 */
#include "cuda_on_cpu.h"

#include "kernels/store.cu"
#include "kernels/finish.cu"
#include "kernels/open.cu"
#include "frame/preprocess.cu"
#include "frame/gather.cu"

SAME(sizeof(preprocessing), sizeof(codec_preprocessing));
SAME(AT(preprocessing, levels), AT(codec_preprocessing, levels));
SAME(AT(preprocessing, dtype), AT(codec_preprocessing, dtype));
SAME(AT(preprocessing, out), AT(codec_preprocessing, out));
SAME(sizeof(group), sizeof(codec_group));
SAME(AT(group, theta), AT(codec_group, theta));
SAME(AT(group, theta_dtype), AT(codec_group, theta_dtype));
SAME(AT(group, theta_term), AT(codec_group, theta_term));
SAME(AT(group, m_term), AT(codec_group, m_term));
SAME(sizeof(piece), sizeof(codec_piece));
SAME(AT(piece, to), AT(codec_piece, to));

CUDA_ON_CPU_EXPORT(store_bytes, store_bytes)
CUDA_ON_CPU_EXPORT(finish_encode, finish_encode)
CUDA_ON_CPU_EXPORT(open_frames, open_frames)
CUDA_ON_CPU_EXPORT(finish_decode, finish_decode)
