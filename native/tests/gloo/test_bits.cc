/*
 * test_bits.cc - test that results of collectives are bit-identical on all ranks, and equal or close to the expected
 * values.
 */
#include <doctest/doctest.h>

#include <thread>

#include <gloo/allreduce.h>

#include "ranks.h"
#include "tensors.h"

using namespace codec::gloo;
using namespace tensors;
using ranks::Rank;

namespace
{

constexpr Algorithm ALGORITHMS[] = {Algorithm::two_shot, Algorithm::all_gather, Algorithm::ring, Algorithm::raw,
				    Algorithm::automatic};

/*
 * Append segments with unusual shapes: rank 0, empty, rows of one value, long rows, a gap before the last segment.
 * Return the tensor's number of values.
 */
uint64_t odd_shapes(std::vector<codec_segment> &segments)
{
	const uint64_t n = laid_out({{}, {64, 30}, {0, 7}, {5, 3, 3, 3}, {1}, {2, 2000}, {700, 1}}, segments);

	segments.push_back(segment(n + 100, {3, 5}));
	return n + 115 + 50;
}

/*
 * All-reduce with each codec and each algorithm, and return this rank's results. Groups of different sizes use
 * different dtypes and operations, and together cover all of them.
 */
std::string each_codec(Rank &me)
{
	Group group(me.connect());
	std::string found;
	std::vector<codec_segment> segments;
	const uint64_t shaped = odd_shapes(segments);
	const std::vector<Case> cases = codecs();

	for (size_t s = 0; s < cases.size(); s++) {
		for (size_t a = 0; a < std::size(ALGORITHMS); a++) {
			for (size_t round = 0; round < 3; round++) {
				const Case &c = cases[s];
				const uint32_t dtype = DTYPES[(s + a + me.size + round) % 3];
				const uint64_t n = round % 2 ? 3001 + 1024 * round : shaped;
				Tensor t = tensor(me.rank, dtype, n, s);
				Options options;

				options.op = OPS[(s + 2 * a + round) % 3];
				options.algorithm = ALGORITHMS[a];
				options.stream = 100 * s + a;
				if (n == shaped)
					options.segments = segments;
				group.allreduce(t.data(), n, dtype, c.spec, options);
				found += t.str();

				const Tensor want = in_order(me.size, dtype, n, options.op, s);
				const std::string which = c.name + ", algorithm " + std::to_string(a) + ", round " +
							  std::to_string(round);
				/* a single rank sends no raw values: its result is its own decoded frame */
				if ((options.algorithm == Algorithm::raw && me.size > 1) ||
				    (!c.limit && options.algorithm != Algorithm::ring)) {
					if (!(t == want))
						throw std::logic_error(which + " is not the sum");
					continue;
				}
				/* errors accumulate in algorithms that encode sums repeatedly */
				const double lost = error(t, want), limit = c.limit * (1 + me.size) + 0.01;
				if (!(lost <= limit))
					throw std::logic_error(which + " loses " + std::to_string(lost));
			}
		}
	}
	return found;
}

} // namespace

TEST_CASE("Results of every codec by every algorithm are identical on all ranks, and lossless ones are the sum in rank "
	  "order")
{
	for (int size : {1, 2, 3, 4})
		ranks::run_alike(size, each_codec);
}

