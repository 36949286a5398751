/*
 * channel.h - exchange messages between the ranks of a context, and agree on the outcome (verdict) of a collective
 * (docs/spec/protocol/cpp.md).
 *
 * One file: most of it is one class.
 */
#pragma once

#include <algorithm>
#include <atomic>
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

/* Outcome of a collective on one rank, in ascending order of severity. lost_peer: another rank is the cause. */
enum class Outcome : uint64_t { success, lost_peer, refused, not_finite };

/* Times of a collective on one rank, or the largest times of all ranks. */
struct Times {
	uint64_t wall = 0; /* duration of the collective in microseconds */
	uint64_t load = 0; /* share of `wall` in which the thread used the CPU, in thousandths */
	/* estimated microseconds that the rank would have waited for messages of uncompressed values */
	uint64_t waited = 0;
};

/* The most severe outcome of all ranks, the rank that reported it, and the largest times of all ranks. */
struct Verdict {
	Outcome outcome;
	int rank;
	Times times;
};

/* Request of a rank for a collective. A rank without a key sends data only after it has received all requests. */
struct Request {
	uint64_t signature = 0;
	bool able = false;
	uint64_t key = 0;
};

/* Return the output function of splitmix64 of z: a bijection whose results look random. */
inline uint64_t mixed(uint64_t z)
{
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
	z = (z ^ z >> 27) * 0x94D049BB133111EB;
	return z ^ z >> 31;
}

/* Return the last 8 bytes of a message, or all bytes of a shorter one, as a number. */
inline uint64_t last_word(const void *p, size_t nbytes)
{
	const size_t n = std::min(nbytes, sizeof(uint64_t));
	uint64_t word = 0;

	if (n)
		std::memcpy(&word, static_cast<const uint8_t *>(p) + nbytes - n, n);
	return word;
}

/*
 * Sends and receives the messages of ranks that perform the same collectives in the same order.
 *
 * Gloo terminates the process if a message is longer than its receive. It does not report the length of a shorter one,
 * after which the rest of the receive buffer keeps its previous contents. Every message therefore carries proof of its
 * length:
 *
 *   - Frame: the message is the frame's length, the frame, and a stamp of 8 bytes. All ranks use the same stamp in a
 *     collective, and no earlier message in this channel's memory has it. The receive buffer has the size of the
 *     longest possible frame.
 *   - Numbers: messages with the same count of numbers have the same size. The count is the last word of the message.
 *     The receive buffer is zeroed before the receive.
 *   - Values: sent from the caller's memory, where no stamp can follow them. The sender announces the last 8 bytes of
 *     each message in a message of numbers. The receiver fills these bytes of its buffer with random bits before the
 *     receive, and compares them afterwards. A short message passes with probability 2^-64.
 *
 * A rank posts all receives of a phase before it sends.
 *
 * Data and verdicts use Gloo slots (message tags) of a key, which stands for the same signature on all ranks. A
 * collective whose signature has a key sends data at once, while the requests are in flight. Its first wait for data
 * waits for the requests, too. Ranks whose request differs from this rank's are `absent` for the rest of the
 * collective: receives and sends that were posted for them remain in slots that are not used again.
 *
 * Gloo closes a connection that is lost or timed out. Channel then closes all other connections, so that no rank waits
 * for this one. The context cannot be used any more.
 */
class Channel
{
public:
	/* A receive or a send in flight, with the rank of its peer. */
	struct Incoming {
		std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
		int source;
	};

	explicit Channel(std::shared_ptr<::gloo::Context> context, uint32_t tag)
	    : rank(context->rank), size(context->size), context_(std::move(context)),
	      slot_(SLOTS << 56 | static_cast<uint64_t>(tag) << 8), adopted_(newest_round().load()),
	      absent_(static_cast<size_t>(size))
	{
		std::random_device random;

		filler_ = static_cast<uint64_t>(random()) << 32 | random();
		for (int i = 1; i < size; i++)
			others.push_back((rank + i) % size);
		ignore_broken_pipes();
	}

	Channel(const Channel &) = delete;
	Channel &operator=(const Channel &) = delete;

	static constexpr uint64_t KEYS = uint64_t(1) << 21; /* number of keys that have different slots */

