/**
 * @file
 * codec_cuda.h - C interface of libcodec_cuda: encode and decode tensors in the memory of an NVIDIA GPU.
 *
 * Frames are bit-identical to those of codec.h: a CPU decodes frames that a GPU has encoded, and vice versa. The
 * kernels are part of the library, as machine code and as PTX. The CUDA driver is loaded by name (libcuda.so.1) when
 * the first device is opened, so that a program needs neither CUDA's headers nor its libraries.
 *
 * Guarantees of codec_cuda_encode and codec_cuda_decode
 *   - Asynchronous: work is submitted to the caller's stream, and the host does not wait for it. Kernels write sizes
 *     and statuses to device memory.
 *   - Resources: no memory is allocated, on the device or on the host. All device memory belongs to the caller.
 *   - Graphs: a call may be captured in a CUDA graph. Data in host memory is copied into the graph; the device memory
 *     that a call was given must still exist at the same address whenever the graph runs.
 *   - Memory safety: a call reads and writes only the memory that its items name and the workspace, also if a frame's
 *     bytes are damaged or malicious. An invalid frame is reported in codec_cuda_result.status.
 *   - Threads: any thread may make any call at any time. A device and a plan are immutable once opened. Calls that may
 *     run at the same time must not share a workspace, an output or a result. Calls on the same stream may share them,
 *     because they run one after the other.
 *
 * Device memory
 *   - Alignment: frames start at multiples of 8 bytes, workspaces at multiples of 256 bytes, and tensors at multiples
 *     of the size of a value. Memory from cudaMalloc and cuMemAlloc satisfies all three.
 *   - Outputs must not overlap inputs, each other or the workspace, except that DELTA's base may be the tensor to
 *     decode to. The library does not check this.
 *
 * Status: functions return CODEC_OK, another codec_status for a wrong argument, or a codec_cuda_status if a device or
 * its driver fails. Invalid values and invalid frames are detected on the device: see codec_cuda_result.status.
 */
#ifndef CODEC_CUDA_H
#define CODEC_CUDA_H

#include "codec/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* CUstream and cudaStream_t are pointers to this struct */

#define CODEC_CUDA_ABI_VERSION 1 /**< version of this header's ABI */

/** Statuses of a device and its driver, in addition to those of codec_status. */
typedef enum codec_cuda_status {
	CODEC_CUDA_NO_DRIVER = 70,    /**< libcuda.so.1 cannot be loaded, is too old, or finds no GPU */
	CODEC_CUDA_NO_DEVICE = 71,    /**< there is no device with this ordinal */
	CODEC_CUDA_NO_KERNELS = 72,   /**< the library has no kernels for this device's architecture */
	CODEC_CUDA_DRIVER_ERROR = 73, /**< a driver call failed: codec_cuda_driver_error returns its CUresult */
	CODEC_CUDA_NO_MEMORY = 74     /**< the host cannot allocate memory for a device or a plan */
} codec_cuda_status;

/** Return one English sentence that describes a codec_status or codec_cuda_status. Never returns NULL. */
CODEC_API const char *codec_cuda_strerror(int status);

/** Return the CUresult of the last driver call that failed in this thread; 0 if none has failed. */
CODEC_API int codec_cuda_driver_error(void);

/** Return CODEC_CUDA_ABI_VERSION of the loaded library. */
CODEC_API uint32_t codec_cuda_abi_version(void);

/** GPU whose kernels are loaded. */
typedef struct codec_cuda_device codec_cuda_device;

/**
 * Open the device with an ordinal of cuDeviceGet. Loads the kernels into the device's primary context, which the CUDA
 * runtime uses as well. Takes up to a second if the driver must compile PTX. Must not be called while a stream is
 * captured. Open a device once, and use it for all calls.
 */
CODEC_API int codec_cuda_open(int ordinal, codec_cuda_device **device);

/**
 * Unload the kernels. No work of the device may be in flight, and plans of the device must not be used afterwards.
 * NULL: do nothing.
 */
