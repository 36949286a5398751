/* tensors.h - tensors and specs for tests of collectives, and expected results of all-reduces. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <codec/gloo.h>

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

/* Return true if the size of a spec's frames does not depend on the values. */
inline bool is_fixed_rate(const codec_spec &spec)
{
	return detail::has_trait(spec, CODEC_TRAIT_FIXED_RATE);
}

/* A spec, and the upper bound of its relative error after one encoding. */
struct Case {
	std::string name;
	codec_spec spec;
	double limit;
};

inline Case made(const std::string &name, uint32_t codec, double limit, const std::function<void(codec_spec &)> &set)
{
	codec_spec spec = spec_of(codec);

	set(spec);
	return {name, spec, limit};
}

/* Return specs of all codecs and variants, except for those that need the state of an optimizer. */
inline std::vector<Case> codecs()
{
	std::vector<Case> found;
	const auto add = [&](const std::string &name, uint32_t codec, double limit,
			     const std::function<void(codec_spec &)> &set) {
		found.push_back(made(name, codec, limit, set));
	};

	add("lossless", CODEC_LOSSLESS, 0, [](codec_spec &) {});
	add("lossless, flat", CODEC_LOSSLESS, 0,
	    [](codec_spec &s) { s.model = CODEC_MODEL_FLAT, s.max_code_length = 5; });
	for (uint32_t level = 0; level < 4; level++)
		add("truncate " + std::to_string(level), CODEC_TRUNCATE, level == 3 ? 0.3 : 0.02, [&](codec_spec &s) {
			s.variant = CODEC_LEVEL_CODING_FIXED, s.bits = level;
			s.options = level == 1 ? CODEC_OPTION_CUT : 0;
		});
	add("float8", CODEC_FLOAT8, 0.06, [](codec_spec &) {});
	add("float8, rows", CODEC_FLOAT8, 0.06, [](codec_spec &s) { s.group_size = 128; });
	add("float8, last", CODEC_FLOAT8, 0.06, [](codec_spec &s) { s.group_size = CODEC_GROUP_SIZE_ROW; });
	add("float8, e5m2", CODEC_FLOAT8, 0.2,
	    [](codec_spec &s) { s.variant = CODEC_E5M2, s.group_size = 100, s.options = CODEC_OPTION_STOCHASTIC; });
	add("float8, entropy", CODEC_FLOAT8, 0.06, [](codec_spec &s) { s.options = CODEC_OPTION_ENTROPY; });
	add("float8, mxfp8", CODEC_FLOAT8, 0.13, [](codec_spec &s) { s.variant = CODEC_MXFP8_E4M3; });
	add("float4, nvfp4", CODEC_FLOAT4, 0.3, [](codec_spec &) {});
	add("float4, mxfp4", CODEC_FLOAT4, 0.5,
	    [](codec_spec &s) { s.variant = CODEC_FLOAT4_MXFP4, s.options = CODEC_OPTION_STOCHASTIC; });
	for (uint32_t bits : {1u, 2u, 3u, 5u, 8u})
		add("quantize " + std::to_string(bits), CODEC_QUANTIZE, 3.0 / (1 << bits), [&](codec_spec &s) {
			s.bits = bits, s.group_size = 40 * bits,
			s.variant = bits == 3 ? CODEC_LEVELS_ODD : CODEC_LEVELS_EVEN;
			s.options = bits % 2 ? CODEC_OPTION_STOCHASTIC : 0;
		});
	add("quantize 4, zero point", CODEC_QUANTIZE, 0.2,
	    [](codec_spec &s) { s.variant = CODEC_LEVELS_AFFINE, s.bits = 4; });
	add("sign", CODEC_SIGN, 1.2, [](codec_spec &) {});
	add("sign, rows", CODEC_SIGN, 1.2, [](codec_spec &s) { s.variant = CODEC_SIGN_L2, s.group_size = 64; });
	add("sign, two means", CODEC_SIGN, 1.2,
	    [](codec_spec &s) { s.variant = CODEC_SIGN_TWO_MEAN, s.group_size = CODEC_GROUP_SIZE_ROW; });
	add("ternary", CODEC_TERNARY, 9, [](codec_spec &) {});
	add("ternary, base 3", CODEC_TERNARY, 9, [](codec_spec &s) { s.variant = CODEC_TERNARY_BASE3, s.seed = 5; });
	add("ternary, entropy", CODEC_TERNARY, 9,
	    [](codec_spec &s) { s.variant = CODEC_TERNARY_ENTROPY, s.clip = 2.5f; });
	return found;
}

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
