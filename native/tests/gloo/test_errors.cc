/*
 * test_errors.cc - test that an error on one rank is reported on all ranks, that no tensor is changed, and that the
 * next collective succeeds.
 */
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

constexpr int WRONG = 1; /* rank with invalid arguments or values */
constexpr size_t N = 40000;
constexpr Algorithm ALGORITHMS[] = {Algorithm::two_shot, Algorithm::all_gather, Algorithm::ring, Algorithm::raw};

/* Arguments of a collective; one rank modifies them to be invalid. */
struct Call {
	Tensor x, out;
	std::vector<float> residual, sums;
	void *data;
	size_t n = N;
	uint32_t dtype;
	codec_spec spec = spec_of(CODEC_QUANTIZE);
	Options options;

	Call(int rank, uint32_t d)
	    : x(tensor(rank, d, N)), out(tensor(9, d, N)), residual(values(rank, N, 3)), sums(values(rank, N, 4)),
	      data(x.data()), dtype(d)
	{
		options.algorithm = Algorithm::two_shot;
		options.residual = residual.data();
		options.sums_residual = sums.data();
	}

	void run(Group &group)
	{
		group.allreduce(data, n, dtype, spec, options);
	}
};

/* Check that the tensors of a failed call are unchanged and that the group's next collective succeeds. */
void check_unharmed(Group &group, const Rank &me, const Call &call)
{
	EXPECT(call.x == tensor(me.rank, call.x.dtype, N));
	EXPECT(call.residual == values(me.rank, N, 3));
	EXPECT(call.sums == values(me.rank, N, 4));
	Tensor t = tensor(me.rank, CODEC_FLOAT32, 300);
	group.allreduce(t.data(), 300, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
	EXPECT(t == in_order(me.size, CODEC_FLOAT32, 300, Op::mean));
	EXPECT(!group.closed());
}

struct Mistake {
	codec_status status; /* status of the error on the rank that causes it */
	std::function<void(Call &)> make;
};

const codec_codebook NO_BOOK{};

/* Metric whose arrays or parameter groups do not match the tensor. */
struct BadMetric {
	std::vector<float> state = std::vector<float>(N, 1);
	codec_tensor theta = detail::tensor_of(CODEC_FLOAT32, state.data(), N), other = theta;
	codec_metric first = detail::blank<codec_metric>(), second = first;

	explicit BadMetric(const std::function<void(BadMetric &)> &spoil)
	{
		first.theta_term = second.theta_term = 1;
		first.theta = second.theta = &theta;
		first.until = N / 2;
		first.next = &second;
		spoil(*this);
	}
};

Mistake bad_metric(const std::function<void(BadMetric &)> &spoil)
{
	const auto bad = std::make_shared<BadMetric>(spoil);

	return {CODEC_BAD_ARGUMENT, [=](Call &c) {
			c.spec = spec_of(CODEC_TRUNCATE);
			c.options.metric = &bad->first;
		}};
}

std::vector<Mistake> mistakes()
{
	return {
		{CODEC_BAD_SPEC, [](Call &c) { c.spec.codec = 99; }},
		{CODEC_BAD_SPEC, [](Call &c) { c.spec = spec_of(CODEC_DELTA); }},
		{CODEC_BAD_SPEC, [](Call &c) { c.spec = spec_of(CODEC_TOPK), c.options.sums_residual = nullptr; }},
		{CODEC_BAD_SPEC,
		 [](Call &c) {
			 c.spec = spec_of(CODEC_TOPK), c.options.residual = nullptr;
			 c.options.algorithm = Algorithm::all_gather;
		 }},
		{CODEC_BAD_SPEC, [](Call &c) { c.spec.bits = 9; }},
		{CODEC_BAD_SPEC, [](Call &c) { c.spec.clip = 1; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.spec.struct_nbytes = 0; }},
		{CODEC_BAD_DTYPE, [](Call &c) { c.dtype = CODEC_FLOAT64; }},
		{CODEC_BAD_DTYPE, [](Call &c) { c.dtype = 0; }},
		{CODEC_BAD_SHAPE, [](Call &c) { c.n = size_t(1) << 62; }}, /* a tensor of more than 2^64 bytes */
		{CODEC_BAD_SHAPE, [](Call &c) { c.n = SIZE_MAX; }},
		{CODEC_BAD_ARGUMENT,
		 [](Call &c) { c.n = size_t(1) << 46; }}, /* a tensor of this size overlaps the residuals */
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.timeout = std::chrono::milliseconds(-1); }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.timeout = std::chrono::milliseconds::min(); }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.timeout = std::chrono::milliseconds::max(); }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.timeout = std::chrono::hours(24 * 3653); }},
		{CODEC_BAD_SEGMENTS, [](Call &c) { c.options.segments = {segment(0, {N + 1})}; }},
		{CODEC_BAD_SEGMENTS, [](Call &c) { c.options.segments = {segment(5, {9}), segment(0, {2})}; }},
		{CODEC_BAD_CODEBOOK, [](Call &c) { c.options.codebook = &NO_BOOK; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.data = nullptr; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.data = c.x.bytes.data() + 1; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.out = c.x.data(); }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.out = c.x.bytes.data() + 4; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.out = c.out.bytes.data() + 1; }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.residual = static_cast<float *>(c.data); }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.sums_residual = c.options.residual + N - 1; }},
		{CODEC_BAD_ARGUMENT,
		 [](Call &c) { c.options.residual = reinterpret_cast<float *>(c.out.bytes.data() + 2); }},
		{CODEC_BAD_ARGUMENT,
		 [](Call &c) {
			 c.options.out = c.out.data();
			 c.options.sums_residual = reinterpret_cast<float *>(c.out.data()) + N / 4;
		 }},
		{CODEC_BAD_ARGUMENT, [](Call &c) { c.options.algorithm = Algorithm::ring; }},
		bad_metric([](BadMetric &b) { b.theta.nbytes = 1024 * sizeof(float); }),
		bad_metric([](BadMetric &b) { b.theta = detail::tensor_of(CODEC_FLOAT32, nullptr, N); }),
		bad_metric([](BadMetric &b) { b.theta.dtype = CODEC_FLOAT16; }),
		bad_metric([](BadMetric &b) { b.theta.struct_nbytes = 0; }),
		bad_metric([](BadMetric &b) { b.first.v = &b.other, b.other.nbytes += sizeof(float); }),
		bad_metric([](BadMetric &b) { b.second.m = &b.other, b.other.nbytes = 0; }),
		bad_metric([](BadMetric &b) { b.second.struct_nbytes = 0; }),
		bad_metric([](BadMetric &b) { b.second.until = N / 2, b.second.next = &b.first; }),
		bad_metric([](BadMetric &b) { b.second.until = N; }),
	};
}

