/* choosing.h - choice between frames and raw values, from measured times, equal on all ranks. */
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
 * Choice for collectives of one signature: frames first; then raw, if ranks were busy computing; then the faster of
 * both (docs/protocol.md, section 13.4).
 *
 * Each rank reports the times of its last collective with the next request. All ranks see all reports, so they choose
 * alike. Raw is not tried on slow links: it would take at least half of the time that ranks waited, multiplied by the
 * ratio of raw bytes to frame bytes. (Half, because ranks also wait for each other.)
 */
class Choice
{
public:
	struct Report {
		uint64_t wall = 0, busy = 0; /* microseconds: duration of a collective; computing time of the thread */
		uint64_t sent = 0;           /* bytes of frames and values */
	};

	/* Return this rank's report on the last collective. */
	Report report() const
	{
		return report_;
	}

	/* Return true if the last collective used raw. The next one most likely does, too. */
	bool last() const
	{
		return values_;
	}

	/*
	 * Return true if the next collective is to use raw, of `nbytes` bytes a rank. `reports` are those of all
	 * ranks.
	 */
	bool use_raw(const std::vector<Report> &reports, uint64_t nbytes)
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

	/* Measures a collective, from its construction to its destruction. */
	class Timer
	{
	public:
		/* `sent` is the counter of bytes that this rank sends. */
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
	/* collectives that begin a trial and are not timed: they allocate memory, and new connections are slow */
	static constexpr uint64_t WARM = 1;
	/* timed collectives in a trial; their median counts, which outliers do not change */
	static constexpr uint64_t TIMED = 4, TRIAL = WARM + TIMED;
	/* times that the median covers; later times can reverse the choice */
	static constexpr size_t LAST = 8;
	static constexpr uint64_t AGAIN = 200; /* collectives from one trial to the next: links and loads change */
	static constexpr double BUSY = 0.25;   /* share of computing time from which raw is tried */

	static uint64_t median(std::deque<uint64_t> took)
	{
		const auto middle = took.begin() + (took.size() - 1) / 2;

		std::nth_element(took.begin(), middle, took.end());
		return *middle;
	}

	/* Return true if the next collective is to use raw, by its number. */
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
		/* took_[1] is empty if raw became worth a trial only after the trial */
		return !took_[1].empty() && median(took_[1]) < median(took_[0]);
	}

	bool values_ = false; /* true if the last collective used raw */
	uint64_t calls_ = 0;
	std::deque<uint64_t> took_[2]; /* microseconds of the slowest rank: [0] frames, [1] raw */
	bool worth_trying_ = false;
	Report report_;
};

/*
 * Choices by signature. Their number is bounded, since programs may use ever new sizes. All ranks drop the same ones,
 * the oldest, or they would choose differently.
 */
class Choices
{
public:
	static constexpr size_t MOST = 256;

	/* Return the choice of a signature; nullptr if there is none. */
	Choice *find(uint64_t signature)
	{
		for (auto &[kind, choice] : kept_)
			if (kind == signature)
				return &choice;
		return nullptr;
	}

	/* Add a choice for a signature; drop the oldest one if there are too many. */
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
