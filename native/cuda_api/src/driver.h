/* driver.h - the CUDA driver, loaded by name when it is first needed. */
#ifndef CODEC_CUDA_DRIVER_H
#define CODEC_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "codec/codec_cuda.h"

/* Types of the CUDA driver API, as its documentation defines them. */
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

#define CU_ATTRIBUTE_PROCESSORS 16 /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
#define CU_ATTRIBUTE_MAJOR 75      /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
#define CU_ATTRIBUTE_MINOR 76      /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR */

/* X(name in struct driver, exported symbol, parameters): functions of the driver, which return a CUresult. */
#define DRIVER_FUNCTIONS(X)                                                                                            \
	X(init, cuInit, (unsigned))                                                                                    \
	X(device_get, cuDeviceGet, (CUdevice *, int))                                                                  \
	X(device_attribute, cuDeviceGetAttribute, (int *, int, CUdevice))                                              \
	X(context_retain, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                           \
	X(context_release, cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                   \
	X(context_push, cuCtxPushCurrent_v2, (CUcontext))                                                              \
	X(context_pop, cuCtxPopCurrent_v2, (CUcontext *))                                                              \
	X(module_load, cuModuleLoadData, (CUmodule *, const void *))                                                   \
	X(module_unload, cuModuleUnload, (CUmodule))                                                                   \
	X(module_function, cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                \
	X(module_global, cuModuleGetGlobal_v2, (CUdeviceptr *, size_t *, CUmodule, const char *))                      \
	X(copy_to_host, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t))                                                \
	X(fill, cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                       \
	X(launch, cuLaunchKernel,                                                                                      \
	  (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **,        \
	   void **))

struct driver {
#define X(name, symbol, parameters) int(*name) parameters;
	DRIVER_FUNCTIONS(X)
#undef X
};

/* Return the CUDA driver, loaded and initialized, or NULL if it cannot be used. */
const struct driver *driver_get(void);

/*
 * Return CODEC_OK if the CUresult `result` is 0. Otherwise store it for codec_cuda_driver_error and return
 * CODEC_CUDA_DRIVER_ERROR.
 */
int driver_check(int result);

#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		int tried_ = (call);                                                                                   \
		if (tried_)                                                                                            \
			return tried_;                                                                                 \
	} while (0)

#endif