	const int rank, size;
	std::vector<int> others; /* other ranks, in the order in which this rank sends to them */
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
		} catch (...) { /* Gloo throws if a connection does not exist */
		}
		sending_.clear();
	}

	/* Return the stamp that ends each message with a frame in the collective number `round`. */
	static uint64_t stamp_of(uint64_t round)
	{
		return mixed(round * 0x9E3779B97F4A7C15);
	}

	/*
	 * Begin a collective: send a request to all ranks. If the request has a key, messages may follow at once;
	 * otherwise call agree() and then open() first.
	 */
	void request(const Request &mine)
	{
		mine_ = mine;
		waiting_ = true;
		absent_.assign(absent_.size(), false);
		requests_ = expect(REQUEST, REQUESTS, others);
		say(requests_, {mine.signature, !mine.able, mine.key, adopted_ + 1}, others);
		if (mine.key)
			open(mine.key, adopted_ + 1);
	}

	/*
	 * Wait for the requests of all ranks, and begin the collective whose number is the largest of their proposals.
	 * Return true if all requests are equal and all ranks are able to begin. Throws PeerError if a proposal is so
	 * large that collective numbers could run out.
	 */
	bool agree()
	{
		bool agreed = mine_.able;

		if (waiting_) {
			waiting_ = false;
			const std::vector<Numbers> all = hear(requests_);
			for (int o : others)
				absent_[o] = all[o] != all[rank];
			adopt(all);
		}
		for (int o : others)
			agreed = agreed && !absent_[o];
		return agreed;
	}

	/* Return the request of a rank. Call it after agree(). */
	Request request_of(int o) const
	{
		const Numbers &numbers = requests_.all[o];

		return {numbers[0], !numbers[1], numbers[2]};
	}

	/* Switch to the slots of a new key, and return the key. Call it after agree(). */
	uint64_t open()
	{
		absent_.assign(absent_.size(), false);
		open(adopted_, adopted_);
		return adopted_;
	}

	/* Allocate a buffer of `room` bytes, from which take() allocates messages. */
	void begin(size_t room)
	{
		if (room_.size() < room)
			room_.resize(room);
		taken_ = 0;
	}

	/* Return the aligned size in bytes of a message whose frame has at most `nbytes` bytes. */
	static size_t room_for(size_t nbytes)
	{
		return (nbytes + LENGTH + STAMP + ALIGN - 1) / ALIGN * ALIGN;
	}

	/* Allocate a message for a frame of at most `nbytes` bytes from the room of begin(). */
	Bytes take(size_t nbytes)
	{
		last_ = taken_;
		taken_ += room_for(nbytes);
		if (taken_ > room_.size())
			throw std::logic_error("a collective takes more room than it has asked for");
		return {room_.data() + last_, LENGTH + nbytes + STAMP};
	}

	/*
	 * Shrink the message that take() has allocated last to a frame of `nbytes` bytes, and write the frame's
	 * length.
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

	/*
	 * Post the receive of `nbytes` bytes of values. Fills the last 8 bytes of the buffer at `p` with random bits
	 * first, to detect a short message.
	 */
	Incoming receive_values(void *p, size_t nbytes, int source, uint64_t kind = FRAMES)
	{
		const uint64_t filler = mixed(filler_ += 0x9E3779B97F4A7C15);
		const size_t n = std::min(nbytes, sizeof filler);

		if (n)
			std::memcpy(static_cast<uint8_t *>(p) + nbytes - n, &filler, n);
		return post(p, nbytes, source, false, kind);
	}

	/*
	 * Wait for a frame. Throws PeerError if the sender has no frame, and FrameError if the message does not have
	 * the length that it announces.
	 */
	Bytes frame(Incoming &incoming)
	{
		wait(incoming, timeout);

		auto *p = static_cast<uint8_t *>(incoming.buffer->ptr);
		const size_t most = incoming.buffer->size - LENGTH - STAMP;
		uint64_t nbytes, found;

		std::memcpy(&nbytes, p, LENGTH);
		if (nbytes > most)
			throw FrameError(CODEC_LIMIT, name(incoming.source) + " announces a frame of " +
							      std::to_string(nbytes) + " bytes; the maximum is " +
							      std::to_string(most));
		std::memcpy(&found, p + LENGTH + nbytes, STAMP);
		if (found != stamp_of(round_))
			throw FrameError(CODEC_TRUNCATED, name(incoming.source) + " announces a frame of " +
								  std::to_string(nbytes) +
								  " bytes, but its message has another length");
		if (!nbytes)
			throw PeerError(name(incoming.source) + " has failed, and has sent no frame");
		return {p + LENGTH, nbytes};
	}

	/*
	 * Wait for values. Throws FrameError if their last 8 bytes differ from those that the sender announced, which
	 * means that the message was shorter than expected.
	 */
	void values(Incoming &incoming, uint64_t announced)
	{
		wait(incoming, timeout);
		if (last_word(incoming.buffer->ptr, incoming.buffer->size) != announced)
			throw FrameError(CODEC_TRUNCATED, name(incoming.source) + " sent fewer than the " +
								  std::to_string(incoming.buffer->size) +
								  " bytes of values that it announced");
	}

	/*
	 * Send a message, whose bytes must not change until finish(). An empty message reports that this rank has no
	 * frame.
	 */
	void send(Bytes message, int to)
	{
		if (!message) {
			send_values(no_frame_, sizeof no_frame_, to);
			return;
		}
		const uint64_t word = stamp_of(round_);
		uint8_t *end = message.p + message.nbytes - STAMP;

		/* store the stamp only if it differs: a send to another peer may be reading it */
		if (std::memcmp(end, &word, STAMP))
			std::memcpy(end, &word, STAMP);
		send_values(message.p, message.nbytes, to);
	}

	/*
	 * Send a received frame to another rank, together with its length and stamp, which still surround it in the
	 * receive buffer.
	 */
	void pass_on(Bytes frame, int to)
	{
		send(frame ? Bytes{frame.p - LENGTH, LENGTH + frame.nbytes + STAMP} : frame, to);
	}

	/* Send bytes from the caller's memory, which must not change until finish(). */
	void send_values(const void *p, size_t nbytes, int to, uint64_t kind = FRAMES)
	{
		sending_.push_back(post(const_cast<void *>(p), nbytes, to, true, kind));
		sent_nbytes += nbytes;
	}

	/* Wait until all messages are sent. */
	void finish()
	{
		for (Incoming &each : sending_)
			wait_sent(each);
		sending_.clear();
	}

	/* An exchange of numbers in flight. */
	struct Asked {
		std::vector<Numbers> all; /* messages of all ranks, including this one */
		std::vector<Incoming> in, out;
		uint64_t kind = 0;
	};

	/* Post the receives of `count` numbers from all ranks; hear() waits for them. */
	Asked expect(size_t count, uint64_t kind)
	{
		return expect(count, kind, others);
	}

	/* Send numbers to all ranks. The count must be that of expect(). */
	void say(Asked &asked, const Numbers &mine)
	{
		say(asked, mine, others);
	}

	/* Wait for the numbers of all ranks, and return them by rank. The numbers of absent ranks are unspecified. */
	std::vector<Numbers> hear(Asked &asked)
	{
		const size_t n = asked.all[rank].back();

		wait(asked, timeout);
		check(asked, n);
		for (Numbers &each : asked.all)
			each.resize(n);
		return asked.all;
	}

	/*
	 * Return the worst outcome and the largest times of all ranks. Every rank reports to rank 0, which sends the
	 * verdict to all. So if a rank other than rank 0 is lost during the exchange, either all other ranks succeed or
	 * none does. The other ranks wait twice the timeout for the verdict: rank 0 may begin to wait for their reports
	 * one timeout later than they began, and may then wait one timeout. An unknown outcome counts as `refused`; if
	 * rank 0 answers with one, the channel is closed and PeerError thrown.
	 */
	Verdict verdict(Outcome mine, const Times &times = {})
	{
		const Numbers report = numbers_of({mine, rank, times});

		say(reports_, report, rank ? std::vector<int>{0} : std::vector<int>{});
		wait(reports_, rank ? 2 * timeout : timeout);
		check(reports_, report.size());
		if (rank)
			return told_by_first(reports_.all[0]);
		const Verdict worst = worst_of(reports_.all);
		put(numbers_of(worst), reports_.all[rank]);
		tell(reports_.all[rank]);
		return worst;
	}

	/* Kinds of messages. Each kind has separate slots. */
	static constexpr uint64_t REQUESTS = 1, FRAMES = 2, SUMS = 3, WORDS_OF_VALUES = 4, REPORTS = 5;

	static std::string name(int rank)
	{
		return "rank " + std::to_string(rank);
	}

