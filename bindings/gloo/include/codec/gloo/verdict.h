/* verdict.h - the outcome of a collective on one rank and on all ranks (docs/spec/protocol/cpp.md, section 4). */
#pragma once

#include <cstdint>
#include <vector>

#include "numbers.h"

namespace codec::gloo::detail
{

/* Outcome of a collective on one rank, in ascending order of severity. lost_peer: another rank is the cause. */
enum class Outcome : uint64_t { success, lost_peer, refused, not_finite };

/* The most severe outcome of all ranks, and the rank that reported it. A rank reports its own outcome alike. */
struct Verdict {
	static constexpr size_t COUNT = 2; /* count of numbers in a report, and in a verdict */

	Outcome outcome = Outcome::success;
	int rank = 0;

	Numbers numbers() const
	{
		return {static_cast<uint64_t>(outcome), static_cast<uint64_t>(rank)};
	}
};

inline bool is_outcome(uint64_t status)
{
	return status <= static_cast<uint64_t>(Outcome::not_finite);
}

/* Return the most severe outcome in the reports of all ranks. An unknown outcome counts as `refused`. */
inline Verdict worst_of(const std::vector<Numbers> &reports)
{
	Verdict worst;

	for (size_t o = 0; o < reports.size(); o++) {
		const uint64_t status = reports[o][0];
		const Outcome outcome = is_outcome(status) ? static_cast<Outcome>(status) : Outcome::refused;

		if (outcome > worst.outcome)
			worst = {outcome, static_cast<int>(o)};
	}
	return worst;
}

} // namespace codec::gloo::detail
