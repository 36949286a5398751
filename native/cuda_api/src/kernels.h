/*
 * kernels.h - tables of the kernels in the library: threads of a CTA, and CTAs that are resident on a multiprocessor.
 *
 * Written by tests/support/kernel_table.py from codec/engines/cuda/kernels.py, which decides.
 *
 * X(identifier, name expression for NVRTC, threads, resident). images.py reads the expressions of both tables from
 * here, in this order.
 */
#ifndef CODEC_CUDA_KERNELS_H
#define CODEC_CUDA_KERNELS_H

#define CODEC_CUDA_KERNELS(X)                                                                                          \
	X(STORE_BYTES, "store_bytes", 256, 1)                                                                          \
	X(FINISH_ENCODE, "finish_encode", 128, 1)                                                                      \
	X(OPEN_FRAMES, "open_frames", 256, 1)                                                                          \
	X(FINISH_DECODE, "finish_decode", 128, 1)                                                                      \
	X(PREPROCESS, "preprocess", 256, 4)                                                                            \
	X(CHOOSE_LOSSLESS, "choose_lossless", 256, 2)                                                                  \
	X(CHOOSE_ROWS, "choose_rows", 256, 2)                                                                          \
	X(SCALE_ROWS, "scale_rows", 256, 2)                                                                            \
	X(CHOOSE_TRUNCATE, "choose_truncate", 256, 2)                                                                  \
	X(ENCODE_LOSSLESS_FAST_2, "encode_lossless_fast<2>", 128, 6)                                                   \
	X(ENCODE_LOSSLESS_FAST_4, "encode_lossless_fast<4>", 128, 5)                                                   \
	X(ENCODE_LOSSLESS_1, "encode_lossless<1>", 128, 4)                                                             \
	X(ENCODE_LOSSLESS_2, "encode_lossless<2>", 128, 4)                                                             \
	X(ENCODE_LOSSLESS_4, "encode_lossless<4>", 128, 4)                                                             \
	X(ENCODE_LOSSLESS_8, "encode_lossless<8>", 128, 4)                                                             \
	X(ENCODE_ROWS_22, "encode_rows<22>", 128, 4)                                                                   \
	X(ENCODE_ROWS_2, "encode_rows<2>", 128, 4)                                                                     \
	X(ENCODE_ROWS_3, "encode_rows<3>", 128, 4)                                                                     \
	X(ENCODE_ROWS_4, "encode_rows<4>", 128, 4)                                                                     \
	X(ENCODE_ROWS_5, "encode_rows<5>", 128, 4)                                                                     \
	X(ENCODE_ROWS_6, "encode_rows<6>", 128, 4)                                                                     \
	X(ENCODE_TRUNCATE, "encode_truncate", 128, 4)                                                                  \
	X(CLOSE_FRAME, "close_frame", 256, 4)                                                                          \
	X(DECODE_LOSSLESS_1, "decode_lossless<1>", 128, 4)                                                             \
	X(DECODE_LOSSLESS_2, "decode_lossless<2>", 128, 4)                                                             \
	X(DECODE_LOSSLESS_4, "decode_lossless<4>", 128, 4)                                                             \
	X(DECODE_LOSSLESS_8, "decode_lossless<8>", 128, 3)                                                             \
	X(DECODE_LOSSLESS_FAST_2, "decode_lossless_fast<2>", 512, 2)                                                   \
	X(DECODE_LOSSLESS_FAST_4, "decode_lossless_fast<4>", 384, 2)                                                   \
	X(DECODE_ROWS_2, "decode_rows<2>", 128, 6)                                                                     \
	X(DECODE_ROWS_3, "decode_rows<3>", 128, 6)                                                                     \
	X(DECODE_ROWS_4, "decode_rows<4>", 128, 6)                                                                     \
	X(DECODE_ROWS_5, "decode_rows<5>", 128, 6)                                                                     \
	X(DECODE_ROWS_6, "decode_rows<6>", 128, 6)                                                                     \
	X(DECODE_TRUNCATE, "decode_truncate", 128, 4)                                                                  \
	X(ENCODE_DELTA_1, "encode_delta<1>", 128, 4)                                                                   \
	X(ENCODE_DELTA_2, "encode_delta<2>", 128, 4)                                                                   \
	X(ENCODE_DELTA_4, "encode_delta<4>", 128, 4)                                                                   \
	X(ENCODE_DELTA_8, "encode_delta<8>", 128, 4)                                                                   \
	X(DECODE_DELTA_1, "decode_delta<1>", 128, 4)                                                                   \
	X(DECODE_DELTA_2, "decode_delta<2>", 128, 4)                                                                   \
	X(DECODE_DELTA_4, "decode_delta<4>", 128, 4)                                                                   \
	X(DECODE_DELTA_8, "decode_delta<8>", 128, 4)                                                                   \
	X(ENCODE_TOPK, "encode_topk", 256, 4)                                                                          \
	X(DECODE_TOPK, "decode_topk", 128, 6)                                                                          \
	X(DECODE_STORED, "decode_stored", 128, 4)

/* Kernels that the library itself does not launch. Other host parts get them from codec_cuda_code_for. */
#define CODEC_CUDA_OTHER_KERNELS(X)                                                                                    \
	X(GATHER, "gather", 256, 4)                                                                                    \
	X(CHECK_FINITE, "check_finite", 256, 4)                                                                        \
	X(REDUCE_ROWS_22, "reduce_rows<22>", 128, 4)                                                                   \
	X(REDUCE_ROWS_2, "reduce_rows<2>", 128, 4)                                                                     \
	X(REDUCE_ROWS_3, "reduce_rows<3>", 128, 4)                                                                     \
	X(REDUCE_ROWS_4, "reduce_rows<4>", 128, 4)                                                                     \
	X(REDUCE_ROWS_5, "reduce_rows<5>", 128, 4)                                                                     \
	X(REDUCE_ROWS_6, "reduce_rows<6>", 128, 4)                                                                     \
	X(CHOOSE_TOPK, "choose_topk", 256, 4)

enum kernel {
#define X(identifier, name, threads, resident) identifier,
	CODEC_CUDA_KERNELS(X)
#undef X
		NKERNELS
};

#define WARPS 4                 /* warps of most CTAs; a grid has a CTA for so many blocks of values */
#define ELEMENTWISE_VALUES 4096 /* values for each CTA of elementwise kernels */
#define ELEMENTWISE_BLOCKS 8    /* maximum CTAs of elementwise kernels for each multiprocessor */
#define OTHER_BLOCKS 2          /* maximum CTAs per multiprocessor of kernels that choose or write frame headers */
#define MAX_GRID_Y 65535        /* CUDA's limit of a grid's second dimension */
#define MAX_IDLE 4096           /* maximum CTAs of a launch that find no work */
#define MAX_SCRATCH 300000000   /* maximum bytes of scratch memory of a call */

#endif
