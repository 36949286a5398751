/* algorithms.h - who sends what to whom. Nothing of the caller's is written, but what it gives for the result. */
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "channel.h"
#include "frames.h"
#include "slices.h"

namespace codec::gloo::detail
{

/* A collective goes on after an error, without frames, so that no rank waits for what never comes. */
class Attempt
{
public:
	explicit Attempt(Channel &channel) : channel_(channel)
	{
	}

	std::exception_ptr error;

	/* What step() gives; nothing after an error. But where no connection is left there is nothing to go on with. */
	template <class F> auto operator()(F &&step) -> decltype(step())
	{
		const GiveWay after;

		return error ? decltype(step())() : tried(step);
	}

	/* Return a frame, or nothing if it is not as announced. Waits for it even after an error. */
	Bytes frame(Channel::Incoming &incoming)
	{
		auto wait = [&] { return channel_.frame(incoming); };

		return tried(wait);
	}

	/* Wait for values, even after an error, and compare their last word with the announced one. */
	void values(Channel::Incoming &incoming, uint64_t announced)
	{
		auto wait = [&] { channel_.values(incoming, announced); };

		tried(wait);
	}

private:
	/* Gloo's thread goes next, if it waits for this core: no connection is locked now, so it need not spin. */
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

/* Put the sum of a piece where its values go. `flags`: those of codec_reduce. */
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

/* One collective, in steps. Residuals are written in both. */
class Collective
{
public:
	Collective(Channel &channel, Reduction &r) : channel_(channel), r_(r), attempt_(channel)
	{
	}

	virtual ~Collective() = default;
	Collective(const Collective &) = delete;
	Collective &operator=(const Collective &) = delete;

	/* What can be done while ranks agree to do it: nothing is sent, and nothing expected. */
	virtual void prepare()
	{
	}

	/* All the rest. */
	virtual void run() = 0;

	/* Now that all ranks have succeeded: what waits in frames goes where it belongs. All was tried before. */
	void deliver()
	{
		for (auto &each : late_)
			each();
	}

	/* What went wrong on this rank. */
	std::exception_ptr error() const
	{
		return attempt_.error;
	}

protected:
	/* Where the values of a piece go. */
	uint8_t *place(const Piece &piece) const
	{
		return r_.result + piece.begin * r_.itemsize;
	}

	/* The values of a frame to where they go, or of one that waits: they could. Pieces and frames stay as they are.
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

	/* The message with what comes out for a piece; its values, as others will see them, are settled. */
	Bytes publish(const float *total, const Piece &piece, size_t most, uint64_t number)
	{
		Bytes message = r_.encode_sum(channel_, total, piece, most, number);

		if (r_.spec.codec != CODEC_LOSSLESS)
			settle(Channel::frame_of(message), piece);
		else if (reinterpret_cast<const uint8_t *>(total) != place(piece))
			narrow(r_.dtype, total, piece.n(), place(piece));
		return message;
	}

