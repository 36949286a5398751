/* test_blocks.cc - test the class Blocks: frames as elements of gloo::allreduce. */
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

using Gloo = ::gloo::AllreduceOptions::Algorithm;

constexpr Gloo HOW[] = {::gloo::detail::AllreduceOptionsImpl::RING, ::gloo::detail::AllreduceOptionsImpl::BCUBE};

void reduce(Blocks &blocks, const std::shared_ptr<::gloo::Context> &context, Gloo how, uint32_t tag = 0)
{
	Blocks::Options options(context);

	blocks.fill(options);
	options.setAlgorithm(how);
	options.setTag(tag);
	::gloo::allreduce(options);
}

std::string by_hand(Rank &me)
{
	auto context = me.connect();
	std::string found;
	size_t number = 0;

	for (const Case &c : codecs()) {
		if (!is_fixed_rate(c.spec)) {
			thrown<SpecError>([&] { Blocks(c.spec, CODEC_FLOAT32, 10); }, "need a codec of fixed rate");
			continue;
		}
		for (Gloo how : HOW) {
			for (Op op : {Op::sum, Op::max}) {
				const uint32_t dtype = DTYPES[number++ % 3];
				const size_t n =
					number % 5 ? 3000 * (number % 7) + 1 : 0; /* the last block is shorter */
				Tensor x = tensor(me.rank, dtype, n);
				Blocks blocks(c.spec, dtype, n, op, static_cast<uint64_t>(me.rank) << 32, 1024);

				blocks.encode(x.data());
				reduce(blocks, context, how);
				blocks.decode(x.data(), op == Op::sum ? static_cast<float>(me.size) : 1);
				found += x.str();
				const Tensor want = in_order(me.size, dtype, n, op == Op::sum ? Op::mean : op);
				if (!(error(x, want) <= c.limit * (1 + me.size) + 0.01))
					throw std::logic_error(c.name + " loses " + std::to_string(error(x, want)));
			}
		}
	}
	return found;
}

} // namespace

TEST_CASE("Elements reduced by Gloo's ring and bcube are identical on all ranks")
{
	for (int size : {1, 2, 3, 4})
		ranks::run_alike(size, by_hand);
}

TEST_CASE("Elements have the size of the frame of a block")
{
	for (const Case &c : codecs()) {
		if (!is_fixed_rate(c.spec))
			continue;
		for (uint64_t block : {1024, 5000, 65536}) {
			Tensor x = tensor(0, CODEC_FLOAT32, block);
			const codec_tensor src = detail::tensor_of(CODEC_FLOAT32, x.data(), block);
			const Blocks blocks(c.spec, CODEC_FLOAT32, block, Op::sum, 0, block);
			size_t written, nbytes;

			detail::check(codec_scratch(&c.spec, &src, &nbytes));
			std::vector<uint8_t> frame(blocks.element_nbytes()), scratch(nbytes);
			detail::check(codec_encode(&c.spec, &src, frame.data(), frame.size(), &written, nullptr,
						   nullptr, scratch.data(), scratch.size()));
			CAPTURE(c.name);
			CHECK(written == blocks.element_nbytes());
		}
	}
}

namespace
{

/* Return the decoded values of four elements with equal contents, encoded with the random stream `stream`. */
std::vector<float> drawn(const codec_spec &spec, uint64_t stream)
{
	std::vector<float> x(4096);

	for (size_t i = 0; i < x.size(); i++)
		x[i] = i % 1024 ? 0.5f : 1;
	Blocks blocks(spec, CODEC_FLOAT32, x.size(), Op::sum, stream, 1024);
	blocks.encode(x.data());
	blocks.decode(x.data());
	return x;
}

} // namespace

TEST_CASE("Random bits differ between streams and between elements")
{
	for (const Case &c : codecs()) {
		const bool draws = c.spec.codec == CODEC_TERNARY || c.spec.options & CODEC_OPTION_STOCHASTIC;

		/* not for codecs that encode these values exactly, whatever the random bits are */
		if (!is_fixed_rate(c.spec) || !draws || drawn(c.spec, 0) == drawn(c.spec, 7))
			continue;
		const std::vector<float> x = drawn(c.spec, 0), y = drawn(c.spec, uint64_t(1) << 32);
		CAPTURE(c.name);
		CHECK(x == drawn(c.spec, 0));
		CHECK(x != y);
		CHECK(!std::equal(x.begin(), x.begin() + 1024, x.begin() + 1024));
	}
	CHECK(drawn(spec_of(CODEC_TERNARY), 0) != drawn(spec_of(CODEC_TERNARY), 7));
}

namespace
{

/* Reduce elements, one of which has a NaN on one rank, or a byte that was damaged before two elements are added. */
std::string spoilt(Rank &me)
{
	constexpr size_t N = 10000;
	auto context = me.connect();

	for (uint32_t codec : {CODEC_FLOAT8, CODEC_QUANTIZE, CODEC_SIGN, CODEC_FLOAT4, CODEC_TERNARY}) {
		Blocks blocks(spec_of(codec), CODEC_FLOAT32, N, Op::sum, 0, 1024);

		for (Gloo how : HOW) {
			std::vector<float> x = values(me.rank, N);

			if (me.rank == 1) {
				x[9999] = NAN;
				EXPECT(thrown<ArgumentError>([&] { blocks.encode(x.data()); }) == CODEC_NONFINITE);
				blocks.give_up();
			} else {
				blocks.encode(x.data());
			}
			reduce(blocks, context, how);
			thrown<PeerError>([&] { blocks.decode(x.data()); }, "has sent no element");

			for (size_t at : {0, 9, 20, 60, 100}) {
				Blocks::Options options(context);
				bool done = false;

				x = values(me.rank, N);
				blocks.encode(x.data());
				blocks.fill(options);
				options.setAlgorithm(how);
				options.setReduceFunction([&](void *out, const void *a, const void *b, size_t n) {
					std::vector<uint8_t> copy(static_cast<const uint8_t *>(b),
								  static_cast<const uint8_t *>(b) +
									  n * blocks.element_nbytes());

					if (me.rank == 1 && !done && n) {
						copy[at] ^= 16;
						done = true;
					}
					blocks.reduce_function()(out, a, copy.data(), n);
				});
				::gloo::allreduce(options);
				if (me.rank == 1)
					thrown<FrameError>([&] { blocks.decode(x.data()); });
				else
					thrown<PeerError>([&] { blocks.decode(x.data()); }, "has sent no element");
			}

			/* the next reduction succeeds */
			x = values(me.rank, N);
			blocks.encode(x.data());
			reduce(blocks, context, how);
			blocks.decode(x.data());
			EXPECT(std::isfinite(x[9999]));
		}
	}
	me.meet("done"); /* other ranks may still read this rank's messages */
	return "";
}

} // namespace

TEST_CASE("A missing or damaged element is an error of decode() on all ranks, not of Gloo")
{
	ranks::run(2, spoilt);
	ranks::run(3, spoilt);
}
