/* images.c - placeholders for kernel images: libcuda.cc loads the kernels from shared libraries instead. */
#include "images.h"
#include "job/launch.h"

#define IMAGE(arch, text) {arch, 0, text, sizeof text}
const struct image codec_cuda_images[] = {
	IMAGE(80, "not for this device"), IMAGE(90, "kernels on the CPU"), {0, 0, NULL, 0}};
const char *const codec_cuda_names[] = {
#define X(identifier, name, ...) name,
	KERNELS(X)
#undef X
};
const char codec_cuda_sources[] = "those of another version";
