/**
 * @file
 * codec.h - tensors to bytes and back: the C interface of libcodec.
 *
 * A frame is a self-describing, checksummed sequence of bytes that holds one tensor. Its layout is fixed by
 * docs/format.md and does not depend on the CPU, the number of threads or the address of any buffer: the same tensor
 * and the same spec give the same bytes everywhere.
 *
 * What every function promises
 *   - It allocates nothing, calls no I/O, starts no thread, and raises no signal on any input. What it keeps between
 *     calls is what CPUID said, which never changes.
 *   - It touches no byte outside of the spans it is given, whatever they contain. A pointer always comes with its size
 *     in bytes or values; NULL with size 0 is an empty span.
 *   - It may be called from any thread at any time; calls do not see each other. It uses at most 16 KiB of stack.
 *   - Another thread that writes into a tensor, a frame or a metric's state meanwhile can spoil the result, not the
 *     process. Structs, segments and codebooks must hold still.
 *   - Arithmetic is the same whatever the caller's rounding mode and treatment of subnormals, which are as they were
 *     when the call returns; exception flags raised meanwhile are not kept.
 *   - What is written (frame, residual, destination, scratch) must not overlap with what is given, nor with each other,
 *     unless it says so: frames, tensors, residuals, levels and a metric's arrays are compared, and CODEC_BAD_ARGUMENT
 *     returned.
 *   - Structs begin with their own size in bytes. A program built against a later header may hand in larger ones. Each
 *     must have all fields of ABI version 1, those below; fields that later versions add are 0 where they are missing.
 *
 * What none of them promises
 *   - The checksum detects accidents. It does not authenticate: who can alter a frame can alter its checksum too.
 *     Decoding such a frame is safe, and gives some tensor of the declared shape or an error.
 *
 * Which error
 *   - Of several faults of a frame, the one in the header is reported first, then that in the side section, then the
 *     lowest block's (its place in the directory, its digest, what it holds), then the checksum of the whole.
 *   - A destination, state or codebook that does not fit is an error of the caller (below 30, or 60 and above) only if
 *     the frame's checksums are right.
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

#define CODEC_ABI_VERSION 2    /**< of this header: what programs built against it rely on */
#define CODEC_FORMAT_VERSION 1 /**< of the frames that this library writes */
#define CODEC_MAX_RANK 8       /**< dimensions of a tensor, at most */

/**
 * Status codes stand in decades by cause and never change their value:
 *   0 success; 10-19 the caller's arguments; 20-29 room; 30-39 the frame is not what the format allows;
 *   40-49 the frame was damaged; 50-59 valid, but not for this library; 60-69 something that must be supplied is
 * missing.
 */
typedef enum codec_status {
	CODEC_OK = 0,
	CODEC_BAD_ARGUMENT = 10,     /**< a pointer is NULL or a field of a struct is out of range */
	CODEC_BAD_SPEC = 11,         /**< no such codec, or parameters it does not take */
	CODEC_BAD_DTYPE = 12,        /**< the codec does not take this dtype */
	CODEC_BAD_SHAPE = 13,        /**< rank above 8, or a product that overflows */
	CODEC_BAD_SEGMENTS = 14,     /**< overlapping, unordered or outside of the tensor */
	CODEC_BAD_CODEBOOK = 15,     /**< code lengths that are not a codebook, another one's id, or other symbols */
	CODEC_SHAPE_MISMATCH = 16,   /**< the destination's shape or dtype is not the frame's */
	CODEC_NONFINITE = 17,        /**< the tensor holds NaN or Inf, and the codec cannot say so */
	CODEC_BAD_SCALE = 18,        /**< a scale was given that is smaller than a value; none is NaN or Inf */
	CODEC_ROUNDED_SCALE = 19,    /**< a scale was given that is 0 or Inf in the tensor's dtype */
	CODEC_SHORT_OUTPUT = 20,     /**< the frame does not fit capacity */
	CODEC_SHORT_SCRATCH = 21,    /**< scratch is smaller than codec_scratch said */
	CODEC_TRUNCATED = 30,        /**< fewer bytes than a header, or than the header says */
	CODEC_TRAILING = 31,         /**< bytes behind the frame, and slack was not allowed */
	CODEC_BAD_MAGIC = 32,        /**< not a frame */
	CODEC_BAD_HEADER = 33,       /**< a header field has a value that the format forbids */
	CODEC_BAD_SIDE = 34,         /**< scale model or codebook */
	CODEC_BAD_DIRECTORY = 35,    /**< regions out of order or out of bounds */
	CODEC_BAD_REGION = 36,       /**< a block's contents */
	CODEC_CHECKSUM = 40,         /**< the bytes are not those that were written */
	CODEC_UNSUPPORTED = 50,      /**< a later format version, or a codec this library does not know */
	CODEC_LIMIT = 51,            /**< larger than the caller's max_nbytes, or than the format can hold */
	CODEC_UNKNOWN_CODEBOOK = 60, /**< the frame names a codebook that was not supplied */
	CODEC_MISSING_STATE = 61,    /**< a metric with its state, or levels, must be supplied */
	CODEC_OTHER_STATE = 62       /**< the frame was made with another state than was supplied */
} codec_status;

