/*
 * channel.h - messages between the ranks of a context, and the verdict on a collective (docs/protocol.md, section
 * 13).
 */
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include "errors.h"

namespace codec::gloo::detail
{

struct Bytes {
	uint8_t *p = nullptr;
	size_t nbytes = 0;

	explicit operator bool() const
	{
		return p;
	}
};

using Numbers = std::vector<uint64_t>;

/* Outcome of a collective on one rank, the worst last. lost_peer: another rank is the cause. */
enum class Outcome : uint64_t { success, lost_peer, refused, not_finite };

/* The worst outcome of all ranks, and the rank that reported it. */
struct Verdict {
	Outcome outcome;
	int rank;
};

/* The output function of splitmix64: a bijection whose results look random. */
inline uint64_t mixed(uint64_t z)
{
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
	z = (z ^ z >> 27) * 0x94D049BB133111EB;
	return z ^ z >> 31;
}

/* The last 8 bytes of a message, or all bytes of a shorter one, as a number. */
inline uint64_t last_word(const void *p, size_t nbytes)
{
	const size_t n = std::min(nbytes, sizeof(uint64_t));
	uint64_t word = 0;

	if (n)
		std::memcpy(&word, static_cast<const uint8_t *>(p) + nbytes - n, n);
	return word;
}

/*
 * Messages of a group of ranks that perform the same collectives in the same order.
 *
 * Gloo terminates the process if a message is longer than its receive, and does not report the length of a shorter one:
 * the memory behind it keeps its previous contents. Every message therefore carries proof of its length.
 *
 *   - Frame: its length, the frame, a stamp. All ranks agree on the stamp for one collective, and no earlier message in
 *     this channel's memory has the same one. It is received into room for the longest possible frame.
 *   - Numbers: always the same size for the same count. The count is the last word; the receive buffer is zero.
 *   - Values: sent from the caller's memory, where no stamp can follow them. The sender announces the last 8 bytes of
 *     each message in a message of numbers. The receiver fills these bytes of its buffer with random bits before the
 *     receive, and compares them afterwards. A short message passes with probability 2^-64.
 *
 * All receives of a phase are posted before this rank sends.
 *
 * Gloo closes a connection that is lost or timed out. Channel then closes all others, so that no rank waits for this
 * one; the context cannot be used any more.
 */
class Channel
{
public:
	/* A receive (or a send) in flight, and its peer. */
	struct Incoming {
		std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
		int source;
	};

	explicit Channel(std::shared_ptr<::gloo::Context> context, uint32_t tag)
	    : rank(context->rank), size(context->size), context_(std::move(context)),
	      slot_(SLOTS << 56 | static_cast<uint64_t>(tag) << 8)
	{
		std::random_device random;

		filler_ = static_cast<uint64_t>(random()) << 32 | random();
		for (int i = 1; i < size; i++)
			others.push_back((rank + i) % size);
		ignore_broken_pipes();
	}

	Channel(const Channel &) = delete;
	Channel &operator=(const Channel &) = delete;

	const int rank, size;
	std::vector<int> others; /* in the order in which this rank addresses them */
	std::chrono::milliseconds timeout{};
	uint64_t sent_nbytes = 0; /* bytes of frames and values sent so far */

	const std::shared_ptr<::gloo::Context> &context() const
	{
		return context_;
	}

	bool closed() const
	{
		return closed_;
	}

	/* Close all connections. */
	void close() noexcept
	{
		if (closed_)
			return;
		closed_ = true;
		try {
			context_->closeConnections();
		} catch (...) { /* a connection may never have been made */
		}
		sending_.clear();
	}

	/* Return the word that ends the messages of frames in a collective of this number. */
	static uint64_t stamp_of(uint64_t round)
	{
		return mixed(round * 0x9E3779B97F4A7C15);
	}

	/* Number of the next collective that this rank proposes. */
	uint64_t next_round() const
	{
		return round_ + 1;
	}

	/*
	 * Begin the collective whose number is the largest of all ranks' proposals: frames carry its stamp. Throws
	 * PeerError if a proposal is so large that numbers could run out.
	 */
	void begin_round(const Numbers &proposals)
	{
		const uint64_t round = *std::max_element(proposals.begin(), proposals.end());

		if (round > MOST_ROUNDS)
			throw PeerError("a rank proposes " + std::to_string(round) +
					" as the number of this collective, which is more than possible");
		round_ = round;
		no_frame_[1] = stamp_of(round);
	}

	/* Make room for messages that take() will hand out, `room` bytes in total. */
	void begin(size_t room)
	{
		if (room_.size() < room)
			room_.resize(room);
		taken_ = 0;
	}

