/* tensors.h - tensors and specs for tests of collectives, and expected results of all-reduces. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <codec/gloo.h>

#include "../examples.h"

namespace tensors
{

using codec::gloo::Op;
using codec::gloo::spec_of;
namespace detail = codec::gloo::detail;

constexpr uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
constexpr Op OPS[] = {Op::mean, Op::sum, Op::max};

/* Random number generator splitmix64. */
class Random
{
public:
	explicit Random(uint64_t seed) : state_(seed * 0x632BE59BD9B4E019 + 1)
	{
	}

	uint64_t operator()()
	{
		uint64_t z = state_ += 0x9E3779B97F4A7C15;

		z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
		z = (z ^ z >> 27) * 0x94D049BB133111EB;
		return z ^ z >> 31;
	}

	uint64_t below(uint64_t n)
	{
		return (*this)() % n;
	}

	/* Return an approximately normally distributed value. */
	float normal()
	{
		const uint64_t u = (*this)();

		return static_cast<float>((u & 0xffff) + (u >> 16 & 0xffff) + (u >> 32 & 0xffff) + (u >> 48)) / 37837 -
		       3.4640f;
	}

private:
	uint64_t state_;
};

/* Tensor of a dtype, stored as bytes. */
struct Tensor {
	uint32_t dtype;
	std::vector<uint8_t> bytes;

	Tensor(uint32_t d, const std::vector<float> &values) : dtype(d), bytes(values.size() * codec_dtype_nbytes(d))
	{
		detail::narrow(dtype, values.data(), values.size(), bytes.data());
	}

	size_t n() const
	{
		return bytes.size() / codec_dtype_nbytes(dtype);
	}

	void *data()
	{
		return bytes.data();
	}

	std::vector<float> floats() const
	{
		std::vector<float> found(n());

		detail::widen(dtype, bytes.data(), n(), found.data());
		return found;
	}

	std::string str() const
	{
		return {bytes.begin(), bytes.end()};
	}

	bool operator==(const Tensor &other) const
	{
		return dtype == other.dtype && bytes == other.bytes;
	}
};

/* Return test gradients of a rank, as float32. Magnitudes vary along the tensor, as they do between layers. */
inline std::vector<float> values(int rank, size_t n, uint64_t seed = 0)
{
	Random random(seed * 100 + static_cast<uint64_t>(rank) + 1), places(seed + 7);
	std::vector<float> found(n);
	float scale = 1;

	for (size_t i = 0; i < n; i++) {
		if (i % 37 == 0)
			scale = std::ldexp(1.0f, -static_cast<int>(places.below(9)));
		found[i] = random.normal() * scale;
	}
	return found;
}

inline Tensor tensor(int rank, uint32_t dtype, size_t n, uint64_t seed = 0)
{
	return {dtype, values(rank, n, seed)};
}

/* Return the reduction of all ranks' tensors, computed in float32 in rank order and rounded once to the dtype. */
inline Tensor in_order(int size, uint32_t dtype, size_t n, Op op, uint64_t seed = 0)
{
	std::vector<float> total = tensor(0, dtype, n, seed).floats();

	for (int rank = 1; rank < size; rank++) {
		const std::vector<float> next = tensor(rank, dtype, n, seed).floats();

		for (size_t i = 0; i < n; i++)
			total[i] = op == Op::max ? std::max(total[i], next[i]) : total[i] + next[i];
	}
	for (float &x : total)
		x = op == Op::mean ? x / static_cast<float>(size) : x;
	return {dtype, total};
}

/* Return the relative error |found - want| / |want| in the Euclidean norm. */
inline double error(const Tensor &found, const Tensor &want)
{
	const std::vector<float> x = found.floats(), y = want.floats();
	double lost = 0, all = 0;

	for (size_t i = 0; i < x.size(); i++) {
		lost += (double(x[i]) - y[i]) * (double(x[i]) - y[i]);
		all += double(y[i]) * y[i];
	}
	return std::sqrt(lost) / (all > 0 ? std::sqrt(all) : 1);
}

/* A spec, and the upper bound of its relative error after one encoding. */
struct Case {
	std::string name;
	codec_spec spec;
	double limit;
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
/* Return the examples of specs, except for those that need a base, a residual or the state of an optimizer. */
inline std::vector<Case> codecs()
{
	std::vector<Case> found;
	const auto add = [&](double limit, const char *name, const codec_spec &spec) {
		const bool fixed = spec.codec != CODEC_TRUNCATE || spec.variant == CODEC_LEVEL_CODING_FIXED;

		if (fixed && spec.codec != CODEC_TOPK && !detail::has_trait(spec, CODEC_TRAIT_BASE))
			found.push_back({name, spec, limit});
	};
#define ADD(limit, name, ...)                                                                                          \
	add(limit, #name " " #__VA_ARGS__,                                                                             \
	    codec_spec{.struct_nbytes = sizeof(codec_spec), .codec = CODEC_##name, __VA_ARGS__});
	EXAMPLES(ADD)
#undef ADD
	return found;
}
#pragma GCC diagnostic pop

inline codec_segment segment(uint64_t offset, const std::vector<uint64_t> &shape)
{
	codec_segment found{};

	found.offset = offset;
	found.rank = static_cast<uint32_t>(shape.size());
	std::copy(shape.begin(), shape.end(), found.shape);
	return found;
}

/* Append the segments of parameters with these shapes, laid out without gaps, and return their number of values. */
inline uint64_t laid_out(const std::vector<std::vector<uint64_t>> &shapes, std::vector<codec_segment> &segments)
{
	uint64_t n = 0;

	for (const auto &shape : shapes) {
		segments.push_back(segment(n, shape));
		n += detail::values_of(segments.back());
	}
	return n;
}

} // namespace tensors