CODEC_API void codec_cuda_close(codec_cuda_device *device);

/** Machine code of all kernels for one architecture. All pointers point to constants in the library. */
typedef struct codec_cuda_code {
	uint32_t struct_nbytes;         /**< input: sizeof(codec_cuda_code) */
	uint32_t nkernels;              /**< length of `expressions` and `names` */
	const void *image;              /**< a cubin, for cuModuleLoadData */
	uint64_t image_nbytes;          /**< size of `image` in bytes */
	const char *const *expressions; /**< names of the kernels in the sources, for example "encode_rows<2>" */
	const char *const *names;       /**< names of the same kernels in the image, for cuModuleGetFunction */
	const char *sources;            /**< SHA-256 of the sources, in hexadecimal digits */
} codec_cuda_code;

/**
 * Find the kernels that codec_cuda_open would load on a GPU of architecture `arch`, which is 10 * major + minor
 * compute capability, for example 90. For programs that launch the kernels themselves, such as the Python package.
 * Needs no driver.
 *
 * CODEC_CUDA_NO_KERNELS: the library has no machine code for this architecture. It may have PTX.
 *
 * The kernels' parameters are not part of the ABI: before launching a kernel, compare `sources` with the digest of the
 * sources that your program was written for.
 */
CODEC_API int codec_cuda_code_for(int arch, codec_cuda_code *code);

/** Settings and sizes that follow from a spec and a tensor's dtype and shape, for one device. */
typedef struct codec_cuda_plan codec_cuda_plan;

/**
 * Make a plan for tensors with the dtype and shape of `like`, whose data is not read. The plan allocates host memory,
 * which codec_cuda_plan_close frees. `segments`, which may be NULL, are the parts of a flat tensor, as in
 * codec_context.
 *
 * CODEC_UNSUPPORTED: TRUNCATE with CODEC_LEVEL_CODING_SHARED, whose decoder needs an optimizer's state.
 */
CODEC_API int codec_cuda_plan_open(const codec_cuda_device *device, const codec_spec *spec, const codec_tensor *like,
				   const codec_segment *segments, uint64_t nsegments, codec_cuda_plan **plan);

/** Free a plan. Work that was submitted with the plan may still be in flight. NULL: do nothing. */
CODEC_API void codec_cuda_plan_close(codec_cuda_plan *plan);

/**
 * Return the upper bound in bytes of a frame of the plan's tensor, whatever its values, as codec_bound_segments does.
 */
CODEC_API uint64_t codec_cuda_bound(const codec_cuda_plan *plan);

/** Result of one item, in device memory at a multiple of 8 bytes. Valid once the stream has completed the call. */
typedef struct codec_cuda_result {
	uint64_t nbytes; /**< size of the frame in bytes; 0 after an error */
	uint32_t status; /**< a codec_status */
	uint32_t block;  /**< decode: 1 + index of the first invalid block; 0: no block is invalid */
} codec_cuda_result;

/** Tensor to encode. Pointers are addresses of device memory, except `plan`. */
typedef struct codec_cuda_encode_item {
	uint32_t struct_nbytes;      /**< sizeof(codec_cuda_encode_item) */
	uint32_t flags;              /**< 0 or CODEC_FEEDBACK: add `residual` to the tensor first */
	const codec_cuda_plan *plan; /**< plan of this tensor */
	const void *tensor;          /**< values */
	void *frame;                 /**< output: the frame */
	uint64_t capacity;           /**< size of `frame` in bytes; less than codec_cuda_bound may be too small */
	/** output: size of the frame, and status; after an error the frame's bytes are unspecified */
	codec_cuda_result *result;
	/**
	 * Output: encoding error, n float32 values, as codec_encode writes it; NULL: not computed. With a residual,
	 * `capacity` must be at least codec_cuda_bound. After an error the residual is unspecified: copy it before the
	 * call to be able to retry.
	 */
	float *residual;
	/** TRUNCATE, input: level of each value, 0..3 (codec_level_bits); NULL with CODEC_LEVEL_CODING_FIXED */
	const uint8_t *levels;
	uint64_t stream;  /**< id of the random stream, as in codec_context; not a CUDA stream */
	const void *base; /**< DELTA: base values, of the tensor's dtype and shape; NULL with other codecs */
} codec_cuda_encode_item;

