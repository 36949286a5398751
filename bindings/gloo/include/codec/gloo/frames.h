/* frames.h - encode, decode and add up the pieces of a tensor that are sent as frames. */
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <codec/codec.h>

#include "channel.h"
#include "errors.h"
#include "metric.h"
#include "parameters.h"
#include "slices.h"
#include "values.h"

namespace codec::gloo
{

/** Reduction operator. */
enum class Op { mean, sum, max };

namespace detail
{

/* Buffers that are reused by later calls. */
struct Workspace {
	std::vector<uint8_t> scratch, result;
	std::vector<uint16_t> halves;
	std::vector<float> total, wide, residuals;

	/* Grow the vector `of` to at least n values if needed, and return its data. */
	template <class T> static T *room(std::vector<T> &of, uint64_t n)
	{
		if (of.size() < n)
			of.resize(n);
		return of.data();
	}
};

/* Arguments of a collective. They are equal on all ranks, except pointers and the data to which they point. */
struct Reduction {
	explicit Reduction(Workspace &memory) : work(memory)
	{
	}

	Workspace &work;
	const uint8_t *x = nullptr;
	uint64_t n = 0;
	uint32_t dtype = CODEC_FLOAT32, itemsize = 4;
	codec_spec spec{};
	std::optional<Parameters> parameters; /* header fields of frames of `spec` */
	Op op = Op::mean;
	uint64_t stream = 0;
	Segments segments;
	bool cut_as_torch = false;
	const codec_metric *metric = nullptr;
	const codec_codebook *codebook = nullptr; /* codebook for encoding, equal on all ranks; or nullptr */
	std::vector<codec_codebook> codebooks;    /* codebooks that received frames may name */
	float *residual = nullptr;                /* n float32 residuals of this rank's own values; read and written */
	/* n float32 residuals of the sums that this rank encodes; read and written */
	float *sums_residual = nullptr;
	uint8_t *result = nullptr; /* destination of the result */
	/*
	 * True if the result overwrites the tensor only after the verdict: until then received frames are validated
	 * but not decoded. For large tensors with small frames this is faster than decoding into a buffer and copying
	 * it.
	 */
	bool late = false;

	/*
	 * Return true if this rank may use its own values instead of their frame, because encoding is lossless. Return
	 * false for Op::max, for which codec_reduce must read every frame to treat NaN as it specifies.
	 */
	bool own_as_is() const
	{
		return has_trait(spec, CODEC_TRAIT_LOSSLESS) && op != Op::max;
	}

	/* Return true if encoding refuses Inf and NaN. */
	bool only_numbers() const
	{
		return has_trait(spec, CODEC_TRAIT_FINITE);
	}

	const uint8_t *own(const Piece &piece) const
	{
		return x + piece.begin * itemsize;
	}

	/*
	 * Return the upper bound in bytes of a frame of `count` values with any segments. The partition into pieces is
	 * computed from this bound.
	 */
	size_t bound(uint64_t count) const
	{
		codec_tensor t = tensor_of(dtype, nullptr, count);
		size_t nbytes;

		check(codec_bound(&spec, &t, &nbytes));
		return nbytes;
	}

	/* Return the upper bound of the frame of a piece, in bytes. */
	size_t bound(const Piece &piece) const
	{
		codec_tensor t = tensor_of(dtype, nullptr, piece.n());
		size_t nbytes;

		check(codec_bound_segments(&spec, &t, piece.segments.data(), piece.segments.size(), &nbytes));
		return nbytes;
	}

	uint64_t chunk_nbytes() const
	{
		return cut_as_torch ? torch_chunk_nbytes(bound(CHUNK_NBYTES / itemsize)) : CHUNK_NBYTES;
	}

	/* Return one slice for each of `size` ranks, cut into chunks. even_slices() returns slices of equal size. */
	std::vector<Slice> slices(int size) const
	{
		return cut(n, size, itemsize, segments, chunk_nbytes());
	}

	std::vector<Slice> even_slices(int size) const
	{
		return cut_evenly(n, size, itemsize, chunk_nbytes());
	}

	std::vector<size_t> bounds(const Slice &pieces) const
	{
		std::vector<size_t> found;

		for (const Piece &piece : pieces)
			found.push_back(bound(piece));
		return found;
	}

	/*
	 * Encode a piece of this rank's values and return the message. `most` is the upper bound of the frame in
	 * bytes. `number` selects the random stream: docs/spec/protocol/collectives.md, section 1.2.
	 */
	Bytes encode(Channel &channel, const Piece &piece, size_t most, uint64_t number)
	{
		return encode(channel, own(piece), piece, most, number, residual);
	}

