/*
 * test_lost.cc - test a rank that dies or freezes: all other ranks throw within the timeout, no tensor is changed, and
 * a new group works.
 *
 * A fault point is the number of bytes that the rank sends before it is lost, so messages may also end in the middle.
 * The environment variable CODEC_FAULT_POINTS sets how many fault points are tried for each algorithm.
 */
#include <doctest/doctest.h>

#include "ranks.h"
#include "tensors.h"
#include "wire.h"

using namespace codec::gloo;
using namespace tensors;
using ranks::Clock;
using ranks::milliseconds;
using ranks::Rank;
using ranks::thrown;

namespace
{

constexpr int SIZE = 3, VICTIM = 1;
constexpr size_t MANY = 500000;                                    /* number of values, sent in several writes */
constexpr milliseconds TIMEOUT(1000), PROMISED(2000), SLACK(2000); /* SLACK: for shared CPUs */

struct Way {
	const char *name;
	Algorithm algorithm;
	uint32_t codec;
	bool feedback;
	bool steady = false; /* true: lost in the second call, in which data is sent before requests are received */
};

constexpr Way WAYS[] = {
	{"two-shot", Algorithm::two_shot, CODEC_QUANTIZE, true},
	{"all-gather", Algorithm::all_gather, CODEC_SIGN, true},
	{"ring", Algorithm::ring, CODEC_LOSSLESS, false},
	{"raw", Algorithm::raw, CODEC_FLOAT8, true},
	{"steady two-shot", Algorithm::two_shot, CODEC_QUANTIZE, true, true},
	{"steady all-gather", Algorithm::all_gather, CODEC_SIGN, true, true},
	{"steady ring", Algorithm::ring, CODEC_LOSSLESS, false, true},
	{"steady raw", Algorithm::raw, CODEC_FLOAT8, true, true},
};

/* One all-reduce with its tensors and residuals. */
struct Step {
	Tensor x;
	std::vector<float> residual, sums;
	Options options;
	codec_spec spec;

	Step(const Way &way, int rank, milliseconds timeout = milliseconds(20000))
	    : x(tensor(rank, CODEC_FLOAT32, MANY)), residual(way.feedback ? MANY : 0, 0.01f), sums(residual),
	      spec(spec_of(way.codec))
	{
		options.algorithm = way.algorithm;
		options.timeout = timeout;
		options.residual = way.feedback ? residual.data() : nullptr;
		options.sums_residual = way.feedback ? sums.data() : nullptr;
	}

	void run(Group &group)
	{
		group.allreduce(x.data(), MANY, CODEC_FLOAT32, spec, options);
	}