private:
	/* first byte of this channel's slots; Gloo's collectives use first bytes from 1 up, other programs use 0 */
	static constexpr uint64_t SLOTS = 0xc0;
	static constexpr size_t REQUEST = 4, REPORT = 5; /* count of numbers in a request, and in a report */
	static constexpr size_t LENGTH = sizeof(uint64_t), STAMP = sizeof(uint64_t), ALIGN = 64;
	static constexpr size_t WORDS = 8; /* messages of numbers are padded to a multiple of this number of words */
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

	/*
	 * Fill a message with numbers, and store their count in the last word, which arrives only if all numbers have
	 * arrived.
	 */
	static void put(const Numbers &numbers, Numbers &message)
	{
		std::copy(numbers.begin(), numbers.end(), message.begin());
		message.back() = numbers.size();
	}

	/*
	 * Return the newest round (number of a collective) of all channels of this process. New channels begin with the
	 * next round, so that their keys are unused.
	 */
	static std::atomic<uint64_t> &newest_round()
	{
		static std::atomic<uint64_t> round{0};

		return round;
	}

	/*
	 * Adopt the largest proposal. Throws PeerError and closes the channel if the proposal is so large that round
	 * numbers could run out.
	 */
	void adopt(const std::vector<Numbers> &requests)
	{
		for (const Numbers &each : requests)
			adopted_ = std::max(adopted_, each.back());
		if (adopted_ > MOST_ROUNDS) {
			close();
			throw PeerError("a rank proposes " + std::to_string(adopted_) +
					" as the number of this collective, which is out of range");
		}
		for (uint64_t newest = newest_round(); newest < adopted_;)
			newest_round().compare_exchange_weak(newest, adopted_);
	}

	/* Switch to the slots of a key and the stamp of a round, and post the receives of reports. */
	void open(uint64_t key, uint64_t round)
	{
		key_ = key % KEYS;
		round_ = round;
		no_frame_[1] = stamp_of(round);
		reports_ = expect(REPORT, REPORTS, rank ? std::vector<int>{0} : others);
	}

	/* Return the slot of a kind of messages. The slot of requests does not depend on the key. */
	uint64_t slot(uint64_t kind) const
	{
		constexpr uint64_t LOW = 32; /* number of different keys in the last byte of a slot */

		return slot_ | kind | (kind == REQUESTS ? 0 : key_ / LOW << 40 | key_ % LOW << 3);
	}

	static Numbers numbers_of(const Verdict &of)
	{
		return {static_cast<uint64_t>(of.outcome), static_cast<uint64_t>(of.rank), of.times.wall, of.times.load,
			of.times.waited};
	}

	static Times times_of(const Numbers &report)
	{
		return {report[2], report[3], report[4]};
	}

	/* Return the most severe outcome in the reports of all ranks, and the largest times. */
	Verdict worst_of(const std::vector<Numbers> &reports) const
	{
		Verdict worst{Outcome::success, 0, {}};

		for (int o = 0; o < size; o++) {
			const uint64_t status = reports[o][0];
			const bool known = status <= static_cast<uint64_t>(Outcome::not_finite);
			const Outcome outcome = known ? static_cast<Outcome>(status) : Outcome::refused;

			if (outcome > worst.outcome)
				worst = {outcome, o, worst.times};
			const Times times = times_of(reports[o]);
			worst.times = {std::max(worst.times.wall, times.wall), std::max(worst.times.load, times.load),
				       std::max(worst.times.waited, times.waited)};
		}
		return worst;
	}

	/* Return the verdict that a message of rank 0 contains. */
	Verdict told_by_first(const Numbers &message)
	{
		if (message[0] > static_cast<uint64_t>(Outcome::not_finite) ||
		    message[1] >= static_cast<uint64_t>(size)) {
			close();
			throw PeerError("rank 0 reports the unknown outcome " + std::to_string(message[0]) +
					" of rank " + std::to_string(message[1]) + ": nothing was changed");
		}
		return {static_cast<Outcome>(message[0]), static_cast<int>(message[1]), times_of(message)};
	}

	/* Post a send or a receive; do nothing if the peer is absent. */
	Incoming post(void *p, size_t nbytes, int peer, bool to_send, uint64_t kind)
	{
		if (absent_[peer])
			return {nullptr, peer};
		Incoming found{context_->createUnboundBuffer(p, nbytes), peer};

		guarded(peer, [&] {
			if (to_send)
				found.buffer->send(peer, slot(kind));
			else
				found.buffer->recv(peer, slot(kind));
		});
		return found;
	}

	Asked expect(size_t count, uint64_t kind, const std::vector<int> &sources)
	{
		Asked asked{std::vector<Numbers>(size, Numbers((count + WORDS) / WORDS * WORDS)), {}, {}, kind};

		for (int o : sources)
			asked.in.push_back(post(asked.all[o].data(), nbytes_of(asked.all[o]), o, false, kind));
		return asked;
	}

	void say(Asked &asked, const Numbers &mine, const std::vector<int> &to)
	{
		put(mine, asked.all[rank]);
		for (int o : to)
			asked.out.push_back(
				post(asked.all[rank].data(), nbytes_of(asked.all[rank]), o, true, asked.kind));
	}

	static size_t nbytes_of(const Numbers &message)
	{
		return message.size() * sizeof(uint64_t);
	}

	/*
	 * Wait for a message. The first wait of a collective waits for the requests of all ranks, too. Throws PeerError
	 * if the sender is absent.
	 */
	void wait(Incoming &incoming, std::chrono::milliseconds within)
	{
		agree();
		if (absent_[incoming.source])
			throw PeerError(name(incoming.source) + " takes part in another collective");
		guarded(incoming.source, [&] { incoming.buffer->waitRecv(within); });
	}

	void wait_sent(Incoming &sending)
	{
		if (!absent_[sending.source])
			guarded(sending.source, [&] { sending.buffer->waitSend(timeout); });
	}

	/*
	 * Wait for the messages of an exchange from all ranks that are not absent. `within` limits the sum of all
	 * waits.
	 */
	void wait(Asked &asked, std::chrono::milliseconds within)
	{
		const auto end = std::chrono::steady_clock::now() + within;
		const auto left = [&] {
			const auto time = end - std::chrono::steady_clock::now();
			const std::chrono::milliseconds least(1); /* Gloo may treat a timeout of 0 as no limit */

			return std::max(least, std::chrono::duration_cast<std::chrono::milliseconds>(time));
		};

		agree();
		for (Incoming &each : asked.in)
			if (!absent_[each.source])
				wait(each, left());
		for (Incoming &each : asked.out)
			wait_sent(each);
	}

	/* Close the channel and throw PeerError unless every message has n numbers. */
	void check(const Asked &asked, size_t n)
	{
		for (const Incoming &each : asked.in) {
			if (!absent_[each.source] && asked.all[each.source].back() != n) {
				close();
				throw PeerError(
					name(each.source) + " is at another point of the program than " + name(rank) +
					", has another version of codec/gloo.h, or has sent only a part of a message");
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
				out.back().buffer->send(o, slot(REPORTS));
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
	uint64_t filler_;  /* state of the generator of random bits, which is kept secret */
	uint64_t adopted_; /* number (round) of the last collective that all ranks have agreed on */
	/* number of the collective in progress, from which the stamp of its frames is computed */
	uint64_t round_ = 0;
	uint64_t key_ = 0;          /* key that selects the slots for data of the collective in progress */
	uint64_t no_frame_[2] = {}; /* message without a frame: length 0, stamp */
	Room room_;
	size_t taken_ = 0, last_ = 0; /* bytes of room_ in use; offset of the message allocated last */
	std::vector<Incoming> sending_;
	Request mine_;
	Asked requests_, reports_;
	bool waiting_ = false;     /* true until the requests of the other ranks have been received */
	std::vector<bool> absent_; /* ranks whose requests differ from this rank's */
	bool closed_ = false;
};

} // namespace codec::gloo::detail
