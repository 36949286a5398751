/* numbers.h - exchange short messages of numbers between the ranks of a context. */
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "link.h"

namespace codec::gloo::detail
{

using Numbers = std::vector<uint64_t>;

/*
 * Link with messages of numbers. Messages with the same count of numbers have the same size, and the count is their
 * last word. The receive buffer is zeroed before the receive.
 */
class NumberLink : public Link
{
public:
	using Link::Link;
	using Link::wait;

	/* An exchange of numbers in flight. */
	struct Asked {
		std::vector<Numbers> all; /* messages of all ranks, including this one */
		std::vector<Incoming> in, out;
		uint64_t kind = 0;
	};

	/* Post the receives of `count` numbers from some ranks. */
	Asked expect(size_t count, uint64_t kind, const std::vector<int> &sources)
	{
		Asked asked{std::vector<Numbers>(size, Numbers((count + WORDS) / WORDS * WORDS)), {}, {}, kind};

		for (int o : sources)
			asked.in.push_back(post(asked.all[o].data(), nbytes_of(asked.all[o]), o, false, kind));
		return asked;
	}

	/* Send numbers to some ranks. The count must be that of expect(). */
	void say(Asked &asked, const Numbers &mine, const std::vector<int> &to)
	{
		put(mine, asked.all[rank]);
		for (int o : to)
			asked.out.push_back(
				post(asked.all[rank].data(), nbytes_of(asked.all[rank]), o, true, asked.kind));
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

		for (Incoming &each : asked.in)
			if (!absent[each.source])
				wait(each, left());
		for (Incoming &each : asked.out)
			wait_sent(each);
	}

	/* Close the connections and throw PeerError unless every message has n numbers. */
	void check(const Asked &asked, size_t n)
	{
		for (const Incoming &each : asked.in) {
			if (!absent[each.source] && asked.all[each.source].back() != n) {
				close();
				throw PeerError(
					name(each.source) + " is at another point of the program than " + name(rank) +
					", has another version of codec/gloo.h, or has sent only a part of a message");
			}
		}
	}

	/* Send a message to all other ranks that can be reached. If a rank is lost, close the connections. */
	void tell(const Numbers &message, uint64_t kind)
	{
		std::vector<Incoming> out;
		bool lost = false;

		for (int o : others) {
			try {
				out.push_back({context()->createUnboundBuffer(const_cast<uint64_t *>(message.data()),
									      nbytes_of(message)),
					       o});
				out.back().buffer->send(o, slot(kind));
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

	/*
	 * Fill a message with numbers, and store their count in the last word, which arrives only if all numbers have
	 * arrived.
	 */
	static void put(const Numbers &numbers, Numbers &message)
	{
		std::copy(numbers.begin(), numbers.end(), message.begin());
		message.back() = numbers.size();
	}

private:
	static constexpr size_t WORDS = 8; /* messages of numbers are padded to a multiple of this number of words */

	static size_t nbytes_of(const Numbers &message)
	{
		return message.size() * sizeof(uint64_t);
	}
};

} // namespace codec::gloo::detail
