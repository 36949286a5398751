/**
 * @file
 * codec_cuda.h - C interface of libcodec_cuda: encode and decode tensors in the memory of an NVIDIA GPU.
 *
 * Frames are those of codec.h, bit for bit: a CPU decodes what a GPU has encoded, and the reverse. The kernels are part
 * of the library, as machine code and as PTX. The CUDA driver is loaded by name (libcuda.so.1) when the first device is
 * opened, so that a program needs neither CUDA's headers nor its libraries.
 *
 * Guarantees of codec_cuda_encode and codec_cuda_decode
 *   - Asynchronous: work is submitted to the caller's stream, and the host waits for nothing. Sizes and statuses are
 *     written to device memory.
 *   - Resources: no memory is allocated, on the device or on the host. All device memory belongs to the caller.
 *   - Graphs: a call may be captured in a CUDA graph. Everything that the host passes is copied into the graph; the
 *     device memory that the call names must exist, unmoved, when the graph runs.
 *   - Memory safety: whatever bytes a frame has, only the memory that an item names and the workspace are read or
 *     written. An invalid frame gives a status.
 *   - Threads: any thread may make any call at any time. A device and a plan do not change after they were opened. Two
 *     calls must not use one workspace, one output or one result at a time; calls on the same stream may, because they
 *     run one after the other.
 *
 * Device memory
 *   - Frames lie at multiples of 8 bytes, workspaces at multiples of 256, and tensors at multiples of the size of a
 *     value. Memory of cudaMalloc and cuMemAlloc does.
 *   - Outputs must not overlap inputs, each other or the workspace, except that DELTA's base may be the tensor to
 * decode to. Addresses are not compared.
 *
 * Status: functions return CODEC_OK, another codec_status for a wrong argument, or a codec_cuda_status if a device or
 * its driver fails. Errors of values and frames are known on the device only: codec_cuda_result.status.
 */
#ifndef CODEC_CUDA_H
#define CODEC_CUDA_H

#include "codec/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* a CUstream, and a cudaStream_t, is a pointer to it */

#define CODEC_CUDA_ABI_VERSION 1 /**< version of this header's ABI */

/** Statuses of a device and its driver, beside those of codec_status. */
typedef enum codec_cuda_status {
	CODEC_CUDA_NO_DRIVER = 70,    /**< libcuda.so.1 cannot be loaded, is too old, or finds no GPU */
	CODEC_CUDA_NO_DEVICE = 71,    /**< there is no device of this ordinal */
	CODEC_CUDA_NO_KERNELS = 72,   /**< the library has no kernels for this device's architecture */
	CODEC_CUDA_DRIVER_ERROR = 73, /**< a driver call failed: codec_cuda_driver_error has its number */
	CODEC_CUDA_NO_MEMORY = 74     /**< the host has no memory for a device or a plan */
} codec_cuda_status;

/** Return one English sentence that describes a codec_status or codec_cuda_status. Never returns NULL. */
CODEC_API const char *codec_cuda_strerror(int status);

/** Return the CUresult of this thread's last driver call that failed; 0: none. */
CODEC_API int codec_cuda_driver_error(void);

/** Return CODEC_CUDA_ABI_VERSION of the loaded library. */
CODEC_API uint32_t codec_cuda_abi_version(void);

/** GPU whose kernels are loaded. */
typedef struct codec_cuda_device codec_cuda_device;

/**
 * Open a device by its ordinal, as cuDeviceGet counts: load the kernels into its primary context, which the CUDA
 * runtime uses as well. Takes up to a second where the driver compiles PTX. Do not call it while a stream is captured.
 * Open a device once, and use it for all calls.
 */
CODEC_API int codec_cuda_open(int ordinal, codec_cuda_device **device);

/** Unload the kernels. No plan of the device may be used after that, and no work may be in flight. NULL: do nothing. */
CODEC_API void codec_cuda_close(codec_cuda_device *device);

/** Machine code of all kernels for one architecture. All pointers are to constants of the library. */
typedef struct codec_cuda_code {
	uint32_t struct_nbytes;         /**< input: sizeof(codec_cuda_code) */
	uint32_t nkernels;              /**< length of `expressions` and `names` */
	const void *image;              /**< a cubin, for cuModuleLoadData */
	uint64_t image_nbytes;          /**< size of `image` in bytes */
	const char *const *expressions; /**< names of the kernels in their sources, for example "encode_rows<2>" */
	const char *const *names;       /**< names of the same kernels in the image, for cuModuleGetFunction */
	const char *sources;            /**< SHA-256 of the sources, in hexadecimal digits */
} codec_cuda_code;

/**
 * Find the kernels that codec_cuda_open loads on a GPU of an architecture: 10 * major + minor compute capability, for
 * example 90. This is for programs that have a host part of their own, such as the Python package. It needs no driver.
 *
 * CODEC_CUDA_NO_KERNELS: the library has no machine code for this architecture, at most PTX.
 *
 * The kernels' parameters are no part of the ABI: compare `sources` with the digest of the sources that you know.
 */
CODEC_API int codec_cuda_code_for(int arch, codec_cuda_code *code);

/** All that a spec and the shape of a tensor determine, on one device. */
typedef struct codec_cuda_plan codec_cuda_plan;

/**
 * Make a plan for tensors like `like`, whose data is not read. The host's memory that the plan takes is freed by
 * codec_cuda_plan_close. `segments`, which may be NULL, are the parts of a flat tensor, as in codec_context.
 *
 * CODEC_UNSUPPORTED: TRUNCATE with CODEC_LEVEL_CODING_SHARED, whose decoder needs an optimizer's state.
 */