namespace
{

/* All-reduce tensors whose sizes are at boundaries of slices and chunks. */
std::string each_size(Rank &me)
{
	Group group(me.connect());
	std::string found;

	for (size_t n : {0, 1, 2, 3, 7, 997, 1023, 1024, 1025, 2047, 2048, 3073, 4096, 8191, 65537}) {
		for (Algorithm algorithm : ALGORITHMS) {
			for (uint32_t codec : {CODEC_LOSSLESS, CODEC_QUANTIZE}) {
				const uint32_t dtype = DTYPES[n % 3];
				Tensor t = tensor(me.rank, dtype, n, n);
				Options options;

				options.algorithm = algorithm;
				group.allreduce(t.data(), n, dtype, spec_of(codec), options);
				found += t.str();
				EXPECT(error(t, in_order(me.size, dtype, n, Op::mean, n)) <=
				       (codec == CODEC_QUANTIZE ? 0.5 : 0.01));
			}
		}
	}
	group.allreduce(nullptr, 0, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
	return found;
}

} // namespace

TEST_CASE("Tensors of 0, 1 and prime numbers of values, and around block boundaries, are reduced")
{
	for (int size : {2, 3, 4})
		ranks::run_alike(size, each_size);
}

namespace
{

/* All-reduce 64 MiB, so that slices have many chunks and the operating system accepts messages in several writes. */
std::string large(Rank &me)
{
	constexpr size_t N = 1 << 24;
	Group group(me.connect());
	const Tensor want = in_order(me.size, CODEC_FLOAT32, N, Op::mean);
	std::string found;

	for (uint32_t codec : {CODEC_LOSSLESS, CODEC_FLOAT8}) {
		Tensor t = tensor(me.rank, CODEC_FLOAT32, N);
		Options options;

		options.algorithm = Algorithm::two_shot;
		group.allreduce(t.data(), N, CODEC_FLOAT32, spec_of(codec), options);
		const double lost = error(t, want);
		EXPECT(codec == CODEC_LOSSLESS ? !lost : lost > 0 && lost < 0.05);
		found += std::to_string(std::hash<std::string>()(t.str())) + " ";
	}
	return found;
}

} // namespace

TEST_CASE("A tensor of 64 MiB is reduced")
{
	ranks::run_alike(2, large);
}

namespace
{

/* Return the part of a tensor that belongs to rank `rank`; each rank's part has `nbytes` bytes. */
std::string part(const Tensor &whole, int rank, size_t nbytes)
{
	return whole.str().substr(rank * nbytes, nbytes);
}

std::string others(Rank &me)
{
	auto context = me.connect();
	Group group(context);
	std::string found;

	for (uint32_t dtype : DTYPES) {
		for (size_t n : {0, 1, 1000, 5000}) {
			for (Op op : OPS) {
				const size_t all = n * me.size;
				const Tensor x = tensor(me.rank, dtype, all), want = in_order(me.size, dtype, all, op);
				Tensor out = tensor(9, dtype, n);
				Options options;

				options.op = op;
				group.reduce_scatter(x.bytes.data(), out.data(), n, dtype, spec_of(CODEC_LOSSLESS),
						     options);
				EXPECT(out.str() == part(want, me.rank, out.bytes.size()));
				group.reduce_scatter(x.bytes.data(), out.data(), n, dtype, spec_of(CODEC_FLOAT8),
						     options);
				EXPECT(x == tensor(me.rank, dtype, all));
				Tensor again = tensor(9, dtype, n);
				reduce_scatter(context, x.bytes.data(), again.data(), n, dtype, spec_of(CODEC_FLOAT8),
					       options, 5);
				EXPECT(again == out);
			}
			const Tensor x = tensor(me.rank, dtype, n);
			for (uint32_t codec : {CODEC_LOSSLESS, CODEC_TERNARY}) {
				Tensor out = tensor(9, dtype, n * me.size);

				group.allgather(x.bytes.data(), out.data(), n, dtype, spec_of(codec));
				found += out.str();
				for (int rank = 0; codec == CODEC_LOSSLESS && rank < me.size; rank++)
					EXPECT(part(out, rank, x.bytes.size()) == tensor(rank, dtype, n).str());
				Tensor free = tensor(9, dtype, n * me.size);
				allgather(context, x.bytes.data(), free.data(), n, dtype, spec_of(codec), {}, 7);
				EXPECT(free == out);
			}
			/* `out` may be a part of the input tensor, as in torch */
			Tensor both = tensor(me.rank, dtype, n * me.size);
			group.reduce_scatter(both.data(), both.bytes.data() + me.rank * x.bytes.size(), n, dtype,
					     spec_of(CODEC_LOSSLESS));
			EXPECT(part(both, me.rank, x.bytes.size()) ==
			       part(in_order(me.size, dtype, n * me.size, Op::mean), me.rank, x.bytes.size()));
		}
	}
	return found;
}

} // namespace

TEST_CASE("Reduce-scatter gives each rank its part of the sum, all-gather the decoded values of all ranks")
{
	for (int size : {1, 2, 3})
		ranks::run_alike(size, others);
}

namespace
{

std::string apart(Rank &me)
{
	constexpr size_t N = 20000;
	auto context = me.connect();
	Group group(context);

	for (uint32_t dtype : DTYPES) {
		for (Algorithm algorithm : ALGORITHMS) {
			const Tensor x = tensor(me.rank, dtype, N);
			Tensor in_place = x, source = x, out = tensor(50, dtype, N), free = x;
			Options options;

			options.algorithm = algorithm;
			group.allreduce(in_place.data(), N, dtype, spec_of(CODEC_FLOAT8), options);
			options.out = out.data();
			group.allreduce(source.data(), N, dtype, spec_of(CODEC_FLOAT8), options);
			EXPECT(source == x);
			EXPECT(out == in_place);
			options.out = nullptr;
			allreduce(context, free.data(), N, dtype, spec_of(CODEC_FLOAT8), options, 3);
			EXPECT(free == in_place);
		}
	}
	return "";
}

} // namespace

TEST_CASE("Out-of-place calls and free functions give the bits of in-place calls and leave the tensor unchanged")
{
	ranks::run(3, apart);
}

namespace
{

/* All-reduce tensors above 8 MiB in place with fixed-rate codecs, whose frames are decoded after the verdict. */
std::string late(Rank &me)
{
	Group group(me.connect());
	std::string found;

	for (uint32_t dtype : {CODEC_FLOAT32, CODEC_FLOAT16})
		for (Algorithm algorithm : {Algorithm::two_shot, Algorithm::all_gather, Algorithm::ring}) {
			const size_t n = 8600002 / codec_dtype_nbytes(dtype);
			const Tensor x = tensor(me.rank, dtype, n);
			const uint32_t codec = dtype == CODEC_FLOAT32 ? CODEC_SIGN : CODEC_FLOAT8;
			Tensor in_place = x, source = x, out = tensor(50, dtype, n);
			Options options;

			options.algorithm = algorithm;
			options.stream = 3;
			group.allreduce(in_place.data(), n, dtype, spec_of(codec), options);
			options.out = out.data();
			group.allreduce(source.data(), n, dtype, spec_of(codec), options);
			EXPECT(source == x);
			EXPECT(out == in_place);
			found += in_place.str();

			std::vector<float> most(n, dtype == CODEC_FLOAT32 ? 2e38f : 6e4f);
			Tensor above(dtype, most), before = above;

			options.out = nullptr;
			options.op = Op::sum;
			try {
				group.allreduce(above.data(), n, dtype, spec_of(codec), options);
				throw std::logic_error("a sum that the dtype cannot hold");
			} catch (const ArgumentError &e) {
				EXPECT(e.status() == CODEC_NONFINITE);
			}
			EXPECT(above == before);
		}
	return found;
}

} // namespace

TEST_CASE("A large tensor in place gets the bits of an out-of-place call, and is unchanged after an error")
{
	const auto results = ranks::run(3, late);

	for (const std::string &each : results)
		CHECK(each == results[0]);
}

namespace
{

/* Perform Gloo's own allreduce of ones, and check the sum. */
void stock(const std::shared_ptr<::gloo::Context> &context, uint32_t tag)
{
	std::vector<float> ones(1000, 1);
	::gloo::AllreduceOptions options(context);

	options.setOutput(ones.data(), ones.size());
	options.setTag(tag);
	options.setReduceFunction([](void *out, const void *a, const void *b, size_t n) {
		for (size_t i = 0; i < n; i++)
			static_cast<float *>(out)[i] =
				static_cast<const float *>(a)[i] + static_cast<const float *>(b)[i];
	});
	::gloo::allreduce(options);
	EXPECT(ones == std::vector<float>(1000, static_cast<float>(context->size)));
}

/* Perform `calls` collectives in one thread, with random pauses. */
void hammer(const std::shared_ptr<::gloo::Context> &context, uint32_t tag, int calls)
{
	Group group(context, tag);
	Random random(tag * 10 + context->rank);

	for (int i = 0; i < calls; i++) {
		const size_t n = 1000 + 977 * static_cast<size_t>(i % 40);
		Tensor t = tensor(context->rank, CODEC_FLOAT32, n, tag + i);
		Options options;

		options.algorithm = ALGORITHMS[i % 5];
		if (random.below(4) == 0)
			std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
		group.allreduce(t.data(), n, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
		EXPECT(error(t, in_order(context->size, CODEC_FLOAT32, n, Op::mean, tag + i)) < 1e-6);
		if (i % 10 == 0)
			stock(context, 100 + tag);
	}
}

std::string threads(Rank &me)
{
	auto context = me.connect();
	std::exception_ptr error;
	std::thread other([&] {
		try {
			hammer(context, 1, 60);
		} catch (...) {
			error = std::current_exception();
		}
	});

	try {
		hammer(context, 2, 60);
	} catch (...) {
		other.join();
		throw;
	}
	other.join();
	if (error)
		std::rethrow_exception(error);
	return "";
}

} // namespace

TEST_CASE("Groups of different tags share a context in two threads with Gloo's own collectives")
{
	ranks::run(3, threads);
}

namespace
{

std::string both_zeros(Rank &me)
{
	Group group(me.connect());
	Random random(static_cast<uint64_t>(me.rank));
	std::vector<float> x(5000);
	std::string found;

	for (float &each : x)
		each = random.below(4) ? std::copysign(0.0f, random.below(2) ? -1.0f : 1.0f) : random.normal();
	for (Op op : OPS) {
		std::vector<std::string> each;

		for (Algorithm algorithm : {Algorithm::two_shot, Algorithm::all_gather, Algorithm::raw}) {
			Tensor t(CODEC_FLOAT32, x);
			Options options;

			options.op = op;
			options.algorithm = algorithm;
			group.allreduce(t.data(), x.size(), CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
			each.push_back(t.str());
		}
		EXPECT(each[0] == each[1]);
		EXPECT(each[0] == each[2]);
		found += each[0];
	}
	return found;
}

} // namespace

TEST_CASE("Raw gives the bits of lossless frames, including zeros of both signs")
{
	ranks::run_alike(3, both_zeros);
}

namespace
{

std::string group_here_only(Rank &me)
{
	constexpr size_t N = 20000;
	auto context = me.connect();
	Group kept(context);

	for (Algorithm algorithm : {Algorithm::all_gather, Algorithm::two_shot, Algorithm::ring, Algorithm::raw}) {
		Tensor t = tensor(me.rank, CODEC_FLOAT32, N);
		Options options;

		options.algorithm = algorithm;
		if (me.rank == 1)
			allreduce(context, t.data(), N, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
		else
			kept.allreduce(t.data(), N, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
		EXPECT(error(t, in_order(me.size, CODEC_FLOAT32, N, Op::mean)) < 1e-6);
	}
	return "";
}

} // namespace

TEST_CASE("A rank that creates a group for each call agrees with ranks that keep theirs")
{
	ranks::run(3, group_here_only);
}