/**
 * Compute the size in bytes of the workspace for encoding these items. Reads only `plan` and `flags` of each item. Most
 * of the workspace is scratch memory of warps, at most 300 MB, which all items share.
 */
CODEC_API int codec_cuda_encode_workspace(const codec_cuda_encode_item *items, size_t count, uint64_t *nbytes);

/**
 * Encode `count` tensors. All plans must be of one device. `stream` is a CUstream or cudaStream_t of that device; NULL:
 * the default stream. If the call fails, no work was submitted, except after CODEC_CUDA_DRIVER_ERROR, when a part of
 * the work may have been submitted.
 */
CODEC_API int codec_cuda_encode(const codec_cuda_encode_item *items, size_t count, void *workspace,
				uint64_t workspace_nbytes, struct CUstream_st *stream);

/** Frame to decode. Pointers are addresses of device memory, except `plan`. */
typedef struct codec_cuda_decode_item {
	uint32_t struct_nbytes;      /**< sizeof(codec_cuda_decode_item) */
	uint32_t into;               /**< CODEC_INTO_*, as in codec_context */
	const codec_cuda_plan *plan; /**< plan with the codec, dtype and shape of the frame */
	const void *frame;           /**< the frame */
	uint64_t frame_nbytes;       /**< number of bytes that may be read at `frame`, at least the frame's size */
	/**
	 * Size of the frame, read on the device when the call runs, for example codec_cuda_result.nbytes of the encoder
	 * that sent it; a size above frame_nbytes is reported as CODEC_TRUNCATED. NULL: the size is frame_nbytes.
	 */
	const uint64_t *frame_nbytes_at;
	void *tensor;              /**< output: values; their dtype is float32, unless `into` is CODEC_INTO_STORE */
	codec_cuda_result *result; /**< output: size of the frame, and status */
	float weight;              /**< CODEC_INTO_ADD: factor by which decoded values are multiplied */
	float divide;              /**< divisor of results, unless `into` is CODEC_INTO_STORE; 0: do not divide */
	const void *base;          /**< DELTA: base values; may be `tensor` itself; `into` must be CODEC_INTO_STORE */
} codec_cuda_decode_item;

/**
 * Compute the size in bytes of the workspace for decoding these items. Reads only `plan` of each item. Most of the
 * workspace is scratch memory of warps, which all items share.
 */
CODEC_API int codec_cuda_decode_workspace(const codec_cuda_decode_item *items, size_t count, uint64_t *nbytes);

/**
 * Decode `count` frames. `flags` apply to all items. CODEC_ALLOW_SLACK accepts frames in larger buffers.
 * CODEC_VERIFY_FIRST leaves a tensor unchanged if its frame is invalid, and decodes each frame twice; without it the
 * tensor is unspecified after an error.
 *
 * The codec's parameters are read from each frame. Statuses are those of codec_decode, after two checks against the
 * plan: CODEC_SHAPE_MISMATCH if the frame has another dtype or shape, CODEC_BAD_SPEC if the frame has another codec or
 * differs in the use of an entropy stage. A frame that names an agreed codebook is reported as CODEC_UNKNOWN_CODEBOOK.
 *
 * DELTA: CODEC_BAD_SPEC if a frame has more values per block than the plan. The digests of base and result are compared
 * on the device. To update a tensor in place, pass CODEC_VERIFY_FIRST: then the kernels that write values start only
 * after the whole frame was validated, and write nothing if the frame is invalid.
 */
CODEC_API int codec_cuda_decode(const codec_cuda_decode_item *items, size_t count, uint32_t flags, void *workspace,
				uint64_t workspace_nbytes, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
