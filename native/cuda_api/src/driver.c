/* driver.c - load the CUDA driver, and report its errors. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#ifndef CODEC_CUDA_DRIVER
#define CODEC_CUDA_DRIVER "libcuda.so.1" /* tests define the name of a simulated driver instead */
#endif

static struct driver driver;
static int usable;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int last_error;

/* Load the driver's functions. libcuda.so.1 is never unloaded, because devices may be open until the process ends. */
static void load(void)
{
	void *library = dlopen(CODEC_CUDA_DRIVER, RTLD_NOW | RTLD_LOCAL), *symbol;

	if (!library)
		return;
#define X(name, exported, parameters)                                                                                  \
	symbol = dlsym(library, #exported);                                                                            \
	if (!symbol)                                                                                                   \
		return;                                                                                                \
	memcpy(&driver.name, &symbol, sizeof symbol);
	DRIVER_FUNCTIONS(X)
#undef X
	usable = driver_check(driver.init(0)) == CODEC_OK;
}

const struct driver *driver_get(void)
{
	pthread_once(&once, load);
	return usable ? &driver : NULL;
}

int driver_check(int result)
{
	if (!result)
		return CODEC_OK;
	last_error = result;
	return CODEC_CUDA_DRIVER_ERROR;
}

int codec_cuda_driver_error(void)
{
	return last_error;
}

uint32_t codec_cuda_abi_version(void)
{
	return CODEC_CUDA_ABI_VERSION;
}

const char *codec_cuda_strerror(int status)
{
	switch (status) {
	case CODEC_CUDA_NO_DRIVER: return "the CUDA driver (libcuda.so.1) cannot be loaded, or finds no GPU";
	case CODEC_CUDA_NO_DEVICE: return "there is no CUDA device with this ordinal";
	case CODEC_CUDA_NO_KERNELS: return "libcodec_cuda has no kernels for the architecture of this device";
	case CODEC_CUDA_DRIVER_ERROR: return "a call of the CUDA driver failed: see codec_cuda_driver_error";
	case CODEC_CUDA_NO_MEMORY: return "the host has too little memory to open a CUDA device or to create a plan";
	default: return codec_strerror((codec_status)status);
	}
}
