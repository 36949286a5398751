/* device.c - open a GPU: load the kernels for its architecture, and read their constants. */
#include "device.h"

#include <stdlib.h>

#include "images.h"

/* Name expressions of the kernels in their sources, in the order of codec_cuda_names. */
static const char *const expressions[] = {
#define X(identifier, name, ...) name,
	KERNELS(X)
#undef X
};

/*
 * Return the image to load on architecture `arch`: machine code of the same major version and the highest minor version
 * up to that of `arch`; else PTX, which the driver compiles. NULL: there is neither.
 */
static const struct image *image_for(int arch)
{
	const struct image *best = NULL;

	for (const struct image *i = codec_cuda_images; i->arch; i++)
		if (!i->is_ptx && i->arch / 10 == arch / 10 && i->arch <= arch && (!best || i->arch > best->arch))
			best = i;
	for (const struct image *i = codec_cuda_images; i->arch && !best; i++)
		if (i->is_ptx && i->arch <= arch)
			best = i;
	return best;
}

int codec_cuda_code_for(int arch, codec_cuda_code *code)
{
	const struct image *image;

	if (!code || code->struct_nbytes < sizeof *code)
		return CODEC_BAD_ARGUMENT;
	image = image_for(arch);
	if (!image || image->is_ptx)
		return CODEC_CUDA_NO_KERNELS;
	code->nkernels = sizeof expressions / sizeof *expressions;
	code->image = image->data;
	code->image_nbytes = image->nbytes;
	code->expressions = expressions;
	code->names = codec_cuda_names;
	code->sources = codec_cuda_sources;
	return CODEC_OK;
}

/* Copy the constant array `name` of the loaded module, which has at most `count` elements, to `to`. */
static int read_constants(const codec_cuda_device *d, const char *name, uint64_t *to, size_t count)
{
	CUdeviceptr at;
	size_t nbytes;

	TRY(driver_check(d->driver->module_global(&at, &nbytes, d->module, name)));
	if (nbytes > count * sizeof *to)
		return CODEC_CUDA_NO_KERNELS;
	return driver_check(d->driver->copy_to_host(to, at, nbytes));
}

/* Load the kernels into the current context. */
static int load_kernels(codec_cuda_device *d)
{
	int major, minor, processors;
	const struct image *image;

	TRY(driver_check(d->driver->device_attribute(&major, CU_ATTRIBUTE_MAJOR, d->device)));
	TRY(driver_check(d->driver->device_attribute(&minor, CU_ATTRIBUTE_MINOR, d->device)));
	TRY(driver_check(d->driver->device_attribute(&processors, CU_ATTRIBUTE_PROCESSORS, d->device)));
	d->processors = (uint32_t)processors;
	if (!(image = image_for(10 * major + minor)))
		return CODEC_CUDA_NO_KERNELS;
	TRY(driver_check(d->driver->module_load(&d->module, image->data)));
	for (uint32_t k = 1; k < NKERNELS; k++) {
		const char *sizes = codec_kernel_at(k)->sizes;

		TRY(driver_check(d->driver->module_function(&d->kernel[k], d->module, codec_cuda_names[k - 1])));
		if (*sizes)
			TRY(read_constants(d, sizes, d->sizes[k], MAX_SIZES));
	}
	return read_constants(d, "choose_nbytes", d->choose, 2);
}

int codec_cuda_open(int ordinal, codec_cuda_device **device)
{
	codec_cuda_device *d;
	CUcontext before;
	int status;

	if (!device)
		return CODEC_BAD_ARGUMENT;
	*device = NULL;
	if (!(d = calloc(1, sizeof *d)))
		return CODEC_CUDA_NO_MEMORY;
	if (!(d->driver = driver_get())) {
		free(d);
		return CODEC_CUDA_NO_DRIVER;
	}
	if (ordinal < 0 || d->driver->device_get(&d->device, ordinal)) {
		free(d);
		return CODEC_CUDA_NO_DEVICE;
	}
	if ((status = driver_check(d->driver->context_retain(&d->context, d->device)))) {
		free(d);
		return status;
	}
	if (!(status = driver_check(d->driver->context_push(d->context)))) {
		status = load_kernels(d);
		d->driver->context_pop(&before);
	}
	if (status) {
		codec_cuda_close(d);
		return status;
	}
	*device = d;
	return CODEC_OK;
}

void codec_cuda_close(codec_cuda_device *d)
{
	CUcontext before;

	if (!d)
		return;
	if (d->module && !d->driver->context_push(d->context)) {
		d->driver->module_unload(d->module);
		d->driver->context_pop(&before);
	}
	d->driver->context_release(d->device);
	free(d);
}

int device_launch(const codec_cuda_device *d, uint32_t k, uint32_t x, uint32_t y, void **args, CUstream stream)
{
	return driver_check(
		d->driver->launch(d->kernel[k], x, y, 1, codec_kernel_at(k)->threads, 1, 1, 0, stream, args, NULL));
}

int run_end(struct run *r)
{
	uint64_t from = r->at;
	void *args[] = {&from};
	int status =
		r->count ? device_launch(r->device, r->kernel, r->most, (uint32_t)r->count, args, r->stream) : CODEC_OK;

	r->at += r->nbytes * r->count;
	r->count = r->used = r->most = 0;
	return status;
}

int run_add(struct run *r, uint32_t ctas)
{
	const uint64_t most = ctas > r->most ? ctas : r->most;

	if (r->count == MAX_GRID_Y || most * (r->count + 1) > r->used + ctas + MAX_IDLE)
		TRY(run_end(r));
	r->most = ctas > r->most ? ctas : r->most;
	r->used += ctas;
	r->count++;
	return CODEC_OK;
}
