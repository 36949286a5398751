/**
 * @file
 * codec.h - C interface of libcodec: compress tensors to frames and decompress frames to tensors.
 *
 * A frame is a self-describing, checksummed sequence of bytes that holds one tensor. docs/spec/format.md specifies its
 * layout. Equal tensors and equal specs give equal bytes on every CPU, for any number of threads and any buffer
 * address.
 *
 * Guarantees of every function
 *   - Resources: a function allocates no memory, does no I/O, starts no thread and raises no signal, on any input. It
 *     uses at most 16 KiB of stack. The library keeps no state between calls except the result of CPUID.
 *   - Memory safety: a function reads and writes only the spans it is given, whatever bytes they contain. Every pointer
 *     has a size in bytes or values; NULL with size 0 is an empty span.
 *   - Threads: any thread may call any function at any time; calls are independent of each other. If another thread
 *     writes to a tensor, a frame or a metric's state during a call, the result may be wrong, but memory safety holds.
 *     Structs, segments and codebooks must not change during a call.
 *   - Floating point: results do not depend on the caller's rounding mode or flush-to-zero mode. Both are restored
 *     before the call returns; exception flags raised during the call are discarded.
 *   - Aliasing: outputs (frame, residual, destination, scratch) must not overlap inputs or each other, unless the
 *     function's description allows it. Overlaps among frames, tensors, residuals, levels and a metric's arrays are
 *     detected and return CODEC_BAD_ARGUMENT.
 *   - Versions: every struct begins with its own size in bytes. A program built with a later header may pass larger
 *     structs. Each struct must contain all fields declared below, those of ABI version 1. Fields that later versions
 *     add are read as 0 where the caller's struct lacks them.
 *
 * Limits
 *   - The checksum detects accidental damage. It does not authenticate: an attacker who alters a frame can recompute
 *     its checksum. Decoding such a frame is safe and gives some tensor of the declared shape, or an error.
 *
 * Order of errors
 *   - If a frame has several faults, the first of this order is reported: header; side section; the lowest-numbered
 *     faulty block (its directory entry, then its digest, then its contents); checksum of the whole frame.
 *   - A mismatch between the frame and the caller's destination, state or codebooks (status below 30, or 60 and above)
 *     is reported only if the frame's checksums are correct.
 *
 * One file: programs include nothing else.
 */
#ifndef CODEC_H
#define CODEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef CODEC_API
#if defined(__GNUC__)
#define CODEC_API __attribute__((visibility("default")))
#else
#define CODEC_API
#endif
#endif

#define CODEC_ABI_VERSION 2    /**< version of this header's ABI */
#define CODEC_FORMAT_VERSION 1 /**< version of the frames that this library writes */
#define CODEC_MAX_RANK 8       /**< maximum number of dimensions of a tensor */

/**
 * Status codes. Their values never change. Each decade has one cause: 0 success; 10-19 the caller's arguments; 20-29 a
 * buffer is too small; 30-39 the frame violates the format; 40-49 the frame was damaged; 50-59 the frame is valid, but
 * this library cannot decode it; 60-69 the caller must supply something that decoding needs.
 */
typedef enum codec_status {
	CODEC_OK = 0,
	CODEC_BAD_ARGUMENT = 10,     /**< a pointer is NULL, or a field of a struct is out of range */
	CODEC_BAD_SPEC = 11,         /**< unknown codec, or parameters that it does not accept */
	CODEC_BAD_DTYPE = 12,        /**< the codec does not accept this dtype */
	CODEC_BAD_SHAPE = 13,        /**< rank above CODEC_MAX_RANK, or a shape whose product overflows */
	CODEC_BAD_SEGMENTS = 14,     /**< segments overlap, are not ascending or exceed the tensor */
	CODEC_BAD_CODEBOOK = 15,     /**< invalid code lengths, or an id or symbols that do not match */
	CODEC_SHAPE_MISMATCH = 16,   /**< the destination's dtype or shape differs from the frame's */
	CODEC_NONFINITE = 17,        /**< the tensor holds NaN or Inf, which the codec cannot encode */
	CODEC_BAD_SCALE = 18,        /**< the given scale is smaller than a value's magnitude */
	CODEC_ROUNDED_SCALE = 19,    /**< the given scale is 0 or Inf in the tensor's dtype */
	CODEC_SHORT_OUTPUT = 20,     /**< the frame needs more than `capacity` bytes */
	CODEC_SHORT_SCRATCH = 21,    /**< scratch is smaller than codec_scratch requires */
	CODEC_TRUNCATED = 30,        /**< the frame has fewer bytes than a header, or than the header declares */
	CODEC_TRAILING = 31,         /**< bytes follow the frame, and CODEC_ALLOW_SLACK is not set */
	CODEC_BAD_MAGIC = 32,        /**< the bytes do not start with the magic number of a frame */
	CODEC_BAD_HEADER = 33,       /**< a header field has a value that the format forbids */
	CODEC_BAD_SIDE = 34,         /**< the scale model or a codebook is malformed */
	CODEC_BAD_DIRECTORY = 35,    /**< the directory's regions are out of order or out of bounds */
	CODEC_BAD_REGION = 36,       /**< a block's contents are malformed */
	CODEC_CHECKSUM = 40,         /**< a checksum does not match: the frame was damaged */
	CODEC_UNSUPPORTED = 50,      /**< later format version, or unknown codec */
	CODEC_LIMIT = 51,            /**< tensor larger than max_nbytes, or than the format allows */
	CODEC_UNKNOWN_CODEBOOK = 60, /**< the frame names a codebook that was not supplied */
	CODEC_MISSING_STATE = 61,    /**< the codec needs a metric with its state, or levels */
	CODEC_OTHER_STATE = 62,      /**< the frame was encoded with a different optimizer state */
	CODEC_MISSING_BASE = 63,     /**< DELTA: codec_context.base is NULL */
	CODEC_OTHER_BASE = 64,       /**< DELTA: the base is not the tensor that the frame was encoded against */
	CODEC_ALREADY_APPLIED = 65   /**< DELTA: the base is the frame's result, so it was decoded in place before */
} codec_status;

