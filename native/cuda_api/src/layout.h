/*
 * layout.h - structs that host programs write and kernels read, and limits of launches. Compiled as C, and as CUDA by
 * NVRTC; the Python host reads this file by cffi.
 *
 * Pointers into device memory are uint64_t here. kernels/layout.cuh checks that the structs of native/cuda are laid out
 * in the same way.
 */
#ifndef CODEC_CUDA_LAYOUT_H
#define CODEC_CUDA_LAYOUT_H

#include "codec/codec_engine.h"

#define WARPS 4                 /* warps of most CTAs; each encodes or decodes one block of values at a time */
#define ELEMENTWISE_VALUES 4096 /* values for each CTA of elementwise kernels */
#define ELEMENTWISE_BLOCKS 8    /* maximum CTAs of elementwise kernels for each multiprocessor */
#define OTHER_BLOCKS 2          /* maximum CTAs per multiprocessor of kernels that choose or write frame headers */
#define MAX_GRID_Y 65535        /* CUDA's limit of a grid's second dimension */
#define MAX_IDLE 4096           /* maximum CTAs of a launch that find no work */
#define MAX_SCRATCH 300000000   /* maximum bytes of scratch memory of a call; if warps need more, fewer run at once */

/* maximum number of bytes that a launch of store_bytes writes; a kernel's arguments are limited to 4 KiB */
#define STORED_NBYTES 3968

/* Argument of store_bytes: bytes that a launch writes to device memory. */
struct stored_bytes {
	uint64_t to;
	uint64_t nbytes; /* number of bytes, a multiple of 8 */
	uint64_t words[STORED_NBYTES / 8];
};

/* Mirror of codec_units in native/cuda/common/scratch.cuh. */
struct units {
	uint64_t taken, memory, each;
	uint32_t count, reserved;
};

/* Mirror of codec_encoding in native/cuda/frame/encode.cuh. */
struct encoding {
	uint64_t view, memory, values, sums, residual, frame, capacity;
	struct units scratch;
	uint64_t found, head, places, out, exponents, levels; /* exponents: or DELTA's base */
	uint32_t nparts, warps;
};

/* Mirror of codec_preprocessing in native/cuda/frame/preprocess.cu. */
struct preprocessing {
	uint64_t n, values, residual, sums, rounded, groups, exponents, levels;
	uint32_t dtype, reserved;
	uint64_t out;
};

/* Mirror of codec_group in native/cuda/frame/preprocess.cu. */
struct group {
	uint64_t first, end, a, theta, v, m;
	uint32_t theta_dtype, v_dtype, m_dtype;
	float theta_term, theta_v_term, v_term, eps, m_term;
};

/* Mirror of codec_written in native/cuda/frame/encode.cuh. */
struct written {
	uint64_t checksum, end, stored, nbytes;
	uint32_t ticket, closed, fault, changed;
	uint64_t base, result;
};

#define WRITTEN_NBYTES 64 /* size of a struct written */

/* Argument of finish_encode for one tensor: addresses of its codec_written and codec_cuda_result. */
struct written_result {
	uint64_t written, result;
};

/* Mirror of codec_decoding in native/cuda/frame/decode.cuh. */
struct decoding {
	uint64_t view, memory, frame;
	struct units scratch;
	uint64_t exponents, found; /* exponents: or DELTA's base */
	uint64_t data;             /* first field of codec_sink */
	uint32_t into;
	float weight, divide;
	uint32_t unscaled, rescale, padding; /* last fields of codec_sink */
	uint32_t checks, warps;
	/* lists: address of a struct lists; libcodec_cuda passes 0, and decodes a block twice instead */
	uint64_t lists, reserved;
};

/* Mirror of codec_found in native/cuda/frame/decode.cuh. */
struct found {
	uint64_t fault, checksum;
	uint32_t done, reserved;
	uint64_t base, result, damage;
};

/* Mirror of codec_lists in native/cuda/frame/decode.cuh. */
struct lists {
	uint64_t used, room;
};

/* Mirror of codec_piece in native/cuda/frame/gather.cu. */
struct piece {
	uint64_t from, to, nbytes;
};

/* Header fields of a frame, written by open_frames and read by finish_decode. */
struct opened {
	uint64_t frame_nbytes;
	uint64_t checksum;      /* checksum of the frame, read from its header */
	uint64_t head_checksum; /* computed checksum of header and side section */
	uint64_t base, result;  /* DELTA: digests in the side section */
	uint32_t status;
	uint32_t decoder; /* kernel that decodes the frame */
};

/* Kernels that may decode a frame: the kernel of its codec, decode_lossless_fast, and decode_stored. */
enum decoder { BLOCKS, FAST_BLOCKS, STORED, NDECODERS };

/* Arguments of open_frames and finish_decode for one frame. */
struct opening {
	uint64_t frame, frame_nbytes, frame_nbytes_at, tensor, result;
	struct units scratch;
	uint64_t view, memory, found, opened; /* output: codec_view, its arrays, struct found, struct opened */
	/*
	 * Output: per kernel, the address of a struct decoding for a launch that checks the frame (0: decode without
	 * checking before) and of one for the launch that decodes it. Kernels other than opened.decoder get no warps.
	 */
	uint64_t checking[NDECODERS], decoding[NDECODERS];
	uint64_t shape[CODEC_MAX_RANK];
	uint32_t codec, dtype, rank, entropy; /* from the plan; entropy: 1 if codes are entropy-coded */
	uint32_t flags, into;                 /* flags: CODEC_ALLOW_SLACK, CODEC_VERIFY_FIRST */
	float weight, divide;
	/* warps: number of warps of each kernel; FAST_BLOCKS: 0 if the kernel must not be used */
	uint32_t warps[NDECODERS], reserved[3];
	uint64_t base, block_nvalues; /* DELTA: address of the base; maximum number of values in a block */
};

#endif
