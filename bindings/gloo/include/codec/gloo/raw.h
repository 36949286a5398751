/* raw.h - all-reduce of uncompressed values, for links on which encoding takes longer than sending. */
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collective.h"

namespace codec::gloo::detail
{

/*
 * Throw if a sum has Inf or NaN and the codec refuses them: PeerError if another rank sent an Inf or NaN (that rank
 * reports the error itself), ArgumentError if all values are finite, but not their sum.
 */
inline void check_sum(const Reduction &r, uint32_t dtype, const void *sum, const std::vector<const uint8_t *> &parts,
		      uint64_t n)
{
	if (!r.only_numbers() || finite(dtype, sum, n))
		return;
	for (const uint8_t *part : parts)
		if (!finite(r.dtype, part, n))
			throw PeerError("a rank has sent Inf or NaN");
	check(CODEC_NONFINITE);
}

/*
 * Reduce the values of all ranks in rank order, as codec_reduce does, and store the result in the tensor's dtype.
 * With error feedback, the residual of sums is added to the sums before rounding, and is replaced by the rounding
 * error.
 */
inline void add_up(Reduction &r, const std::vector<const uint8_t *> &parts, const Piece &piece, uint8_t *place)
{
	float *total = r.total(piece, place), *residual = r.sums_residual ? r.sums_residual + piece.begin : nullptr;

	widen(r.dtype, parts[0], piece.n(), total);
	for (size_t k = 1; k < parts.size(); k++) {
		const float *next = r.as_float32(parts[k], piece);

		if (r.op == Op::max)
			keep_larger(total, next, piece.n());
		else
			add(total, next, piece.n());
	}
	if (r.op == Op::mean)
		divide(total, piece.n(), static_cast<float>(parts.size()));
	if (r.dtype != CODEC_FLOAT32)
		narrow(r.dtype, total, piece.n(), place);
	check_sum(r, r.dtype, place, parts, piece.n());
	if (!residual)
		return;
	add(total, residual, piece.n());
	check_sum(r, CODEC_FLOAT32, total, parts, piece.n());
	if (r.dtype != CODEC_FLOAT32)
		narrow_numbers(r.dtype, total, piece.n(), place);
	lost(residual, total, r.as_float32(place, piece), piece.n());
}

/*
 * Two-shot all-reduce of uncompressed values; its result is bit-identical to that with lossless frames. Ranks send the
 * digest of each message of values, with which receivers detect a message that is damaged or too short. They send those
 * of the terms (values to be summed) while the first terms are in flight, and those of sums just before the verdict,
 * because sums are not used earlier.
 */
class Raw : public Collective
{
public:
	Raw(Channel &channel, Reduction &r)
	    : Collective(channel, r), slices_(cut(r.n, channel.size, r.itemsize, r.segments, CHUNK))
	{
	}

