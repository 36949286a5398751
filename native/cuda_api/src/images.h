/* images.h - kernels compiled for each architecture; images.py generates the definitions. */
#ifndef CODEC_CUDA_IMAGES_H
#define CODEC_CUDA_IMAGES_H

#include <stddef.h>

/* Kernels as machine code (a cubin) or as PTX. */
struct image {
	int arch; /* 10 * major + minor compute capability, for example 90 */
	int is_ptx;
	const void *data; /* contents; PTX ends with a zero byte */
	size_t nbytes;
};

extern const struct image codec_cuda_images[]; /* the last element has arch 0 */
/* function names in an image, in the order of the table KERNELS of job/launch.h */
extern const char *const codec_cuda_names[];
extern const char codec_cuda_sources[]; /* SHA-256 of the sources in native/cuda, in hexadecimal digits */

#endif
