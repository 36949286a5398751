/* test_state.cc - test collectives that use an optimizer's state (TRUNCATE) or residuals. */
#include <doctest/doctest.h>

#include <cmath>

#include "ranks.h"
#include "tensors.h"

using namespace codec::gloo;
using namespace tensors;
using ranks::Rank;
using ranks::thrown;

namespace
{

constexpr size_t N_VALUES = 60000;

/* State arrays of an optimizer, with the metrics that use them, equal on all ranks. */
struct State {
	Tensor theta, v, m;
	codec_tensor t, w, k;
	std::vector<codec_metric> metrics;

	/* Create one metric for each parameter group; `begins`: index of each group's first value. */
	State(uint32_t dtype, const std::vector<uint64_t> &begins)
	    : theta(tensor(90, dtype, N_VALUES)), v(CODEC_FLOAT32, squares()), m(tensor(92, dtype, N_VALUES)),
	      t(detail::tensor_of(dtype, theta.data(), N_VALUES)),
	      w(detail::tensor_of(CODEC_FLOAT32, v.data(), N_VALUES)), k(detail::tensor_of(dtype, m.data(), N_VALUES)),
	      metrics(begins.size(), detail::blank<codec_metric>())
	{
		for (size_t i = 0; i < metrics.size(); i++) {
			codec_metric &each = metrics[i];

			each.theta = &t;
			each.theta_term = std::ldexp(0.3f, static_cast<int>(i));
			if (i % 2 == 0) {
				each.v = &w;
				each.m = &k;
				each.theta_v_term = 3;
				each.v_term = 1.5f;
				each.eps = 1e-8f;
				each.m_term = 9;
			}
			if (i + 1 < metrics.size()) {
				each.until = begins[i + 1];
				each.next = &metrics[i + 1];
			}
		}
	}

	static std::vector<float> squares()
	{
		std::vector<float> x = values(91, N_VALUES);

		for (float &each : x)
			each *= each;
		return x;
	}
};

/* Metric function (codec_metric.user) that computes the same A as the built-in metric. */
void as_built_in(void *data, uint64_t first, uint64_t n, float *a)
{
	const codec_metric &metric = static_cast<State *>(data)->metrics[0];
	const auto *theta = static_cast<const float *>(metric.theta->data) + first;
	const auto *v = static_cast<const float *>(metric.v->data) + first;
	const auto *m = static_cast<const float *>(metric.m->data) + first;

	for (uint64_t i = 0; i < n; i++) {
		const float step = (std::sqrt(metric.v_term * v[i]) + metric.eps) * metric.theta_v_term;

		a[i] = theta[i] * (step + metric.theta_term) + metric.m_term * m[i];
	}
}

/*
 * Encode and decode a whole tensor. A value's level depends on that value only, so pieces of the tensor must decode to
 * the same values.
 */
std::vector<float> through_frame(const codec_spec &spec, const codec_metric *metric, const Tensor &x)
{
	codec_tensor like = detail::tensor_of(x.dtype, x.bytes.data(), N_VALUES);
	auto with = detail::blank<codec_context>();
	size_t bound, nbytes;

	with.metric = metric;
	detail::check(codec_bound(&spec, &like, &bound));
	detail::check(codec_scratch(&spec, &like, &nbytes));
	std::vector<uint8_t> frame(bound), scratch(nbytes);
	std::vector<float> found(N_VALUES);
	detail::check(codec_encode(&spec, &like, frame.data(), bound, &bound, nullptr, &with, scratch.data(), nbytes));
	codec_tensor dst = detail::tensor_of(CODEC_FLOAT32, found.data(), N_VALUES);
	with.into = CODEC_INTO_FLOAT32;
	if (spec.variant != CODEC_LEVEL_CODING_SHARED)
		with.metric = nullptr;
	detail::check(codec_decode(frame.data(), bound, &dst, &with, scratch.data(), nbytes));
	return found;
}

/* Return the mean of all ranks' decoded frames. `again`: encode and decode the mean once more, as two_shot does. */
Tensor expected(int size, uint32_t dtype, const codec_spec &spec, const codec_metric *metric, bool again)
{
	std::vector<float> total = through_frame(spec, metric, tensor(0, dtype, N_VALUES));

	for (int rank = 1; rank < size; rank++) {
		const std::vector<float> next = through_frame(spec, metric, tensor(rank, dtype, N_VALUES));

		detail::add(total.data(), next.data(), N_VALUES);
	}
	detail::divide(total.data(), N_VALUES, static_cast<float>(size));
	return again ? Tensor(dtype, through_frame(spec, metric, {dtype, total})) : Tensor(dtype, total);
}

std::string by_metric(Rank &me)
{
	Group group(me.connect());
	std::string found;

	for (uint32_t variant : {CODEC_LEVEL_CODING_PLANE, CODEC_LEVEL_CODING_CODED, CODEC_LEVEL_CODING_SHARED}) {
		for (uint32_t dtype : {CODEC_FLOAT32, CODEC_BFLOAT16}) {
			const uint32_t of_state = dtype == CODEC_BFLOAT16 ? CODEC_BFLOAT16 : CODEC_FLOAT32;
			/* groups that begin inside slices, and groups of a few values */
			for (const std::vector<uint64_t> &begins :
			     {std::vector<uint64_t>{0}, {0, 21001, 21003, 26000, N_VALUES - 1}, {0, 1, 30000}}) {
				const State state(of_state, begins);
				codec_spec spec = spec_of(CODEC_TRUNCATE);
				Options options;

				spec.variant = variant;
				spec.guard = -2;
				options.metric = state.metrics.data();
				for (Algorithm algorithm : {Algorithm::two_shot, Algorithm::all_gather}) {
					Tensor x = tensor(me.rank, dtype, N_VALUES);

					options.algorithm = algorithm;
					group.allreduce(x.data(), N_VALUES, dtype, spec, options);
					const bool again = algorithm == Algorithm::two_shot;
					EXPECT(x == expected(me.size, dtype, spec, options.metric, again));
					EXPECT(!(x == in_order(me.size, dtype, N_VALUES, Op::mean)) ||
					       dtype != CODEC_FLOAT32);
				}
				Tensor x = tensor(me.rank, dtype, N_VALUES);
				options.algorithm = Algorithm::ring;
				group.allreduce(x.data(), N_VALUES, dtype, spec, options);
				EXPECT(error(x, in_order(me.size, dtype, N_VALUES, Op::mean)) < 0.5);
				found += std::to_string(std::hash<std::string>()(x.str()));
			}
		}
	}
	return found;
}

} // namespace

