/* channel.h - messages between the ranks of a context, and agreement on how a collective went. */
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
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

/*
 * A group of ranks that do one collective after the other, all in the same order.
 *
 * Gloo ends the process where a message is longer than its receive, and does not tell how long a shorter one was. So a
 * message begins with the length of its frame, and is received into room for the longest frame there can be; numbers
 * come in messages of one size. All that will come is expected before anything is sent.
 *
 * Gloo closes a connection that was lost or waited for in vain. Then this closes all others, too, so that no rank waits
 * for this one: the context is of no use any more.
 */
class Channel
{
public:
	/* A message on its way. */
	struct Incoming {
		std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
		int source;
	};

	explicit Channel(std::shared_ptr<::gloo::Context> context, uint32_t tag)
	    : rank(context->rank), size(context->size), context_(std::move(context)),
	      slot_(SLOTS << 56 | static_cast<uint64_t>(tag) << 8)
	{
		for (int i = 1; i < size; i++)
			others.push_back((rank + i) % size);
		ignore_broken_pipes();
	}

	Channel(const Channel &) = delete;
	Channel &operator=(const Channel &) = delete;

	const int rank, size;
	std::vector<int> others; /* each rank's begin with another one */
	std::chrono::milliseconds timeout{};
	uint64_t sent_nbytes = 0; /* by frames and values, so far */

	const std::shared_ptr<::gloo::Context> &context() const
	{
		return context_;
	}

	bool closed() const
	{
		return closed_;
	}

	/* Give the connections up. */
	void close() noexcept
	{
		if (closed_)
			return;
		closed_ = true;
		try {
			context_->closeConnections();
		} catch (...) { /* one that was never made */
		}
		sending_.clear();
	}

	/* A new collective, which will take so many bytes of take(). */
	void begin(size_t room)
	{
		if (room_.size() < room)
			room_.resize(room);
		taken_ = 0;
	}

	/* What to ask begin() for, for a frame of so many bytes at most. */
	static size_t room_for(size_t nbytes)
	{
		return (nbytes + LENGTH + ALIGN - 1) / ALIGN * ALIGN;
	}

	/* Room for a message with a frame of so many bytes at most. */
	Bytes take(size_t nbytes)
	{
		last_ = taken_;
		taken_ += room_for(nbytes);
		if (taken_ > room_.size())
			throw std::logic_error("a collective takes more room than it has asked for");
		return {room_.data() + last_, LENGTH + nbytes};
	}

	/* The message with a frame of so many bytes, for the room that was taken last; the rest of that is free again.
	 */
	Bytes sized(Bytes room, size_t nbytes)
	{
		uint64_t length = nbytes;

		std::memcpy(room.p, &length, LENGTH);
		taken_ = last_ + room_for(nbytes);
		return {room.p, LENGTH + nbytes};
	}

	/* Where the frame of a message is. */
	static Bytes frame_of(Bytes message)
	{
		return {message.p + LENGTH, message.nbytes - LENGTH};
	}

	/* Expect a frame of so many bytes at most. */
	Incoming receive(size_t nbytes, int source)
	{
		Bytes room = take(nbytes);

		return receive_values(room.p, room.nbytes, source);
	}

	/* Expect just so many bytes. */
	Incoming receive_values(void *p, size_t nbytes, int source)
	{
		return post(p, nbytes, source, false, FRAMES);
	}

	/* Wait for a frame. Throws PeerError if the sender has none, FrameError if its length cannot be. */
	Bytes frame(Incoming &incoming)
	{
		uint64_t nbytes;

		wait(incoming);
		std::memcpy(&nbytes, incoming.buffer->ptr, LENGTH);
		if (!nbytes)
			throw PeerError(name(incoming.source) + " has given up");
		if (nbytes > incoming.buffer->size - LENGTH)
			throw FrameError(CODEC_LIMIT, name(incoming.source) + " sends a frame of " +
							      std::to_string(nbytes) + " bytes, which cannot be");
		return {static_cast<uint8_t *>(incoming.buffer->ptr) + LENGTH, nbytes};
	}

	void wait(Incoming &incoming)
	{
		wait(incoming, timeout);
	}

	/* Send a message, which stays as it is until finish(); an empty one: there is no frame. */
	void send(Bytes message, int to)
	{
		send_values(message ? message.p : NO_FRAME, message ? message.nbytes : LENGTH, to);
	}

	/* Send a frame that came; its length is still before it. */
	void pass_on(Bytes frame, int to)
	{
		send(frame ? Bytes{frame.p - LENGTH, frame.nbytes + LENGTH} : frame, to);
	}