/** One sentence in English; never NULL, for any argument. */
CODEC_API const char *codec_strerror(codec_status status);

/** CODEC_ABI_VERSION of the library that was loaded. */
CODEC_API uint32_t codec_abi_version(void);

/** What a tensor's elements are; in structs a uint32_t. */
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

/** Bytes an element, or 0 for a number that is not a dtype. */
CODEC_API uint32_t codec_dtype_nbytes(uint32_t dtype);

/** Bits of the mantissa of TRUNCATE's dtypes; 0 for all others. */
CODEC_API uint32_t codec_mantissa_bits(uint32_t dtype);

/** How many of them a level of 0 to 3 drops; 0 for all others. */
CODEC_API uint32_t codec_level_bits(uint32_t dtype, uint32_t level);

/** A C-contiguous tensor in the machine's byte order, at any address. */
typedef struct codec_tensor {
	uint32_t struct_nbytes;         /**< sizeof(codec_tensor) */
	uint32_t dtype;                 /**< a codec_dtype */
	uint32_t rank;                  /**< at most CODEC_MAX_RANK; 0: one value */
	uint32_t reserved;              /**< 0 */
	uint64_t shape[CODEC_MAX_RANK]; /**< the last dimension is contiguous */
	void *data;                     /**< not read by codec_bound and codec_scratch; never written as a source */
	uint64_t nbytes;                /**< of data: the product of the shape times the bytes an element */
} codec_tensor;

/**
 * @name codec_spec.codec
 * All but the first take float32, bfloat16 and float16 and lose something.
 * @{
 */
#define CODEC_LOSSLESS 1 /**< every bit */
#define CODEC_SIGN 2     /**< one bit a value */
#define CODEC_TERNARY 3  /**< -1, 0 or 1, unbiased */
#define CODEC_FLOAT8 4   /**< 8-bit floats, a scale a row */
#define CODEC_FLOAT4 5   /**< 4-bit floats, NVFP4 or MXFP4 */
#define CODEC_QUANTIZE 6 /**< 1 to 8 bits a value */
#define CODEC_TRUNCATE 7 /**< mantissas cut to what an optimizer's step can tell */
/** @} */