TEST_CASE("Levels follow the state of each value, in parameter groups too, for any partition")
{
	ranks::run_alike(3, by_metric);
}

namespace
{

std::string by_users_metric(Rank &me)
{
	Group group(me.connect());
	State state(CODEC_FLOAT32, {0});
	codec_metric mine = detail::blank<codec_metric>();

	mine.user = as_built_in;
	mine.data = &state;
	for (uint32_t variant : {CODEC_LEVEL_CODING_CODED, CODEC_LEVEL_CODING_SHARED}) {
		codec_spec spec = spec_of(CODEC_TRUNCATE);
		Tensor x = tensor(me.rank, CODEC_FLOAT32, N_VALUES), y = x;
		Options options;

		spec.variant = variant;
		options.algorithm = Algorithm::two_shot;
		options.metric = &mine;
		group.allreduce(x.data(), N_VALUES, CODEC_FLOAT32, spec, options);
		options.metric = state.metrics.data();
		group.allreduce(y.data(), N_VALUES, CODEC_FLOAT32, spec, options);
		EXPECT(x == y);

		/* one receiver has another optimizer state */
		const Tensor before = tensor(me.rank, CODEC_FLOAT32, N_VALUES);
		x = before;
		if (me.rank == 1)
			state.metrics[0].theta_term *= 1024;
		bool raised = false;
		try {
			group.allreduce(x.data(), N_VALUES, CODEC_FLOAT32, spec, options);
		} catch (const Error &) {
			raised = true;
		}
		EXPECT(raised == (variant == CODEC_LEVEL_CODING_SHARED));
		EXPECT(!raised || x == before);
		if (me.rank == 1)
			state.metrics[0].theta_term /= 1024;
		/* one rank passes no metric */
		x = before;
		options.metric = me.rank == 1 ? nullptr : options.metric;
		thrown<PeerError>([&] { group.allreduce(x.data(), N_VALUES, CODEC_FLOAT32, spec, options); },
				  "has begun another collective, or passed other arguments");
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("A user-defined metric gets positions in the whole tensor; other state on one rank is an error on all")
{
	ranks::run(3, by_users_metric);
}

namespace
{

/* Return the sum of `mine` over all ranks. */
std::vector<float> everyones(Group &group, std::vector<float> mine)
{
	Options options;

	options.op = Op::sum;
	options.algorithm = Algorithm::two_shot;
	group.allreduce(mine.data(), mine.size(), CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
	return mine;
}

/* Training steps with error feedback: sums over the steps of results and of exact means, and the residuals. */
struct Steps {
	std::vector<float> residual = std::vector<float>(N_VALUES), sums = residual, given = residual;
	std::vector<double> wanted = std::vector<double>(N_VALUES);
	int taken = 0;

	void take(Group &group, const Rank &me, uint32_t dtype, const codec_spec &spec, Algorithm algorithm)
	{
		const uint64_t seed = 1000 + static_cast<uint64_t>(taken++);
		Tensor x = tensor(me.rank, dtype, N_VALUES, seed);
		Options options;

		options.algorithm = algorithm;
		options.stream = seed;
		options.residual = residual.data();
		options.sums_residual = sums.data();
		for (int rank = 0; rank < me.size; rank++) {
			const std::vector<float> g = tensor(rank, dtype, N_VALUES, seed).floats();

			for (size_t i = 0; i < N_VALUES; i++)
				wanted[i] += double(g[i]) / me.size;
		}
		group.allreduce(x.data(), N_VALUES, dtype, spec, options);
		const std::vector<float> got = x.floats();
		detail::add(given.data(), got.data(), N_VALUES);
	}

	/* Return the largest difference between exact and actual sums, after subtracting the residuals. */
	double unexplained(Group &group, const Rank &me)
	{
		const std::vector<float> of_terms = everyones(group, residual), of_sums = everyones(group, sums);
		double worst = 0;

		for (size_t i = 0; i < N_VALUES; i++) {
			const double want = wanted[i] - double(of_terms[i]) / me.size - of_sums[i];

			worst = std::max(worst, std::fabs(want - given[i]));
		}
		return worst;
	}

	double largest_residual() const
	{
		double worst = 0;

		for (size_t i = 0; i < N_VALUES; i++)
			worst = std::max({worst, std::fabs(double(residual[i])), std::fabs(double(sums[i]))});
		return worst;
	}
};

std::string telescoped(Rank &me)
{
	Group group(me.connect());

	for (uint32_t dtype : DTYPES) {
		for (uint32_t codec : {CODEC_QUANTIZE, CODEC_SIGN, CODEC_FLOAT8, CODEC_TOPK}) {
			/* residuals do not include the error of rounding sums to the dtype before encoding */
			const double limit = dtype == CODEC_FLOAT32 ? 2e-6 : dtype == CODEC_BFLOAT16 ? 0.04 : 0.005;
			codec_spec spec = spec_of(codec);
			Steps steps;

			if (codec == CODEC_SIGN)
				spec.group_size = 1024;
			for (int i = 0; i < 4; i++)
				steps.take(group, me, dtype, spec, Algorithm::two_shot);
			EXPECT(steps.largest_residual() > 1e-3);
			EXPECT(steps.unexplained(group, me) < limit);
			/* all_gather, which has one phase, encodes no sums */
			Steps one_phase;
			for (int i = 0; i < 3; i++)
				one_phase.take(group, me, dtype, spec, Algorithm::all_gather);
			EXPECT(one_phase.sums == std::vector<float>(N_VALUES));
			EXPECT(one_phase.unexplained(group, me) < limit);
			/* raw sends whole residuals, up to the precision of the dtype */
			steps.take(group, me, dtype, spec, Algorithm::raw);
			EXPECT(steps.largest_residual() <= (dtype == CODEC_FLOAT32 ? 0 : limit));
			EXPECT(steps.unexplained(group, me) < limit);
			Steps only_raw; /* the residuals of raw include every rounding */
			for (int i = 0; i < 3; i++)
				only_raw.take(group, me, dtype, spec, Algorithm::raw);
			EXPECT(only_raw.unexplained(group, me) < 2e-6);
		}
	}
	return "";
}

} // namespace

TEST_CASE("Results and residuals of error feedback add up to the exact means")
{
	ranks::run(2, telescoped);
	ranks::run(3, telescoped);
}

namespace
{

/*
 * Value of rank 1, value of the other ranks, residual of rank 1's value, residual of the sum. `good`: codecs that
 * cannot encode NaN and Inf accept these values.
 */
struct Extreme {
	const char *name;
	uint32_t dtype;
	Op op;
	float mine, others, residual, sum_residual;
	bool good;
};

constexpr float MOST = 3.4e38f, MOST_BFLOAT16 = 3.3895e38f;

const Extreme EXTREMES[] = {
	{"value and residual overflow the dtype", CODEC_FLOAT16, Op::mean, 65000, 0, 600, 0, true},
	{"value and residual overflow bfloat16", CODEC_BFLOAT16, Op::mean, MOST_BFLOAT16, 0, 1e36f, 0, true},
	{"sum and its residual overflow the dtype", CODEC_FLOAT16, Op::sum, 65000, 0, 0, 600, true},
	{"value and residual overflow float32", CODEC_FLOAT32, Op::mean, MOST, 0, MOST, 0, false},
	{"sum and its residual overflow float32", CODEC_FLOAT32, Op::max, MOST, 0, 0, MOST, false},
	{"the sum overflows the dtype", CODEC_FLOAT16, Op::sum, 40000, 40000, 0, 0, false},
	{"the sum overflows the dtype before its residual is added", CODEC_FLOAT16, Op::sum, 40000, 40000, 0, -60000,
	 false},
	{"the sum overflows float32", CODEC_FLOAT32, Op::mean, MOST, MOST, 0, 0, false},
	{"Inf", CODEC_FLOAT32, Op::mean, INFINITY, 0, 0, 0, false},
	{"NaN", CODEC_FLOAT16, Op::max, NAN, 0, 0, 0, false},
	{"the residual is Inf", CODEC_BFLOAT16, Op::mean, 1, 0, -INFINITY, 0, false},
};

/*
 * Perform a step, and return true if it succeeds. If it fails, check that no tensor is changed. Check that residuals
 * remain finite.
 */
bool take(Group &group, const Rank &me, const Extreme &of, const codec_spec &spec, Algorithm algorithm, bool feedback)
{
	constexpr size_t AT = 2500; /* index of a value that lies in the slice of the last rank */
	std::vector<float> x = values(me.rank, 3000), residual(x.size()), sums(x.size());
	Options options;

	x[AT] = me.rank == 1 ? of.mine : of.others;
	residual[AT] = me.rank == 1 ? of.residual : 0;
	sums[AT] = of.sum_residual;
	Tensor t(of.dtype, x);
	const Tensor given = t;
	const std::vector<float> before = residual, before_sums = sums;
	options.op = of.op;
	options.algorithm = algorithm;
	options.residual = feedback ? residual.data() : nullptr;
	options.sums_residual = feedback ? sums.data() : nullptr;
	try {
		group.allreduce(t.data(), x.size(), of.dtype, spec, options);
	} catch (const Error &e) {
		EXPECT(e.status() == CODEC_NONFINITE);
		EXPECT(t == given);
		EXPECT(residual == before);
		EXPECT(sums == before_sums);
		return false;
	}
	EXPECT(!feedback || (std::isfinite(residual[AT]) && std::isfinite(sums[AT])));
	return true;
}

std::string extremes(Rank &me)
{
	Group group(me.connect());
	codec_spec quantize = spec_of(CODEC_QUANTIZE), propagate = spec_of(CODEC_FLOAT8),
		   truncate = spec_of(CODEC_TRUNCATE);

	quantize.bits = 8;
	propagate.options = CODEC_OPTION_PROPAGATE;
	truncate.variant = CODEC_LEVEL_CODING_FIXED;
	for (const Extreme &of : EXTREMES) {
		for (const codec_spec &spec : {quantize, propagate, truncate}) {
			for (Algorithm algorithm : {Algorithm::two_shot, Algorithm::all_gather, Algorithm::raw}) {
				const bool sums_have_residuals = algorithm != Algorithm::all_gather;

				for (bool feedback : {false, true}) {
					if (!feedback && (of.residual || of.sum_residual))
						continue;
					if (of.sum_residual && !sums_have_residuals)
						continue;
					const bool want = of.good || spec.codec != CODEC_QUANTIZE;
					const std::string which = std::string(of.name) + ", codec " +
								  std::to_string(spec.codec) + ", algorithm " +
								  std::to_string(int(algorithm)) + ": ";

					try {
						EXPECT(take(group, me, of, spec, algorithm, feedback) == want);
					} catch (const std::exception &e) {
						throw std::logic_error(which + e.what());
					}
				}
			}
		}
	}
	return "";
}

} // namespace

TEST_CASE("Overflow of a dtype is an error by all algorithms or by none, and residuals stay finite")
{
	ranks::run(3, extremes);
}
