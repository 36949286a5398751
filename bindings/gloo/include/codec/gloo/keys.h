/* keys.h - remember on which signatures of collectives the ranks have agreed. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "link.h"

namespace codec::gloo::detail
{

/*
 * Keys of the newest signatures. Their number is bounded, since a program may use new sizes for ever. Every rank drops
 * its oldest signature, which is the same on all ranks.
 */
class Keys
{
public:
	static constexpr size_t MOST = 256;

	/* Return the key of a signature, or 0. */
	uint64_t of(uint64_t signature) const
	{
		for (const auto &[known, key] : kept_)
			if (known == signature)
				return key;
		return 0;
	}

	/* Add a signature. Drops any other signature whose key has the same slots, and the oldest one of too many. */
	void add(uint64_t signature, uint64_t key)
	{
		kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
					   [&](const auto &each) { return (key - each.second) % Link::KEYS == 0; }),
			    kept_.end());
		if (kept_.size() == MOST)
			kept_.pop_front();
		kept_.emplace_back(signature, key);
	}

	void clear()
	{
		kept_.clear();
	}

private:
	std::deque<std::pair<uint64_t, uint64_t>> kept_;
};

} // namespace codec::gloo::detail