/** @name codec_spec.variant */
/** @{ */
#define CODEC_LEVELS_PLANE 0    /**< TRUNCATE: each value's level in 2 bits */
#define CODEC_LEVELS_CODED 1    /**< in one code with the exponent */
#define CODEC_LEVELS_SHARED 2   /**< not sent: the receiver has the same metric and state */
#define CODEC_LEVELS_FIXED 3    /**< codec_spec.bits is the level of all; what it drops, codec_level_bits says */
#define CODEC_SIGN_L1 0         /**< SIGN: the scale is the mean of |x| */
#define CODEC_SIGN_L2 1         /**< its root mean square */
#define CODEC_SIGN_TWO_MEAN 2   /**< two scales: the means of positive and negative values */
#define CODEC_TERNARY_2BIT 0    /**< TERNARY: four values a byte */
#define CODEC_TERNARY_BASE3 1   /**< five values a byte */
#define CODEC_TERNARY_ENTROPY 2 /**< those through the entropy coder */
#define CODEC_E4M3FN 0          /**< FLOAT8: 3 bits of mantissa */
#define CODEC_E5M2 1            /**< 2 bits */
#define CODEC_FLOAT4_NVFP4 0    /**< FLOAT4: rows of 16, scales e4m3fn under one of the tensor */
#define CODEC_FLOAT4_MXFP4 1    /**< rows of 32, scales powers of two */
#define CODEC_LEVELS_EVEN 0     /**< QUANTIZE: 2^bits levels, none of them 0 */
#define CODEC_LEVELS_ODD 1      /**< 2^bits - 1 levels with 0 */
/** @} */

/** @name codec_spec.options */
/** @{ */
#define CODEC_OPTION_STOCHASTIC 1 /**< FLOAT8, FLOAT4, QUANTIZE: unbiased rounding (TERNARY always) */
#define CODEC_OPTION_PROPAGATE 2  /**< FLOAT8: NaN and Inf become NaN; otherwise they are refused */
#define CODEC_OPTION_BITS 8       /**< TRUNCATE, shared: drop any number of bits, not four levels */
#define CODEC_OPTION_CUT 16       /**< TRUNCATE: towards zero, not to nearest even */
#define CODEC_OPTION_ENTROPY 4    /**< FLOAT8: codes go through the entropy coder */
/** @} */

/** codec_spec.row: the last dimension, or as many of the last ones as it takes to have 64 values; 1,024 of a vector */
#define CODEC_ROW_LAST 4294967295

/** @name codec_spec.model */
/** @{ */
#define CODEC_MODEL_AUTO 0      /**< offsets where a sample says that they pay */
#define CODEC_MODEL_FLAT 1      /**< none */
#define CODEC_MODEL_SEPARABLE 2 /**< wherever the shape allows */
/** @} */

/**
 * What is asked for. Zero in every field but the first two is the default of that codec. Python's differ for two:
 * Quantize has CODEC_OPTION_STOCHASTIC, Truncate CODEC_LEVELS_CODED and a guard of -8.
 */
typedef struct codec_spec {
	uint32_t struct_nbytes; /**< sizeof(codec_spec) */
	uint32_t codec;         /**< CODEC_LOSSLESS to CODEC_TRUNCATE */
	uint32_t cap;           /**< LOSSLESS, TRUNCATE: longest code in bits: 0 for 8, else 2..8 */
	uint32_t model;         /**< LOSSLESS: CODEC_MODEL_* */
	uint32_t variant;       /**< the rest: not LOSSLESS */
	uint32_t options;       /**< CODEC_OPTION_* */
	uint32_t bits;          /**< QUANTIZE: 0 for 4, else 1..8; TRUNCATE, LEVELS_FIXED: the level, 0..3 */
	/** Values that share a scale. SIGN: 0 for all; FLOAT8: 0 for CODEC_ROW_LAST; QUANTIZE: 0 for 64. */
	uint32_t row;
	uint32_t seed; /**< of random draws */
	float scale;   /**< TERNARY, FLOAT8: use this one; 0: found from the tensor */
	float clip;    /**< TERNARY: limit magnitudes to this many standard deviations; 0: none */
	int32_t guard; /**< TRUNCATE: bits more (or less) than would leave the step as it is; -128 to 126 */
} codec_spec;

/** A part of a flat bucket with a shape of its own: values [offset, offset + product of shape). */
typedef struct codec_segment {
	uint64_t offset;                /**< its first value, counted from the bucket's */
	uint32_t rank;                  /**< dimensions */
	uint32_t reserved;              /**< 0 */
	uint64_t shape[CODEC_MAX_RANK]; /**< of the part */
} codec_segment;

