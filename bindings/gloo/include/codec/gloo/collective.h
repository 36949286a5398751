/* collective.h - base of collectives: the first error of this rank, and results stored after the verdict. */
#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "channel.h"
#include "frames.h"
#include "slices.h"

namespace codec::gloo::detail
{

/*
 * Records the first error of a collective on this rank. After an error the rank still receives every message, and
 * sends its own messages without frames, so that no rank waits for a message that never comes.
 */
class Attempt
{
public:
	explicit Attempt(Channel &channel) : channel_(channel)
	{
	}

	std::exception_ptr error;

	/*
	 * Return the result of step(), or a default-constructed result after an earlier error. If step() throws, store
	 * the exception in `error`; rethrow it only if the channel is closed, since no message can follow.
	 */
	template <class F> auto operator()(F &&step) -> decltype(step())
	{
		const GiveWay after;

		return error ? decltype(step())() : tried(step);
	}

	/* Wait for a frame, even after an error, and return it. Return an empty frame if the message is invalid. */
	Bytes frame(Channel::Incoming &incoming)
	{
		auto wait = [&] { return channel_.frame(incoming); };

		return tried(wait);
	}

	/* Wait for uncompressed values, even after an error, and compare their digest with that of the sender. */
	void values(Channel::Incoming &incoming, uint64_t digest)
	{
		auto wait = [&] { channel_.values(incoming, digest); };

		tried(wait);
	}

private:
	/*
	 * Yields the core to Gloo's thread at the end of a step. At that point this thread holds no connection's lock,
	 * so that Gloo's thread need not spin.
	 */
	struct GiveWay {
		~GiveWay()
		{
			std::this_thread::yield();
		}
	};

	template <class F> auto tried(F &step) -> decltype(step())
	{
		try {
			return step();
		} catch (const Error &) {
			if (channel_.closed())
				throw;
			if (!error)
				error = std::current_exception();
		}
		return decltype(step())();
	}

	Channel &channel_;
};

/* Store the sum of a piece's frames in the tensor's dtype at `place`. `flags`: as for codec_reduce. */
inline void sum_into(Reduction &r, const Piece &piece, const std::vector<Bytes> &parts, uint8_t *place, uint32_t flags)
{
	float *total = r.total(piece, place);

	if (r.dtype == CODEC_FLOAT32) {
		r.sum(parts, piece, total, flags);
		return;
	}
	r.sum(parts, piece, total, flags & ~CODEC_NONTEMPORAL);
	narrow(r.dtype, total, piece.n(), place);
	if (flags & CODEC_FINITE && !finite(r.dtype, place, piece.n()))
		check(CODEC_NONFINITE);
}

/* Base class of a collective. Call prepare(), then run(). Both may write residuals. */
class Collective
{
public:
	Collective(Channel &channel, Reduction &r) : channel_(channel), r_(r), attempt_(channel)
	{
	}

	virtual ~Collective() = default;
	Collective(const Collective &) = delete;
	Collective &operator=(const Collective &) = delete;

	/*
	 * Do the work that needs no message from other ranks. Meanwhile, the requests with which ranks compare
	 * arguments may be in flight.
	 */
	virtual void prepare()
	{
	}

	/* Exchange all messages of the collective, and compute the result. */
	virtual void run() = 0;

	/*
	 * Decode the frames that were only validated before (Reduction::late). Call it after the verdict that all
	 * ranks have succeeded.
	 */
	void deliver()
	{
		for (auto &each : late_)
			each();
	}

	/* Return the first error on this rank; null if there was none. */
	std::exception_ptr error() const
	{
		return attempt_.error;
	}

protected:
	/* Return the address of a piece in the result. */
	uint8_t *place(const Piece &piece) const
	{
		return r_.result + piece.begin * r_.itemsize;
	}

	/*
	 * Decode the frame of a piece into the result. If Reduction::late is set, only validate the frame now, and
	 * decode it in deliver(); the piece and the frame must not change until then.
	 */
	void settle(Bytes frame, const Piece &piece)
	{
		if (!r_.late) {
			r_.decode(frame, piece, place(piece));
			return;
		}
		r_.decode(frame, piece, place(piece), CODEC_CHECK_ONLY);
		late_.push_back([this, frame, &piece] { r_.decode(frame, piece, place(piece), CODEC_NO_CHECKSUM); });
	}

	/* Encode the sum of a piece, store the values decoded from its frame in the result, and return the message. */
	Bytes publish(const float *total, const Piece &piece, size_t most, uint64_t number)
	{
		Bytes message = r_.encode_sum(channel_, total, piece, most, number);

		if (!has_trait(r_.spec, CODEC_TRAIT_LOSSLESS))
			settle(Channel::frame_of(message), piece);
		else if (reinterpret_cast<const uint8_t *>(total) != place(piece))
			narrow(r_.dtype, total, piece.n(), place(piece));
		return message;
	}

	/*
	 * Return CODEC_FINITE if NaN and Inf are errors, else 0. Use it for sums that no rank encodes, since only an
	 * encoder would refuse NaN and Inf.
	 */
	uint32_t finite_sums() const
	{
		return r_.only_numbers() ? CODEC_FINITE : 0;
	}

	/*
	 * Store the sum of the frames of all ranks in the result. If Reduction::late is set, validate the frames now
	 * and store the sum in deliver().
	 */
	void settle_sum(const std::vector<Bytes> &parts, const Piece &piece)
	{
		if (!r_.late) {
			sum_into(r_, piece, parts, place(piece), finite_sums() | r_.past_caches());
			return;
		}
		sum_into(r_, piece, parts, r_.aside(piece), finite_sums());
		late_.push_back([this, parts, &piece] {
			sum_into(r_, piece, parts, place(piece), CODEC_NO_CHECKSUM | r_.past_caches());
		});
	}

	Channel &channel_;
	Reduction &r_;
	Attempt attempt_;

private:
	std::vector<std::function<void()>> late_;
};

using Messages = std::vector<std::vector<Channel::Incoming>>; /* [chunk][index into channel_.others] */

inline size_t room_for(const std::vector<std::vector<size_t>> &bounds)
{
	size_t found = 0;

	for (const auto &each : bounds)
		for (size_t nbytes : each)
			found += Channel::room_for(nbytes);
	return found;
}

inline std::vector<std::vector<size_t>> bounds_of(const Reduction &r, const std::vector<Slice> &slices)
{
	std::vector<std::vector<size_t>> found;

	for (const Slice &slice : slices)
		found.push_back(r.bounds(slice));
	return found;
}

/*
 * Throw ArgumentError for Inf or NaN that encoding would refuse. It is called for values and sums that are not encoded,
 * so that the same input fails with every algorithm.
 */
inline void check_finite(const Reduction &r, uint32_t dtype, const void *values, uint64_t n)
{
	if (r.only_numbers() && !finite(dtype, values, n))
		check(CODEC_NONFINITE);
}

} // namespace codec::gloo::detail
