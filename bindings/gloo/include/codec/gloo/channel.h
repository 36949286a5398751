/*
 * channel.h - exchange messages between the ranks of a context, and agree on the outcome (verdict) of a collective
 * (docs/spec/protocol/cpp.md).
 */
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "errors.h"
#include "link.h"
#include "numbers.h"
#include "room.h"
#include "verdict.h"

namespace codec::gloo::detail
{

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

/* Return the digest of the bytes of a message (docs/spec/format.md, section 13). */
inline uint64_t digest_of(const void *p, size_t nbytes)
{
	codec_tensor bytes{};
	uint64_t digest = 0;

	bytes.struct_nbytes = sizeof bytes;
	bytes.dtype = CODEC_UINT8;
	bytes.rank = 1;
	bytes.shape[0] = bytes.nbytes = nbytes;
	bytes.data = const_cast<void *>(p);
	check(codec_digest(&bytes, 0, UINT64_MAX, &digest));
	return digest;
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
 *   - Values: sent from the caller's memory, where no stamp can follow them. The sender sends the digest of each
 *     message in a message of numbers. A message that is short or damaged has another digest.
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
class Channel : public NumberLink, public FrameRoom
{
public:
	explicit Channel(std::shared_ptr<::gloo::Context> context, uint32_t tag)
	    : NumberLink(std::move(context), tag), adopted_(newest_round().load())
	{
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
		absent.assign(absent.size(), false);
		requests_ = expect(REQUEST, REQUESTS);
		say(requests_, {mine.signature, !mine.able, mine.key, adopted_ + 1});
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
				absent[o] = all[o] != all[rank];
			adopt(all);
		}
		for (int o : others)
			agreed = agreed && !absent[o];
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
		absent.assign(absent.size(), false);
		open(adopted_, adopted_);
		return adopted_;
	}

	/* Post the receive of a frame of at most `nbytes` bytes. */
	Incoming receive(size_t nbytes, int source)
	{
		Bytes room = take(nbytes);

		std::memset(room.p, 0, LENGTH);
		return post(room.p, room.nbytes, source, false, FRAMES);
	}

	/* Post the receive of `nbytes` bytes of values. */
	Incoming receive_values(void *p, size_t nbytes, int source, uint64_t kind = FRAMES)
	{
		return post(p, nbytes, source, false, kind);
	}

	/*
	 * Wait for a frame. Throws PeerError if the sender has no frame, and FrameError if the message does not have
	 * the length that it announces.
	 */
	Bytes frame(Incoming &incoming)
	{
		wait_agreed(incoming);

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

	/* Wait for values. Throws FrameError if they do not have the digest that the sender has computed. */
	void values(Incoming &incoming, uint64_t digest)
	{
		wait_agreed(incoming);
		if (digest_of(incoming.buffer->ptr, incoming.buffer->size) != digest)
			throw FrameError(CODEC_CHECKSUM, "a message of " + name(incoming.source) + " with " +
								 std::to_string(incoming.buffer->size) +
								 " bytes of values was damaged, or was shorter");
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

	/* Post the receives of `count` numbers from all ranks; hear() waits for them. */
	Asked expect(size_t count, uint64_t kind)
	{
		return NumberLink::expect(count, kind, others);
	}

	/* Send numbers to all ranks. The count must be that of expect(). */
	void say(Asked &asked, const Numbers &mine)
	{
		NumberLink::say(asked, mine, others);
	}

	/* Wait for the numbers of all ranks, and return them by rank. The numbers of absent ranks are unspecified. */
	std::vector<Numbers> hear(Asked &asked)
	{
		const size_t n = asked.all[rank].back();

		agree();
		wait(asked, timeout);
		check(asked, n);
		for (Numbers &each : asked.all)
			each.resize(n);
		return asked.all;
	}

	/*
	 * Return the worst outcome of all ranks. Every rank reports to rank 0, which sends the verdict to all. So if a
	 * rank other than rank 0 is lost during the exchange, either all other ranks succeed or none does. The other
	 * ranks wait twice the timeout for the verdict: rank 0 may begin to wait for their reports one timeout later
	 * than they began, and may then wait one timeout. An unknown outcome counts as `refused`; if rank 0 answers
	 * with one, the channel is closed and PeerError thrown.
	 */
	Verdict verdict(Outcome mine)
	{
		const Numbers report = Verdict{mine, rank}.numbers();

		NumberLink::say(reports_, report, rank ? std::vector<int>{0} : std::vector<int>{});
		agree();
		wait(reports_, rank ? 2 * timeout : timeout);
		check(reports_, report.size());
		if (rank)
			return told_by_first(reports_.all[0]);
		const Verdict worst = worst_of(reports_.all);
		put(worst.numbers(), reports_.all[rank]);
		tell(reports_.all[rank], REPORTS);
		return worst;
	}

private:
	static constexpr size_t REQUEST = 4; /* count of numbers in a request */
	static constexpr uint64_t MOST_ROUNDS = uint64_t(1) << 62;

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
	void open(uint64_t chosen, uint64_t round)
	{
		key = chosen % KEYS;
		round_ = round;
		no_frame_[1] = stamp_of(round);
		reports_ = NumberLink::expect(Verdict::COUNT, REPORTS, rank ? std::vector<int>{0} : others);
	}

	/* Return the verdict that a message of rank 0 contains. */
	Verdict told_by_first(const Numbers &message)
	{
		if (!is_outcome(message[0]) || message[1] >= static_cast<uint64_t>(size)) {
			close();
			throw PeerError("rank 0 reports the unknown outcome " + std::to_string(message[0]) +
					" of rank " + std::to_string(message[1]) + ": nothing was changed");
		}
		return {static_cast<Outcome>(message[0]), static_cast<int>(message[1])};
	}

	/* Wait for a message. The first wait of a collective waits for the requests of all ranks, too. */
	void wait_agreed(Incoming &incoming)
	{
		agree();
		wait(incoming, timeout);
	}

	uint64_t adopted_; /* number (round) of the last collective that all ranks have agreed on */
	/* number of the collective in progress, from which the stamp of its frames is computed */
	uint64_t round_ = 0;
	uint64_t no_frame_[2] = {}; /* message without a frame: length 0, stamp */
	Request mine_;
	Asked requests_, reports_;
	bool waiting_ = false; /* true until the requests of the other ranks have been received */
};

} // namespace codec::gloo::detail