std::string mistaken(Rank &me)
{
	Group group(me.connect());

	for (uint32_t dtype : {CODEC_FLOAT32, CODEC_BFLOAT16}) {
		size_t number = 0;

		for (const Mistake &mistake : mistakes()) {
			Call call(me.rank, dtype);
			const std::string which = "mistake " + std::to_string(number++) + ": ";

			try {
				if (me.rank == WRONG) {
					mistake.make(call);
					const auto run = [&] { call.run(group); };
					EXPECT((mistake.status == CODEC_BAD_SPEC
							? thrown<SpecError>(run)
							: thrown<ArgumentError>(run)) == mistake.status);
				} else {
					thrown<PeerError>([&] { call.run(group); }, "rank 1 could not begin");
				}
				check_unharmed(group, me, call);
			} catch (const std::exception &e) {
				throw std::logic_error(which + e.what());
			}
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("Invalid arguments on one rank are an ArgumentError or SpecError there and a PeerError elsewhere")
{
	ranks::run(3, mistaken);
}

#ifndef __SANITIZE_ADDRESS__ /* AddressSanitizer ends the process if memory is exhausted */
namespace
{

/* Run out of memory on one rank. That rank returns "bad_alloc", all others the message of their PeerError. */
std::string without_memory(Rank &me)
{
	Group group(me.connect());
	Call call(me.rank, CODEC_FLOAT32);
	std::string said;

	call.options.residual = call.options.sums_residual = nullptr;
	me.meet("connected");
	if (me.rank == WRONG)
		call.n = size_t(1) << 46;
	try {
		call.run(group);
	} catch (const std::bad_alloc &) {
		said = "bad_alloc";
	} catch (const PeerError &e) {
		said = e.what();
	}
	EXPECT(group.closed() || me.rank != WRONG);
	EXPECT(call.x == tensor(me.rank, CODEC_FLOAT32, N));
	me.meet("done");
	return said;
}

} // namespace

TEST_CASE("A rank without memory for messages throws bad_alloc, the others PeerError")
{
	const std::vector<std::string> said = ranks::run(3, without_memory);
	const auto names = [&](int who, const char *words) { return said[who].find(words) != std::string::npos; };

	CHECK(said[WRONG] == "bad_alloc");
	/*
	 * A rank that loses a peer closes its connections to all other ranks. So one survivor reports rank 1 as lost;
	 * the other survivor may first notice that its connection to that survivor was closed.
	 */
	CAPTURE(said[0]);
	CAPTURE(said[2]);
	CHECK((names(0, "rank 1") || names(0, "rank 2 is gone")));
	CHECK((names(2, "rank 1") || names(2, "rank 0 is gone")));
	CHECK((names(0, "rank 1") || names(2, "rank 1")));
}
#endif

namespace
{

std::string without_timeout(Rank &me)
{
	auto context = me.connect();
	Group group(context);

	for (bool in_options : {false, true}) {
		Call call(me.rank, CODEC_FLOAT32);

		context->setTimeout(std::chrono::milliseconds(me.rank == WRONG ? 0 : 20000)); /* 0: no timeout */
		call.options.timeout = std::chrono::hours(in_options ? 24 * 3652 : 0);
		if (in_options)
			call.run(group);
		else if (me.rank == WRONG)
			EXPECT(thrown<ArgumentError>([&] { call.run(group); }, "timeout") == CODEC_BAD_ARGUMENT);
		else
			thrown<PeerError>([&] { call.run(group); }, "rank 1 could not begin");
		EXPECT(!group.closed());
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("A context without a timeout is refused unless the call has one of up to 10 years")
{
	ranks::run(3, without_timeout);
}

namespace
{

/* Invalid arguments of a reduce-scatter or an all-gather: a null output, or n too large. */
struct Given {
	codec_status status;
	bool out;
	size_t n;
};

std::string others_mistaken(Rank &me)
{
	Group group(me.connect());
	const size_t size = static_cast<size_t>(me.size);

	for (const Given &given : {Given{CODEC_BAD_ARGUMENT, false, 100},
				   {CODEC_BAD_SHAPE, true, SIZE_MAX / size + 2},
				   {CODEC_BAD_SHAPE, true, SIZE_MAX / size / 4 + 2}}) {
		for (bool gather : {false, true}) {
			std::vector<float> x(100 * size, 1), out = x;
			const auto call = [&](float *place, size_t n) {
				if (gather)
					group.allgather(x.data(), place, n, CODEC_FLOAT32, spec_of(CODEC_SIGN));
				else
					group.reduce_scatter(x.data(), place, n, CODEC_FLOAT32, spec_of(CODEC_SIGN));
			};

			if (me.rank == WRONG)
				EXPECT(thrown<ArgumentError>([&] {
					       call(given.out ? out.data() : nullptr, given.n);
				       }) == given.status);
			else
				thrown<PeerError>([&] { call(out.data(), 100); }, "rank 1 could not begin");
			EXPECT(x == out);
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("A reduce-scatter or all-gather to null, or of too many values, is refused")
{
	ranks::run(3, others_mistaken);
}

namespace
{

/*
 * Perform calls with more signatures than a group remembers; one rank cannot begin some of them. All ranks must
 * remember the same signatures.
 */
std::string many_kinds(Rank &me)
{
	constexpr size_t LARGE = 50000; /* number of values */
	Group group(me.connect());
	const Tensor want = in_order(me.size, CODEC_FLOAT32, LARGE, Op::mean);
	const auto large = [&] {
		Tensor t = tensor(me.rank, CODEC_FLOAT32, LARGE);

		group.allreduce(t.data(), LARGE, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
		EXPECT(t == want);
	};

	for (int round = 0; round < 2; round++) {
		large();
		/*
		 * Rank WRONG cannot begin this request. The other ranks must not add its signature to their caches:
		 * otherwise they would evict a key that rank WRONG still remembers.
		 */
		std::vector<float> x(300, 1);
		const auto refused = [&] {
			group.allreduce(me.rank == WRONG ? nullptr : x.data(), x.size(), CODEC_FLOAT32,
					spec_of(CODEC_LOSSLESS));
		};
		if (me.rank == WRONG)
			thrown<ArgumentError>(refused);
		else
			thrown<PeerError>(refused, "rank 1 could not begin");
		for (size_t n = 1; n < detail::Keys::MOST; n++)
			group.allreduce(x.data(), n, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("Ranks remember the same signatures after a call that one of them could not begin")
{
	ranks::run(3, many_kinds);
}

namespace
{

/* Request a collective on one rank that differs from the other ranks', with valid arguments. */
std::string other_wish(Rank &me)
{
	Group group(me.connect());
	const std::vector<std::function<void(Group &, Call &)>> wishes = {
		[](Group &g, Call &c) { c.n = N - 1, c.run(g); },
		[](Group &g, Call &c) { c.spec.bits = 5, c.run(g); },
		[](Group &g, Call &c) { c.spec.seed = 1, c.run(g); },
		[](Group &g, Call &c) { c.spec = spec_of(CODEC_SIGN), c.run(g); },
		[](Group &g, Call &c) { c.dtype = CODEC_FLOAT16, c.run(g); },
		[](Group &g, Call &c) { c.options.op = Op::sum, c.run(g); },
		[](Group &g, Call &c) { c.options.op = Op::max, c.run(g); },
		[](Group &g, Call &c) { c.options.cut_as_torch = true, c.run(g); },
		[](Group &g, Call &c) { c.options.algorithm = Algorithm::all_gather, c.run(g); },
		[](Group &g, Call &c) { c.options.algorithm = Algorithm::raw, c.run(g); },
		[](Group &g, Call &c) { c.options.segments = {segment(0, {100, 20})}, c.run(g); },
		[](Group &g, Call &c) { c.options.segments = {segment(0, {N})}, c.run(g); },
		[](Group &g, Call &c) {
			std::vector<uint8_t> all(c.x.bytes.size() * 3);
			g.allgather(c.x.data(), all.data(), N, c.dtype, c.spec);
		},
		[](Group &g, Call &c) { g.reduce_scatter(c.x.data(), c.out.data(), N / 4, c.dtype, c.spec); },
	};

	const size_t keeps = wishes.size(); /* index of the request in which TOPK keeps another number of values */

	for (size_t i = 0; i <= keeps; i++) {
		Call call(me.rank, CODEC_BFLOAT16);

		if (i == keeps)
			call.spec = spec_of(CODEC_TOPK);
		if (i == keeps && me.rank == WRONG)
			call.spec.kept = 100;
		try {
			thrown<PeerError>(
				[&] {
					if (me.rank == WRONG && i < keeps)
						wishes[i](group, call);
					else
						call.run(group);
				},
				"has begun another collective, or passed other arguments");
			check_unharmed(group, me, call);
		} catch (const std::exception &e) {
			throw std::logic_error("wish " + std::to_string(i) + ": " + e.what());
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("Another size, spec, operation, algorithm or collective on one rank is a PeerError on all")
{
	ranks::run(3, other_wish);
}

namespace
{

/*
 * Reduce a NaN or an Inf of one rank with all algorithms. That rank must throw ArgumentError, the others PeerError with
 * its number.
 */
std::string not_finite(Rank &me)
{
	Group group(me.connect());
	Random random(8);

	for (const Case &c : codecs()) {
		if (!detail::has_trait(c.spec, CODEC_TRAIT_FINITE))
			continue;
		for (Algorithm algorithm : ALGORITHMS) {
			const uint32_t dtype = DTYPES[random.below(3)];
			const size_t at = random.below(N);
			const float what = random.below(2) ? NAN : -INFINITY;
			Call call(me.rank, dtype);
			const Tensor before = call.x;

			call.spec = c.spec;
			call.options.algorithm = algorithm;
			if (algorithm == Algorithm::ring)
				call.options.residual = call.options.sums_residual = nullptr;
			if (me.rank == WRONG)
				detail::narrow(dtype, &what, 1, call.x.bytes.data() + at * codec_dtype_nbytes(dtype));
			const Tensor given = call.x;
			try {
				if (me.rank == WRONG)
					EXPECT(thrown<ArgumentError>([&] { call.run(group); }) == CODEC_NONFINITE);
				else
					EXPECT(thrown<PeerError>([&] { call.run(group); }, "rank 1 has NaN") ==
					       CODEC_NONFINITE);
				EXPECT(call.x == given);
				call.x = before;
				check_unharmed(group, me, call);
			} catch (const std::exception &e) {
				throw std::logic_error(c.name + ", algorithm " + std::to_string(int(algorithm)) + ": " +
						       e.what());
			}
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("NaN or Inf on one rank is an error on all, for every lossy codec by every algorithm")
{
	ranks::run(3, not_finite);
}

namespace
{

/*
 * Make a sum overflow to Inf in the slice of rank WRONG in reduce_scatter. That rank must throw ArgumentError, the
 * others PeerError.
 */
std::string overflowing_part(Rank &me)
{
	Group group(me.connect());
	const size_t n = 3000;
	codec_spec propagate = spec_of(CODEC_FLOAT8);

	propagate.options = CODEC_OPTION_PROPAGATE;
	for (uint32_t dtype : DTYPES) {
		const float large = dtype == CODEC_FLOAT16 ? 6e4f : 3e38f;
		std::vector<float> wide(n * me.size, 1);
		Options options;

		options.op = Op::sum;
		wide[n * WRONG + 7] = large;
		const Tensor x(dtype, wide), before = tensor(9, dtype, n);
		Tensor part = before;
		const auto reduce = [&](const codec_spec &spec) {
			group.reduce_scatter(x.bytes.data(), part.data(), n, dtype, spec, options);
		};

		if (me.rank == WRONG)
			EXPECT(thrown<ArgumentError>([&] { reduce(spec_of(CODEC_FLOAT8)); }) == CODEC_NONFINITE);
		else
			EXPECT(thrown<PeerError>([&] { reduce(spec_of(CODEC_FLOAT8)); }, "rank 1 has NaN") ==
			       CODEC_NONFINITE);
		EXPECT(part == before);
		for (const codec_spec &spec : {propagate, spec_of(CODEC_LOSSLESS)}) {
			reduce(spec);
			EXPECT(std::isfinite(part.floats()[7]) == (me.rank != WRONG));
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("A sum that overflows in reduce_scatter is an error on all ranks, unless the codec represents Inf")
{
	ranks::run(3, overflowing_part);
}

namespace
{

/* Reduce NaN and Inf with codecs that can encode them, and return the results. */
std::string said(Rank &me)
{
	Group group(me.connect());
	std::string found;
	codec_spec propagate = spec_of(CODEC_FLOAT8);

	propagate.options = CODEC_OPTION_PROPAGATE;
	for (const codec_spec &spec : {spec_of(CODEC_LOSSLESS), propagate}) {
		for (Algorithm algorithm : {Algorithm::two_shot, Algorithm::all_gather, Algorithm::ring}) {
			for (Op op : OPS) {
				std::vector<float> x = values(me.rank, 3000);
				Options options;

				if (me.rank == WRONG)
					x[7] = NAN, x[2999] = INFINITY;
				options.algorithm = algorithm;
				options.op = op;
				group.allreduce(x.data(), x.size(), CODEC_FLOAT32, spec, options);
				EXPECT(std::isnan(x[7]));
				EXPECT(spec.codec == CODEC_LOSSLESS ? std::isinf(x[2999]) : std::isnan(x[2999]));
				EXPECT(std::isfinite(x[8]));
				found += Tensor(CODEC_FLOAT32, x).str();
			}
		}
	}
	return found;
}

} // namespace

TEST_CASE("NaN and Inf arrive on all ranks if the codec represents them")
{
	ranks::run_alike(3, said);
}

namespace
{

/*
 * Reduce NaNs whose bits differ between ranks (both signs, quiet and signaling) with NaNs, numbers and Inf of other
 * ranks.
 */
std::string many_nans(Rank &me)
{
	Group group(me.connect());
	std::string found;

	for (uint32_t dtype : DTYPES) {
		const int fraction = dtype == CODEC_FLOAT32 ? 23 : dtype == CODEC_BFLOAT16 ? 7 : 10;
		const size_t itemsize = codec_dtype_nbytes(dtype);
		const uint64_t sign = uint64_t(1) << (8 * itemsize - 1), infinite = sign - (uint64_t(1) << fraction);

		for (Algorithm algorithm : {Algorithm::all_gather, Algorithm::two_shot, Algorithm::raw}) {
			for (Op op : OPS) {
				Random random(static_cast<uint64_t>(me.rank) + 20);
				Tensor t = tensor(me.rank, dtype, 3000);
				Options options;

				for (size_t i = 0; i < t.n(); i++) {
					const uint64_t bits = infinite | (random() & ((uint64_t(1) << fraction) - 1)) |
							      (random() & sign);

					if (random.below(4))
						std::memcpy(t.bytes.data() + i * itemsize, &bits, itemsize);
				}
				options.algorithm = algorithm;
				options.op = op;
				group.allreduce(t.data(), t.n(), dtype, spec_of(CODEC_LOSSLESS), options);
				found += t.str();
			}
		}
	}
	return found;
}

} // namespace

TEST_CASE("NaNs of different bits are reduced to the same bits on all ranks")
{
	for (int size : {2, 3})
		ranks::run_alike(size, many_nans);
}

namespace
{

/* Build a codebook from the test values of a seed. */
codec_codebook book_of(const codec_spec &spec, uint64_t seed)
{
	Tensor t = tensor(0, CODEC_FLOAT32, N, seed);
	codec_tensor src = detail::tensor_of(CODEC_FLOAT32, t.data(), N);
	uint64_t counts[256] = {};
	size_t nbytes;
	auto book = codec_codebook{};

	for (float *x = reinterpret_cast<float *>(t.data()); x < reinterpret_cast<float *>(t.data()) + N; x++)
		*x *= static_cast<float>(std::ldexp(1, static_cast<int>(seed)));
	detail::check(codec_scratch(&spec, &src, &nbytes));
	std::vector<uint8_t> scratch(nbytes);
	detail::check(codec_count(&spec, &src, counts, nullptr, scratch.data(), nbytes));
	detail::check(codec_codebook_build(&spec, CODEC_FLOAT32, counts, &book));
	return book;
}

std::string books(Rank &me)
{
	Group group(me.connect());
	codec_spec truncate = spec_of(CODEC_TRUNCATE);

	truncate.variant = CODEC_LEVEL_CODING_FIXED;
	for (const codec_spec &spec : {spec_of(CODEC_LOSSLESS), truncate}) {
		const codec_codebook a = book_of(spec, 1), b = book_of(spec, 6);
		const auto reduce = [&](const codec_codebook *book, const std::vector<codec_codebook> &known) {
			Tensor t = tensor(me.rank, CODEC_FLOAT32, N);
			Options options;

			options.algorithm = Algorithm::two_shot;
			options.codebook = book;
			options.codebooks = known;
			group.allreduce(t.data(), N, CODEC_FLOAT32, spec, options);
			return t;
		};
		EXPECT(a.id != b.id);
		const Tensor want = in_order(me.size, CODEC_FLOAT32, N, Op::mean);
		const uint64_t before = group.sent_nbytes();
		for (int step = 0; step < 3; step++)
			EXPECT(reduce(&a, {a}) == want);
		const uint64_t with_a = group.sent_nbytes() - before;
		EXPECT(reduce(&a, {a, b}) == want); /* receivers know book B, senders do not use it yet */
		EXPECT(reduce(&b, {a, b}) == want);
		EXPECT(reduce(&b, {b}) == want);
		EXPECT(group.sent_nbytes() - before != 2 * with_a); /* codebook B gives frames of another size */
		/* ranks encode with different codebooks */
		const codec_codebook &mine = me.rank == WRONG ? b : a;
		thrown<PeerError>([&] { reduce(&mine, {a, b}); },
				  "has begun another collective, or passed other arguments");
		thrown<PeerError>([&] { reduce(me.rank == WRONG ? nullptr : &a, {a, b}); },
				  "has begun another collective, or passed other arguments");
		/* frames name book A, which no receiver knows: every rank has its own error */
		EXPECT(thrown<ArgumentError>([&] { reduce(&a, {b}); }) == CODEC_UNKNOWN_CODEBOOK);
		/* one receiver does not know book A */
		if (me.rank == WRONG)
			EXPECT(thrown<ArgumentError>([&] { reduce(&a, {b}); }) == CODEC_UNKNOWN_CODEBOOK);
		else
			thrown<PeerError>([&] { reduce(&a, {a}); }, "rank 1 could not do its part");
		EXPECT(reduce(&b, {b}) == want);
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("The codebook may change while receivers know both; frames with an unknown one are an error on all ranks")
{
	ranks::run(3, books);
}