/** @name codec_codebook.symbols */
/** @{ */
#define CODEC_SYMBOLS_PATTERN 0  /**< LOSSLESS: plane 0 of floats */
#define CODEC_SYMBOLS_EXPONENT 1 /**< TRUNCATE: exponents */
#define CODEC_SYMBOLS_JOINT 2    /**< TRUNCATE, levels coded: exponent and level; float32, bfloat16 */
#define CODEC_SYMBOLS_JOINT16 3  /**< the same of float16 */
/** @} */

/**
 * A codebook agreed upon beforehand: code lengths in bits for each symbol, 0 for those to be escaped. Its id is a
 * digest of all the rest (docs/format.md, section 5.1), which encoders and decoders compare: CODEC_BAD_CODEBOOK.
 */
typedef struct codec_codebook {
	uint64_t id;           /**< the digest */
	uint8_t length[256];   /**< of symbols 0 to 255 */
	uint8_t escape_length; /**< of the code that stands for all that have none */
	uint8_t symbols;       /**< CODEC_SYMBOLS_*: what they stand for, which the frame's must */
	uint8_t reserved[6];   /**< 0 */
} codec_codebook;

/** Where and why a frame was refused. */
typedef struct codec_fault {
	uint64_t offset;   /**< byte of the frame */
	uint64_t found;    /**< the value there */
	uint64_t expected; /**< the value, or the bound, that it disagrees with */
} codec_fault;

/** @name codec_context.flags */
/** @{ */
#define CODEC_ALLOW_SLACK 1u /**< bytes behind the frame are ignored */
/**
 * Decoding in one call: check everything, checksums, structure and state, before the first byte of the destination is
 * written, so that on any error it is as it was. The coder's loop is then done twice (of one block values are copied).
 */
#define CODEC_VERIFY_FIRST 2u
#define CODEC_CHECK_ONLY 64u /**< decoding or reducing in one call: check all of that, write nothing */
#define CODEC_NO_CHECKSUM 4u /**< skip the checksums; structure is checked all the same */
#define CODEC_UNSCALED 8u    /**< decode, TERNARY: values are -1, 0 and 1 */
/** With UNSCALED: what came out is multiplied by the scale, last of all but `divide`. Not with CODEC_INTO_STORE. */
#define CODEC_RESCALE 16u
/**
 * Error feedback: what the residual holds is added to the tensor before it is encoded, each sum rounded to float32, and
 * then it gets what the sums lose. As if the sums had been encoded, but in the tensor's dtype, to which TRUNCATE rounds
 * them, to nearest even and at most its largest number (what that loses is part of the residual). A sum that is NaN is
 * 7fc00000. The residual must not be the tensor then. Not for LOSSLESS, which loses nothing: CODEC_BAD_ARGUMENT.
 */
#define CODEC_FEEDBACK 32u
/**
 * Decoding: the destination will not be read soon, being part of something larger than the caches, say. Values stored
 * there go past them, as those of destinations of CODEC_UNCACHED_NBYTES or more do; they are the same.
 */
#define CODEC_NONTEMPORAL 128u
/**
 * Reducing: a result that is NaN or Inf, since a sum overflows, say, is CODEC_NONFINITE, as encoding it would be. It is
 * found as results are made: dst then holds anything, whatever other flags say.
 */
#define CODEC_FINITE 256u
/**
 * Encoding: after an error the residual may hold anything. Where scales are those of rows, groups or blocks, that saves
 * the pass by which NaN and Inf are found before any of it is written.
 */
#define CODEC_ONE_PASS 512u
/** @} */

#define CODEC_UNCACHED_NBYTES 8388608u /**< 8 MiB: what has so many bytes is taken for more than caches keep */