	/* Bytes of the message with a frame of at most `nbytes` bytes, aligned. */
	static size_t room_for(size_t nbytes)
	{
		return (nbytes + LENGTH + STAMP + ALIGN - 1) / ALIGN * ALIGN;
	}

	/* Return room for the message with a frame of at most `nbytes` bytes. */
	Bytes take(size_t nbytes)
	{
		last_ = taken_;
		taken_ += room_for(nbytes);
		if (taken_ > room_.size())
			throw std::logic_error("a collective takes more room than it has asked for");
		return {room_.data() + last_, LENGTH + nbytes + STAMP};
	}

	/* Return the message with a frame of `nbytes` bytes in the room that was taken last; free the rest of the room.
	 */
	Bytes sized(Bytes room, size_t nbytes)
	{
		uint64_t length = nbytes;

		std::memcpy(room.p, &length, LENGTH);
		taken_ = last_ + room_for(nbytes);
		return {room.p, LENGTH + nbytes + STAMP};
	}

	/* Return the part of a message that is its frame. */
	static Bytes frame_of(Bytes message)
	{
		return {message.p + LENGTH, message.nbytes - LENGTH - STAMP};
	}

	/* Post the receive of a frame of at most `nbytes` bytes. */
	Incoming receive(size_t nbytes, int source)
	{
		Bytes room = take(nbytes);

		std::memset(room.p, 0, LENGTH);
		return post(room.p, room.nbytes, source, false, FRAMES);
	}

	/* Post the receive of `nbytes` bytes of values. Until they arrive, the last 8 bytes at p are random. */
	Incoming receive_values(void *p, size_t nbytes, int source)
	{
		const uint64_t filler = mixed(filler_ += 0x9E3779B97F4A7C15);
		const size_t n = std::min(nbytes, sizeof filler);

		if (n)
			std::memcpy(static_cast<uint8_t *>(p) + nbytes - n, &filler, n);
		return post(p, nbytes, source, false, FRAMES);
	}

	/*
	 * Wait for a frame. Throws PeerError if the sender could not make one, FrameError if the message does not have
	 * the length that it announces.
	 */
	Bytes frame(Incoming &incoming)
	{
		auto *p = static_cast<uint8_t *>(incoming.buffer->ptr);
		const size_t most = incoming.buffer->size - LENGTH - STAMP;
		uint64_t nbytes, found;

		wait(incoming, timeout);
		std::memcpy(&nbytes, p, LENGTH);
		if (nbytes > most)
			throw FrameError(CODEC_LIMIT, name(incoming.source) + " announces a frame of " +
							      std::to_string(nbytes) + " bytes; it can have at most " +
							      std::to_string(most));
		std::memcpy(&found, p + LENGTH + nbytes, STAMP);
		if (found != stamp_of(round_))
			throw FrameError(CODEC_TRUNCATED, name(incoming.source) + " announces a frame of " +
								  std::to_string(nbytes) +
								  " bytes, but its message has another length");
		if (!nbytes)
			throw PeerError(name(incoming.source) + " has given up");
		return {p + LENGTH, nbytes};
	}

	/*
	 * Wait for values. Throws FrameError unless their last 8 bytes are those that the sender announced: then the
	 * message was shorter than expected.
	 */
	void values(Incoming &incoming, uint64_t announced)
	{
		wait(incoming, timeout);
		if (last_word(incoming.buffer->ptr, incoming.buffer->size) != announced)
			throw FrameError(CODEC_TRUNCATED, name(incoming.source) + " sent fewer than the " +
								  std::to_string(incoming.buffer->size) +
								  " bytes of values that it announced");
	}

	/* Send a message, which must not change until finish(). An empty one says that this rank has no frame. */
	void send(Bytes message, int to)
	{
		if (!message) {
			send_values(no_frame_, sizeof no_frame_, to);
			return;
		}
		const uint64_t word = stamp_of(round_);
		uint8_t *end = message.p + message.nbytes - STAMP;

		if (std::memcmp(end, &word, STAMP)) /* another peer's send may be reading it */
			std::memcpy(end, &word, STAMP);
		send_values(message.p, message.nbytes, to);
	}

	/* Send a received frame to another rank. Its length and stamp are still around it. */
	void pass_on(Bytes frame, int to)
	{
		send(frame ? Bytes{frame.p - LENGTH, LENGTH + frame.nbytes + STAMP} : frame, to);
	}

	/* Send bytes from the caller's memory, which must not change until finish(). */
	void send_values(const void *p, size_t nbytes, int to)
	{
		sending_.push_back(post(const_cast<void *>(p), nbytes, to, true, FRAMES));
		sent_nbytes += nbytes;
	}