	/* The sum of frames of all ranks to where it goes, or of one that waits: it could. */
	void settle_sum(const std::vector<Bytes> &parts, const Piece &piece)
	{
		const uint32_t finite = r_.only_numbers() ? CODEC_FINITE : 0;

		if (!r_.late) {
			sum_into(r_, piece, parts, place(piece), finite | r_.past_caches());
			return;
		}
		sum_into(r_, piece, parts, r_.aside(piece), finite);
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

using Messages = std::vector<std::vector<Channel::Incoming>>; /* by chunk, then by rank */

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
 * What encoding says of Inf and NaN, where values or sums are not encoded: which way they travel must not decide
 * whether a step is good.
 */
inline void check_finite(const Reduction &r, uint32_t dtype, const void *values, uint64_t n)
{
	if (r.only_numbers() && !finite(dtype, values, n))
		check(CODEC_NONFINITE);
}

/* The first phase of most collectives: each rank gets the frames of its slice from all. */
class Scatter : public Collective
{
public:
	Scatter(Channel &channel, Reduction &r, std::vector<Slice> slices)
	    : Collective(channel, r), slices_(std::move(slices)), bounds_(bounds_of(r, slices_)),
	      chunks_(slices_[channel.rank].size())
	{
	}

	void prepare() override
	{
		channel_.begin(room());
		if (channel_.size > 1)
			first_ = encode(channel_.others[0], 0);
	}

protected:
	/* Bytes of messages. */
	virtual size_t room() const
	{
		return room_for(bounds_) + (channel_.size - 1) * room_for({bounds_[channel_.rank]});
	}

	const Slice &mine() const
	{
		return slices_[channel_.rank];
	}

	/* Expect what will come. */
	void receive()
	{
		for (size_t nbytes : bounds_[channel_.rank]) {
			incoming_.emplace_back();
			for (int o : channel_.others)
				incoming_.back().push_back(channel_.receive(nbytes, o));
		}
	}

	/* Send all other slices' chunks, the first ones of all first. */
	void send()
	{
		for (size_t c = 0; c < chunks_; c++) {
			for (int o : channel_.others)
				channel_.send(c || o != channel_.others[0] ? encode(o, c) : first_, o);
			own_.push_back(r_.own_as_is() ? Bytes{} : encode(channel_.rank, c));
		}
	}

	/* Chunk c of this rank's slice from all ranks, in their order, as Reduction::sum takes them. */
	std::vector<Bytes> parts(size_t c)
	{
		std::vector<Bytes> found(channel_.size);

		for (Channel::Incoming &each : incoming_[c])
			found[each.source] = attempt_.frame(each);
		if (own_[c])
			found[channel_.rank] = Channel::frame_of(own_[c]);
		return found;
	}

	const std::vector<Slice> slices_;
	const std::vector<std::vector<size_t>> bounds_;
	const size_t chunks_;

private:
	Bytes encode(int o, size_t c)
	{
		const uint64_t number = (uint64_t(channel_.rank) * channel_.size + o) * chunks_ + c;

		return attempt_([&] { return r_.encode(channel_, slices_[o][c], bounds_[o][c], number); });
	}

	Messages incoming_;
	Bytes first_;
	std::vector<Bytes> own_;
};

/*
 * Each rank reduces a slice of all frames and sends what comes out to all: 2 (N - 1) / N frames on the wire. Chunks of
 * slices follow each other, so that encoding, wire and decoding overlap.
 */
class TwoShot : public Scatter
{
public:
	TwoShot(Channel &channel, Reduction &r) : Scatter(channel, r, r.slices(channel.size))
	{
	}

	void run() override
	{
		Messages sums(chunks_);

		receive();
		for (size_t c = 0; c < chunks_; c++)
			for (int o : channel_.others)
				sums[c].push_back(channel_.receive(bounds_[o][c], o));
		send();
		for (size_t c = 0; c < chunks_; c++) {
			const Bytes message = sum(c);

			for (int o : channel_.others)
				channel_.send(message, o);
		}
		for (size_t c = 0; c < chunks_; c++) {
			for (Channel::Incoming &each : sums[c]) {
				const Bytes frame = attempt_.frame(each);
				const Piece &piece = slices_[each.source][c];

				attempt_([&] { settle(frame, piece); });
			}
		}
		channel_.finish();
	}

private:
	size_t room() const override
	{
		return Scatter::room() + room_for(bounds_);
	}

	Bytes sum(size_t c)
	{
		const Piece &piece = mine()[c];
		const std::vector<Bytes> of_ranks = parts(c);
		const uint64_t number = (uint64_t(channel_.size) * channel_.size + channel_.rank) * chunks_ + c;

		return attempt_([&] {
			float *total = r_.total_to_encode(piece, place(piece));

			r_.sum(of_ranks, piece, total);
			return publish(total, piece, bounds_[channel_.rank][c], number);
		});
	}
};

/* Each rank reduces a slice of all frames: (N - 1) / N frames on the wire. The slices are of one size. */
class ReduceScatter : public Scatter
{
public:
	ReduceScatter(Channel &channel, Reduction &r) : Scatter(channel, r, r.even_slices(channel.size))
	{
	}

	void run() override
	{
		receive();
		send();
		for (size_t c = 0; c < chunks_; c++) {
			const Piece &piece = mine()[c];
			const std::vector<Bytes> of_ranks = parts(c);
			uint8_t *there = r_.result + (piece.begin - mine()[0].begin) * r_.itemsize;

			attempt_([&] { sum_into(r_, piece, of_ranks, there, r_.past_caches()); });
		}
		channel_.finish();
	}
};

/* Each rank sends its frames to all: one phase, N - 1 frames on the wire. */
class Spread : public Collective
{
public:
	Spread(Channel &channel, Reduction &r)
	    : Collective(channel, r), pieces_(r.slices(1)[0]), bounds_(r.bounds(pieces_))
	{
	}

	void prepare() override
	{
		channel_.begin(channel_.size * room_for({bounds_}));
		own_.push_back(encode(0));
	}

	void run() override
	{
		Messages incoming(pieces_.size());

		for (size_t c = 0; c < pieces_.size(); c++)
			for (int o : channel_.others)
				incoming[c].push_back(channel_.receive(bounds_[c], o));
		for (size_t c = 0; c < pieces_.size(); c++) {
			if (c)
				own_.push_back(encode(c));
			for (int o : channel_.others)
				channel_.send(own_[c], o);
		}
		for (size_t c = 0; c < pieces_.size(); c++) {
			std::vector<Bytes> parts(channel_.size);

			for (Channel::Incoming &each : incoming[c])
				parts[each.source] = attempt_.frame(each);
			if (own_[c] && !r_.own_as_is())
				parts[channel_.rank] = Channel::frame_of(own_[c]);
			attempt_([&] { take(pieces_[c], parts); });
		}
		channel_.finish();
	}

private:
	/* What there is of a piece on all ranks, in their order, as Reduction::sum takes it. */
	virtual void take(const Piece &piece, const std::vector<Bytes> &parts) = 0;

	Bytes encode(size_t c)
	{
		const uint64_t number = uint64_t(channel_.rank) * pieces_.size() + c;

		return attempt_([&] { return r_.encode(channel_, pieces_[c], bounds_[c], number); });
	}

	const Slice pieces_;
	const std::vector<size_t> bounds_;
	std::vector<Bytes> own_;
};

/* Each rank reduces the frames of all. */
class AllGather : public Spread
{
	using Spread::Spread;

	void take(const Piece &piece, const std::vector<Bytes> &parts) override
	{
		settle_sum(parts, piece);
	}
};

/* The values of all ranks, one after the other. */
class Gather : public Spread
{
	using Spread::Spread;

	void take(const Piece &piece, const std::vector<Bytes> &parts) override
	{
		for (int rank = 0; rank < channel_.size; rank++) {
			uint8_t *there = place(piece) + rank * r_.n * r_.itemsize;

			if (parts[rank])
				r_.decode(parts[rank], piece, there);
			else if (piece.n())
				std::memcpy(there, r_.own(piece), piece.n() * r_.itemsize);
		}
	}
};

/*
 * Sums of slices go around, encoded anew by each rank, then what comes out: 2 (N - 1) / N frames, to one peer only. A
 * chunk goes on as soon as it is added to, while the next one is on the wire. Sums are added in the order in which they
 * pass the ranks; what lossy codecs lose adds up.
 */
class Ring : public Collective
{
public:
	Ring(Channel &channel, Reduction &r)
	    : Collective(channel, r), slices_(r.slices(channel.size)), bounds_(bounds_of(r, slices_)),
	      chunks_(slices_[0].size()), left_((channel.rank + channel.size - 1) % channel.size),
	      right_((channel.rank + 1) % channel.size)
	{
	}

	void prepare() override
	{
		channel_.begin(4 * room_for(bounds_));
		total_ = Workspace::room(r_.work.total, r_.n);
		widen(r_.dtype, r_.x, r_.n, total_);
		first_ = encode(0, 0);
	}

	void run() override
	{
		const int steps = channel_.size - 1;
		Messages sums(steps), results(steps);

		for (int s = 0; s < steps; s++)
			for (size_t nbytes : bounds_[slice(s + 1)])
				sums[s].push_back(channel_.receive(nbytes, left_));
		for (int s = 0; s < steps; s++)
			for (size_t nbytes : bounds_[slice(s)])
				results[s].push_back(channel_.receive(nbytes, left_));
		for (size_t c = 0; c < chunks_; c++)
			channel_.send(c ? encode(0, c) : first_, right_);
		for (int s = 0; s < steps; s++) {
			for (size_t c = 0; c < chunks_; c++) {
				const Bytes frame = attempt_.frame(sums[s][c]);

				channel_.send(add(frame, s + 1, c), right_);
			}
		}
		for (int s = 0; s < steps; s++) {
			for (size_t c = 0; c < chunks_; c++) {
				const Piece &piece = slices_[slice(s)][c];
				const Bytes frame = attempt_.frame(results[s][c]);

				if (s < steps - 1)
					channel_.pass_on(attempt_.error ? Bytes{} : frame, right_);
				attempt_([&] { settle(frame, piece); });
			}
		}
		channel_.finish();
	}

private:
	/* The slice that this rank sends in a step. */
	int slice(int step) const
	{
		return (channel_.rank - step + channel_.size) % channel_.size;
	}

	uint64_t number(int step, size_t c) const
	{
		return (uint64_t(step) * channel_.size + channel_.rank) * chunks_ + c;
	}

	Bytes encode(int step, size_t c)
	{
		const Piece &piece = slices_[slice(step)][c];
		const size_t most = bounds_[slice(step)][c];

		return attempt_(
			[&] { return r_.encode_sum(channel_, total_ + piece.begin, piece, most, number(step, c)); });
	}

	/* The message of a step, once this rank's values are added to what came; in the last step, with what comes out.
	 */
	Bytes add(Bytes frame, int step, size_t c)
	{
		const Piece &piece = slices_[slice(step)][c];
		const size_t most = bounds_[slice(step)][c];
		float *total = total_ + piece.begin;

		attempt_([&] { r_.accumulate(frame, piece, total); });
		if (step < channel_.size - 1)
			return encode(step, c);
		return attempt_([&] {
			if (r_.op == Op::mean)
				divide(total, piece.n(), static_cast<float>(channel_.size));
			return publish(total, piece, most, number(channel_.size, c));
		});
	}

	const std::vector<Slice> slices_;
	const std::vector<std::vector<size_t>> bounds_;
	const size_t chunks_;
	const int left_, right_;
	float *total_ = nullptr;
	Bytes first_;
};

} // namespace codec::gloo::detail
