/* arguments.h - check the arguments of a collective, hash them, and back up the residuals that it changes. */
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "channel.h"
#include "errors.h"
#include "frames.h"
#include "metric.h"
#include "options.h"
#include "parameters.h"
#include "slices.h"

namespace codec::gloo::detail
{

constexpr uint64_t PROTOCOL = 7; /* protocol version: docs/spec/protocol/cpp.md */

/* Collective, numbered as in the signature. */
enum class Kind { allreduce, reduce_scatter, allgather };

/*
 * Return n times the number of ranks. Throws ArgumentError if the product is too large, or if `out` is null.
 */
inline size_t of_all(size_t n, int size, const void *out)
{
	if (!out && n)
		throw ArgumentError(CODEC_BAD_ARGUMENT, "the destination of the result must not be null");
	if (n > SIZE_MAX / sizeof(float) / size)
		throw ArgumentError(CODEC_BAD_SHAPE, "the result has more values than memory can hold");
	return n * size;
}

/*
 * Throw ArgumentError unless tensor, `out` and residuals are aligned and do not overlap. Overlap is refused
 * because one is written while another is still read.
 */
inline void check_memory(const Reduction &r, const uint8_t *out)
{
	const struct {
		const void *p;
		size_t itemsize;
	} each[] = {{r.x, r.itemsize}, {out, r.itemsize}, {r.residual, 4}, {r.sums_residual, 4}};

	for (const auto &a : each) {
		const auto begin = reinterpret_cast<uintptr_t>(a.p), end = begin + r.n * a.itemsize;
		bool good = begin % a.itemsize == 0;

		for (const auto *b = each; a.p && b < &a; b++) {
			const auto other = reinterpret_cast<uintptr_t>(b->p);

			good = good && (!b->p || begin >= other + r.n * b->itemsize || other >= end);
		}
		if (!good)
			throw ArgumentError(CODEC_BAD_ARGUMENT, "tensor, out and residuals must be aligned to "
								"their values, and must not overlap");
	}
}

/* Return the arguments as a Reduction. Throws ArgumentError or SpecError if one is invalid. */
inline Reduction reduction(Workspace &work, const void *values, size_t n, uint32_t dtype, const codec_spec &spec,
			   const Options &options)
{
	if (dtype != CODEC_FLOAT32 && dtype != CODEC_BFLOAT16 && dtype != CODEC_FLOAT16)
		throw ArgumentError(CODEC_BAD_DTYPE, "dtype must be float32, bfloat16 or float16");
	if (!values && n)
		throw ArgumentError(CODEC_BAD_ARGUMENT, "the tensor must not be null");
	if (has_trait(spec, CODEC_TRAIT_BASE))
		throw SpecError(CODEC_BAD_SPEC, "CODEC_DELTA needs a base, which collectives do not have: use "
						"CODEC_LOSSLESS for exact results");
	check_segments(options.segments, n);
	if (options.codebook)
		check(codec_codebook_check(options.codebook));

	Reduction r(work);
	r.x = static_cast<const uint8_t *>(values);
	r.n = n;
	r.dtype = dtype;
	r.itemsize = codec_dtype_nbytes(dtype);
	r.spec = spec;
	r.op = options.op;
	r.stream = options.stream;
	r.segments = options.segments;
	r.cut_as_torch = options.cut_as_torch;
	r.metric = options.metric;
	r.codebook = options.codebook;
	r.codebooks = options.codebooks;
	r.residual = options.residual;
	r.sums_residual = options.sums_residual;
	r.bound(n); /* throws if the spec or the size is invalid */
	r.parameters.emplace(spec, dtype, options.metric, work.scratch);
	check_metrics(options.metric, n);
	check_memory(r, static_cast<const uint8_t *>(options.out));
	return r;
}

inline void only_plain(const Options &options)
{
	if (options.algorithm != Algorithm::automatic || options.out || options.sums_residual ||
	    !options.segments.empty())
		throw ArgumentError(CODEC_BAD_ARGUMENT,
				    "algorithm, segments, out and sums_residual of Options are for all-reduces only");
}

/*
 * Throw SpecError if CODEC_TOPK has no residual to keep the values that it drops. `sums` is true if the
 * algorithm also encodes sums, which need sums_residual.
 */
inline void require_feedback(const Reduction &r, bool sums)
{
	if (r.spec.codec == CODEC_TOPK && r.n && (!r.residual || (sums && !r.sums_residual)))
		throw SpecError(CODEC_BAD_SPEC,
				"CODEC_TOPK drops most values: pass Options::residual, which sends them later, and "
				"Options::sums_residual if this algorithm encodes sums (all_gather does not)");
}

/* Backup of the residuals. The destructor restores the residuals, unless commit() was called after success. */
class Backup
{
public:
	Backup(std::vector<float> &room, const Options &options, const Reduction &r, const Channel &channel)
	    : residual_(options.residual), sums_(options.sums_residual), n_(residual_ ? r.n : 0)
	{
		if (sums_) {
			const auto slices = cut(r.n, channel.size, r.itemsize, r.segments);
			const Slice &mine = slices[channel.rank];

			sums_ += mine.front().begin;
			sums_n_ = mine.back().end - mine.front().begin;
		}
		copy_ = Workspace::room(room, n_ + sums_n_);
		if (n_)
			std::memcpy(copy_, residual_, n_ * sizeof *copy_);
		if (sums_n_)
			std::memcpy(copy_ + n_, sums_, sums_n_ * sizeof *copy_);
	}

	~Backup()
	{
		restore();
	}

	Backup(const Backup &) = delete;
	Backup &operator=(const Backup &) = delete;

	void restore()
	{
		if (n_)
			std::memcpy(residual_, copy_, n_ * sizeof *copy_);
		if (sums_n_)
			std::memcpy(sums_, copy_ + n_, sums_n_ * sizeof *copy_);
	}

	void commit()
	{
		n_ = sums_n_ = 0;
	}

private:
	float *residual_, *sums_, *copy_;
	uint64_t n_, sums_n_ = 0;
};

/* Return a hash of all arguments that must be equal on all ranks. */
inline uint64_t signature_of(const Reduction &r, Kind kind, Algorithm algorithm)
{
	uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
	const auto mix = [&](const auto &word) {
		uint64_t wide = 0;

		static_assert(sizeof word <= sizeof wide);
		std::memcpy(&wide, &word, sizeof word);
		for (int i = 0; i < 8; i++)
			hash = (hash ^ (wide >> 8 * i & 0xff)) * 0x100000001b3;
	};
	const codec_spec &s = r.spec;

	mix(PROTOCOL);
	mix(kind);
	mix(uint32_t(CODEC_FORMAT_VERSION));
	for (uint32_t word :
	     {s.codec, s.max_code_length, s.model, s.variant, s.options, s.bits, s.group_size, s.kept, s.seed})
		mix(word);
	mix(s.scale);
	mix(s.clip);
	mix(s.guard);
	mix(r.dtype);
	mix(r.n);
	mix(r.op);
	mix(r.cut_as_torch);
	mix(algorithm);
	mix(uint64_t(r.metric != nullptr));
	mix(r.codebook ? r.codebook->id : 0);
	for (const codec_segment &segment : r.segments) {
		mix(segment.offset);
		for (uint32_t d = 0; d < segment.rank; d++)
			mix(segment.shape[d]);
		mix(segment.rank);
	}
	return hash;
}

} // namespace codec::gloo::detail
