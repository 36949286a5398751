/* device.c - open a GPU: load the kernels for its architecture, and read their constants. */
#include "device.h"

#include <stdlib.h>

#include "images.h"

static const struct {
	uint32_t threads, resident;
} kernels[] = {
#define X(identifier, name, threads, resident) {threads, resident},
	CODEC_CUDA_KERNELS(X)
#undef X
};

/* Name expressions of the kernels in their sources, in the order of codec_cuda_names. */
static const char *const expressions[] = {
#define X(identifier, name, threads, resident) name,
	CODEC_CUDA_KERNELS(X) CODEC_CUDA_OTHER_KERNELS(X)
#undef X
};

uint32_t kernel_threads(enum kernel k)
{
	return kernels[k].threads;
}

uint32_t kernel_resident(enum kernel k)
{
	return kernels[k].resident;
}

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

/* Copy `count` constants named `name` from the loaded module to `to`. */
static int read_constants(const codec_cuda_device *d, const char *name, uint64_t *to, size_t count)
{
	CUdeviceptr at;
	size_t nbytes;

	TRY(driver_check(d->driver->module_global(&at, &nbytes, d->module, name)));
	if (nbytes < count * sizeof *to)
		return CODEC_CUDA_NO_KERNELS;
	return driver_check(d->driver->copy_to_host(to, at, count * sizeof *to));
}

static int read_scratch_sizes(codec_cuda_device *d)
{
	struct scratch_sizes *s = &d->scratch;

	TRY(read_constants(d, "encode_lossless_nbytes", &s->encode_lossless, 1));
	TRY(read_constants(d, "decode_lossless_nbytes", &s->decode_lossless, 1));
	TRY(read_constants(d, "encode_rows_nbytes", s->encode_rows, 2));
	TRY(read_constants(d, "decode_rows_nbytes", &s->decode_rows, 1));
	TRY(read_constants(d, "encode_truncate_nbytes", s->encode_truncate, 2));
	TRY(read_constants(d, "decode_truncate_nbytes", &s->decode_truncate, 1));
	TRY(read_constants(d, "encode_delta_nbytes", s->encode_delta, 4));
	TRY(read_constants(d, "decode_delta_nbytes", s->decode_delta, 4));
	return read_constants(d, "choose_nbytes", s->choose, 2);
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
	for (int k = 0; k < NKERNELS; k++)
		TRY(driver_check(d->driver->module_function(&d->kernel[k], d->module, codec_cuda_names[k])));
	return read_scratch_sizes(d);
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

int device_launch(const codec_cuda_device *d, enum kernel k, uint32_t x, uint32_t y, void **args, CUstream stream)
{
	return driver_check(d->driver->launch(d->kernel[k], x, y, 1, kernel_threads(k), 1, 1, 0, stream, args, NULL));
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