/** Return one English sentence that describes `status`. Never returns NULL, for any argument. */
CODEC_API const char *codec_strerror(codec_status status);

/** Return CODEC_ABI_VERSION of the loaded library. */
CODEC_API uint32_t codec_abi_version(void);

/** Element types of tensors. Structs hold them as uint32_t. */
typedef enum codec_dtype {
	CODEC_FLOAT32 = 1,
	CODEC_FLOAT64 = 2,
	CODEC_BFLOAT16 = 3,
	CODEC_FLOAT16 = 4,
	CODEC_FLOAT8_E4M3FN = 5,
	CODEC_FLOAT8_E5M2 = 6,
	CODEC_FLOAT8_E4M3FNUZ = 7,
	CODEC_FLOAT8_E5M2FNUZ = 8,
	CODEC_FLOAT8_E8M0FNU = 9,
	CODEC_BOOL = 16,
	CODEC_INT8 = 17,
	CODEC_INT16 = 18,
	CODEC_INT32 = 19,
	CODEC_INT64 = 20,
	CODEC_UINT8 = 21,
	CODEC_UINT16 = 22,
	CODEC_UINT32 = 23,
	CODEC_UINT64 = 24
} codec_dtype;

/** Return the size of an element in bytes, or 0 if `dtype` is not a codec_dtype. */
CODEC_API uint32_t codec_dtype_nbytes(uint32_t dtype);

/** Return the number of mantissa bits of a dtype that TRUNCATE accepts, or 0 for any other. */
CODEC_API uint32_t codec_mantissa_bits(uint32_t dtype);

/** Return the number of mantissa bits that TRUNCATE drops at `level` 0 to 3, or 0 for other levels or dtypes. */
CODEC_API uint32_t codec_level_bits(uint32_t dtype, uint32_t level);

/** C-contiguous tensor in native byte order. Its data need not be aligned. */
typedef struct codec_tensor {
	uint32_t struct_nbytes;         /**< sizeof(codec_tensor) */
	uint32_t dtype;                 /**< a codec_dtype */
	uint32_t rank;                  /**< number of dimensions, at most CODEC_MAX_RANK; 0: one value */
	uint32_t reserved;              /**< 0 */
	uint64_t shape[CODEC_MAX_RANK]; /**< sizes of dimensions; the last one is contiguous */
	void *data;                     /**< codec_bound and codec_scratch do not read it; encoders never write it */
	uint64_t nbytes;                /**< size of data in bytes: product of the shape times the element size */
} codec_tensor;

/**
 * @name codec_spec.codec
 * LOSSLESS and DELTA are lossless and accept all dtypes. The others are lossy, for float32, bfloat16 and float16.
 * @{
 */
#define CODEC_LOSSLESS 1 /**< exact, for all dtypes */
#define CODEC_SIGN 2     /**< 1 bit per value */
#define CODEC_TERNARY 3  /**< -1, 0 or 1 times a scale, unbiased */
#define CODEC_FLOAT8 4   /**< 8-bit floats, one scale per group of values; MXFP8 */
#define CODEC_FLOAT4 5   /**< 4-bit floats in NVFP4 or MXFP4 layout */
#define CODEC_QUANTIZE 6 /**< integers of 1 to 8 bits per value */
#define CODEC_TRUNCATE 7 /**< mantissa bits dropped where the optimizer's step rounds them away */
#define CODEC_DELTA 8 /**< exact, for all dtypes: the changes against codec_context.base, which the decoder has too */
#define CODEC_TOPK 9  /**< the values of largest magnitude; the others are 0 */
/** @} */