	/* Encode the float32 sum of a piece, rounded to the tensor's dtype, and return the message. */
	Bytes encode_sum(Channel &channel, const float *sum, const Piece &piece, size_t most, uint64_t number)
	{
		const void *values = sum;

		if (dtype != CODEC_FLOAT32) {
			uint16_t *halves = Workspace::room(work.halves, piece.n());

			narrow(dtype, sum, piece.n(), halves);
			values = halves;
		}
		return encode(channel, values, piece, most, number, sums_residual);
	}

	/* Decode the frame of a piece. With CODEC_CHECK_ONLY only validate it. */
	void decode(Bytes frame, const Piece &piece, void *into, uint32_t flags = 0)
	{
		decode(frame, check_frame(frame, piece), piece, dtype, into, CODEC_INTO_STORE, flags);
	}

	/* Add the values of a frame to the float32 values `total`; for Op::max store the larger of the two. */
	void accumulate(Bytes frame, const Piece &piece, float *total)
	{
		uint32_t into = op == Op::max ? CODEC_INTO_MAX : CODEC_INTO_ADD;

		decode(frame, check_frame(frame, piece), piece, CODEC_FLOAT32, total, into);
	}

	/*
	 * Reduce the frames of a piece, in rank order, to float32 values. An empty frame stands for this rank's own
	 * values. `flags` are those of codec_reduce; they apply only if no frame is empty.
	 */
	void sum(const std::vector<Bytes> &parts, const Piece &piece, float *total, uint32_t flags = 0)
	{
		std::vector<codec_spec> specs;
		bool all = true;

		for (Bytes part : parts) {
			all = all && part;
			specs.push_back(part ? check_frame(part, piece) : spec);
		}
		if (all) {
			reduce(parts, piece, total, flags);
			return;
		}
		for (size_t i = 0; i < parts.size(); i++) {
			uint32_t into = i ? CODEC_INTO_ADD : CODEC_INTO_FLOAT32;

			if (parts[i])
				decode(parts[i], specs[i], piece, CODEC_FLOAT32, total, into);
			else
				add_own(piece, total, !i);
		}
		/* each rank adds its own values uncompressed, so NaN payloads could differ between ranks */
		one_nan(total, piece.n());
		if (op == Op::mean)
			divide(total, piece.n(), static_cast<float>(parts.size()));
	}

	/*
	 * Return a float32 buffer for the sum of a piece: `place` itself if the tensor is float32, else a temporary
	 * buffer.
	 */
	float *total(const Piece &piece, uint8_t *place)
	{
		if (dtype == CODEC_FLOAT32)
			return reinterpret_cast<float *>(place);
		return room_for_total(piece);
	}

	/* Return a temporary buffer for a piece, in the tensor's dtype. */
	uint8_t *aside(const Piece &piece)
	{
		if (dtype == CODEC_FLOAT32)
			return reinterpret_cast<uint8_t *>(room_for_total(piece));
		return reinterpret_cast<uint8_t *>(Workspace::room(work.halves, piece.n()));
	}

	/*
	 * Return a float32 buffer for a sum that is encoded. With a lossy codec it is a temporary buffer, since the
	 * result receives the decoded values.
	 */
	float *total_to_encode(const Piece &piece, uint8_t *place)
	{
		return has_trait(spec, CODEC_TRAIT_LOSSLESS) ? total(piece, place) : room_for_total(piece);
	}

	/*
	 * Return the values of a piece as float32, converted in a buffer that the next call overwrites. Float32 values
	 * are not copied.
	 */
	const float *as_float32(const uint8_t *values, const Piece &piece)
	{
		if (dtype == CODEC_FLOAT32)
			return reinterpret_cast<const float *>(values);
		float *wide = Workspace::room(work.wide, piece.n());

		widen(dtype, values, piece.n(), wide);
		return wide;
	}

	/* Return true if the tensor is too large for the CPU's caches. */
	bool is_large() const
	{
		return n * itemsize >= CODEC_UNCACHED_NBYTES;
	}

	/*
	 * Return CODEC_NONTEMPORAL for large tensors, else 0: non-temporal stores of results that are not read again.
	 */
	uint32_t past_caches() const
	{
		return is_large() ? CODEC_NONTEMPORAL : 0;
	}

