/* link.h - send and receive messages by Gloo's unbound buffers, and close all connections if one is lost. */
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include "errors.h"

namespace codec::gloo::detail
{

/*
 * Connections to all ranks of a context. Ranks that are `absent` take part in another collective: messages from and to
 * them are not posted.
 */
class Link
{
public:
	/* A receive or a send in flight, with the rank of its peer. */
	struct Incoming {
		std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
		int source;
	};

	Link(std::shared_ptr<::gloo::Context> context, uint32_t tag)
	    : rank(context->rank), size(context->size), absent(static_cast<size_t>(size)), context_(std::move(context)),
	      slot_(SLOTS << 56 | static_cast<uint64_t>(tag) << 8)
	{
		for (int i = 1; i < size; i++)
			others.push_back((rank + i) % size);
		ignore_broken_pipes();
	}

	Link(const Link &) = delete;
	Link &operator=(const Link &) = delete;

	static constexpr uint64_t KEYS = uint64_t(1) << 21; /* number of keys that have different slots */

	const int rank, size;
	std::vector<int> others; /* other ranks, in the order in which this rank sends to them */
	std::chrono::milliseconds timeout{};
	uint64_t sent_nbytes = 0; /* bytes of frames and values sent so far */
	std::vector<bool> absent; /* ranks whose requests differ from this rank's */
	uint64_t key = 0;         /* key that selects the slots for data of the collective in progress */

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

	/* Kinds of messages. Each kind has separate slots. */
	static constexpr uint64_t REQUESTS = 1, FRAMES = 2, SUMS = 3, DIGESTS = 4, REPORTS = 5;

	static std::string name(int rank)
	{
		return "rank " + std::to_string(rank);
	}

	/* Post a send or a receive; do nothing if the peer is absent. */
	Incoming post(void *p, size_t nbytes, int peer, bool to_send, uint64_t kind)
	{
		if (absent[peer])
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

	/* Wait for a message. Throws PeerError if the sender is absent. */
	void wait(Incoming &incoming, std::chrono::milliseconds within)
	{
		if (absent[incoming.source])
			throw PeerError(name(incoming.source) + " takes part in another collective");
		guarded(incoming.source, [&] { incoming.buffer->waitRecv(within); });
	}

	void wait_sent(Incoming &sending)
	{
		if (!absent[sending.source])
			guarded(sending.source, [&] { sending.buffer->waitSend(timeout); });
	}

protected:
	/* Return the slot of a kind of messages. The slot of requests does not depend on the key. */
	uint64_t slot(uint64_t kind) const
	{
		constexpr uint64_t LOW = 32; /* number of different keys in the last byte of a slot */

		return slot_ | kind | (kind == REQUESTS ? 0 : key / LOW << 40 | key % LOW << 3);
	}

private:
	/* first byte of this link's slots; Gloo's collectives use first bytes from 1 up, other programs use 0 */
	static constexpr uint64_t SLOTS = 0xc0;

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

	/* Call work(). If a connection is lost, close all connections and throw PeerError. */
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
	std::vector<Incoming> sending_;
	bool closed_ = false;
};

} // namespace codec::gloo::detail