/** @name codec_spec.variant */
/** @{ */
#define CODEC_LEVEL_CODING_PLANE 0  /**< TRUNCATE: the frame has 2 bits per value for its level */
#define CODEC_LEVEL_CODING_CODED 1  /**< TRUNCATE: one code for exponent and level */
#define CODEC_LEVEL_CODING_SHARED 2 /**< TRUNCATE: levels not sent; the decoder has the same metric and state */
#define CODEC_LEVEL_CODING_FIXED 3  /**< TRUNCATE: one level for all values, codec_spec.bits; see codec_level_bits */
#define CODEC_SIGN_L1 0             /**< SIGN: the scale is the mean of |x| */
#define CODEC_SIGN_L2 1             /**< SIGN: the scale is the root mean square of x */
#define CODEC_SIGN_TWO_MEAN 2       /**< SIGN: two scales, the means of positive and of negative values */
#define CODEC_TERNARY_2BIT 0        /**< TERNARY: 4 values per byte */
#define CODEC_TERNARY_BASE3 1       /**< TERNARY: 5 values per byte */
#define CODEC_TERNARY_ENTROPY 2     /**< TERNARY: 5 values per byte, entropy coded */
#define CODEC_E4M3FN 0              /**< FLOAT8: 4 exponent bits, 3 mantissa bits */
#define CODEC_E5M2 1                /**< FLOAT8: 5 exponent bits, 2 mantissa bits */
#define CODEC_MXFP8_E4M3 2          /**< FLOAT8: E4M3FN, power-of-two scale per 32 values */
#define CODEC_MXFP8_E5M2 3          /**< FLOAT8: E5M2, power-of-two scale per 32 values */
#define CODEC_FLOAT4_NVFP4 0        /**< FLOAT4: e4m3fn scale per 16 values, and one scale for the tensor */
#define CODEC_FLOAT4_MXFP4 1        /**< FLOAT4: power-of-two scale per 32 values */
#define CODEC_LEVELS_EVEN 0         /**< QUANTIZE: 2^bits levels, none of which is 0 */
#define CODEC_LEVELS_ODD 1          /**< QUANTIZE: 2^bits - 1 levels, one of which is 0 */
#define CODEC_LEVELS_AFFINE 2       /**< QUANTIZE: 2^bits levels from a group's smallest to its largest value */
/** @} */

/** @name codec_spec.options */
/** @{ */
#define CODEC_OPTION_STOCHASTIC 1  /**< FLOAT8, FLOAT4, QUANTIZE: unbiased rounding (always on in TERNARY) */
#define CODEC_OPTION_PROPAGATE 2   /**< FLOAT8: encode NaN and Inf as NaN; default: CODEC_NONFINITE */
#define CODEC_OPTION_BITS 8        /**< TRUNCATE, levels shared: drop any number of bits, not one of 4 levels */
#define CODEC_OPTION_CUT 16        /**< TRUNCATE: round towards zero; default: to nearest even */
#define CODEC_OPTION_ENTROPY 4     /**< FLOAT8: entropy-code the codes */
#define CODEC_OPTION_ZERO_SCALE 64 /**< TERNARY: the given scale is 0; every value must be 0, else CODEC_BAD_SCALE */
#define CODEC_OPTION_RCEIL 128     /**< MXFP8 to nearest: round scales up where values would saturate */
/** @} */

/**
 * Value of codec_spec.group_size: one scale per row, which is the last dimension. If the last dimension has fewer than
 * 64 values, the dimensions before it are joined until a row has at least 64 values. In a tensor of rank 1 a row has
 * 1,024 values.
 */
#define CODEC_GROUP_SIZE_ROW 4294967295

#define CODEC_TOPK_CHUNK 4096 /**< TOPK: default of codec_spec.group_size */

/** @name codec_spec.model */
/** @{ */
#define CODEC_MODEL_AUTO 0      /**< scale model: use offsets if a sample shows that they shrink the frame */
#define CODEC_MODEL_FLAT 1      /**< scale model: use no offsets */
#define CODEC_MODEL_SEPARABLE 2 /**< scale model: use offsets wherever the shape allows */
/** @} */

/**
 * Codec and its parameters. 0 in any field after `codec` selects the codec's default. The Python defaults differ for
 * two codecs: Quantize sets CODEC_OPTION_STOCHASTIC; Truncate sets CODEC_LEVEL_CODING_CODED and a guard of -8.
 */
typedef struct codec_spec {
	uint32_t struct_nbytes;   /**< sizeof(codec_spec) */
	uint32_t codec;           /**< CODEC_LOSSLESS to CODEC_TOPK */
	uint32_t max_code_length; /**< LOSSLESS, TRUNCATE: longest code in bits, 2..8; 0: 8 */
	uint32_t model;           /**< LOSSLESS: CODEC_MODEL_* */
	uint32_t variant;         /**< all codecs but LOSSLESS: one of the variants above */
	uint32_t options;         /**< bitwise or of CODEC_OPTION_* */
	uint32_t bits; /**< QUANTIZE: 1..8, 0: 4; TRUNCATE, LEVEL_CODING_FIXED: the level, 0..3; TOPK: 1..8, 0: 2 */
	/**
	 * Number of values that share a scale. 0 selects the default: all values (SIGN), CODEC_GROUP_SIZE_ROW (FLOAT8),
	 * 32 (MXFP8 variants, which accept no other size) or 64 (QUANTIZE). DELTA: values per block, a power of two
	 * from 1,024 to 262,144; 0: 131,072. TOPK: values per chunk, a power of two from 64 to 65,536; 0 selects
	 * CODEC_TOPK_CHUNK.
	 */
	uint32_t group_size;
	uint32_t seed; /**< seed of random bits for stochastic rounding */
	/**
	 * TERNARY, and FLOAT8 except MXFP8: scale to use. 0: compute it from the tensor. To use a scale of 0, set
	 * CODEC_OPTION_ZERO_SCALE.
	 */
	float scale;
	float clip;    /**< TERNARY: clip magnitudes to this many standard deviations; 0: none */
	int32_t guard; /**< TRUNCATE: mantissa bits to keep in addition to those that the step needs, -128..126 */
	uint32_t kept; /**< TOPK: number of values to keep per chunk, at most half of them; 0: 1/64 */
} codec_spec;

