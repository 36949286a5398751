/* algorithms.h - who sends what to whom. Nothing of the caller's is written, but what it gives for the result. */
#pragma once

#include <cstring>
#include <exception>
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
		return error ? decltype(step())() : tried(step);
	}

	/* A frame, waited for whatever has happened. */
	Bytes frame(Channel::Incoming &incoming)
	{
		auto wait = [&] { return channel_.frame(incoming); };

		return tried(wait);
	}

private:
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

/* The first phase of most algorithms: each rank gets the frames of its slice from all. */
class Scatter
{
public:
	Scatter(Channel &channel, Reduction &r, const std::vector<Slice> &slices, Attempt &attempt)
	    : channel_(channel), r_(r), slices_(slices), bounds_(bounds_of(r, slices)), attempt_(attempt)
	{
	}

	const std::vector<std::vector<size_t>> &bounds() const
	{
		return bounds_;
	}

	size_t room() const
	{
		return room_for(bounds_) + (channel_.size - 1) * room_for({bounds_[channel_.rank]});
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
		const int me = channel_.rank, size = channel_.size;
		const size_t chunks = slices_[me].size();

		for (size_t c = 0; c < chunks; c++) {
			for (int o : channel_.others)
				channel_.send(encode(o, c, (uint64_t(me) * size + o) * chunks + c), o);
			own_.push_back(r_.own_as_is() ? Bytes{}
						      : encode(me, c, (uint64_t(me) * size + me) * chunks + c));
		}
	}

