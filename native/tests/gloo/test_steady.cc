/*
 * test_steady.cc - test steady collectives: in an earlier call, all ranks agreed on the signature (hash of arguments),
 * so they send data before they receive the other ranks' requests. Different arguments or an error on one rank must be
 * errors on all ranks, and the connections must remain usable.
 */
#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include "ranks.h"
#include "tensors.h"

using namespace codec::gloo;
using namespace tensors;
using ranks::Clock;
using ranks::milliseconds;
using ranks::Rank;
using ranks::thrown;

namespace
{

constexpr int WRONG = 1;                                      /* rank with different arguments or values */
constexpr size_t SMALL = 300, MEDIUM = 40000, LARGE = 900000; /* numbers of values; LARGE has several chunks */
constexpr milliseconds SOON(5000);                            /* a quarter of the timeout, enough on shared CPUs */

/* One collective with its tensors, which errors must not change. */
struct Call {
	std::string name;
	int kind; /* 0 allreduce, 1 reduce_scatter, 2 allgather */
	size_t n;
	uint32_t codec;
	Algorithm algorithm;
	bool feedback;

	/* Perform the collective. `spoil`, if given, first makes this rank's tensor or options invalid. */
	std::string run(Group &group, const Rank &me, const std::function<void(Tensor &, Options &)> &spoil = {}) const
	{
		const size_t size = static_cast<size_t>(me.size);
		Tensor x = tensor(me.rank, CODEC_FLOAT32, kind == 1 ? n * size : n);
		Tensor out = tensor(7, CODEC_FLOAT32, kind == 2 ? n * size : n);
		std::vector<float> residual(x.n(), 0.25f), sums(x.n(), 0.5f);
		const codec_spec spec = spec_of(codec);
		Options options;

		if (feedback) {
			options.residual = residual.data();
			options.sums_residual = sums.data();
		}
		if (!kind)
			options.algorithm = algorithm;
		if (spoil)
			spoil(x, options);
		const Tensor before = x, before_out = out;
		try {
			if (!kind)
				group.allreduce(x.data(), n, CODEC_FLOAT32, spec, options);
			else if (kind == 1)
				group.reduce_scatter(x.data(), out.data(), n, CODEC_FLOAT32, spec, options);
			else
				group.allgather(x.data(), out.data(), n, CODEC_FLOAT32, spec, options);
		} catch (const Error &) {
			EXPECT(x == before);
			EXPECT(out == before_out);
			EXPECT(residual == std::vector<float>(x.n(), 0.25f));
			EXPECT(sums == std::vector<float>(x.n(), 0.5f));
			throw;
		}
		EXPECT(!feedback || residual != std::vector<float>(x.n(), 0.25f));
		return kind ? out.str() : x.str();
	}
};

const std::vector<Call> CALLS = {
	{"two_shot", 0, MEDIUM, CODEC_QUANTIZE, Algorithm::two_shot, true},
	{"large two_shot", 0, LARGE, CODEC_QUANTIZE, Algorithm::two_shot, false},
	{"all_gather", 0, MEDIUM, CODEC_SIGN, Algorithm::all_gather, true},
	{"automatic", 0, SMALL, CODEC_LOSSLESS, Algorithm::automatic, false},
	{"ring", 0, MEDIUM, CODEC_LOSSLESS, Algorithm::ring, false},
	{"raw", 0, MEDIUM, CODEC_FLOAT8, Algorithm::raw, true},
	{"large raw", 0, LARGE, CODEC_FLOAT8, Algorithm::raw, false},
	{"reduce_scatter", 1, SMALL, CODEC_LOSSLESS, Algorithm::automatic, false},
	{"allgather", 2, MEDIUM, CODEC_LOSSLESS, Algorithm::automatic, false},
};

/* Run work(), and throw if it takes longer than SOON, within which errors of other ranks must be reported. */
template <class F> void soon(F &&work)
{
	const Clock::time_point begin = Clock::now();

	work();
	EXPECT(Clock::now() - begin < SOON);
}

/*
 * For each pair of collectives: perform both, so that both are steady. Then perform one while rank WRONG performs the
 * other. Afterwards both must succeed and be steady again.
 */
std::string differ(Rank &me)
{
	Group group(me.connect());
	std::vector<std::string> wanted;

	for (const Call &call : CALLS)
		wanted.push_back(call.run(group, me));
	for (size_t a = 0; a < CALLS.size(); a++) {
		for (size_t b = 0; b < CALLS.size(); b++) {
			if (a == b)
				continue;
			try {
				for (int i = 0; i < 2; i++) {
					EXPECT(CALLS[a].run(group, me) == wanted[a]);
					EXPECT(CALLS[b].run(group, me) == wanted[b]);
				}
				const Call &mine = CALLS[me.rank == WRONG ? b : a];
				soon([&] {
					thrown<PeerError>([&] { mine.run(group, me); },
							  "has begun another collective, or passed other arguments");
				});
				EXPECT(!group.closed());
			} catch (const std::exception &e) {
				throw std::logic_error(CALLS[a].name + " and " + CALLS[b].name + ": " + e.what());
			}
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("Other arguments of one rank in a steady group are a PeerError on all at once, and the next collectives work")
{
	ranks::run(2, differ);
	ranks::run(3, differ);
}

namespace
{

/* Make a steady collective fail on one rank, by invalid arguments and by a NaN. */
std::string fail(Rank &me)
{
	Group group(me.connect());

	for (const Call &call : CALLS) {
		try {
			const std::string wanted = call.run(group, me);

			EXPECT(call.run(group, me) == wanted);
			for (int i = 0; i < 2; i++) {
				const auto refused = [&] {
					call.run(group, me, [&](Tensor &, Options &options) {
						options.timeout = milliseconds(me.rank == WRONG ? -1 : 20000);
					});
				};

				soon([&] {
					if (me.rank == WRONG)
						thrown<ArgumentError>(refused, "timeout");
					else
						thrown<PeerError>(refused, "rank 1 could not begin");
				});
				EXPECT(call.run(group, me) == wanted);
				EXPECT(call.run(group, me) == wanted);
			}
			for (int i = 0; call.codec != CODEC_LOSSLESS && i < 2; i++) {
				const auto spoiled = [&] {
					call.run(group, me, [&](Tensor &x, Options &) {
						const float nan = NAN;

						if (me.rank == WRONG)
							std::memcpy(x.bytes.data() + 4 * 777, &nan, sizeof nan);
					});
				};

				soon([&] {
					if (me.rank == WRONG)
						EXPECT(thrown<ArgumentError>(spoiled) == CODEC_NONFINITE);
					else
						EXPECT(thrown<PeerError>(spoiled, "rank 1 has NaN") == CODEC_NONFINITE);
				});
				EXPECT(call.run(group, me) == wanted);
			}
			EXPECT(!group.closed());
		} catch (const std::exception &e) {
			throw std::logic_error(call.name + ": " + e.what());
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("An error of one rank in a steady collective is an error on all at once, and the connections stay usable")
{
	ranks::run(3, fail);
}

namespace
{

/* Create a new group on one rank, on all ranks or on none, also after a steady collective with different arguments. */
std::string renew(Rank &me)
{
	auto context = me.connect();
	auto group = std::make_unique<Group>(context);
	std::vector<std::string> wanted;

	for (const Call &call : CALLS)
		wanted.push_back(call.run(*group, me));
	for (bool differ : {false, true}) {
		for (bool all : {false, true}) {
			for (size_t i = 0; i < CALLS.size(); i++) {
				const Call &call = CALLS[i];

				try {
					EXPECT(call.run(*group, me) == wanted[i]);
					EXPECT(call.run(*group, me) == wanted[i]);
					if (differ) {
						const Call &mine = CALLS[(i + (me.rank == WRONG)) % CALLS.size()];

						thrown<PeerError>(
							[&] { mine.run(*group, me); },
							"has begun another collective, or passed other arguments");
					}
					if (all || me.rank == WRONG)
						group = std::make_unique<Group>(context);
					for (int k = 0; k < 3; k++)
						EXPECT(call.run(*group, me) == wanted[i]);
				} catch (const std::exception &e) {
					throw std::logic_error(call.name + ": " + e.what());
				}
			}
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("Groups can be made anew on one rank or on all, and never use the messages of earlier ones")
{
	ranks::run(3, renew);
}

namespace
{

/*
 * Perform steady collectives in a group with this tag. `differs`: every third one has different arguments on one rank.
 */
void work(const std::shared_ptr<::gloo::Context> &context, const Rank &me, uint32_t tag, bool differs)
{
	Group group(context, tag);
	std::vector<std::string> wanted;

	for (const Call &call : CALLS)
		wanted.push_back(call.run(group, me));
	for (int i = 0; i < 40; i++) {
		const size_t a = static_cast<size_t>(i) % CALLS.size(), b = (a + 1) % CALLS.size();

		if (differs && i % 3 == 2)
			thrown<PeerError>([&] { CALLS[me.rank == WRONG ? b : a].run(group, me); },
					  "has begun another collective, or passed other arguments");
		else
			EXPECT(CALLS[a].run(group, me) == wanted[a]);
	}
}

std::string side_by_side(Rank &me)
{
	auto context = me.connect();
	std::vector<std::exception_ptr> errors(3);
	std::vector<std::thread> all;

	for (uint32_t i = 0; i < errors.size(); i++) {
		all.emplace_back([&, i] {
			try {
				work(context, me, i * 77, i == 1);
			} catch (...) {
				errors[i] = std::current_exception();
			}
		});
	}
	for (std::thread &each : all)
		each.join();
	for (const std::exception_ptr &error : errors)
		if (error)
			std::rethrow_exception(error);
	return "";
}

} // namespace

TEST_CASE("Steady groups of a context work in three threads while the ranks of one of them differ")
{
	ranks::run(3, side_by_side);
}