/** Part of a flat tensor, for example one parameter, with its shape: values [offset, offset + product of shape). */
typedef struct codec_segment {
	uint64_t offset;                /**< index of the first value in the flat tensor */
	uint32_t rank;                  /**< number of dimensions */
	uint32_t reserved;              /**< 0 */
	uint64_t shape[CODEC_MAX_RANK]; /**< sizes of the part's dimensions */
} codec_segment;

/** @name codec_codebook.symbols */
/** @{ */
#define CODEC_SYMBOLS_PATTERN 0  /**< LOSSLESS: plane 0 of floats */
#define CODEC_SYMBOLS_EXPONENT 1 /**< TRUNCATE: exponents */
#define CODEC_SYMBOLS_JOINT 2    /**< TRUNCATE, levels coded: exponent and level of float32 or bfloat16 */
#define CODEC_SYMBOLS_JOINT16 3  /**< TRUNCATE, levels coded: exponent and level of float16 */
/** @} */

/**
 * Codebook that encoder and decoder agree on beforehand. Its id is a digest of all other fields (docs/spec/format.md,
 * section 5.1). Encoders and decoders check the id and return CODEC_BAD_CODEBOOK if it does not match.
 */
typedef struct codec_codebook {
	uint64_t id;           /**< digest of the fields below */
	uint8_t length[256];   /**< code length in bits of symbols 0 to 255; 0: symbol is escaped */
	uint8_t escape_length; /**< code length in bits of the escape code */
	uint8_t symbols;       /**< CODEC_SYMBOLS_*: meaning of the symbols; must equal the frame's */
	uint8_t reserved[6];   /**< 0 */
} codec_codebook;

/** Location and cause of a frame's rejection. */
typedef struct codec_fault {
	uint64_t offset;   /**< byte offset in the frame */
	uint64_t found;    /**< value found there */
	uint64_t expected; /**< expected value, or the bound that `found` violates */
} codec_fault;

/** @name codec_context.flags */
/** @{ */
#define CODEC_ALLOW_SLACK 1u /**< decode: ignore bytes that follow the frame */
/**
 * Decode or reduce in one call: check checksums, structure and state before the destination is written, so that any
 * error leaves the destination unchanged. Cost: every block is decoded twice; a frame of one block is decoded once, and
 * its values are copied.
 *
 * Encode: check the tensor before any of `residual` is written, so that any error leaves `residual` unchanged. Cost:
 * codecs with one scale per row, group or block search for NaN and Inf in an extra pass.
 */
#define CODEC_VERIFY_FIRST 2u
#define CODEC_CHECK_ONLY 8u /**< decode or reduce in one call: check as CODEC_VERIFY_FIRST does, write nothing */
/**
 * Decode: skip checksums; the structure is still checked. DELTA: also skip the digests of base and result, so that a
 * base other than the one that the frame was encoded against gives wrong values or CODEC_BAD_REGION.
 */
#define CODEC_NO_CHECKSUM 4u
/**
 * Encode: error feedback. Add `residual` to the tensor, encode the sums, and store their encoding error in `residual`.
 * Each sum is rounded to float32. The frame is the one that encoding the sums gives, but has the tensor's dtype:
 * TRUNCATE first rounds sums to that dtype, to nearest even, clamped to its largest finite value; this error is part of
 * the residual. A NaN sum becomes 0x7fc00000. `residual` must not be the tensor. LOSSLESS has no error and returns
 * CODEC_BAD_ARGUMENT.
 */
#define CODEC_FEEDBACK 16u
/**
 * Encode: encode the tensor minus `residual`, each difference rounded to float32, and add the decoded values to
 * `residual`, each sum rounded. Receivers store a copy of `residual` and update it by calling codec_accumulate with the
 * frame. The frame is the one that encoding the differences gives, but has the tensor's dtype. A NaN difference becomes
 * 0x7fc00000, so frames do not depend on payloads. A sum in `residual` is NaN if the decoded value or the given
 * residual is NaN. The payload of that NaN is unspecified, as with codec_accumulate, and may differ between instruction
 * sets. `residual` must not be the tensor. Codecs 2 to 6 accept this flag. Other codecs, and CODEC_FEEDBACK together
 * with this flag, return CODEC_BAD_ARGUMENT.
 */
