/* hostile.h - a test rank that composes the messages of codec/gloo.h itself, so that it can violate the protocol. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <codec/gloo.h>

#include "tensors.h"

namespace hostile
{

using codec::gloo::detail::Numbers;
using Bytes = std::vector<uint8_t>;

/* Test rank, one of two, that sends and receives message by message. Sent messages live as long as this object. */
class Peer
{
public:
	static constexpr size_t WORDS = 8; /* size of a message of up to 7 numbers, in words of 8 bytes */

	explicit Peer(std::shared_ptr<::gloo::Context> context) : context_(std::move(context)), to_(1 - context_->rank)
	{
	}

	const std::shared_ptr<::gloo::Context> &context() const
	{
		return context_;
	}

	/* Kinds of messages: of numbers, and of uncompressed sums (SUMS). */
	static constexpr uint64_t REQUEST = 1, SUMS = 3, DIGESTS = 4, REPORT = 5;

	/* Key from which the slots of data messages are computed. */
	uint64_t key = 0;

	void send_numbers(const Bytes &message, uint64_t kind = REQUEST)
	{
		send(message, kind);
	}

	void send_frame(const Bytes &message, uint64_t kind = 2)
	{
		send(message, kind);
	}

	/* Receive a message of numbers, and return the numbers, without the last word, which is their count. */
	Numbers numbers(uint64_t kind = REQUEST, size_t words = WORDS)
	{
		const Bytes message = receive(words * sizeof(uint64_t), kind);
		Numbers found(words);

		std::memcpy(found.data(), message.data(), message.size());
		found.pop_back();
		return found;
	}

	/* Receive a message with a frame or with values, of at most `nbytes` bytes. */
	Bytes frame(size_t nbytes, uint64_t kind = 2)
	{
		return receive(nbytes, kind);
	}

	/* Answer the other rank's request with an equal request. Return the stamp of the collective. */
	uint64_t agree()
	{
		Numbers wanted = numbers();

		wanted.resize(4);
		send_numbers(message_of(wanted));
		key = wanted[2] ? wanted[2] : wanted[3];
		return codec::gloo::detail::Channel::stamp_of(wanted[3]);
	}

	/* Report to the other rank that this rank succeeded. */
	void succeed()
	{
		if (context_->rank)
			send_numbers(message_of({0, 1}), REPORT);
		else
			numbers(REPORT);
		if (context_->rank)
			numbers(REPORT);
		else
			send_numbers(message_of({0, 0}), REPORT);
	}

	/* Return a message with `numbers`, followed by their count. */
	static Bytes message_of(const Numbers &numbers)
	{
		return message_of(numbers, numbers.size());
	}

	/* Return a message with `numbers` that announces `count` as their number. */
	static Bytes message_of(const Numbers &numbers, uint64_t count)
	{
		Numbers words((numbers.size() + WORDS) / WORDS * WORDS);
		Bytes message(words.size() * sizeof words[0]);

		std::copy(numbers.begin(), numbers.end(), words.begin());
		words.back() = count;
		std::memcpy(message.data(), words.data(), message.size());
		return message;
	}

	/* Return a message with `frame` that announces a frame of `length` bytes. */
	static Bytes message_of(const Bytes &frame, uint64_t length, uint64_t stamp)
	{
		Bytes message(sizeof length + frame.size() + sizeof stamp);

		std::memcpy(message.data(), &length, sizeof length);
		std::copy(frame.begin(), frame.end(), message.begin() + sizeof length);
		std::memcpy(message.data() + sizeof length + frame.size(), &stamp, sizeof stamp);
		return message;
	}

private:
	static constexpr std::chrono::milliseconds PATIENCE{5000};

	uint64_t slot(uint64_t kind) const
	{
		const uint64_t k = kind == REQUEST ? 0 : key % (uint64_t(1) << 21);

		return uint64_t(0xc0) << 56 | k / 32 << 40 | k % 32 << 3 | kind;
	}

	void send(const Bytes &message, uint64_t kind)
	{
		sent_.push_back(std::make_unique<Bytes>(message));
		buffers_.push_back(context_->createUnboundBuffer(sent_.back()->data(), message.size()));
		buffers_.back()->send(to_, slot(kind));
		buffers_.back()->waitSend(PATIENCE);
	}

	Bytes receive(size_t nbytes, uint64_t kind)
	{
		Bytes message(nbytes);
		auto buffer = context_->createUnboundBuffer(message.data(), nbytes);

		buffer->recv(to_, slot(kind));
		buffer->waitRecv(PATIENCE);
		return message;
	}

	std::shared_ptr<::gloo::Context> context_;
	const int to_;
	std::vector<std::unique_ptr<Bytes>> sent_;
	std::vector<std::unique_ptr<::gloo::transport::UnboundBuffer>> buffers_;
};

/* Encode the n test values of rank `rank` to a frame. */
inline Bytes encoded(const codec_spec &spec, uint32_t dtype, size_t n, int rank)
{
	namespace detail = codec::gloo::detail;
	tensors::Tensor x = tensors::tensor(rank, dtype, n);
	codec_tensor src = detail::tensor_of(dtype, x.data(), n);
	auto with = detail::blank<codec_context>();
	size_t bound, nbytes, written;

	detail::check(codec_bound(&spec, &src, &bound));
	detail::check(codec_scratch(&spec, &src, &nbytes));
	Bytes frame(bound), scratch(nbytes);
	detail::check(codec_encode(&spec, &src, frame.data(), bound, &written, nullptr, &with, scratch.data(), nbytes));
	frame.resize(written);
	return frame;
}

} // namespace hostile
