/*
 * algorithms.h - collectives that exchange frames: two-shot, all-gather, ring, reduce-scatter
 * (docs/spec/protocol/collectives.md, section 3). They write only two parts of the caller's memory, the result and the
 * residuals.
 */
#pragma once

#include <cstring>
#include <vector>

#include "collective.h"

namespace codec::gloo::detail
{

/* First phase of two-shot and reduce-scatter: each rank receives the frames of its slice from all others. */
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
	/* Return the total size of all messages in bytes. */
	virtual size_t room() const
	{
		return room_for(bounds_) + (channel_.size - 1) * room_for({bounds_[channel_.rank]});
	}

	const Slice &mine() const
	{
		return slices_[channel_.rank];
	}

	/* Post all receives of this phase, for frames of this rank's slice. */
	void receive()
	{
		for (size_t nbytes : bounds_[channel_.rank]) {
			incoming_.emplace_back();
			for (int o : channel_.others)
				incoming_.back().push_back(channel_.receive(nbytes, o));
		}
	}

	/* Send the chunks of all other slices: chunk 0 of each slice, then chunk 1, and so on. */
	void send()
	{
		for (size_t c = 0; c < chunks_; c++) {
			for (int o : channel_.others)
				channel_.send(c || o != channel_.others[0] ? encode(o, c) : first_, o);
			own_.push_back(r_.own_as_is() ? Bytes{} : encode(channel_.rank, c));
		}
	}

	/*
	 * Wait for chunk c of this rank's slice. Return the frames of all ranks in rank order; an empty frame stands
	 * for this rank's own values.
	 */
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
 * Two-shot all-reduce: each rank sums up the frames of one slice and sends the encoded sum to all. A rank sends 2 (N
 * - 1) / N frames of the tensor. Chunks are pipelined: encoding, transfer and decoding overlap.
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

/*
 * Reduce-scatter: each rank sums up the frames of one slice. A rank sends (N - 1) / N frames of the tensor. All
 * slices have the same size.
 */
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

			attempt_([&] { sum_into(r_, piece, of_ranks, there, finite_sums() | r_.past_caches()); });
		}
		channel_.finish();
	}
};

/*
 * Base of all-gather algorithms: each rank sends its frames to all others, N - 1 frames of the tensor in one phase.
 */
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
	/*
	 * Process the frames of a piece from all ranks, in rank order. An empty frame stands for this rank's own
	 * values.
	 */
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

/* All-gather all-reduce: each rank sums up the frames of all ranks. */
class AllGather : public Spread
{
	using Spread::Spread;

	void take(const Piece &piece, const std::vector<Bytes> &parts) override
	{
		settle_sum(parts, piece);
	}
};

/* All-gather of tensors: the result has the values of rank 0, then the values of rank 1, and so on. */
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
 * Ring all-reduce: partial sums pass from rank to rank, and each rank encodes them anew; then the results pass around
 * the ring. A rank sends 2 (N - 1) / N frames of the tensor, to one neighbour only. Chunks are pipelined. Values are
 * added in ring order; the errors of lossy codecs accumulate.
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
	/* Return the index of the slice that this rank sends in a step. */
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

	/*
	 * Add the values of a received frame to this rank's values. Return the message of the step: the encoded
	 * partial sum, or in the last step the encoded result.
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