	void run() override
	{
		const Slice &mine = slices_[channel_.rank];
		const uint64_t room = nbytes(*std::max_element(
			mine.begin(), mine.end(), [](const Piece &a, const Piece &b) { return a.n() < b.n(); }));
		std::vector<Channel::Incoming> sums;

		channel_.begin(channel_.others.size() * Channel::room_for(room));
		rooms_.resize(channel_.size);
		for (int o : channel_.others)
			rooms_[o] = channel_.take(room).p;

		Channel::Asked digests = channel_.expect(slices_.size() * mine.size(), Channel::DIGESTS);
		Channel::Asked digests_of_sums = channel_.expect(mine.size(), Channel::DIGESTS);
		std::vector<Channel::Incoming> terms = expected(mine[0]);
		for (size_t c = 0; c < mine.size(); c++) {
			for (int o : channel_.others) {
				const Piece &piece = slices_[o][c];

				sums.push_back(channel_.receive_values(place(piece), nbytes(piece), o, Channel::SUMS));
			}
		}
		const uint8_t *x = values();
		for (size_t c = 0; c < std::min<size_t>(2, mine.size()); c++)
			send(x, c);
		channel_.say(digests, digests_of(x, slices_));
		const std::vector<Numbers> of_terms = channel_.hear(digests);
		for (size_t c = 0; c < mine.size(); c++) {
			std::vector<const uint8_t *> parts(rooms_.begin(), rooms_.end());

			parts[channel_.rank] = x + mine[c].begin * r_.itemsize;
			for (Channel::Incoming &each : terms)
				attempt_.values(each, of_terms[each.source][channel_.rank * mine.size() + c]);
			attempt_([&] { add_up(r_, parts, mine[c], place(mine[c])); });
			if (attempt_.error && mine[c].n()) /* do not send uninitialized memory */
				std::memset(place(mine[c]), 0, nbytes(mine[c]));
			if (c + 1 < mine.size())
				terms = expected(mine[c + 1]);
			for (int o : channel_.others)
				channel_.send_values(place(mine[c]), nbytes(mine[c]), o, Channel::SUMS);
			if (c + 2 < mine.size())
				send(x, c + 2);
		}
		channel_.say(digests_of_sums, digests_of(r_.result, {mine}));
		const std::vector<Numbers> of_sums = channel_.hear(digests_of_sums);
		for (size_t i = 0; i < sums.size(); i++) /* sums[] has one entry per other rank and chunk */
			attempt_.values(sums[i], of_sums[sums[i].source][i / channel_.others.size()]);
		channel_.finish();
	}

private:
	/*
	 * Bytes of the tensor in a chunk. Raw all-reduces are limited by memory bandwidth, so the data in flight
	 * should fit in caches: the receives of a chunk's terms are posted only when the previous chunk has been summed
	 * up, and reuse its buffers.
	 */
	static constexpr uint64_t CHUNK = 3 << 18;

	std::vector<Channel::Incoming> expected(const Piece &piece)
	{
		std::vector<Channel::Incoming> found;

		for (int o : channel_.others)
			found.push_back(channel_.receive_values(rooms_[o], nbytes(piece), o));
		return found;
	}

	/* Return the digest of each chunk of some slices. `p` points to the first value of the tensor. */
	Numbers digests_of(const uint8_t *p, const std::vector<Slice> &slices) const
	{
		Numbers found;

		for (const Slice &slice : slices)
			for (const Piece &piece : slice)
				found.push_back(digest_of(p + piece.begin * r_.itemsize, nbytes(piece)));
		return found;
	}

	/* Send chunk c of each other rank's slice. */
	void send(const uint8_t *x, size_t c)
	{
		for (int o : channel_.others)
			channel_.send_values(x + slices_[o][c].begin * r_.itemsize, nbytes(slices_[o][c]), o);
	}

	size_t nbytes(const Piece &piece) const
	{
		return piece.n() * r_.itemsize;
	}

	/*
	 * Return the values to send: the tensor, with the residual added. Throws for NaN and Inf if the codec refuses
	 * them.
	 */
	const uint8_t *values()
	{
		if (!r_.residual) {
			attempt_([&] { check_finite(r_, r_.dtype, r_.x, r_.n); });
			return r_.x;
		}
		std::vector<float> sums(r_.n), seen(r_.n);

		adjusted_.resize(r_.n * r_.itemsize);
		widen(r_.dtype, r_.x, r_.n, sums.data());
		add(sums.data(), r_.residual, r_.n);
		attempt_([&] { check_finite(r_, CODEC_FLOAT32, sums.data(), r_.n); });
		narrow_numbers(r_.dtype, sums.data(), r_.n, adjusted_.data());
		widen(r_.dtype, adjusted_.data(), r_.n, seen.data());
		lost(r_.residual, sums.data(), seen.data(), r_.n);
		return adjusted_.data();
	}

	const std::vector<Slice> slices_;
	std::vector<uint8_t *> rooms_; /* receive buffers for one chunk of each rank */
	std::vector<uint8_t> adjusted_;
};

} // namespace codec::gloo::detail