/**
 * What TRUNCATE goes by: A, all of an optimizer's step that does not depend on the gradient, over what the gradient is
 * multiplied by. k bits may go where exponent(A) - exponent(gradient) >= k + guard + (mantissa bits of theta) - (those
 * of the gradient). Built-in: A = theta * ((sqrt(v_term * v) + eps) * theta_v_term + theta_term) + m_term * m, without
 * v theta * theta_term, each operation rounded to float32. Or `user` writes A of values [first, first + n).
 */
typedef struct codec_metric {
	uint32_t struct_nbytes; /**< sizeof(codec_metric) */
	uint32_t theta_dtype;   /**< of the parameters; 0: theta's, or float32. Groups share the guard of the finest */
	float theta_term;       /**< factor of theta */
	float theta_v_term;     /**< factor of theta times the root */
	float v_term;           /**< factor of v, under the root */
	float eps;              /**< added to the root */
	float m_term;           /**< factor of m */
	uint32_t reserved;      /**< 0 */
	const codec_tensor *theta; /**< float32, bfloat16 or float16; as many values as the gradient */
	const codec_tensor *v;     /**< the second moment; NULL: none */
	const codec_tensor *m;     /**< the first; NULL: none */
	void (*user)(void *data, uint64_t first, uint64_t n, float *a); /**< reentrant; NULL: built-in */
	void *data;                                                     /**< handed to `user` */
	uint64_t until;                  /**< first value of the next metric: parameter groups; 0: there is none */
	const struct codec_metric *next; /**< all state arrays have as many values as the whole gradient */
} codec_metric;

/**
 * @name codec_context.into
 * What becomes of decoded values. All but the first take a destination of float32 with the frame's shape, and frames
 * of float32, bfloat16 or float16. What comes out may be divided or rescaled then: with CODEC_INTO_STORE that is
 * CODEC_BAD_ARGUMENT, and so is a divisor that is negative, infinite or NaN.
 * @{
 */
#define CODEC_INTO_STORE 0   /**< stored, in the frame's dtype */
#define CODEC_INTO_ADD 1     /**< out = out + weight * value, rounded twice; which NaN is up to the machine */
#define CODEC_INTO_MAX 2     /**< the larger one; NaN if either is */
#define CODEC_INTO_FLOAT32 3 /**< stored, as float32 */
/** @} */

/** What a call may be given beyond its arguments. NULL for none; zero in every field but the first is the same. */
typedef struct codec_context {
	uint32_t struct_nbytes;          /**< sizeof(codec_context) */
	uint32_t flags;                  /**< of those above, from CODEC_ALLOW_SLACK on; no others */
	uint32_t isa;                    /**< 0: the best of this CPU; else 1 + index into codec_isa_name */
	uint32_t into;                   /**< decode: CODEC_INTO_* */
	uint64_t max_nbytes;             /**< decode: largest tensor, in bytes; 0 for no limit */
	const codec_segment *segments;   /**< encode: ascending, not overlapping; gaps are flat */
	uint64_t nsegments;              /**< how many */
	const codec_codebook *codebooks; /**< encode: the one to use; decode: those that frames may name */
	uint64_t ncodebooks;             /**< how many */
	codec_fault *fault;              /**< decode: filled in with 30 to 60 and 62, and 12 and 16; else as it was */
	uint64_t stream;                 /**< encode: draws of different streams are independent: rank, step, tensor */
	float *residual;                 /**< encode: as codec_encode's */
	float weight;                    /**< decode, INTO_ADD */
	float divide;                    /**< decode, not INTO_STORE: divide what came out by this; 0: do not */
	const codec_metric *metric;      /**< TRUNCATE: encode, and decode with shared levels */
	const uint8_t *levels;           /**< TRUNCATE, encode: a level 0..3 for each value, instead of a metric */
} codec_context;

/**
 * The largest frame that this spec makes of a tensor of this dtype and shape, whatever its values: *nbytes. Equal on
 * all machines. codec_encode with this capacity never returns CODEC_SHORT_OUTPUT.
 */
