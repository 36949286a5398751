/* device.h - a GPU with its kernels, and launches on it. */
#ifndef CODEC_CUDA_DEVICE_H
#define CODEC_CUDA_DEVICE_H

#include "driver.h"
#include "kernels.h"

/* Bytes of scratch memory that warps of encoding and decoding kernels need, as the kernels' files define them. */
struct scratch_sizes {
	uint64_t encode_lossless, decode_lossless; /* bytes of a unit */
	uint64_t encode_rows[2]; /* with an entropy stage, without the region; with codes of which five share a byte */
	uint64_t encode_truncate[2]; /* index 0: levels stored separately; 1: coded together with symbols */
	uint64_t decode_rows, decode_truncate;
	/* By the size of a value; decode_delta: for each 1,024 values of a block. */
	uint64_t encode_delta[4], decode_delta[4];
	uint64_t choose[2]; /* bytes of a codec_choice, and of a codec_part_found */
};

struct codec_cuda_device {
	const struct driver *driver;
	CUdevice device;
	CUcontext context;
	CUmodule module;
	CUfunction kernel[NKERNELS];
	struct scratch_sizes scratch;
	uint32_t processors;
};

/* Return the threads of a CTA of a kernel, and the CTAs of it that are resident on a multiprocessor. */
uint32_t kernel_threads(enum kernel k);
uint32_t kernel_resident(enum kernel k);

/* Launch a kernel with a grid of x times y CTAs; `args` are addresses of its arguments. */
int device_launch(const codec_cuda_device *d, enum kernel k, uint32_t x, uint32_t y, void **args, CUstream stream);

/*
 * Launches of a kernel for adjacent structs in device memory: grid.y selects the struct. All structs of a launch have
 * as many CTAs as the one with most, so structs with few are launched apart from it: at most 4,096 CTAs of a launch
 * find no work. Few launches are needed if structs are in descending order of CTAs.
 */
struct run {
	const codec_cuda_device *device;
	enum kernel kernel;
	uint64_t nbytes; /* bytes of a struct of arguments */
	CUstream stream;
	uint64_t at, count; /* structs not launched yet: device address and number */
	uint64_t used;      /* sum of their CTAs */
	uint32_t most;      /* CTAs of the largest one */
};

/* Launch the kernel with `ctas` CTAs for the next struct, now or with later ones. */
int run_add(struct run *r, uint32_t ctas);

/* Launch the kernel for the last structs. */
int run_end(struct run *r);

#endif
