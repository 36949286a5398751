/* images.c - kernels for tests/cuda_api/libcuda.cc, which has them in other libraries. */
#include "images.h"
#include "kernels.h"

const struct image codec_cuda_images[] = {{80, 0, "not for this device"}, {90, 0, "kernels on the CPU"}, {0, 0, NULL}};
const char *const codec_cuda_names[] = {
#define X(identifier, name, threads, resident) name,
	CODEC_CUDA_KERNELS(X)
#undef X
};