CODEC_API int codec_cuda_plan_open(const codec_cuda_device *device, const codec_spec *spec, const codec_tensor *like,
				   const codec_segment *segments, uint64_t nsegments, codec_cuda_plan **plan);

/** Free a plan. Work that was submitted with it may still run. NULL: do nothing. */
CODEC_API void codec_cuda_plan_close(codec_cuda_plan *plan);

/** Return the size in bytes of the largest frame of such a tensor, for any values: codec_bound_segments. */
CODEC_API uint64_t codec_cuda_bound(const codec_cuda_plan *plan);

/** Result in device memory, valid when the stream has passed the call. Its address is a multiple of 8. */
typedef struct codec_cuda_result {
	uint64_t nbytes; /**< size of the frame in bytes; 0 after an error */
	uint32_t status; /**< a codec_status */
	uint32_t block;  /**< decode: 1 + index of the first invalid block; 0: the error belongs to no block */
} codec_cuda_result;

/** Tensor to encode. Pointers are addresses of device memory, except `plan`. */
typedef struct codec_cuda_encode_item {
	uint32_t struct_nbytes;      /**< sizeof(codec_cuda_encode_item) */
	uint32_t flags;              /**< 0 or CODEC_FEEDBACK: add `residual` to the tensor first */
	const codec_cuda_plan *plan; /**< plan of this tensor */
	const void *tensor;          /**< values */
	void *frame;                 /**< output: the frame */
	uint64_t capacity;           /**< size of `frame` in bytes; less than codec_cuda_bound may not suffice */
	codec_cuda_result *result;   /**< output: size of the frame, and status; a frame with an error is unspecified */
	/**
	 * Output: encoding error, n float32 values, as codec_encode writes it; NULL: not wanted. `capacity` must then
	 * be at least codec_cuda_bound. After an error the residual is unspecified: to go on, keep a copy.
	 */
	float *residual;
	/** TRUNCATE, input: level of each value, 0..3 (codec_level_bits); NULL with CODEC_LEVEL_CODING_FIXED */
	const uint8_t *levels;
	uint64_t stream;  /**< random stream id, as in codec_context; not the CUDA stream */
	const void *base; /**< DELTA: values of the base, as `tensor` is; NULL with other codecs */
} codec_cuda_encode_item;

/**
 * Compute the size in bytes of the workspace that encoding these items needs. Only `plan` and `flags` are read.
 * The tensors of a batch share the scratch memory of the warps that run at once, which is most of the workspace:
 * at most 100 MB.
 */
CODEC_API int codec_cuda_encode_workspace(const codec_cuda_encode_item *items, size_t count, uint64_t *nbytes);

/**
 * Encode `count` tensors. All plans must be of one device. `stream` is a CUstream or cudaStream_t of that device; NULL:
 * the default stream. On an error nothing was submitted, unless it is CODEC_CUDA_DRIVER_ERROR.
 */
CODEC_API int codec_cuda_encode(const codec_cuda_encode_item *items, size_t count, void *workspace,
				uint64_t workspace_nbytes, struct CUstream_st *stream);

/** Frame to decode. Pointers are addresses of device memory, except `plan`. */
typedef struct codec_cuda_decode_item {
	uint32_t struct_nbytes;      /**< sizeof(codec_cuda_decode_item) */
	uint32_t into;               /**< CODEC_INTO_*, as in codec_context */
	const codec_cuda_plan *plan; /**< plan whose codec, dtype and shape are the frame's */
	const void *frame;           /**< the frame */
	uint64_t frame_nbytes;       /**< bytes that may be read at `frame`, at least the frame's size */
	/**
	 * Size of the frame, read on the device when the call runs, for example codec_cuda_result.nbytes of the encoder
	 * that sent it; values above frame_nbytes are CODEC_TRUNCATED. NULL: the size is frame_nbytes.
	 */
	const uint64_t *frame_nbytes_at;
	void *tensor;              /**< output: values; float32 unless `into` is CODEC_INTO_STORE */
	codec_cuda_result *result; /**< output: size of the frame, and status */
	float weight;              /**< CODEC_INTO_ADD: factor of decoded values */
	float divide;              /**< not CODEC_INTO_STORE: divide results by this; 0: do not */
	const void *base;          /**< DELTA: values of the base, which may be `tensor` itself; `into` is STORE */
} codec_cuda_decode_item;

/**
 * Compute the size in bytes of the workspace that decoding these items needs. Only `plan` is read. See
 * codec_cuda_encode_workspace.
 */
CODEC_API int codec_cuda_decode_workspace(const codec_cuda_decode_item *items, size_t count, uint64_t *nbytes);

/**
 * Decode `count` frames. `flags`, for all items: CODEC_ALLOW_SLACK, for frames in larger buffers; CODEC_VERIFY_FIRST,
 * which leaves tensors unchanged if their frame is invalid, and decodes each frame twice. Without it the tensor is
 * unspecified after an error.
 *
 * Frames carry their own parameters. The status of a frame is as codec_decode returns it, and first of all
 * CODEC_SHAPE_MISMATCH if dtype or shape are not the plan's, or CODEC_BAD_SPEC if the codec, or its use of an entropy
 * stage, is not. A frame that names an agreed codebook is CODEC_UNKNOWN_CODEBOOK.
 *
 * DELTA: blocks of a frame have at most as many values as the plan's, or the status is CODEC_BAD_SPEC. The digests of
 * base and result are compared on the device. To update a tensor in place, pass CODEC_VERIFY_FIRST: then nothing is
 * written before the verdict, which the writing kernels read on the device.
 */
CODEC_API int codec_cuda_decode(const codec_cuda_decode_item *items, size_t count, uint32_t flags, void *workspace,
				uint64_t workspace_nbytes, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