CODEC_API codec_status codec_bound(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/** Scratch that encoding or decoding such a tensor needs, in bytes: at most 2.5% of the tensor + 1 MiB. */
CODEC_API codec_status codec_scratch(const codec_spec *spec, const codec_tensor *like, size_t *nbytes);

/**
 * Encode src. On CODEC_OK *written is the frame's size and dst[0, *written) the frame. On any other status *written
 * is 0, and dst[0, capacity) is unspecified. `with` may name segments and one codebook.
 *
 * `residual`, unless NULL, gets src less what a decoder will see, as float32, n values at any address; it may be src,
 * or an array of the metric's state. Of NaN and Inf that are encoded, not refused, nothing is left: 0. On any status
 * but CODEC_OK it is as it was. (If another thread changes src meanwhile, it may be written in part.) See
 * CODEC_FEEDBACK and CODEC_ONE_PASS.
 */
CODEC_API codec_status codec_encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
				    size_t *written, float *residual, const codec_context *with, void *scratch,
				    size_t scratch_nbytes);

/** What a header says. Offsets and sizes are in bytes from the frame's start. */
typedef struct codec_info {
	uint32_t struct_nbytes;         /**< sizeof(codec_info), set by the caller */
	uint32_t version;               /**< of the format */
	uint32_t dtype;                 /**< a codec_dtype */
	uint32_t rank;                  /**< dimensions of the tensor */
	uint64_t shape[CODEC_MAX_RANK]; /**< 0 behind the last of them */
	/**
	 * What was asked for, with the row in use. Parts have their own, which stand in the side section:
	 * CODEC_ROW_LAST if they differ, 0 if that was not given. TRUNCATE: with the guard in use, which dtypes add to.
	 */
	codec_spec spec;
	uint32_t stored;           /**< 1: the tensor's bytes follow the header as they are */
	uint32_t block_nvalues;    /**< values a block; 0 if stored, or where blocks follow rows: codecs 2 to 6 */
	uint64_t nblocks;          /**< 0 if stored */
	uint64_t n;                /**< values */
	uint64_t tensor_nbytes;    /**< n times the bytes an element */
	uint64_t frame_nbytes;     /**< of all of the frame: so many must be there to decode it */
	uint64_t checksum;         /**< of the whole */
	uint64_t side_offset;      /**< codebooks and scale model */
	uint64_t side_nbytes;      /**< 0: none */
	uint64_t directory_offset; /**< where blocks end, and their digests */
	uint64_t directory_nbytes; /**< 8 a block */
	uint64_t planes_offset;    /**< planes that are raw in every block */
	uint64_t planes_nbytes;    /**< 0: none */
	uint64_t regions_offset;   /**< what blocks hold; stored: the values */
	uint64_t regions_nbytes;   /**< up to the frame's end */
	uint32_t fixed_planes;     /**< bit p: plane p stands in the section at planes_offset */
	uint32_t coded_planes;     /**< bit p: plane p has a codebook */
	uint64_t codebook_id;      /**< 0: the frame carries its own */
	uint64_t nsegments;        /**< of the scale model; 0: none */
	codec_fault fault;         /**< filled in when the status is 30 or more */
	uint32_t clipped;          /**< TERNARY: 1 if magnitudes were limited; how far, a frame does not say */
	uint32_t reserved;         /**< 0 */
} codec_info;

#define CODEC_HEADER_NBYTES 112 /**< bytes of a header, at most */

/**
 * Read and check a header, and nothing behind it: nbytes may be less than the frame. codebook_id and nsegments are
 * read from the side section and are 0 if it was not given. *info is filled in up to the first field at fault.
 *
 * Of a frame that is still arriving, from no byte on: CODEC_TRUNCATED says that there is no whole header yet, and
 * info->fault.expected how many bytes it takes to go on, more than nbytes and at most CODEC_HEADER_NBYTES. CODEC_OK
 * says that the header is whole and right, and info->frame_nbytes how many bytes the frame has. Who reads only what is
 * asked for reads nothing behind the frame.
 */
CODEC_API codec_status codec_inspect(const void *frame, size_t nbytes, codec_info *info);