	/* Wait until all messages are sent. */
	void finish()
	{
		for (Incoming &each : sending_)
			guarded(each.source, [&] { each.buffer->waitSend(timeout); });
		sending_.clear();
	}

	/* An exchange of numbers in flight. */
	struct Asked {
		std::vector<Numbers> all;
		std::vector<Incoming> in, out;
	};

	/* Send numbers to all ranks and post the receives of theirs, as many from each; hear() waits for them. */
	Asked ask(const Numbers &mine)
	{
		Asked asked{std::vector<Numbers>(size, Numbers(words(mine))), {}, {}};

		put(mine, asked.all[rank]);
		post_numbers(asked, others, others);
		return asked;
	}

	std::vector<Numbers> hear(Asked &asked)
	{
		const size_t n = asked.all[rank].back();

		wait(asked, timeout);
		check(asked.all, n, others);
		for (Numbers &each : asked.all)
			each.resize(n);
		return asked.all;
	}

	/*
	 * Return the worst outcome of all ranks. Every rank reports to rank 0, which answers all: if another rank is
	 * lost meanwhile, either all succeed or none does. Other ranks wait for two timeouts, since rank 0 may begin
	 * to wait one timeout later than they, and waits for one itself. An unknown outcome counts as `refused`; if
	 * rank 0 answers with one, the channel is closed and PeerError thrown.
	 */
	Verdict verdict(Outcome mine)
	{
		const Numbers report{static_cast<uint64_t>(mine), static_cast<uint64_t>(rank)};
		Asked asked{std::vector<Numbers>(size, Numbers(words(report))), {}, {}};
		const std::vector<int> sources = rank ? std::vector<int>{0} : others;

		put(report, asked.all[rank]);
		post_numbers(asked, sources, rank ? sources : std::vector<int>{});
		wait(asked, rank ? 2 * timeout : timeout);
		check(asked.all, report.size(), sources);
		if (rank)
			return told_by_first(asked.all[0]);
		const Verdict worst = worst_of(asked.all);
		Numbers message(words(report));
		put({static_cast<uint64_t>(worst.outcome), static_cast<uint64_t>(worst.rank)}, message);
		tell(message);
		return worst;
	}

	static std::string name(int rank)
	{
		return "rank " + std::to_string(rank);
	}

private:
	static constexpr uint64_t SLOTS = 0xc0; /* prefix of slots; Gloo's collectives use 1 and up, other users 0 */
	static constexpr uint64_t NUMBERS = 1, FRAMES = 2;
	static constexpr size_t LENGTH = sizeof(uint64_t), STAMP = sizeof(uint64_t), ALIGN = 64;
	static constexpr size_t WORDS = 8; /* messages of numbers have a multiple of this number of words */
	static constexpr uint64_t MOST_ROUNDS = uint64_t(1) << 62;

	/* Memory for messages. It is zeroed, so that it holds only stamps of this channel. */
	class Room
	{
	public:
		uint8_t *data() const
		{
			const auto at = reinterpret_cast<uintptr_t>(p_.get());

			return p_.get() + (ALIGN - at % ALIGN) % ALIGN;
		}

		size_t size() const
		{
			return nbytes_;
		}

		void resize(size_t nbytes)
		{
			p_.reset();
			nbytes_ = 0;
			p_.reset(static_cast<uint8_t *>(std::calloc(1, nbytes + ALIGN)));
			if (!p_)
				throw std::bad_alloc();
			nbytes_ = nbytes;
		}

	private:
		struct Free {
			void operator()(uint8_t *p) const
			{
				std::free(p);
			}
		};
		std::unique_ptr<uint8_t, Free> p_;
		size_t nbytes_ = 0;
	};