#define CODEC_DIFFERENCE 32u
/**
 * Decode: store values with non-temporal (streaming) stores, which bypass the caches. Set it if the destination is not
 * read soon, for example because it is part of a buffer larger than the caches. Destinations of CODEC_UNCACHED_NBYTES
 * or more always use such stores. The decoded values do not depend on this flag.
 */
#define CODEC_NONTEMPORAL 64u
/**
 * Reduce: return CODEC_NONFINITE if a result is NaN or Inf, for example because a sum overflows. Encoding that result
 * would return the same status. The check runs while results are written: dst is then unspecified, even with
 * CODEC_VERIFY_FIRST.
 */
#define CODEC_FINITE 128u
/** @} */

#define CODEC_UNCACHED_NBYTES 8388608u /**< 8 MiB: destinations of this size or more bypass the caches */

/**
 * Metric of TRUNCATE: how much of each gradient value the optimizer's step can resolve. A is the part of the step that
 * does not depend on the gradient, divided by the gradient's factor. TRUNCATE may drop k bits of a gradient value g if
 * exponent(A) - exponent(g) >= k + guard + (mantissa bits of theta) - (mantissa bits of g).
 *
 * The built-in A is theta * ((sqrt(v_term * v) + eps) * theta_v_term + theta_term) + m_term * m, or, if v is NULL,
 * theta * theta_term + m_term * m. Each operation is rounded to float32. Alternatively, `user` computes A.
 */
typedef struct codec_metric {
	uint32_t struct_nbytes; /**< sizeof(codec_metric) */
	uint32_t theta_dtype;   /**< dtype of theta; 0: as `theta`, or float32; the longest mantissa sets the guard */
	float theta_term;       /**< factor of theta */
	float theta_v_term;     /**< factor of theta times the root */
	float v_term;           /**< factor of v, under the root */
	float eps;              /**< added to the root */
	float m_term;           /**< factor of m */
	uint32_t reserved;      /**< 0 */
	const codec_tensor *theta; /**< parameters: float32, bfloat16 or float16; as many values as the gradient */
	const codec_tensor *v;     /**< second moment; NULL: none */
	const codec_tensor *m;     /**< first moment; NULL: none */
	void (*user)(void *data, uint64_t first, uint64_t n,
		     float *a);          /**< write A of values [first, first + n); reentrant; NULL: built-in */
	void *data;                      /**< passed to `user` */
	uint64_t until;                  /**< first value of the next metric (parameter group); 0: this is the last */
	const struct codec_metric *next; /**< next parameter group; its arrays cover the whole gradient */
} codec_metric;

/**
 * @name codec_context.into
 * Operation on decoded values. All operations but CODEC_INTO_STORE require a destination of the frame's shape, of
 * float32 unless said otherwise, and a frame of float32, bfloat16 or float16. CODEC_BAD_ARGUMENT: `divide` with
 * CODEC_INTO_STORE, CODEC_INTO_CODES or CODEC_INTO_ADD_CODES, or a divisor that is negative, infinite or NaN.
 *
 * The last three operations are for TERNARY frames only. They use the codes of the values: c is -1, 0 or 1, the value
 * divided by the scale. CODEC_INTO_CODES and CODEC_INTO_ADD_CODES also accept destinations of int8, int16 and int32;
 * the caller ensures that sums do not overflow.
 * @{
 */
#define CODEC_INTO_STORE 0       /**< store, in the frame's dtype */
#define CODEC_INTO_ADD 1         /**< out = out + weight * value, rounded twice; the payload of a NaN is unspecified */
#define CODEC_INTO_MAX 2         /**< out = the larger of out and value; NaN if either is NaN */
#define CODEC_INTO_FLOAT32 3     /**< store, as float32 */
#define CODEC_INTO_CODES 4       /**< TERNARY: out = c */
#define CODEC_INTO_ADD_CODES 5   /**< TERNARY: out = out + c */
#define CODEC_INTO_SCALE_CODES 6 /**< TERNARY: out = (out + c) * scale, for the last of frames of one scale */
/** @} */

/** Optional arguments of a call. NULL, or 0 in all fields after struct_nbytes, means defaults. */
typedef struct codec_context {
	uint32_t struct_nbytes;        /**< sizeof(codec_context) */
	uint32_t flags;                /**< bitwise or of the flags above, from CODEC_ALLOW_SLACK on */
	uint32_t isa;                  /**< 0: fastest set of this CPU; else 1 + index of codec_isa_name */
	uint32_t into;                 /**< decode: CODEC_INTO_* */
	uint64_t max_nbytes;           /**< decode: largest tensor accepted, in bytes; 0: no limit */
	const codec_segment *segments; /**< encode: ascending, disjoint segments; values in gaps are one-dimensional */
	uint64_t nsegments;            /**< number of segments */
	const codec_codebook *codebooks; /**< encode: codebook to use; decode: codebooks that frames may name */
	uint64_t ncodebooks;             /**< number of codebooks */
	codec_fault *fault;              /**< decode: set if the status is 12, 16, 30 to 60, or 62; else unchanged */
	uint64_t stream; /**< encode: id of the random stream, from rank, step, tensor; ids give independent bits */
	float *residual; /**< encode: see codec_encode */
	float weight;    /**< decode, CODEC_INTO_ADD: factor of decoded values */
	float divide;    /**< decode: divisor of results, for some values of `into`; 0: do not divide */
	const codec_metric *metric; /**< TRUNCATE: metric for encoding, and for decoding shared levels */
	const uint8_t *levels;      /**< TRUNCATE, encode: level 0..3 of each value, in place of a metric */
	const codec_tensor *base;   /**< DELTA: tensor of the frame's dtype and shape that the changes apply to */
} codec_context;