	/*
	 * Return the spec of a frame. Throws FrameError unless dtype, size, codec and parameters are those that the
	 * ranks agreed on.
	 */
	codec_spec check_frame(Bytes frame, const Piece &piece) const
	{
		auto info = blank<codec_info>();

		check(codec_inspect(frame.p, frame.nbytes, &info), &info.fault);
		if (info.dtype != dtype || info.rank != 1 || info.n != piece.n())
			throw FrameError(CODEC_SHAPE_MISMATCH,
					 "a frame was received whose dtype or shape is not that of the tensor");
		parameters->check(info, !piece.segments.empty());
		return info.spec;
	}

private:
	/* stride between random streams; odd and large, so that piece numbers of two streams do not collide */
	static constexpr uint64_t APART = 0x9E3779B97F4A7C15;

	float *room_for_total(const Piece &piece)
	{
		return Workspace::room(work.total, piece.n());
	}

	codec_context context_for(const Piece &piece)
	{
		auto with = blank<codec_context>();

		fault_ = {};
		with.fault = &fault_;
		with.weight = 1;
		with.segments = piece.segments.data();
		with.nsegments = piece.segments.size();
		return with;
	}

	Bytes encode(Channel &channel, const void *values, const Piece &piece, size_t most, uint64_t number,
		     float *feedback)
	{
		Bytes message = channel.take(most), room_for_it = Channel::frame_of(message);
		codec_tensor src = tensor_of(dtype, values, piece.n());
		codec_context with = context_for(piece);
		MetricOf part(metric, piece);
		size_t written, nbytes;

		with.metric = part.get();
		with.codebooks = codebook;
		with.ncodebooks = codebook != nullptr;
		with.stream = stream * APART + number;
		if (feedback) { /* encoding overwrites the residual; after an error the caller restores it */
			with.flags = CODEC_FEEDBACK;
			feedback += piece.begin;
		}
		check(codec_scratch(&spec, &src, &nbytes));
		check(codec_encode(&spec, &src, room_for_it.p, room_for_it.nbytes, &written, feedback, &with,
				   Workspace::room(work.scratch, nbytes), nbytes));
		return channel.sized(message, written);
	}

	/* Return the context for decoding a frame of a piece. */
	codec_context context_of_frame(const Piece &piece, const MetricOf &part)
	{
		codec_context with = context_for(piece);

		with.segments = nullptr;
		with.nsegments = 0;
		with.codebooks = codebooks.data();
		with.ncodebooks = codebooks.size();
		with.metric = part.get();
		return with;
	}

	const codec_metric *shared() const
	{
		return spec.codec == CODEC_TRUNCATE && spec.variant == CODEC_LEVEL_CODING_SHARED ? metric : nullptr;
	}

	void decode(Bytes frame, const codec_spec &of, const Piece &piece, uint32_t to_dtype, void *to, uint32_t into,
		    uint32_t flags = 0)
	{
		codec_tensor dst = tensor_of(to_dtype, to, piece.n());
		MetricOf part(shared(), piece);
		codec_context with = context_of_frame(piece, part);
		codec_tensor like = tensor_of(dtype, nullptr, piece.n());
		size_t nbytes;

		with.into = into;
		with.flags = flags | past_caches();
		check(codec_scratch(&of, &like, &nbytes));
		check(codec_decode(frame.p, frame.nbytes, &dst, &with, Workspace::room(work.scratch, nbytes), nbytes),
		      &fault_);
	}

	void reduce(const std::vector<Bytes> &parts, const Piece &piece, float *total, uint32_t flags)
	{
		codec_tensor dst = tensor_of(CODEC_FLOAT32, total, piece.n());
		MetricOf part(shared(), piece);
		codec_context with = context_of_frame(piece, part);
		std::vector<const void *> frames;
		std::vector<size_t> sizes;
		size_t nbytes;
		uint32_t how = op == Op::sum ? CODEC_REDUCE_SUM : op == Op::mean ? CODEC_REDUCE_MEAN : CODEC_REDUCE_MAX;

		for (Bytes each : parts) {
			frames.push_back(each.p);
			sizes.push_back(each.nbytes);
		}
		with.flags = flags;
		check(codec_reduce_scratch(frames.data(), sizes.data(), frames.size(), &nbytes));
		check(codec_reduce(frames.data(), sizes.data(), frames.size(), how, &dst, &with,
				   Workspace::room(work.scratch, nbytes), nbytes),
		      &fault_);
	}

	void add_own(const Piece &piece, float *total, bool first)
	{
		if (first)
			widen(dtype, own(piece), piece.n(), total);
		else
			add(total, as_float32(own(piece), piece), piece.n());
	}

	codec_fault fault_{};
};

} // namespace detail
} // namespace codec::gloo
