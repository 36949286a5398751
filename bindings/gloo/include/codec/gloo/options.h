/* options.h - specs, algorithms and optional arguments of the collectives. */
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <codec/codec.h>

#include "errors.h"
#include "frames.h"

namespace codec::gloo
{

/**
 * Return a spec of codec `codec` with the defaults of codec.h. The defaults of the Python package differ in two
 * codecs: Quantize has CODEC_OPTION_STOCHASTIC, and Truncate has CODEC_LEVEL_CODING_CODED and a guard of -8.
 */
inline codec_spec spec_of(uint32_t codec)
{
	auto spec = detail::blank<codec_spec>();

	spec.codec = codec;
	return spec;
}

/** Algorithm of an all-reduce. N is the number of ranks. */
enum class Algorithm {
	automatic,  /**< all_gather for two ranks or small tensors, else two_shot */
	two_shot,   /**< each rank reduces one slice, and sends the bytes of 2 (N - 1) / N frames of the tensor */
	all_gather, /**< each rank reduces the whole tensor, and sends N - 1 frames, in one phase */
	ring,       /**< as many bytes as two_shot, to one neighbour; sums are encoded N - 1 times */
	raw,        /**< two_shot with uncompressed values */
};

/** Optional arguments of a collective. All pointers must stay valid until the call returns. */
struct Options {
	Op op = Op::mean;                           /**< operation of a reduction */
	Algorithm algorithm = Algorithm::automatic; /**< algorithm of an all-reduce */
	std::vector<codec_segment> segments;        /**< positions and shapes of the parameters in a flat bucket */
	/** for CODEC_TRUNCATE; its arrays have one entry per value of the tensor */
	const codec_metric *metric = nullptr;
	const codec_codebook *codebook = nullptr; /**< codebook for encoding, equal on all ranks */
	std::vector<codec_codebook> codebooks;    /**< codebooks that received frames may name */
	uint64_t stream = 0; /**< id of the random bits of stochastic codecs; must differ between tensors of a step */
	void *out = nullptr; /**< destination of the result; nullptr: the tensor itself, which is slower */
	/**
	 * Cut tensors into chunks of up to 4 MiB instead of 1 MiB, as codec.torch does. Set it if results must be
	 * bit-identical to those of codec.torch and the codec's scales or random bits depend on chunks. Slightly
	 * slower.
	 */
	bool cut_as_torch = false;
	/**
	 * Residuals of error feedback: n float32 values each, zero before the first call. A call adds them to the
	 * values that it encodes, and replaces them by the encoding error. `residual` belongs to this rank's own
	 * values, `sums_residual` to the sums that this rank encodes. The algorithm `ring` accepts neither. CODEC_TOPK
	 * requires `residual` for all_gather and reduce_scatter, and both for two_shot.
	 */
	float *residual = nullptr;
	float *sums_residual = nullptr; /**< residual of the sums that this rank encodes: see `residual` */
	/** Timeout of each wait for another rank, from 1 ms to 10 years; 0: the context's timeout. */
	std::chrono::milliseconds timeout{0};
};

} // namespace codec::gloo