	/* Send values as they are. */
	void send_values(const void *p, size_t nbytes, int to)
	{
		sending_.push_back(post(const_cast<void *>(p), nbytes, to, true, FRAMES));
		sent_nbytes += nbytes;
	}

	/* Wait until all is sent. */
	void finish()
	{
		for (Incoming &each : sending_)
			guarded(each.source, [&] { each.buffer->waitSend(timeout); });
		sending_.clear();
	}

	/* Numbers on their way. */
	struct Asked {
		std::vector<Numbers> all;
		std::vector<Incoming> in, out;
	};

	/* Tell all ranks, and ask them; hear() waits for what each has: as many numbers on all of them. */
	Asked ask(const Numbers &mine)
	{
		Asked asked{std::vector<Numbers>(size, Numbers(words(mine))), {}, {}};

		put(mine, asked.all[rank]);
		post_numbers(asked, others, others);
		return asked;
	}

	std::vector<Numbers> hear(Asked &asked)
	{
		const size_t n = asked.all[rank][0];

		wait(asked, timeout);
		check(asked.all, n, others);
		for (Numbers &each : asked.all) {
			each.erase(each.begin());
			each.resize(n);
		}
		return asked.all;
	}

	/*
	 * The worst that any rank has to tell, and which one has. Rank 0 asks all, and then tells all: whichever other
	 * one is lost meanwhile, either all succeed or none does. It may have begun to wait a timeout after this one,
	 * and then waits for one itself.
	 */
	Numbers verdict(uint64_t status)
	{
		const Numbers mine{status, static_cast<uint64_t>(rank)};
		Asked asked{std::vector<Numbers>(size, Numbers(words(mine))), {}, {}};
		const std::vector<Numbers> &all = asked.all;
		const std::vector<int> sources = rank ? std::vector<int>{0} : others;

		put(mine, asked.all[rank]);
		post_numbers(asked, sources, rank ? sources : std::vector<int>{});
		wait(asked, rank ? 2 * timeout : timeout);
		check(all, mine.size(), sources);
		if (rank)
			return {all[0][1], all[0][2]};
		const Numbers &worst = *std::max_element(
			all.begin(), all.end(), [](const Numbers &a, const Numbers &b) { return a[1] < b[1]; });
		Numbers found(worst);
		tell(found);
		return {found[1], found[2]};
	}

	static std::string name(int rank)
	{
		return "rank " + std::to_string(rank);
	}

private:
	static constexpr uint64_t SLOTS = 0xc0; /* Gloo's own collectives begin at 1; their users' slots have 0 */
	static constexpr uint64_t NUMBERS = 1, FRAMES = 2;
	static constexpr size_t LENGTH = sizeof(uint64_t), ALIGN = 64;
	static constexpr size_t WORDS = 8; /* of a message of numbers, or a multiple: how many, and they */
	static constexpr uint8_t NO_FRAME[LENGTH] = {};

	/* Memory that nobody clears. */
	class Room
	{
	public:
		uint8_t *data() const
		{
			return p_.get();
		}

		size_t size() const
		{
			return nbytes_;
		}

		void resize(size_t nbytes)
		{
			p_.reset();
			nbytes_ = 0;
			p_.reset(static_cast<uint8_t *>(::operator new(nbytes, std::align_val_t{ALIGN})));
			nbytes_ = nbytes;
		}

	private:
		struct Free {
			void operator()(uint8_t *p) const
			{
				::operator delete(p, std::align_val_t{ALIGN});
			}
		};
		std::unique_ptr<uint8_t, Free> p_;
		size_t nbytes_ = 0;
	};

	/* Gloo writes to connections whose other end is gone. The signal for that ends the process, if left alone. */
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

	static void put(const Numbers &numbers, Numbers &message)
	{
		message[0] = numbers.size();
		std::copy(numbers.begin(), numbers.end(), message.begin() + 1);
	}

	/* Begin to send or to receive. */
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

	/* Begin to receive some ranks' messages, and to send this one's to others. */
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

	/* All of them within this time, not one after the other. */
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
			if (all[o][0] != n) {
				close();
				throw PeerError(name(o) + " is at another point of the program than " + name(rank));
			}
		}
	}

	/* Send this to all who are there. That one is not any more is for the next collective to find. */
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

	/* Do what may find that a connection is gone. */
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
	Room room_;
	size_t taken_ = 0, last_ = 0; /* of the room, and where what was taken last begins */
	std::vector<Incoming> sending_;
	bool closed_ = false;
};

} // namespace codec::gloo::detail
