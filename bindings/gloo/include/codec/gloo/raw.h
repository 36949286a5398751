/* raw.h - values as they are instead of frames: where a link is so fast that encoding would take longer. */
#pragma once

#include <vector>

#include "algorithms.h"

namespace codec::gloo::detail
{

/* What check_finite says, of a sum of n values of all ranks; of what was sent its sender says so. */
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
 * Two-shot with the values themselves: where a link is so fast that encoding would take longer than sending. Lossless
 * frames would give the same bits.
 */
class Raw : public Collective
{
public:
	Raw(Channel &channel, Reduction &r)
	    : Collective(channel, r), slices_(cut(r.n, channel.size, r.itemsize, r.segments))
	{
	}

	void run() override
	{
		const Slice &mine = slices_[channel_.rank];
		Messages firsts(mine.size()), seconds(mine.size());
		size_t room = 0;

		for (const Piece &piece : mine)
			room += channel_.size * Channel::room_for(nbytes(piece));
		channel_.begin(room);
		for (size_t c = 0; c < mine.size(); c++)
			for (int o : channel_.others)
				firsts[c].push_back(
					channel_.receive_values(channel_.take(nbytes(mine[c])).p, nbytes(mine[c]), o));
		for (size_t c = 0; c < mine.size(); c++)
			for (int o : channel_.others)
				seconds[c].push_back(
					channel_.receive_values(place(slices_[o][c]), nbytes(slices_[o][c]), o));

		const uint8_t *x = values();
		for (size_t c = 0; c < mine.size(); c++)
			for (int o : channel_.others)
				channel_.send_values(x + slices_[o][c].begin * r_.itemsize, nbytes(slices_[o][c]), o);
		for (size_t c = 0; c < mine.size(); c++) {
			std::vector<const uint8_t *> parts(channel_.size);

			parts[channel_.rank] = x + mine[c].begin * r_.itemsize;
			for (Channel::Incoming &each : firsts[c]) {
				channel_.wait(each);
				parts[each.source] = static_cast<const uint8_t *>(each.buffer->ptr);
			}
			attempt_([&] { add_up(r_, parts, mine[c], place(mine[c])); });
			for (int o : channel_.others)
				channel_.send_values(place(mine[c]), nbytes(mine[c]), o);
		}
		for (auto &chunk : seconds)
			for (Channel::Incoming &each : chunk)
				channel_.wait(each);
		channel_.finish();
	}

private:
	size_t nbytes(const Piece &piece) const
	{
		return piece.n() * r_.itemsize;
	}

	/* What is sent: the values with what is owed to them. */
	const uint8_t *values()
	{
		if (!r_.residual) {
			attempt_([&] { check_finite(r_, r_.dtype, r_.x, r_.n); });
			return r_.x;
		}
		std::vector<float> sums(r_.n), seen(r_.n);

		owed_.resize(r_.n * r_.itemsize);
		widen(r_.dtype, r_.x, r_.n, sums.data());
		add(sums.data(), r_.residual, r_.n);
		attempt_([&] { check_finite(r_, CODEC_FLOAT32, sums.data(), r_.n); });
		narrow_numbers(r_.dtype, sums.data(), r_.n, owed_.data());
		widen(r_.dtype, owed_.data(), r_.n, seen.data());
		lost(r_.residual, sums.data(), seen.data(), r_.n);
		return owed_.data();
	}

	const std::vector<Slice> slices_;
	std::vector<uint8_t> owed_;
};

} // namespace codec::gloo::detail
