/* parameters.h - check that a frame has the codec and parameters that the ranks agreed on. */
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <codec/codec.h>

#include "errors.h"

namespace codec::gloo::detail
{

/* Return a struct of codec.h in which all fields are 0 except struct_nbytes. */
template <class T> T blank()
{
	T found{};

	found.struct_nbytes = sizeof found;
	return found;
}

/* Return a codec_tensor that describes n values at `data` as a vector. */
inline codec_tensor tensor_of(uint32_t dtype, const void *data, uint64_t n)
{
	auto t = blank<codec_tensor>();

	t.dtype = dtype;
	t.rank = 1;
	t.shape[0] = n;
	t.data = const_cast<void *>(data);
	t.nbytes = n * codec_dtype_nbytes(dtype);
	return t;
}

/*
 * The header fields that all frames of a spec share. To resolve defaults, the constructor encodes a frame of one value
 * and reads its header. TRUNCATE is an exception: its encoder would need the optimizer's state, and the only default
 * that its header resolves is `max_code_length`.
 *
 * `seed`, `scale` and `clip` are not in a header. `guard` is compared only without a metric, since the encoder
 * adjusts it to the dtype of the parameters.
 */
class Parameters
{
public:
	/* `memory` is a scratch buffer, which grows as needed. */
	Parameters(const codec_spec &spec, uint32_t dtype, bool has_metric, std::vector<uint8_t> &memory)
	    : spec_(spec), has_metric_(has_metric)
	{
		if (spec.codec == CODEC_TRUNCATE)
			spec_.max_code_length = spec.max_code_length ? spec.max_code_length : 8;
		else
			encode_one(dtype, memory);
	}

	/*
	 * Throw FrameError unless a header has the agreed codec and parameters. `any_row` is true for pieces with
	 * segments: the row size of their frames depends on the segments' shapes, and is not compared.
	 */
	void check(const codec_info &info, bool any_row) const
	{
		const codec_spec &s = info.spec;
		const bool has_rows = s.codec != CODEC_TOPK; /* CODEC_TOPK: group_size is the size of a chunk */
		const bool row = (has_rows && any_row) || !info.n || s.group_size == spec_.group_size;
		const bool guard = has_metric_ || s.guard == spec_.guard;

		if (s.codec != spec_.codec)
			throw FrameError(CODEC_BAD_SPEC, "a frame of codec " + std::to_string(s.codec) +
								 " was received; the ranks agreed on codec " +
								 std::to_string(spec_.codec));
		if (!row || !guard || s.max_code_length != spec_.max_code_length || s.model != spec_.model ||
		    s.variant != spec_.variant || s.options != spec_.options || s.bits != spec_.bits ||
		    (info.n && s.kept != spec_.kept) || info.clipped != clipped_)
			throw FrameError(
				CODEC_BAD_SPEC,
				"a frame was received whose parameters are not those that the ranks agreed on");
	}

private:
	void encode_one(uint32_t dtype, std::vector<uint8_t> &memory)
	{
		const uint32_t zero = 0;
		codec_tensor one = tensor_of(dtype, &zero, 1);
		auto with = blank<codec_context>();
		auto info = blank<codec_info>();
		size_t bound, written, scratch;

		detail::check(codec_bound(&spec_, &one, &bound));
		detail::check(codec_scratch(&spec_, &one, &scratch));
		if (memory.size() < bound + scratch)
			memory.resize(bound + scratch);
		detail::check(codec_encode(&spec_, &one, memory.data(), bound, &written, nullptr, &with,
					   memory.data() + bound, scratch));
		detail::check(codec_inspect(memory.data(), written, &info));
		spec_ = info.spec;
		clipped_ = info.clipped;
	}

	codec_spec spec_;
	bool has_metric_;
	uint32_t clipped_ = 0;
};

} // namespace codec::gloo::detail
