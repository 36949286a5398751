/* device.h - a GPU with its kernels, and launches on it. */
#ifndef CODEC_CUDA_DEVICE_H
#define CODEC_CUDA_DEVICE_H

#include "driver.h"
#include "kernels.h"

/* Bytes of scratch memory that warps of encoding and decoding kernels need, as the kernels' files define them. */
struct scratch_sizes {
	uint64_t encode_lossless, decode_lossless; /* of a unit */
	uint64_t encode_rows[2]; /* with an entropy stage, without the region; with codes of which five share a byte */
	uint64_t encode_truncate[2]; /* levels apart from symbols; coded together */
	uint64_t decode_rows, decode_truncate;
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
 * Launch a kernel for `count` adjacent structs of `nbytes` bytes at device address `at`, each with x CTAs: grid.y
 * selects the struct.
 */
int device_launch_each(const codec_cuda_device *d, enum kernel k, uint32_t x, uint64_t count, uint64_t at,
		       uint64_t nbytes, CUstream stream);

#endif