	/* Chunk c of this rank's slice from all ranks, in their order, as Reduction::sum takes them; none if one lacks.
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

private:
	Bytes encode(int o, size_t c, uint64_t number)
	{
		return attempt_([&] { return r_.encode(channel_, slices_[o][c], bounds_[o][c], number); });
	}

	Channel &channel_;
	Reduction &r_;
	const std::vector<Slice> &slices_;
	const std::vector<std::vector<size_t>> bounds_;
	Attempt &attempt_;
	Messages incoming_;
	std::vector<Bytes> own_;
};

/* Put the sum of a piece where its values go. */
inline void sum_into(Reduction &r, const Piece &piece, const std::vector<Bytes> &parts, uint8_t *place)
{
	float *total = r.total(piece, place);

	r.sum(parts, piece, total);
	if (r.dtype != CODEC_FLOAT32)
		narrow(r.dtype, total, piece.n(), place);
}

/* The message with what came out for a piece; its values, as others will see them, are put into the result. */
inline Bytes publish(Channel &channel, Reduction &r, const float *total, const Piece &piece, size_t most,
		     uint64_t number)
{
	uint8_t *place = r.result + piece.begin * r.itemsize;
	Bytes message = r.encode_sum(channel, total, piece, most, number);

	if (r.spec.codec != CODEC_LOSSLESS)
		r.decode(Channel::frame_of(message), piece, place);
	else if (reinterpret_cast<const uint8_t *>(total) != place)
		narrow(r.dtype, total, piece.n(), place);
	return message;
}

/*
 * Each rank reduces a slice of all frames and sends what comes out to all: 2 (N - 1) / N frames on the wire. Chunks of
 * slices follow each other, so that encoding, wire and decoding overlap.
 */
inline std::exception_ptr two_shot(Channel &channel, Reduction &r)
{
	const int size = channel.size, me = channel.rank;
	const std::vector<Slice> slices = cut(r.n, size, r.itemsize, r.segments);
	const size_t chunks = slices[me].size();
	Attempt attempt(channel);
	Scatter scatter(channel, r, slices, attempt);
	Messages sums(chunks);

	channel.begin(scatter.room() + room_for(scatter.bounds()));
	scatter.receive();
	for (size_t c = 0; c < chunks; c++)
		for (int o : channel.others)
			sums[c].push_back(channel.receive(scatter.bounds()[o][c], o));
	scatter.send();
	for (size_t c = 0; c < chunks; c++) {
		const Piece &piece = slices[me][c];
		const std::vector<Bytes> parts = scatter.parts(c);
		const Bytes message = attempt([&] {
			float *total = r.total(piece, r.result + piece.begin * r.itemsize);

			r.sum(parts, piece, total);
			return publish(channel, r, total, piece, scatter.bounds()[me][c],
				       (uint64_t(size) * size + me) * chunks + c);
		});
		for (int o : channel.others)
			channel.send(message, o);
	}
	for (size_t c = 0; c < chunks; c++) {
		for (Channel::Incoming &each : sums[c]) {
			const Bytes frame = attempt.frame(each);
			const Piece &piece = slices[each.source][c];

			attempt([&] { r.decode(frame, piece, r.result + piece.begin * r.itemsize); });
		}
	}
	channel.finish();
	return attempt.error;
}

/* Each rank reduces a slice of all frames: (N - 1) / N frames on the wire. The slices are of one size. */
inline std::exception_ptr scatter_sums(Channel &channel, Reduction &r)
{
	const std::vector<Slice> slices = cut_evenly(r.n, channel.size, r.itemsize);
	const Slice &mine = slices[channel.rank];
	Attempt attempt(channel);
	Scatter scatter(channel, r, slices, attempt);

	channel.begin(scatter.room());
	scatter.receive();
	scatter.send();
	for (size_t c = 0; c < mine.size(); c++) {
		const std::vector<Bytes> parts = scatter.parts(c);
		uint8_t *place = r.result + (mine[c].begin - mine[0].begin) * r.itemsize;

		attempt([&] { sum_into(r, mine[c], parts, place); });
	}
	channel.finish();
	return attempt.error;
}

/* Send this rank's frames to all, and take(piece, parts) what there is of all ranks. */
template <class F> std::exception_ptr spread(Channel &channel, Reduction &r, F &&take)
{
	const Slice pieces = cut(r.n, 1, r.itemsize, r.segments)[0];
	const std::vector<size_t> bounds = r.bounds(pieces);
	Attempt attempt(channel);
	Messages incoming(pieces.size());
	std::vector<Bytes> own;

	channel.begin(channel.size * room_for({bounds}));
	for (size_t c = 0; c < pieces.size(); c++)
		for (int o : channel.others)
			incoming[c].push_back(channel.receive(bounds[c], o));
	for (size_t c = 0; c < pieces.size(); c++) {
		own.push_back(attempt([&] {
			return r.encode(channel, pieces[c], bounds[c], uint64_t(channel.rank) * pieces.size() + c);
		}));
		for (int o : channel.others)
			channel.send(own[c], o);
	}
	for (size_t c = 0; c < pieces.size(); c++) {
		std::vector<Bytes> parts(channel.size);

		for (Channel::Incoming &each : incoming[c])
			parts[each.source] = attempt.frame(each);
		if (own[c] && !r.own_as_is())
			parts[channel.rank] = Channel::frame_of(own[c]);
		attempt([&] { take(pieces[c], parts); });
	}
	channel.finish();
	return attempt.error;
}

/* Each rank sends its frame to all, and each reduces all of them: one phase, N - 1 frames on the wire. */
inline std::exception_ptr all_gather(Channel &channel, Reduction &r)
{
	return spread(channel, r, [&](const Piece &piece, const std::vector<Bytes> &parts) {
		sum_into(r, piece, parts, r.result + piece.begin * r.itemsize);
	});
}

/* The values of all ranks, one after the other: N - 1 frames on the wire. */
inline std::exception_ptr gather(Channel &channel, Reduction &r)
{
	return spread(channel, r, [&](const Piece &piece, const std::vector<Bytes> &parts) {
		for (int rank = 0; rank < channel.size; rank++) {
			uint8_t *place = r.result + (rank * r.n + piece.begin) * r.itemsize;

			if (parts[rank])
				r.decode(parts[rank], piece, place);
			else if (piece.n())
				std::memcpy(place, r.own(piece), piece.n() * r.itemsize);
		}
	});
}

/*
 * Sums of slices go around, encoded anew by each rank, then what comes out: 2 (N - 1) / N frames, to one peer only. A
 * chunk goes on as soon as it is added to, while the next one is on the wire. Sums are added in the order in which they
 * pass the ranks; what lossy codecs lose adds up.
 */
inline std::exception_ptr ring(Channel &channel, Reduction &r)
{
	const int size = channel.size, me = channel.rank, left = (me + size - 1) % size, right = (me + 1) % size;
	const std::vector<Slice> slices = cut(r.n, size, r.itemsize, r.segments);
	const std::vector<std::vector<size_t>> bounds = bounds_of(r, slices);
	const size_t chunks = slices[me].size();
	const auto turn = [&](int steps) { return ((me - steps) % size + size) % size; };
	Attempt attempt(channel);
	Messages sums(size - 1), results(size - 1);

	channel.begin(4 * room_for(bounds));
	for (int s = 0; s < size - 1; s++)
		for (size_t nbytes : bounds[turn(s + 1)])
			sums[s].push_back(channel.receive(nbytes, left));
	for (int s = 0; s < size - 1; s++)
		for (size_t nbytes : bounds[turn(s)])
			results[s].push_back(channel.receive(nbytes, left));

	float *total = Workspace::room(r.work.total, r.n);
	widen(r.dtype, r.x, r.n, total);
	for (size_t c = 0; c < chunks; c++) {
		const Piece &piece = slices[me][c];

		channel.send(attempt([&] {
				     return r.encode_sum(channel, total + piece.begin, piece, bounds[me][c],
							 uint64_t(me) * chunks + c);
			     }),
			     right);
	}
	for (int s = 0; s < size - 1; s++) {
		const int slice = turn(s + 1);
		const bool last = s == size - 2;
		const uint64_t number = (uint64_t(last ? size : s + 1) * size + me) * chunks;

		for (size_t c = 0; c < chunks; c++) {
			const Piece &piece = slices[slice][c];
			const Bytes frame = attempt.frame(sums[s][c]);

			channel.send(attempt([&] {
					     float *part = total + piece.begin;

					     r.accumulate(frame, piece, part);
					     if (!last)
						     return r.encode_sum(channel, part, piece, bounds[slice][c],
									 number + c);
					     if (r.op == Op::mean)
						     Reduction::divide(part, piece.n(), static_cast<float>(size));
					     return publish(channel, r, part, piece, bounds[slice][c], number + c);
				     }),
				     right);
		}
	}
	for (int s = 0; s < size - 1; s++) {
		for (size_t c = 0; c < chunks; c++) {
			const Piece &piece = slices[turn(s)][c];
			const Bytes frame = attempt.frame(results[s][c]);

			if (s < size - 2)
				channel.pass_on(attempt.error ? Bytes{} : frame, right);
			attempt([&] { r.decode(frame, piece, r.result + piece.begin * r.itemsize); });
		}
	}
	channel.finish();
	return attempt.error;
}

/* What encoding would have said of NaN and Inf: which way values travel must not decide whether a step is good. */
inline void check_finite(Reduction &r)
{
	constexpr uint64_t STEP = 4096;
	float values[STEP];
	uint32_t worst = 0;

	if (r.spec.codec == CODEC_LOSSLESS)
		return;
	for (uint64_t i = 0; i < r.n; i += STEP) {
		uint64_t count = std::min(STEP, r.n - i);

		widen(r.dtype, r.x + i * r.itemsize, count, values);
		for (uint64_t k = 0; k < count; k++)
			worst = std::max(worst, bits_of(values[k]) & 0x7fffffff);
	}
	if (worst >= 0x7f800000)
		check(CODEC_NONFINITE);
}

/* The larger one; NaN if either is. */
inline void keep_larger(float *total, const float *x, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		total[i] = total[i] >= x[i] || total[i] != total[i] ? total[i] : x[i];
}

/* Values of all ranks to what comes out, as codec_reduce has it, in the tensor's dtype. */
inline void add_up(Reduction &r, const std::vector<const uint8_t *> &parts, const Piece &piece, uint8_t *place)
{
	float *total = r.total(piece, place), *residual = r.sums_residual ? r.sums_residual + piece.begin : nullptr;

	widen(r.dtype, parts[0], piece.n(), total);
	for (size_t k = 1; k < parts.size(); k++) {
		const float *next = r.as_float32(parts[k], piece);

		if (r.op == Op::max)
			keep_larger(total, next, piece.n());
		else
			Reduction::add(total, next, piece.n());
	}
	if (r.op == Op::mean)
		Reduction::divide(total, piece.n(), static_cast<float>(parts.size()));
	if (residual)
		Reduction::add(total, residual, piece.n());
	if (r.dtype != CODEC_FLOAT32)
		narrow(r.dtype, total, piece.n(), place);
	if (residual) { /* of float32 nothing is lost */
		const float *seen = r.as_float32(place, piece);

		for (uint64_t i = 0; i < piece.n(); i++)
			residual[i] = total[i] - seen[i];
	}
}

/*
 * Two-shot with the values themselves: where a link is so fast that encoding would take longer than sending. Lossless
 * frames would give the same bits.
 */
inline std::exception_ptr raw(Channel &channel, Reduction &r)
{
	const int size = channel.size, me = channel.rank;
	const std::vector<Slice> slices = cut(r.n, size, r.itemsize, r.segments);
	const Slice &mine = slices[me];
	const auto nbytes = [&](const Piece &piece) { return piece.n() * r.itemsize; };
	Attempt attempt(channel);
	Messages firsts(mine.size()), seconds(mine.size());
	size_t needed = 0;

	for (const Piece &piece : mine)
		needed += size * Channel::room_for(nbytes(piece));
	channel.begin(needed);
	for (size_t c = 0; c < mine.size(); c++)
		for (int o : channel.others)
			firsts[c].push_back(
				channel.receive_values(channel.take(nbytes(mine[c])).p, nbytes(mine[c]), o));
	for (size_t c = 0; c < mine.size(); c++)
		for (int o : channel.others)
			seconds[c].push_back(channel.receive_values(r.result + slices[o][c].begin * r.itemsize,
								    nbytes(slices[o][c]), o));
	attempt([&] { check_finite(r); });

	const uint8_t *x = r.x;
	std::vector<uint8_t> owed;
	if (r.residual) {
		std::vector<float> sums(r.n), rounded(r.n);

		widen(r.dtype, r.x, r.n, sums.data());
		for (uint64_t i = 0; i < r.n; i++)
			sums[i] += r.residual[i];
		owed.resize(r.n * r.itemsize);
		narrow(r.dtype, sums.data(), r.n, owed.data());
		widen(r.dtype, owed.data(), r.n, rounded.data());
		for (uint64_t i = 0; i < r.n; i++)
			r.residual[i] = sums[i] - rounded[i];
		x = owed.data();
	}
	for (size_t c = 0; c < mine.size(); c++)
		for (int o : channel.others)
			channel.send_values(x + slices[o][c].begin * r.itemsize, nbytes(slices[o][c]), o);
	for (size_t c = 0; c < mine.size(); c++) {
		const Piece &piece = mine[c];
		uint8_t *place = r.result + piece.begin * r.itemsize;
		std::vector<const uint8_t *> parts(size);

		parts[me] = x + piece.begin * r.itemsize;
		for (Channel::Incoming &each : firsts[c]) {
			channel.wait(each);
			parts[each.source] = static_cast<const uint8_t *>(each.buffer->ptr);
		}
		add_up(r, parts, piece, place);
		for (int o : channel.others)
			channel.send_values(place, nbytes(piece), o);
	}
	for (auto &chunk : seconds)
		for (Channel::Incoming &each : chunk)
			channel.wait(each);
	channel.finish();
	return attempt.error;
}

} // namespace codec::gloo::detail
