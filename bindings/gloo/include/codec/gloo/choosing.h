/* choosing.h - whether frames pay: decided from what collectives have taken, alike on all ranks. */
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <time.h>
#include <utility>
#include <vector>

namespace codec::gloo::detail
{

/*
 * For collectives of one size and spec: frames at first; values too if ranks are busy; then what took less time.
 *
 * Each rank reports, with the next collective, what the last one took; all see all reports, and so decide alike. On a
 * slow link the processor waits, values would take longer still, and are never tried: they need at least the time that
 * ranks did not compute, as often as they are larger than frames. (Half of that, for ranks wait for each other, too.)
 */
class Choice
{
public:
	struct Report {
		uint64_t wall = 0, busy = 0; /* microseconds that a collective took, and of those that it computed */
		uint64_t sent = 0;           /* bytes */
	};

	/* What the collective before took on this rank. */
	Report report() const
	{
		return report_;
	}

	/* What was decided last: most likely what will be next. */
	bool last() const
	{
		return values_;
	}

	/* Whether values are to travel as they are, so many bytes a rank, from the reports of all ranks. */
	bool as_they_are(const std::vector<Report> &reports, uint64_t nbytes)
	{
		uint64_t wall = 0;
		double load = 0, waited = 0;

		for (const Report &each : reports) {
			const double idle = static_cast<double>(each.wall - std::min(each.wall, each.busy));

			wall = std::max(wall, each.wall);
			load = std::max(load, static_cast<double>(each.busy) / std::max<uint64_t>(1, each.wall));
			if (each.sent)
				waited = std::max(waited,
						  idle * static_cast<double>(nbytes) / static_cast<double>(each.sent));
		}
		if (calls_ && wall) {
			took_[values_].push_back(wall);
			if (took_[values_].size() > LAST)
				took_[values_].pop_front();
			if (!values_)
				worth_trying_ = load >= BUSY && waited <= 2 * static_cast<double>(wall);
		}
		calls_++;
		return values_ = next();
	}

	/* Time a collective. */
	class Timer
	{
	public:
		/* `sent` counts the bytes that this rank sends. */
		Timer(Choice &choice, const uint64_t &sent)
		    : choice_(choice), sent_(sent), before_(sent), wall_(now(CLOCK_MONOTONIC)),
		      busy_(now(CLOCK_THREAD_CPUTIME_ID))
		{
		}

		~Timer()
		{
			choice_.report_ = {now(CLOCK_MONOTONIC) - wall_, now(CLOCK_THREAD_CPUTIME_ID) - busy_,
					   sent_ - before_};
		}

		Timer(const Timer &) = delete;
		Timer &operator=(const Timer &) = delete;

	private:
		static uint64_t now(clockid_t clock)
		{
			timespec t;

			clock_gettime(clock, &t);
			return static_cast<uint64_t>(t.tv_sec) * 1000000 + t.tv_nsec / 1000;
		}

		Choice &choice_;
		const uint64_t &sent_, before_;
		uint64_t wall_, busy_;
	};

private:
	/* collectives of a kind that are not timed: they allocate, and links are slow at first */
	static constexpr uint64_t WARM = 1;
	/* their median counts: what else a machine does makes single ones longer by half, and the best are luck */
	static constexpr uint64_t TIMED = 4, TRIAL = WARM + TIMED;
	/* of what is sent: where it comes to take longer than what was not chosen, that is chosen */
	static constexpr size_t LAST = 8;
	static constexpr uint64_t AGAIN = 200; /* collectives until it is looked at again: links and loads change */
	static constexpr double BUSY = 0.25; /* a rank that computes for so much of the time may be what all wait for */

	static uint64_t median(std::deque<uint64_t> took)
	{
		const auto middle = took.begin() + (took.size() - 1) / 2;

		std::nth_element(took.begin(), middle, took.end());
		return *middle;
	}

	/* By the number of this collective. */
	bool next()
	{
		uint64_t i = (calls_ - 1) % AGAIN;

		if (i == 0)
			took_[1].clear();
		if (i < TRIAL) {
			if (i <= WARM)
				took_[0].clear();
			return false;
		}
		if (!worth_trying_)
			return false;
		if (i < 2 * TRIAL) {
			if (i <= TRIAL + WARM)
				took_[1].clear();
			return true;
		}
		/* values may come to be worth a trial when it is over: next time */
		return !took_[1].empty() && median(took_[1]) < median(took_[0]);
	}

	bool values_ = false; /* what travels in the collective that is reported next */
	uint64_t calls_ = 0;
	std::deque<uint64_t> took_[2]; /* microseconds of the slowest rank: of frames, of values */
	bool worth_trying_ = false;
	Report report_;
};

/*
 * What was chosen for collectives of a kind, of the kinds that came last: where sizes change from call to call there is
 * no end to them. Ranks must keep the same ones, or they would choose differently.
 */
class Choices
{
public:
	static constexpr size_t MOST = 256;

	/* That of a kind; nullptr: there is none. */
	Choice *find(uint64_t signature)
	{
		for (auto &[kind, choice] : kept_)
			if (kind == signature)
				return &choice;
		return nullptr;
	}

	/* Begin one; the oldest is forgotten if there are too many. */
	Choice *add(uint64_t signature)
	{
		if (kept_.size() == MOST)
			kept_.pop_front();
		return &kept_.emplace_back(signature, Choice()).second;
	}

private:
	std::deque<std::pair<uint64_t, Choice>> kept_;
};

} // namespace codec::gloo::detail