	std::string digest() const
	{
		const auto text = [](const std::vector<float> &y) {
			return std::string(reinterpret_cast<const char *>(y.data()), y.size() * sizeof y[0]);
		};

		return std::to_string(std::hash<std::string>()(x.str() + text(residual) + text(sums)));
	}
};

/* Perform a collective before the one with the fault: an empty one or, if way.steady, one with the same signature. */
void warm_up(Group &group, const Way &way, int rank)
{
	Step step(way, rank);

	if (way.steady)
		step.run(group);
	else
		group.allreduce(nullptr, 0, CODEC_FLOAT32, step.spec);
}

/* Results of an all-reduce without a fault, and the number of bytes that the victim sends in this all-reduce. */
struct Undisturbed {
	std::vector<std::string> digests;
	uint64_t nbytes;
};

Undisturbed undisturbed(const Way &way)
{
	const std::vector<std::string> results = ranks::run(SIZE, [&](Rank &me) {
		Group group(me.connect());
		Step step(way, me.rank);

		warm_up(group, way, me.rank);
		wire::restart();
		step.run(group);
		return step.digest() + " " + std::to_string(wire::sent_nbytes());
	});
	Undisturbed found{{}, std::stoull(results[VICTIM].substr(results[VICTIM].find(' ')))};

	for (const std::string &each : results)
		found.digests.push_back(each.substr(0, each.find(' ')));
	return found;
}

/*
 * Perform an all-reduce as a surviving rank: it must succeed, or throw within `within` and change no tensor. Then
 * perform another all-reduce in a new group.
 */
std::string survive(Rank &me, const Way &way, milliseconds within, bool voted, const std::string &want)
{
	Step step(way, me.rank, TIMEOUT);
	const std::string before = step.digest();
	bool raised = false;

	{
		Group group(me.connect());

		warm_up(group, way, me.rank);
		const Clock::time_point begin = Clock::now();
		try {
			step.run(group);
		} catch (const PeerError &) {
			raised = true;
		}
		const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
		if (took > within)
			throw std::logic_error("it took " + std::to_string(took.count()) + " ms");
		/* once the victim has reported its outcome, its loss need not cause an error */
		EXPECT(raised || voted);
		EXPECT(step.digest() == (raised ? before : want));
		if (raised)
			thrown<PeerError>([&] { step.run(group); }, "make a new context");
		EXPECT(group.closed() || !raised);
	}
	Rank again = me;
	again.size = SIZE;
	Group group(again.connect("second"));
	Step anew(way, me.rank);
	anew.run(group);
	EXPECT(anew.digest() == want);
	return raised ? "raised" : "none";
}

int moments(int few)
{
	const char *asked = std::getenv("CODEC_FAULT_POINTS");

	return asked ? std::max(2, std::atoi(asked)) : few;
}

/* Perform an all-reduce as the victim, which raises signal `number` after it has sent `moment` bytes. */
std::string be_lost(Rank &me, const Way &way, uint64_t moment, int number)
{
	Group group(me.connect());
	Step step(way, me.rank, TIMEOUT);
	const std::string before = step.digest();

	warm_up(group, way, me.rank);
	wire::at(moment, [&] { raise(number); });
	try {
		step.run(group);
	} catch (const PeerError &) {
		EXPECT(step.digest() == before);
		return "raised";
	}
	return "none";
}

/* Start a team of ranks, one of which is lost, and a process that replaces this rank in the next group. */
std::unique_ptr<ranks::Team> lose(const Way &way, const Undisturbed &want, uint64_t moment, int number)
{
	const bool voted = moment + 2 * (wire::HEADER + 64) >= want.nbytes;
	auto team = std::make_unique<ranks::Team>(SIZE, [=, &way](Rank &me) {
		return me.rank == VICTIM ? be_lost(me, way, moment, number)
					 : survive(me, way, PROMISED + SLACK, voted, want.digests[me.rank]);
	});

	team->replace(VICTIM, [=, &way](Rank &me) {
		Rank as{VICTIM, SIZE, me.folder};
		Group group(as.connect("second"));
		Step step(way, VICTIM);

		step.run(group);
		EXPECT(step.digest() == want.digests[VICTIM]);
		return std::string();
	});
	return team;
}

/* Check the results of a team after one of its ranks was lost. */
void check(ranks::Team &team, int number)
{
	if (number == SIGKILL) {
		CHECK(team.ended_by(VICTIM, SIGKILL));
	}
	const std::vector<std::string> found = team.results({0, 2, 3});
	CHECK(found[0] == found[1]);
	if (number == SIGSTOP) { /* the frozen rank throws once it continues */
		team.thaw(VICTIM);
		CHECK(team.result(VICTIM) == found[0]);
	}
}

/* Test up to `most` fault points per algorithm. Teams run concurrently, because their ranks mostly wait. */
void sweep(int number, int most)
{
	std::vector<Undisturbed> wants;
	const int n = moments(most);

	for (const Way &way : WAYS) {
		wants.push_back(undisturbed(way));
		REQUIRE(wants.back().nbytes > 50000);
	}
	for (int i = 0; i < n; i++) {
		std::vector<std::unique_ptr<ranks::Team>> teams;

		for (size_t w = 0; w < std::size(WAYS); w++) {
			const uint64_t moment =
				(wants[w].nbytes - 1) * static_cast<uint64_t>(i) / static_cast<uint64_t>(n - 1);

			teams.push_back(lose(WAYS[w], wants[w], moment, number));
		}
		for (size_t w = 0; w < std::size(WAYS); w++) {
			CAPTURE(WAYS[w].name);
			CAPTURE(i);
			check(*teams[w], number);
		}
	}
}

} // namespace

TEST_CASE("A rank dies at any fault point of an all-reduce: PeerError on all others, nothing is changed, a new group "
	  "works")
{
	sweep(SIGKILL, 3);
}

namespace
{

/* Exchange outcomes, which the ranks report one after the other. `too_late`: rank 3 reports after the timeout. */
std::string last_message(Rank &me, bool too_late)
{
	const int wait_ms[] = {700, 0, 1300, too_late ? 2500 : 1400};
	detail::Channel channel(me.connect(), 0);

	channel.timeout = TIMEOUT;
	channel.request({1, true, 0});
	EXPECT(channel.agree()); /* all ranks have started */
	channel.open();
	std::this_thread::sleep_for(milliseconds(wait_ms[me.rank]));
	try {
		channel.verdict(detail::Outcome::success);
	} catch (const PeerError &) {
		EXPECT(channel.closed());
		return "raised";
	}
	return "none";
}

} // namespace

TEST_CASE("All ranks or none succeed if outcomes are reported late")
{
	CHECK(ranks::run_alike(4, [](Rank &me) { return last_message(me, false); }) == "none");
	CHECK(ranks::run_alike(4, [](Rank &me) { return last_message(me, true); }) == "raised");
}

TEST_CASE("A rank freezes at any fault point of an all-reduce: PeerError on all others after the timeout, and on it "
	  "later")
{
	sweep(SIGSTOP, 2);
}