/**
 * Set *nbytes to the size in bytes of the largest frame that `spec` can produce from a tensor with the dtype and shape
 * of `like`, for any values and any segments. The bound is the same on all machines. codec_encode with this capacity
 * never returns CODEC_SHORT_OUTPUT. `like->data` is not read.
 */
CODEC_API codec_status codec_bound(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/**
 * Set *nbytes to the size in bytes of the largest frame with these segments, for any values. It is at most the size
 * that codec_bound computes. `nsegments` 0: the tensor is encoded without segments. codec_encode with these segments
 * and this capacity never returns CODEC_SHORT_OUTPUT. The size is exact for codecs 2 to 6 without an entropy stage,
 * which is in FLOAT8 with CODEC_OPTION_ENTROPY and in CODEC_TERNARY_ENTROPY. CODEC_BAD_SEGMENTS is returned as by
 * codec_encode.
 */
CODEC_API codec_status codec_bound_segments(const codec_spec *spec, const codec_tensor *like,
					    const codec_segment *segments, uint64_t nsegments, size_t *nbytes);

/** @name Properties of a codec with its parameters: bits of codec_traits() */
/** @{ */
#define CODEC_TRAIT_ROWS 1       /**< groups of values share a scale */
#define CODEC_TRAIT_ENTROPY 2    /**< symbols are coded with a codebook */
#define CODEC_TRAIT_FIXED_RATE 4 /**< the size of a frame depends on the shape of the tensor only */
#define CODEC_TRAIT_LOSSLESS 8   /**< exact; all other codecs take a residual */
#define CODEC_TRAIT_FINITE 16    /**< encoding refuses NaN and Inf: CODEC_NONFINITE */
#define CODEC_TRAIT_BASE 32      /**< values are encoded against codec_context.base */
#define CODEC_TRAIT_SUMS 64      /**< codes of several frames can be added as integers: CODEC_REDUCE_CODES */
/** @} */

/** Set *traits to the bits CODEC_TRAIT_* of a codec with these parameters. CODEC_BAD_SPEC: they are invalid. */
CODEC_API codec_status codec_traits(const codec_spec *spec, uint32_t *traits);

/**
 * Set *nbytes to the scratch size in bytes that encoding or decoding a tensor like `like` needs. It is at most 2.5% of
 * the tensor plus 1 MiB, for LOSSLESS of float8 5%. DELTA lists changes before it applies them, and needs at most 75%
 * of the tensor plus 6 MiB. `like->data` is not read.
 */
CODEC_API codec_status codec_scratch(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/**
 * Encode `src` into a frame. On CODEC_OK the frame is dst[0, *written). On any other status *written is 0, and dst[0,
 * capacity) is unspecified.
 *
 * `with` may supply segments and at most one codebook. `scratch` needs the size that codec_scratch computes.
 *
 * `residual`, unless NULL, receives the encoding error, src minus the decoded values: n float32 values, at any address.
 * It may be `src` itself or an array of the metric's state. The error of an encoded NaN or Inf is 0. On any status but
 * CODEC_OK `residual` is unspecified or, with CODEC_VERIFY_FIRST, unchanged, unless another thread changes src during
 * the call. See CODEC_FEEDBACK and CODEC_DIFFERENCE.
 */
CODEC_API codec_status codec_encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
				    size_t *written, float *residual, const codec_context *with, void *scratch,
				    size_t scratch_nbytes);

/** Contents of a frame's header. Offsets are in bytes from the frame's start, sizes in bytes. */
typedef struct codec_info {
	uint32_t struct_nbytes;         /**< sizeof(codec_info), set by the caller */
	uint32_t version;               /**< format version */
	uint32_t dtype;                 /**< a codec_dtype */
	uint32_t rank;                  /**< number of dimensions of the tensor */
	uint64_t shape[CODEC_MAX_RANK]; /**< sizes of dimensions; 0 after the last */
	/**
	 * Spec of the frame. `group_size` is the one in use; for tensors with segments it is read from the side
	 * section: CODEC_GROUP_SIZE_ROW if parts differ, 0 if the side section was not given. TRUNCATE: `guard` is the
	 * one in use, which includes the correction for the dtypes.
	 */
	codec_spec spec;
	uint32_t stored;           /**< 1: the tensor's raw bytes follow the header (stored frame) */
	uint32_t block_nvalues;    /**< values per block; 0: stored, or codecs 2 to 6, whose blocks follow rows */
	uint64_t nblocks;          /**< number of blocks; 0 if stored */
	uint64_t n;                /**< number of values */
	uint64_t tensor_nbytes;    /**< size of the tensor: n times the element size */
	uint64_t frame_nbytes;     /**< size of the whole frame, which decoding needs */
	uint64_t checksum;         /**< checksum of the whole frame */
	uint64_t side_offset;      /**< offset of the side section: codebooks and scale model */
	uint64_t side_nbytes;      /**< size of the side section; 0: none */
	uint64_t directory_offset; /**< offset of the directory: end and digest of each block */
	uint64_t directory_nbytes; /**< size of the directory: 8 bytes per block */
	uint64_t planes_offset;    /**< offset of the planes that are raw in every block */
	uint64_t planes_nbytes;    /**< size of these planes; 0: none */
	uint64_t regions_offset;   /**< offset of the blocks' contents; stored: of the tensor */
	uint64_t regions_nbytes;   /**< size of the blocks' contents, up to the frame's end */
	uint32_t fixed_planes;     /**< bit p: plane p is in the section at planes_offset */
	uint32_t coded_planes;     /**< bit p: plane p has a codebook */
	uint64_t codebook_id;      /**< id of the agreed codebook; 0: the frame carries its own */
	uint64_t nsegments;        /**< segments of the scale model; 0: none */
	codec_fault fault;         /**< set if the status is 30 or more */
	uint32_t clipped;          /**< TERNARY: 1 if magnitudes were clipped; the limit is not recorded */
	uint32_t reserved;         /**< 0 */
	float scale;               /**< TERNARY: scale that all values share; -1: none, or not in the bytes given */
	uint32_t reserved_2;       /**< 0 */
	uint64_t base_digest;      /**< DELTA: codec_digest of the base; 0: not in the bytes given */
	uint64_t result_digest;    /**< DELTA: codec_digest of the decoded tensor; 0: not in the bytes given */
} codec_info;

#define CODEC_HEADER_NBYTES 112 /**< maximum size of a header, in bytes */

/**
 * Read and check a frame's header. Bytes after the header are not checked, so `nbytes` may be smaller than the frame.
 * codebook_id, nsegments and scale are read from the side section; if `nbytes` does not include it they are 0, 0 and
 * -1. On an error *info is filled in up to the first faulty field.
 *
 * To receive a frame of unknown size, call codec_inspect with the bytes that have arrived, from 0 on. CODEC_TRUNCATED:
 * the header is incomplete, and info->fault.expected is the number of bytes needed to continue, more than `nbytes` and
 * at most CODEC_HEADER_NBYTES. CODEC_OK: the header is complete and valid, and info->frame_nbytes is the frame's size.
 * A caller that reads no more bytes than these numbers request never reads past the frame.
 */
CODEC_API codec_status codec_inspect(const void *frame, size_t nbytes, codec_info *info);

/**
 * Compute the digest of a tensor's bytes, or the part of the digest that chunks [first, first + count) of 1,024 bytes
 * contribute; count UINT64_MAX: up to the last chunk. The parts add up to the digest, modulo 2^64. DELTA's frames
 * identify their base and their result by digest. The digest does not depend on dtype and shape. It detects accidental
 * changes, not deliberate ones: every change within one 32-bit word; changes in several chunks, and arbitrary changes
 * in one chunk, but for a probability of 2^-64; several changes in one chunk that all are the same small step up or
 * down, such as of one unit in the last place, but for about 2^-33 (docs/spec/format.md, section 13).
 */
CODEC_API codec_status codec_digest(const codec_tensor *tensor, uint64_t first, uint64_t count, uint64_t *digest);

/** Check everything that can be checked without decoding: header, sections, directory and all checksums. */
CODEC_API codec_status codec_verify(const void *frame, size_t nbytes);

/**
 * Decode a frame into `dst`, whose dtype, rank and shape must be the frame's. `dst` may be an array of the metric's
 * state, or DELTA's base. `scratch` needs the size that codec_scratch computes. On an error with a status below 30, or
 * with CODEC_VERIFY_FIRST, dst is unchanged; on any other error it is unspecified.
 */
CODEC_API codec_status codec_decode(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
				    void *scratch, size_t scratch_nbytes);

/**
 * Set *nbytes to the memory in bytes that makes checking a frame before it is decoded faster; 0: none does. Add it to
 * the scratch of codec_decode with CODEC_VERIFY_FIRST, or to the job of codec_decode_open if codec_decode_check is
 * called before codec_decode_blocks. Decoding then uses the symbols that the check has decoded: a byte per value, for
 * frames of LOSSLESS of at most 2^26 values. `info` is that of codec_inspect.
 */
CODEC_API codec_status codec_keep_nbytes(const codec_info *info, size_t *nbytes);

/**
 * Decode blocks [first, first + count) of a DELTA frame, for a process that holds a part of the tensor. `base` and
 * `dst`, `part_nbytes` bytes each, hold the values of these blocks and nothing else; the two may be the same memory. A
 * block has codec_info.block_nvalues values; the tensor's last block may have fewer. A frame without blocks counts as
 * one block of all values. `scratch` needs the size that codec_scratch computes for the whole tensor.
 *
 * The frame's checksums are verified, and any error leaves dst unchanged. The digests of base and result cover whole
 * tensors, so they are not checked: if `base` holds other values than the tensor that the frame was encoded against,
 * the result is wrong values or CODEC_BAD_REGION.
 */
CODEC_API codec_status codec_decode_part(const void *frame, size_t nbytes, uint64_t first, uint64_t count,
					 const void *base, void *dst, size_t part_nbytes, const codec_context *with,
					 void *scratch, size_t scratch_nbytes);

/**
 * Compute dst = dst + weight * decode(frame) in float32, without a temporary tensor. Same as codec_decode with
 * CODEC_INTO_ADD and CODEC_VERIFY_FIRST: any error leaves dst unchanged.
 */
CODEC_API codec_status codec_accumulate(const void *frame, size_t nbytes, float weight, codec_tensor *dst,
					const codec_context *with, void *scratch, size_t scratch_nbytes);

/** @name op of codec_reduce */
/** @{ */
#define CODEC_REDUCE_SUM 0  /**< sum, in the order given */
#define CODEC_REDUCE_MEAN 1 /**< sum divided by `count` */
#define CODEC_REDUCE_MAX 2  /**< maximum; NaN if a value is NaN */
/**
 * Sum of TERNARY's codes -1, 0 and 1, as integers, without the scale. `dst` is int8 for at most 127 frames, int16 for
 * at most 32,767, or int32. CODEC_BAD_ARGUMENT: a frame is not TERNARY, scales differ, or `dst` could overflow.
 */
#define CODEC_REDUCE_CODES 3
/** @} */

/**
 * Decode `count` frames of one shape and reduce them to their sum, mean or maximum, as float32. Frames are added in the
 * order given, with each addition rounded. The mean is the sum divided by `count`, unless `count` is 1. TERNARY frames
 * with equal scales are summed as integers, then scaled; CODEC_REDUCE_CODES gives the integers.
 *
 * `scratch` needs the size that codec_reduce_scratch computes. CODEC_VERIFY_FIRST leaves dst unchanged on any error;
 * CODEC_CHECK_ONLY leaves it unchanged always. If several frames are faulty, the first one's error is reported. With
 * more than one frame, dst must not be an array of the metric's state.
 */
CODEC_API codec_status codec_reduce(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
				    codec_tensor *dst, const codec_context *with, void *scratch, size_t scratch_nbytes);

/** Compute the scratch size in bytes that codec_reduce needs for these frames. The frames' headers must be valid. */
CODEC_API codec_status codec_reduce_scratch(const void *const *frames, const size_t *nbytes, size_t count,
					    size_t *scratch_nbytes);

/** Return the name of the instruction set with this index, slowest first, or NULL if there is none. */
CODEC_API const char *codec_isa_name(uint32_t index);

/** Return 1 if this CPU and operating system support the instruction set with this index, else 0. */
CODEC_API int codec_isa_usable(uint32_t index);

/**
 * Build a codebook for frames of `spec` and `dtype` from symbol counts, such as those of codec_count. `spec` must be
 * LOSSLESS or TRUNCATE, and its `max_code_length` limits code lengths. `dtype` must have exponents.
 */
CODEC_API codec_status codec_codebook_build(const codec_spec *spec, uint32_t dtype, const uint64_t counts[256],
					    codec_codebook *book);

/**
 * Check that encoding accepts `book`: the Kraft sum of the code lengths is 1, and the id is the digest of the other
 * fields. Return CODEC_BAD_CODEBOOK otherwise.
 */
CODEC_API codec_status codec_codebook_check(const codec_codebook *book);

#define CODEC_CODEBOOK_NBYTES 140 /**< maximum size of a packed codebook, in bytes */

/**
 * Serialize a codebook (id, symbols and code lengths) to store or send it. Writes at most CODEC_CODEBOOK_NBYTES bytes;
 * *written is their number.
 */
CODEC_API codec_status codec_codebook_pack(const codec_codebook *book, void *dst, size_t capacity, size_t *written);

/**
 * Deserialize a codebook that codec_codebook_pack wrote. Any other bytes, or bytes after it, return CODEC_BAD_CODEBOOK.
 */
CODEC_API codec_status codec_codebook_unpack(const void *src, size_t nbytes, codec_codebook *book);

/**
 * Count symbols for codec_codebook_build. Sample `src` as codec_encode would, under the scale model that codec_encode
 * would choose, and add the number of times each symbol occurs to counts[256]. `with` may supply segments and
 * TRUNCATE's metric or levels; `scratch` needs the size that codec_scratch computes. On an error counts is unchanged.
 */
CODEC_API codec_status codec_count(const codec_spec *spec, const codec_tensor *src, uint64_t counts[256],
				   const codec_context *with, void *scratch, size_t scratch_nbytes);

#ifdef __cplusplus
}
#endif

#endif
