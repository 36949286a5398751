/*
 * test_words.cc - unit tests without communication: conversion of dtypes, partition of tensors, remembered signatures,
 * connect.h.
 */
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>

#include <codec/gloo.h>
#include <codec/gloo/connect.h>

#include "tensors.h"

using namespace codec::gloo::detail;
using tensors::laid_out;
using tensors::segment;

namespace
{

/* Return the value of a 16-bit float, computed from the definition of its format. */
double value_of(uint16_t h, int exponent_bits, int mantissa_bits)
{
	const int most = (1 << exponent_bits) - 1, bias = most >> 1;
	const int exponent = h >> mantissa_bits & most, mantissa = h & ((1 << mantissa_bits) - 1);
	const double sign = h >> 15 ? -1 : 1;

	if (exponent == most)
		return mantissa ? NAN : sign * INFINITY;
	if (!exponent)
		return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
	return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

/*
 * Return the 16-bit float nearest to x >= 0, ties to even. Distances between float32 values are exact in double
 * precision.
 */
uint16_t nearest(double x, int exponent_bits, int mantissa_bits)
{
	const uint16_t infinite = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
	uint16_t low = 0, high = infinite; /* low <= x < high */

	if (std::isinf(x))
		return infinite;
	while (high - low > 1) {
		const uint16_t middle = static_cast<uint16_t>((low + high) / 2);

		(value_of(middle, exponent_bits, mantissa_bits) <= x ? low : high) = middle;
	}
	/* for rounding, Inf stands for the number one step above the largest finite number */
	const double below = value_of(low, exponent_bits, mantissa_bits);
	const double above =
		high == infinite ? 2 * below - value_of(static_cast<uint16_t>(low - 1), exponent_bits, mantissa_bits)
				 : value_of(high, exponent_bits, mantissa_bits);
	if (x - below == above - x)
		return low & 1 ? high : low;
	return x - below < above - x ? low : high;
}

struct Half {
	uint16_t (*narrow)(float);
	float (*widen)(uint16_t);
	int exponent_bits, mantissa_bits;
};

constexpr Half HALVES[] = {{to_bfloat16, from_bfloat16, 8, 7}, {to_float16, from_float16, 5, 10}};

bool as_nearest(const Half &half, float x)
{
	const uint16_t sign = std::signbit(x) ? 0x8000 : 0, found = half.narrow(x);

	if (std::isnan(x))
		return std::isnan(half.widen(found)) && (found & 0x8000) == (half.mantissa_bits == 7 ? 0 : sign);
	return found == (sign | nearest(std::fabs(double(x)), half.exponent_bits, half.mantissa_bits));
}

} // namespace

TEST_CASE("Every 16-bit float converts to its value in float32 and back to itself")
{
	for (const Half &half : HALVES) {
		for (uint32_t h = 0; h < 65536; h++) {
			const float x = half.widen(static_cast<uint16_t>(h));
			const double want = value_of(static_cast<uint16_t>(h), half.exponent_bits, half.mantissa_bits);

			if (std::isnan(want)) {
				REQUIRE(std::isnan(x));
				REQUIRE(std::isnan(half.widen(half.narrow(x))));
			} else {
				REQUIRE(x == want);
				REQUIRE(std::signbit(x) == (h >> 15));
				REQUIRE(half.narrow(x) == h);
			}
		}
	}
}

TEST_CASE("Float32 values round to the nearest 16-bit float, ties to even, including subnormals and overflow")
{
	tensors::Random random(1);

	for (const Half &half : HALVES) {
		/*
		 * convert each 16-bit float, the midpoint between it and the next one, and the float32 neighbours of
		 * both
		 */
		for (uint32_t h = 0; h < 65536; h++) {
			const uint16_t next = static_cast<uint16_t>(h + 1);
			const float x = half.widen(static_cast<uint16_t>(h)), y = half.widen(next);
			const uint32_t middle = half.mantissa_bits == 7
							? bits_of(x) + 0x8000
							: bits_of(static_cast<float>((double(x) + y) / 2));

			for (uint32_t u : {bits_of(x), middle})
				for (int d = -1; d <= 1; d++)
					REQUIRE(as_nearest(half, float_of(u + static_cast<uint32_t>(d))));
		}
		for (int i = 0; i < 200000; i++)
			REQUIRE(as_nearest(half, float_of(static_cast<uint32_t>(random()))));
		/* the largest finite number, the tie above it, and larger numbers */
		for (float x :
		     {65504.0f, 65519.996f, 65520.0f, 65536.0f, 3.3895314e38f, 3.4e38f, INFINITY, 1e-45f, 0.0f})
			for (float sign : {1.0f, -1.0f})
				REQUIRE(as_nearest(half, sign * x));
	}
}

namespace
{

/*
 * Check that the pieces of all ranks cover a tensor without gaps, and that their segments are at the same positions of
 * the tensor and consist of whole rows.
 */
void check_cut(uint64_t n, int size, uint32_t itemsize, const Segments &segments, uint64_t chunk = CHUNK_NBYTES)
{
	const std::vector<Slice> slices = cut(n, size, itemsize, segments, chunk);
	uint64_t at = 0;

	REQUIRE(slices.size() == static_cast<size_t>(size));
	for (const Slice &slice : slices) {
		REQUIRE(slice.size() == slices[0].size());
		for (const Piece &piece : slice) {
			REQUIRE(piece.begin == at);
			REQUIRE(piece.end >= at);
			at = piece.end;
			check_segments(piece.segments, piece.n());
			for (const codec_segment &part : piece.segments) {
				uint64_t offset = piece.begin + part.offset;
				const codec_segment *whole = nullptr;

				for (const codec_segment &s : segments)
					if (s.offset <= offset && offset < s.offset + values_of(s))
						whole = &s;
				REQUIRE(whole);
				REQUIRE(part.rank == whole->rank);
				REQUIRE(values_of(part, 1) == values_of(*whole, 1));
				REQUIRE((offset - whole->offset) % values_of(*whole, 1) == 0);
				REQUIRE(values_of(part) > 0);
			}
		}
	}
	REQUIRE(at == n);
}

} // namespace

TEST_CASE("Slices cover a tensor in rank order and keep short rows whole")
{
	const std::vector<std::vector<std::vector<uint64_t>>> layouts = {
		{},
		{{64, 100}, {64}, {128, 64, 3, 3}, {1000}, {3000, 1100}, {2, 500000}, {}},
		{{0, 5}, {7}, {}, {}, {3, 0, 2}, {1, 1, 1}, {100000, 1}, {5, 70000}},
		{{33, 65536}, {3, 65537}},
		{{1, 300000}, {}, {0}, {300000, 2}},
	};

	for (const auto &shapes : layouts) {
		for (uint64_t before : {0, 1, 5000}) { /* number of values before and after the segments */
			Segments segments;
			uint64_t n = laid_out(shapes, segments) + before + before / 2;

			for (codec_segment &s : segments)
				s.offset += before;
			check_segments(segments, n);
			for (int size : {1, 2, 3, 4, 7, 64})
				for (uint32_t itemsize : {2u, 4u})
					for (uint64_t chunk : {CHUNK_NBYTES, MOST_NBYTES})
						check_cut(n, size, itemsize, segments, chunk);
		}
	}
	for (uint64_t rows = 1; rows < 550; rows++) { /* slices of fewer than 1,024 values, some after the segment */
		Segments segments;

		laid_out({{rows, 2}}, segments);
		for (int size : {3, 7, 64})
			check_cut(1100, size, 4, segments);
	}
	for (uint64_t n : {0, 1, 2, 3, 997, 1023, 1024, 1025, 3071, 3072, 3073, 1 << 22, (1 << 24) + 1})
		for (int size : {1, 2, 3, 4, 5, 16})
			check_cut(n, size, 4, {});
}

TEST_CASE("Cut points are starts of rows, and elsewhere multiples of 1,024 that lie in no earlier segment")
{
	Segments segments;
	const uint64_t n = laid_out({{700, 30}, {5000}, {0, 3}, {2, 65536}, {2, 65537}, {}, {9, 1}}, segments);

	for (uint64_t at = 0; at < n; at += 7) {
		const uint64_t found = near(at, n, segments);
		const uint64_t row = at < 21000 ? 30 : at - 26000 < 131072 ? 65536 : 0;

		if (row)
			REQUIRE(found == at - (at - (row == 30 ? 0 : 26000)) % row);
		else if (at - 157072 < 131074)
			REQUIRE(found == at); /* cut points in long rows need no alignment */
		else
			REQUIRE(found == std::max<uint64_t>(at < 26000    ? 21000
							    : at < 288147 ? 288146
									  : 288147,
							    at / 1024 * 1024));
	}
	CHECK(near(n, n, segments) == n);
	CHECK(near(5000, 6000, {}) == 4096);
}

TEST_CASE("Chunks of codec.torch are larger if frames are small, and slices begin at the same values")
{
	CHECK(torch_chunk_nbytes(1) == MOST_NBYTES);
	CHECK(torch_chunk_nbytes(FRAME_NBYTES / 4) == MOST_NBYTES);
	CHECK(torch_chunk_nbytes(FRAME_NBYTES / 2) == 2 * CHUNK_NBYTES);
	CHECK(torch_chunk_nbytes(FRAME_NBYTES) == CHUNK_NBYTES);
	CHECK(torch_chunk_nbytes(2 * CHUNK_NBYTES) == CHUNK_NBYTES);

	Workspace memory;
	Reduction asked(memory);

	asked.spec.struct_nbytes = sizeof asked.spec;
	for (bool as_torch : {false, true}) {
		asked.cut_as_torch = as_torch;
		asked.spec.codec = CODEC_SIGN;
		CHECK(asked.chunk_nbytes() == (as_torch ? MOST_NBYTES : CHUNK_NBYTES));
		asked.spec.codec = CODEC_LOSSLESS;
		CHECK(asked.chunk_nbytes() == CHUNK_NBYTES);
	}
	for (uint64_t n : {5, 1 << 20, 6553600, 99999999}) {
		const std::vector<Slice> few = cut(n, 3, 4, {}, MOST_NBYTES), many = cut(n, 3, 4, {});

		for (int r = 0; r < 3; r++) {
			CHECK(few[r].size() <= many[r].size());
			CHECK(few[r].size() >=
			      (4 * n / 3 > CHUNK_NBYTES ? 2 : 1)); /* two chunks, so that transfers overlap */
			CHECK(few[r].front().begin == many[r].front().begin);
			CHECK(few[r].back().end == many[r].back().end);
		}
	}
}

TEST_CASE("Even slices have one size and cover each rank's part")
{
	for (int size : {1, 2, 3, 5}) {
		for (uint64_t each : {0, 1, 1000, 5000001}) {
			const std::vector<Slice> slices = cut_evenly(each * size, size, 4, CHUNK_NBYTES);
			uint64_t at = 0;

			for (int r = 0; r < size; r++) {
				REQUIRE(slices[r].front().begin == r * each);
				REQUIRE(slices[r].back().end == (r + 1) * each);
				for (const Piece &piece : slices[r]) {
					REQUIRE(piece.begin == at);
					at = piece.end;
				}
			}
			REQUIRE(at == each * size);
		}
	}
}

TEST_CASE("share() equals the result without overflow")
{
	for (uint64_t n : {uint64_t(0), uint64_t(7), uint64_t(1) << 40, ~uint64_t(0)})
		for (uint64_t m : {1, 3, 64, 1000})
			for (uint64_t i : {uint64_t(0), uint64_t(1), m / 2, m})
				REQUIRE(share(n, i, m) ==
					static_cast<uint64_t>(static_cast<unsigned __int128>(n) * i / m));
}

TEST_CASE("Segments that overlap, descend, end outside or have no valid shape are refused")
{
	const uint64_t huge = uint64_t(1) << 40;
	codec_segment reserved = segment(0, {2}), deep = segment(0, {});

	reserved.reserved = 1;
	deep.rank = CODEC_MAX_RANK + 1;
	for (const Segments &good : {Segments{},
				     {segment(0, {10})},
				     {segment(10, {0})},
				     {segment(0, {})},
				     {segment(9, {})},
				     {segment(0, {2, 3}), segment(6, {0, huge}), segment(6, {4})},
				     {segment(5, {huge, huge, 0, huge})}})
		CHECK_NOTHROW(check_segments(good, 10));
	for (const Segments &bad : {Segments{segment(0, {11})},
				    {segment(1, {10})},
				    {segment(10, {})},
				    {segment(11, {0})},
				    {reserved},
				    {deep},
				    {segment(0, {2}), segment(1, {2})},
				    {segment(4, {2}), segment(0, {2})},
				    {segment(0, {huge, huge})},
				    {segment(0, {uint64_t(1) << 32, uint64_t(1) << 32})},
				    {segment(0, {5}), segment(4, {0})}})
		CHECK_THROWS_AS(check_segments(bad, 10), codec::gloo::ArgumentError);
}

TEST_CASE("Finite values beyond the largest 16-bit float become that one; Inf and NaN stay")
{
	const std::vector<float> x = {65504,    65519,    65520,     -1e30f, 3.3895e38f,
				      -3.4e38f, INFINITY, -INFINITY, NAN,    1.5f};
	const auto narrowed = [&](uint32_t dtype) {
		std::vector<uint16_t> found(x.size());

		narrow_numbers(dtype, x.data(), x.size(), found.data());
		return found;
	};

	CHECK(narrowed(CODEC_FLOAT16) ==
	      std::vector<uint16_t>{0x7bff, 0x7bff, 0x7bff, 0xfbff, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x3e00});
	CHECK(narrowed(CODEC_BFLOAT16) ==
	      std::vector<uint16_t>{0x4780, 0x4780, 0x4780, 0xf14a, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x3fc0});
}

TEST_CASE("The last 256 signatures are remembered, and no two with the same slots")
{
	Keys keys;

	CHECK(!keys.of(1));
	for (uint64_t i = 1; i <= Keys::MOST; i++)
		keys.add(i * i, i);
	CHECK(keys.of(1) == 1);
	keys.add(7, 1000);
	CHECK(!keys.of(1));
	CHECK(keys.of(4) == 2);
	CHECK(keys.of(7) == 1000);
	keys.add(8, 1000 + Link::KEYS);
	CHECK(!keys.of(7));
	CHECK(keys.of(4) == 2);
	keys.clear();
	CHECK(!keys.of(4));
}

namespace
{

/* Stand-ins for Gloo's context, with the function signatures of older and of current Gloo. */
struct Old {
	Old(int r, int s) : rank(r), size(s)
	{
	}

