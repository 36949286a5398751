/* choosing.h - choose between frames and uncompressed values by measured times, alike on all ranks. */
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <time.h>
#include <utility>
#include "channel.h"

namespace codec::gloo::detail
{

/*
 * Choice for the collectives of one signature. The first collectives use frames. The next ones use raw (uncompressed
 * values), if ranks were busy computing. All later ones use the faster of the two (docs/spec/protocol/cpp.md, section
 * 5).
 *
 * All ranks report their times of a collective, and the verdict contains the largest of these times, so that all ranks
 * choose alike. Raw is not tried on slow links: it would take at least half of the time that ranks waited, multiplied
 * by the ratio of raw bytes to frame bytes. (Half, because ranks also wait for each other.)
 */
class Choice
{
public:
	/* Begin a collective, and return true if the collective must use raw. */
	bool begin()
	{
		calls_++;
		return values_ = next();
	}

	/* Record the largest times of all ranks in a collective, which are part of its verdict. */
	void record(const Times &times)
	{
		if (!times.wall)
			return;
		took_[values_].push_back(times.wall);
		if (took_[values_].size() > LAST)
			took_[values_].pop_front();
		if (!values_)
			worth_trying_ = times.load >= BUSY && times.waited / 2 <= times.wall;
	}

private:
	/*
	 * number of untimed collectives at the beginning of a trial: they allocate memory, and new connections are slow
	 */
	static constexpr uint64_t WARM = 1;
	/* number of timed collectives in a trial, whose median is compared, because it ignores outliers */
	static constexpr uint64_t TIMED = 4, TRIAL = WARM + TIMED;
	/* number of most recent times in the median, so that later collectives can reverse the choice */
	static constexpr size_t LAST = 8;
	/* number of collectives from one trial to the next; trials are repeated because links and loads change */
	static constexpr uint64_t AGAIN = 200;
	/* raw is tried if ranks compute for at least this many thousandths of the time */
	static constexpr uint64_t BUSY = 250;

	static uint64_t median(std::deque<uint64_t> took)
	{
		const auto middle = took.begin() + (took.size() - 1) / 2;

		std::nth_element(took.begin(), middle, took.end());
		return *middle;
	}

	/*
	 * Return true if the next collective must use raw. The result depends on the number of calls so far, and on
	 * recorded times.
	 */
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
		/* took_[1] is empty if ranks were not busy enough during the trial to try raw */
		return !took_[1].empty() && median(took_[1]) < median(took_[0]);
	}

	bool values_ = false; /* true if the last collective used raw */
	uint64_t calls_ = 0;
	std::deque<uint64_t> took_[2]; /* microseconds of the slowest rank: [0] frames, [1] raw */
	bool worth_trying_ = false;
};

/* Measures a collective from its construction to stop(). */
class Timer
{
public:
	/* `sent` counts the bytes that this rank has sent; the timer keeps a reference to it. */
	explicit Timer(const uint64_t &sent)
	    : sent_(sent), before_(sent), wall_(now(CLOCK_MONOTONIC)), busy_(now(CLOCK_THREAD_CPUTIME_ID))
	{
	}

	/* Return the times of the collective. `raw_nbytes`: bytes that this rank would send in a raw collective. */
	Times stop(uint64_t raw_nbytes) const
	{
		constexpr double MOST = static_cast<double>(uint64_t(1) << 62);
		const uint64_t wall = now(CLOCK_MONOTONIC) - wall_;
		const uint64_t busy = std::min(wall, now(CLOCK_THREAD_CPUTIME_ID) - busy_);
		const auto sent = static_cast<double>(sent_ - before_);
		const double waited = static_cast<double>(wall - busy) * static_cast<double>(raw_nbytes);

		return {wall, 1000 * busy / std::max<uint64_t>(1, wall),
			sent > 0 ? static_cast<uint64_t>(std::min(MOST, waited / sent)) : 0};
	}

private:
	static uint64_t now(clockid_t clock)
	{
		timespec t;

		clock_gettime(clock, &t);
		return static_cast<uint64_t>(t.tv_sec) * 1000000 + t.tv_nsec / 1000;
	}

	const uint64_t &sent_, before_;
	const uint64_t wall_, busy_;
};

/*
 * Cache with one record per signature. Its size is bounded, since a program may use new sizes for ever. Every rank
 * drops its oldest signature, which is the same on all ranks, so that all ranks choose alike.
 */
template <class T> class Recent
{
public:
	static constexpr size_t MOST = 256;

	/* Return the record of a signature, or nullptr. */
	T *find(uint64_t signature)
	{
		for (auto &[kind, found] : kept_)
			if (kind == signature)
				return &found;
		return nullptr;
	}

	/* Add a signature; drop the oldest one if there are too many. */
	T *add(uint64_t signature, T value)
	{
		if (kept_.size() == MOST)
			kept_.pop_front();
		return &kept_.emplace_back(signature, std::move(value)).second;
	}

	/* Drop the signatures for which matches(value) is true. */
	template <class F> void drop(F &&matches)
	{
		kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
					   [&](const auto &each) { return matches(each.second); }),
			    kept_.end());
	}

	void clear()
	{
		kept_.clear();
	}

private:
	std::deque<std::pair<uint64_t, T>> kept_;
};

} // namespace codec::gloo::detail