/** Check everything that can be checked without decoding: header, sections, directory and every checksum. */
CODEC_API codec_status codec_verify(const void *frame, size_t nbytes);

/**
 * Decode into dst, whose dtype, rank and shape must be the frame's; it may be an array of the metric's state. On any
 * status but CODEC_OK the contents of dst are unspecified, unless the status is below 30 or `with` has
 * CODEC_VERIFY_FIRST: then they are as they were.
 */
CODEC_API codec_status codec_decode(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
				    void *scratch, size_t scratch_nbytes);

/**
 * out = out + weight * decode(frame), in float32, without the tensor in between. As codec_decode with CODEC_INTO_ADD
 * and CODEC_VERIFY_FIRST: on any error dst is as it was.
 */
CODEC_API codec_status codec_accumulate(const void *frame, size_t nbytes, float weight, codec_tensor *dst,
					const codec_context *with, void *scratch, size_t scratch_nbytes);

/** @name op of codec_reduce */
/** @{ */
#define CODEC_REDUCE_SUM 0  /**< in the order given */
#define CODEC_REDUCE_MEAN 1 /**< the sum divided by count */
#define CODEC_REDUCE_MAX 2  /**< the largest; NaN if one is */
/** @} */

/**
 * The sum, mean or maximum of frames of one shape, as float32, in the order given: each addition is rounded, and the
 * mean is the sum divided by count, unless that is 1. Codes of TERNARY frames with equal scales are summed as integers,
 * then scaled. As with codec_decode, CODEC_VERIFY_FIRST leaves dst as it was on any error, and CODEC_CHECK_ONLY on
 * success, too; of several faults the first frame's is reported. dst must not be an array of the metric's state, unless
 * there is one frame.
 */
CODEC_API codec_status codec_reduce(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
				    codec_tensor *dst, const codec_context *with, void *scratch, size_t scratch_nbytes);

/** Scratch that codec_reduce needs for these frames, whose headers are read and must be right. */
CODEC_API codec_status codec_reduce_scratch(const void *const *frames, const size_t *nbytes, size_t count,
					    size_t *scratch_nbytes);

/** The i-th instruction set that this library has loops for, slowest first, or NULL. */
CODEC_API const char *codec_isa_name(uint32_t index);

/** 1 if this CPU and operating system run it. */
CODEC_API int codec_isa_usable(uint32_t index);

/**
 * A codebook for frames of this spec (LOSSLESS or TRUNCATE, whose cap holds) and dtype (one with exponents), from
 * counts of their symbols, for example those of codec_count.
 */
CODEC_API codec_status codec_codebook_build(const codec_spec *spec, uint32_t dtype, const uint64_t counts[256],
					    codec_codebook *book);

/** CODEC_OK if it is one that encoding takes: code lengths with a Kraft sum of 1, and the id that they have. */
CODEC_API codec_status codec_codebook_check(const codec_codebook *book);

#define CODEC_CODEBOOK_NBYTES 140 /**< bytes of a packed codebook, at most */

/** A codebook as bytes, to keep or to send: its id, symbols and code lengths, at most CODEC_CODEBOOK_NBYTES. */
CODEC_API codec_status codec_codebook_pack(const codec_codebook *book, void *dst, size_t capacity, size_t *written);

/** Takes all nbytes or none, and only what codec_codebook_pack writes: anything else is CODEC_BAD_CODEBOOK. */
CODEC_API codec_status codec_codebook_unpack(const void *src, size_t nbytes, codec_codebook *book);

/**
 * Add to counts[256] how often each symbol occurs in the sample that codec_encode would take of src, under the scale
 * model that it would choose. `with` as for encoding: segments, and TRUNCATE's metric or levels. scratch as
 * codec_scratch says. counts is as it was on any status but CODEC_OK.
 */
CODEC_API codec_status codec_count(const codec_spec *spec, const codec_tensor *src, uint64_t counts[256],
				   const codec_context *with, void *scratch, size_t scratch_nbytes);

#ifdef __cplusplus
}
#endif

#endif