	int rank, size;
	const ::gloo::rendezvous::Store *store = nullptr;
	::gloo::transport::Device *device = nullptr;

	void connectFullMesh(::gloo::rendezvous::Store &s, std::shared_ptr<::gloo::transport::Device> &d)
	{
		store = &s;
		device = d.get();
	}
};

struct Current {
	Current(int r, int s) : rank(r), size(s)
	{
	}

	int rank, size;
	std::shared_ptr<::gloo::rendezvous::Store> store;
	::gloo::transport::Device *device = nullptr;

	void connectFullMesh(std::shared_ptr<::gloo::rendezvous::Store> s,
			     std::shared_ptr<::gloo::transport::Device> &d)
	{
		store = std::move(s);
		device = d.get();
	}
};

struct NoStore : ::gloo::rendezvous::Store {
	void set(const std::string &, const std::vector<char> &) override
	{
	}

	std::vector<char> get(const std::string &) override
	{
		return {};
	}

	void wait(const std::vector<std::string> &) override
	{
	}

	void wait(const std::vector<std::string> &, const std::chrono::milliseconds &) override
	{
	}
};

} // namespace

TEST_CASE("Means are bit-identical whether computed by division or multiplication")
{
	const float odd[] = {
		0,    -0.0f,         0x1p-149f, 0x1.fffffep-127f, 0x1.8p-148f, 0x1.000002p-126f, 0x1.fffffep127f,
		1.0f, 0x1.fffffep0f, -3.0f,     -0x1p-126f,       INFINITY,    -INFINITY,        NAN};

	for (float by : {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 64.0f, 96.0f, 1024.0f}) {
		std::vector<float> x(std::begin(odd), std::end(odd)), quotients;

		for (uint32_t i = 0; i < 5000; i++)
			x.push_back(float_of(0x9e3779b9u * i));
		for (float value : x) {
			volatile float divided = value;

			divided /= by;
			quotients.push_back(float(divided));
		}
		divide(x.data(), x.size(), by);
		for (size_t i = 0; i < x.size(); i++)
			CHECK((bits_of(x[i]) == bits_of(quotients[i]) ||
			       (std::isnan(x[i]) && std::isnan(quotients[i]))));
	}
}

/* Return the number of threads of this process by scheduling policy. */
static std::map<int, int> policies()
{
	std::map<int, int> found;

	for (const auto &task : std::filesystem::directory_iterator("/proc/self/task"))
		found[sched_getscheduler(std::stoi(task.path().filename()))]++;
	return found;
}

TEST_CASE("create_device() gives its thread SCHED_BATCH and restores the policy of the caller, also if it fails")
{
	const sched_param none{};
	::gloo::transport::tcp::attr attr;

	for (int mine : {SCHED_OTHER, SCHED_BATCH}) {
		std::map<int, int> before;

		REQUIRE(!sched_setscheduler(0, mine, &none));
		before = policies();
		attr.iface = "lo";
		{
			auto device = codec::gloo::create_device(attr);

			before[SCHED_BATCH]++;
			CHECK(policies() == before);
			CHECK(sched_getscheduler(0) == mine);
		}
		attr.iface = "no such interface";
		CHECK_THROWS(codec::gloo::create_device(attr));
		CHECK(sched_getscheduler(0) == mine);
	}
	REQUIRE(!sched_setscheduler(0, SCHED_OTHER, &none));
}

TEST_CASE("connect() works with a Gloo that takes a reference to the store or a shared pointer")
{
	auto store = std::make_shared<NoStore>();
	/* the device is never dereferenced */
	std::shared_ptr<::gloo::transport::Device> device(reinterpret_cast<::gloo::transport::Device *>(store.get()),
							  [](void *) {});
	auto old = codec::gloo::connect<Old>(1, 3, store, device);
	auto current = codec::gloo::connect<Current>(2, 3, store, device);

	CHECK(old->store == store.get());
	CHECK(old->device == device.get());
	CHECK(old->rank == 1);
	CHECK(current->store == store);
	CHECK(current->device == device.get());
	CHECK(current->size == 3);
}