	/*
	 * Ignore SIGPIPE unless it is handled: Gloo writes to connections whose other end is closed, and the signal
	 * would end the process.
	 */
	static void ignore_broken_pipes()
	{
		struct sigaction now;

		if (!sigaction(SIGPIPE, nullptr, &now) && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
			std::signal(SIGPIPE, SIG_IGN);
	}

	static size_t words(const Numbers &numbers)
	{
		return (numbers.size() + WORDS) / WORDS * WORDS;
	}

	/* Fill a message with numbers. Their count comes last, so that it arrives only if all the rest does. */
	static void put(const Numbers &numbers, Numbers &message)
	{
		std::copy(numbers.begin(), numbers.end(), message.begin());
		message.back() = numbers.size();
	}

	/* Return the worst of the outcomes that ranks report. */
	Verdict worst_of(const std::vector<Numbers> &reports) const
	{
		Verdict worst{Outcome::success, 0};

		for (int o = 0; o < size; o++) {
			const uint64_t status = reports[o][0];
			const bool known = status <= static_cast<uint64_t>(Outcome::not_finite);
			const Outcome outcome = known ? static_cast<Outcome>(status) : Outcome::refused;

			if (outcome > worst.outcome)
				worst = {outcome, o};
		}
		return worst;
	}

	/* Return the verdict that rank 0 tells. */
	Verdict told_by_first(const Numbers &message)
	{
		if (message[0] > static_cast<uint64_t>(Outcome::not_finite) ||
		    message[1] >= static_cast<uint64_t>(size)) {
			close();
			throw PeerError("rank 0 reports outcome " + std::to_string(message[0]) + " of rank " +
					std::to_string(message[1]) + ", which is unknown: nothing was changed");
		}
		return {static_cast<Outcome>(message[0]), static_cast<int>(message[1])};
	}

	/* Post a send or a receive. */
	Incoming post(void *p, size_t nbytes, int peer, bool to_send, uint64_t kind)
	{
		Incoming found{context_->createUnboundBuffer(p, nbytes), peer};

		guarded(peer, [&] {
			if (to_send)
				found.buffer->send(peer, slot_ | kind);
			else
				found.buffer->recv(peer, slot_ | kind);
		});
		return found;
	}

	/* Post the receives of messages from `sources`, and the sends of this rank's message. */
	void post_numbers(Asked &asked, const std::vector<int> &sources, const std::vector<int> &to)
	{
		const size_t nbytes = asked.all[rank].size() * sizeof(uint64_t);

		for (int o : sources)
			asked.in.push_back(post(asked.all[o].data(), nbytes, o, false, NUMBERS));
		for (int o : to)
			asked.out.push_back(post(asked.all[rank].data(), nbytes, o, true, NUMBERS));
	}

	void wait(Incoming &incoming, std::chrono::milliseconds within)
	{
		guarded(incoming.source, [&] { incoming.buffer->waitRecv(within); });
	}

	/* Wait for all messages of an exchange; `within` limits the sum of all waits. */
	void wait(Asked &asked, std::chrono::milliseconds within)
	{
		const auto end = std::chrono::steady_clock::now() + within;
		const auto left = [&] {
			const auto time = end - std::chrono::steady_clock::now();
			const std::chrono::milliseconds least(1); /* Gloo may take 0 for no limit */

			return std::max(least, std::chrono::duration_cast<std::chrono::milliseconds>(time));
		};

		for (Incoming &each : asked.in)
			wait(each, left());
		for (Incoming &each : asked.out)
			guarded(each.source, [&] { each.buffer->waitSend(timeout); });
	}

	void check(const std::vector<Numbers> &all, size_t n, const std::vector<int> &sources)
	{
		for (int o : sources) {
			if (all[o].back() != n) {
				close();
				throw PeerError(name(o) + " is at another point of the program than " + name(rank) +
						", has another version of codec/gloo.h, or sent a message in part");
			}
		}
	}

	/*
	 * Send the verdict to all ranks that can be reached. If a rank is lost, close the channel, so that the next
	 * collective fails.
	 */
	void tell(const Numbers &message)
	{
		std::vector<Incoming> out;
		bool lost = false;

		for (int o : others) {
			try {
				out.push_back({context_->createUnboundBuffer(const_cast<uint64_t *>(message.data()),
									     message.size() * sizeof(uint64_t)),
					       o});
				out.back().buffer->send(o, slot_ | NUMBERS);
			} catch (const ::gloo::Exception &) {
				out.pop_back();
				lost = true;
			}
		}
		for (Incoming &each : out) {
			try {
				each.buffer->waitSend(timeout);
			} catch (const ::gloo::Exception &) {
				lost = true;
			}
		}
		if (lost)
			close();
	}

	/* Call work(). If a connection is lost, close the channel and throw PeerError. */
	template <class F> void guarded(int peer, F &&work)
	{
		if (closed_)
			throw PeerError("a peer was lost: make a new context");
		try {
			work();
		} catch (const ::gloo::Exception &e) {
			close();
			throw PeerError(name(peer) + " is gone or does not answer: " + e.what());
		}
	}

	std::shared_ptr<::gloo::Context> context_;
	const uint64_t slot_;
	uint64_t filler_;           /* secret state of the generator of random bits */
	uint64_t round_ = 0;        /* number of the collective in progress */
	uint64_t no_frame_[2] = {}; /* message without a frame: length 0, stamp */
	Room room_;
	size_t taken_ = 0, last_ = 0; /* bytes of the room in use; begin of the message taken last */
	std::vector<Incoming> sending_;
	bool closed_ = false;
};

} // namespace codec::gloo::detail
