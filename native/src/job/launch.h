/*
 * launch.h - kernels of native/cuda, and the choice among them for a job. launch.c makes this choice for all programs
 * that launch kernels.
 */
#ifndef CODEC_LAUNCH_H
#define CODEC_LAUNCH_H

/*
 * X(identifier, name expression for NVRTC, source file, threads of a CTA, CTAs that are resident on a multiprocessor,
 * blocks of values per CTA, array of scratch sizes). They are the members of codec_kernel. images.py reads the names
 * from here, in this order. An instance encode_rows<N> is for codec N; N 22 is QUANTIZE with zero points
 * (QUANTIZE_AFFINE of native/cuda/rows/rows.cuh).
 */
#define KERNELS(X)                                                                                                     \
	X(STORE_BYTES, "store_bytes", "", 256, 1, 4, "")                                                               \
	X(FINISH_ENCODE, "finish_encode", "", 128, 1, 4, "")                                                           \
	X(OPEN_FRAMES, "open_frames", "", 256, 1, 4, "")                                                               \
	X(FINISH_DECODE, "finish_decode", "", 128, 1, 4, "")                                                           \
	X(GATHER, "gather", "frame/gather", 256, 4, 4, "")                                                             \
	X(CHECK_FINITE, "check_finite", "frame/check_finite", 256, 4, 4, "")                                           \
	X(PREPROCESS, "preprocess", "frame/preprocess", 256, 4, 4, "")                                                 \
	X(CHOOSE_LOSSLESS, "choose_lossless", "lossless/choose", 256, 2, 4, "")                                        \
	X(CHOOSE_ROWS, "choose_rows", "rows/choose", 256, 2, 4, "")                                                    \
	X(SCALE_ROWS, "scale_rows", "rows/choose", 256, 2, 4, "")                                                      \
	X(CHOOSE_TRUNCATE, "choose_truncate", "truncate/choose", 256, 2, 4, "")                                        \
	X(ENCODE_LOSSLESS_FAST_2, "encode_lossless_fast<2>", "lossless/encode_fast", 128, 6, 4,                        \
	  "encode_lossless_nbytes")                                                                                    \
	X(ENCODE_LOSSLESS_FAST_4, "encode_lossless_fast<4>", "lossless/encode_fast", 128, 5, 4,                        \
	  "encode_lossless_nbytes")                                                                                    \
	X(ENCODE_LOSSLESS_1, "encode_lossless<1>", "lossless/encode", 128, 4, 4, "encode_lossless_nbytes")             \
	X(ENCODE_LOSSLESS_2, "encode_lossless<2>", "lossless/encode", 128, 4, 4, "encode_lossless_nbytes")             \
	X(ENCODE_LOSSLESS_4, "encode_lossless<4>", "lossless/encode", 128, 4, 4, "encode_lossless_nbytes")             \
	X(ENCODE_LOSSLESS_8, "encode_lossless<8>", "lossless/encode", 128, 4, 4, "encode_lossless_nbytes")             \
	X(ENCODE_ROWS_2, "encode_rows<2>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                             \
	X(ENCODE_ROWS_3, "encode_rows<3>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                             \
	X(ENCODE_ROWS_4, "encode_rows<4>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                             \
	X(ENCODE_ROWS_5, "encode_rows<5>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                             \
	X(ENCODE_ROWS_6, "encode_rows<6>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                             \
	X(ENCODE_ROWS_22, "encode_rows<22>", "rows/encode", 128, 4, 4, "encode_rows_nbytes")                           \
	X(ENCODE_TRUNCATE, "encode_truncate", "truncate/encode", 128, 4, 4, "encode_truncate_nbytes")                  \
	X(CLOSE_FRAME, "close_frame", "frame/close", 256, 4, 4, "")                                                    \
	X(DECODE_LOSSLESS_1, "decode_lossless<1>", "lossless/decode", 128, 4, 4, "decode_lossless_nbytes")             \
	X(DECODE_LOSSLESS_2, "decode_lossless<2>", "lossless/decode", 128, 4, 4, "decode_lossless_nbytes")             \
	X(DECODE_LOSSLESS_4, "decode_lossless<4>", "lossless/decode", 128, 4, 4, "decode_lossless_nbytes")             \
	X(DECODE_LOSSLESS_8, "decode_lossless<8>", "lossless/decode", 128, 3, 4, "decode_lossless_nbytes")             \
	X(DECODE_LOSSLESS_FAST_2, "decode_lossless_fast<2>", "lossless/decode_fast2", 512, 2, 4, "")                   \
	X(DECODE_LOSSLESS_FAST_4, "decode_lossless_fast<4>", "lossless/decode_fast4", 384, 2, 4, "")                   \
	X(DECODE_ROWS_2, "decode_rows<2>", "rows/decode", 128, 6, 4, "decode_rows_nbytes")                             \
	X(DECODE_ROWS_3, "decode_rows<3>", "rows/decode", 128, 6, 4, "decode_rows_nbytes")                             \
	X(DECODE_ROWS_4, "decode_rows<4>", "rows/decode", 128, 6, 4, "decode_rows_nbytes")                             \
	X(DECODE_ROWS_5, "decode_rows<5>", "rows/decode", 128, 6, 4, "decode_rows_nbytes")                             \
	X(DECODE_ROWS_6, "decode_rows<6>", "rows/decode", 128, 6, 4, "decode_rows_nbytes")                             \
	X(REDUCE_ROWS_2, "reduce_rows<2>", "rows/reduce", 128, 4, 1, "")                                               \
	X(REDUCE_ROWS_3, "reduce_rows<3>", "rows/reduce", 128, 4, 1, "")                                               \
	X(REDUCE_ROWS_4, "reduce_rows<4>", "rows/reduce", 128, 4, 1, "")                                               \
	X(REDUCE_ROWS_5, "reduce_rows<5>", "rows/reduce", 128, 4, 1, "")                                               \
	X(REDUCE_ROWS_6, "reduce_rows<6>", "rows/reduce", 128, 4, 1, "")                                               \
	X(REDUCE_ROWS_22, "reduce_rows<22>", "rows/reduce", 128, 4, 1, "")                                             \
	X(DECODE_TRUNCATE, "decode_truncate", "truncate/decode", 128, 4, 4, "decode_truncate_nbytes")                  \
	X(ENCODE_DELTA_1, "encode_delta<1>", "delta/encode", 128, 4, 4, "encode_delta_nbytes")                         \
	X(ENCODE_DELTA_2, "encode_delta<2>", "delta/encode", 128, 4, 4, "encode_delta_nbytes")                         \
	X(ENCODE_DELTA_4, "encode_delta<4>", "delta/encode", 128, 4, 4, "encode_delta_nbytes")                         \
	X(ENCODE_DELTA_8, "encode_delta<8>", "delta/encode", 128, 4, 4, "encode_delta_nbytes")                         \
	X(DECODE_DELTA_1, "decode_delta<1>", "delta/decode", 128, 4, 4, "decode_delta_nbytes")                         \
	X(DECODE_DELTA_2, "decode_delta<2>", "delta/decode", 128, 4, 4, "decode_delta_nbytes")                         \
	X(DECODE_DELTA_4, "decode_delta<4>", "delta/decode", 128, 4, 4, "decode_delta_nbytes")                         \
	X(DECODE_DELTA_8, "decode_delta<8>", "delta/decode", 128, 4, 4, "decode_delta_nbytes")                         \
	X(CHOOSE_TOPK, "choose_topk", "topk/encode", 256, 4, 4, "")                                                    \
	X(ENCODE_TOPK, "encode_topk", "topk/encode", 256, 4, 1, "")                                                    \
	X(DECODE_TOPK, "decode_topk", "topk/decode", 128, 6, 4, "")                                                    \
	X(DECODE_STORED, "decode_stored", "frame/decode_stored", 128, 4, 4, "")

/* Numbers of kernels, as in a codec_launch. */
enum kernel {
	KERNEL_NONE,
#define X(identifier, ...) KERNEL_##identifier,
	KERNELS(X)
#undef X
		NKERNELS /* numbers, including KERNEL_NONE */
};

#endif
