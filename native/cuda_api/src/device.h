/* device.h - a GPU with its kernels, and launches on it. */
#ifndef CODEC_CUDA_DEVICE_H
#define CODEC_CUDA_DEVICE_H

#include "driver.h"
#include "job/launch.h"
#include "layout.h"

#define MAX_SIZES 4 /* maximum number of elements of an array of scratch sizes */

struct codec_cuda_device {
	const struct driver *driver;
	CUdevice device;
	CUcontext context;
	CUmodule module;
	CUfunction kernel[NKERNELS];
	uint64_t sizes[NKERNELS][MAX_SIZES]; /* per kernel: its constant array codec_kernel.sizes */
	uint64_t choose[2];                  /* sizes of codec_choice and of codec_part_found in bytes */
	uint32_t processors;
};

/* Launch a kernel with a grid of x times y CTAs; `args` are addresses of its arguments. */
int device_launch(const codec_cuda_device *d, uint32_t k, uint32_t x, uint32_t y, void **args, CUstream stream);

/*
 * Launches of a kernel for an array of argument structs in device memory; grid.y selects the struct. In a launch, every
 * struct gets as many CTAs as the struct that needs most. Structs that need few CTAs are launched separately from
 * structs that need many, so that at most 4,096 CTAs of a launch are idle. Add structs in descending order of their
 * number of CTAs, to keep the number of launches small.
 */
struct run {
	const codec_cuda_device *device;
	uint32_t kernel;
	uint64_t nbytes; /* size of a struct of arguments in bytes */
	CUstream stream;
	uint64_t at, count; /* structs not launched yet: device address of the first, and their number */
	uint64_t used;      /* sum of the CTAs of structs not launched yet */
	uint32_t most;      /* largest number of CTAs of a struct not launched yet */
};

/* Add the next struct, which needs `ctas` CTAs. It is launched now, or together with later structs. */
int run_add(struct run *r, uint32_t ctas);

/* Launch the kernel for the structs that are not launched yet. */
int run_end(struct run *r);

#endif
