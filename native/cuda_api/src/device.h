/* device.h - a GPU with its kernels, and launches on it. */
#ifndef CODEC_CUDA_DEVICE_H
#define CODEC_CUDA_DEVICE_H

#include "driver.h"
#include "kernels.h"

/* Bytes of scratch memory per warp of encoding and decoding kernels, read from constants in the kernels' module. */
struct scratch_sizes {
	uint64_t encode_lossless, decode_lossless; /* size of a unit in bytes */
	/* [0]: with an entropy stage, not counting the region; [1]: with ternary codes packed five per byte */
	uint64_t encode_rows[2];
	uint64_t encode_truncate[2]; /* [0]: levels stored separately; [1]: levels coded together with exponents */
	uint64_t decode_rows, decode_truncate;
	/* Indexed by log2 of a value's size in bytes. decode_delta: bytes per 1,024 values of a block. */
	uint64_t encode_delta[4], decode_delta[4];
	uint64_t choose[2]; /* sizes of codec_choice and of codec_part_found */
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

/*
 * kernel_threads: return the number of threads per CTA of kernel k. kernel_resident: return the number of its CTAs that
 * are resident on one multiprocessor.
 */
uint32_t kernel_threads(enum kernel k);
uint32_t kernel_resident(enum kernel k);

/* Launch a kernel with a grid of x times y CTAs; `args` are addresses of its arguments. */
int device_launch(const codec_cuda_device *d, enum kernel k, uint32_t x, uint32_t y, void **args, CUstream stream);

/*
 * Launches of a kernel for an array of argument structs in device memory; grid.y selects the struct. In a launch, every
 * struct gets as many CTAs as the struct that needs most. Structs that need few CTAs are launched separately from
 * structs that need many, so that at most 4,096 CTAs of a launch are idle. Add structs in descending order of their
 * number of CTAs, to keep the number of launches small.
 */
struct run {
	const codec_cuda_device *device;
	enum kernel kernel;
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
