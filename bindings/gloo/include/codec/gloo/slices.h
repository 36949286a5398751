/* slices.h - where a flat tensor is cut: equally on all ranks, for it follows from sizes and shapes alone. */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <codec/codec.h>

#include "errors.h"

namespace codec::gloo::detail
{

constexpr uint64_t CHUNK_NBYTES = 1 << 20; /* of a tensor: while one is on the wire, others are encoded and decoded */
constexpr uint64_t FRAME_NBYTES = 1 << 19; /* codec.torch: if their frames are smaller, chunks are larger, */
constexpr uint64_t MOST_NBYTES = 1 << 22;  /* up to this */
constexpr int MOST_CHUNKS = 16;            /* of a slice */
constexpr uint64_t LONG_ROW = 1 << 16;     /* values of a row that is cut like any others */
constexpr uint64_t CUT_ALIGN =
	1024; /* values: no block or group of a codec of rows is cut, as long as it divides this */

using Segments = std::vector<codec_segment>;

/* Values [begin, end) of a flat tensor, and what has a shape in it, counted from `begin`. */
struct Piece {
	uint64_t begin, end;
	Segments segments;

	uint64_t n() const
	{
		return end - begin;
	}
};

using Slice = std::vector<Piece>;

/* How many values a shape has from a dimension on. */
inline uint64_t values_of(const codec_segment &segment, uint32_t from = 0)
{
	uint64_t n = 1;

	for (uint32_t d = from; d < segment.rank; d++)
		n *= segment.shape[d];
	return n;
}

/* Throw unless segments ascend, do not overlap and lie in n values. */
inline void check_segments(const Segments &segments, uint64_t n)
{
	uint64_t end = 0;

	for (const codec_segment &segment : segments) {
		bool good = segment.rank <= CODEC_MAX_RANK && !segment.reserved && segment.offset >= end &&
			    segment.offset <= n;
		uint64_t room = good ? n - segment.offset : 0, count = 1;

		/* a product is taken only where it cannot overflow: a dimension of 0 makes all of it 0 */
		for (uint32_t d = 0; good && d < segment.rank; d++)
			count = segment.shape[d] ? count : 0;
		for (uint32_t d = 0; good && count && d < segment.rank; d++) {
			good = segment.shape[d] <= room / count;
			count *= good ? segment.shape[d] : 1;
		}
		if (!good || count > room)
			throw SpecError(CODEC_BAD_SEGMENTS, codec_strerror(CODEC_BAD_SEGMENTS));
		end = segment.offset + count;
	}
}

/* About how large chunks of codec.torch are, if CHUNK_NBYTES of a tensor become a frame of so many bytes at most. */
inline uint64_t torch_chunk_nbytes(uint64_t frame_nbytes)
{
	return std::clamp(CHUNK_NBYTES * FRAME_NBYTES / frame_nbytes, CHUNK_NBYTES, MOST_NBYTES);
}

/* At least two of a slice that is not small: while the sum of one goes out, the other one comes in. */
inline uint64_t chunks_of(double nbytes, uint64_t chunk_nbytes)
{
	double least = nbytes > double(CHUNK_NBYTES) ? 2 : 1;

	return static_cast<uint64_t>(
		std::clamp(std::nearbyint(nbytes / double(chunk_nbytes)), least, double(MOST_CHUNKS)));
}

/* The part i of m equal ones of n: where it begins. */
inline uint64_t share(uint64_t n, uint64_t i, uint64_t m)
{
	return n / m * i + n % m * i / m;
}

/* A good place to cut at or before `at`: at the start of a row where rows are short. */
inline uint64_t near(uint64_t at, uint64_t n, const Segments &segments)
{
	if (at >= n)
		return n;
	auto behind = std::upper_bound(segments.begin(), segments.end(), at,
				       [](uint64_t v, const codec_segment &s) { return v < s.offset; });
	/* what has no values or no shape has no rows, and may begin where another one does */
	while (behind != segments.begin() && (!behind[-1].rank || !values_of(behind[-1])))
		--behind;
	if (behind != segments.begin()) {
		const codec_segment &s = behind[-1];
		uint64_t row = values_of(s, 1), inside = at - s.offset;

		if (inside < values_of(s) && row > 1)
			return row <= LONG_ROW ? at - inside % row : at;
	}
	return at - at % CUT_ALIGN;
}

/* What of the parameters lies in [begin, end): whole ones, and whole rows of those that are cut. */
inline Segments inside(const Segments &segments, uint64_t begin, uint64_t end)
{
	Segments found;

	for (codec_segment s : segments) {
		uint64_t count = values_of(s), last = s.offset + count;

		if (s.offset >= end || last <= begin || !count)
			continue;
		if (s.offset < begin || last > end) {
			uint64_t row = values_of(s, 1);
			uint64_t first = s.offset < begin ? (begin - s.offset + row - 1) / row : 0;
			uint64_t behind = std::min(count, end - s.offset) / row;

			if (behind <= first)
				continue;
			s.offset += first * row;
			s.shape[0] = behind - first;
		}
		s.offset -= begin;
		found.push_back(s);
	}
	return found;
}

/*
 * A slice for each of `size` ranks, in chunks; some may be empty. Where slices begin does not depend on chunks. Short
 * rows of parameters stay whole.
 */
inline std::vector<Slice> cut(uint64_t n, int size, uint32_t itemsize, const Segments &segments,
			      uint64_t chunk_nbytes = CHUNK_NBYTES)
{
	uint64_t chunks = chunks_of(double(n) * itemsize / size, chunk_nbytes), m = size * chunks,
		 begin = near(0, n, segments);
	std::vector<Slice> slices(size);

	for (uint64_t i = 0; i < m; i++) {
		uint64_t end = near(share(n, i + 1, m), n, segments);

		slices[i / chunks].push_back({begin, end, inside(segments, begin, end)});
		begin = end;
	}
	return slices;
}

/* The same with slices of n / size values, a whole number, and nothing that has a shape. */
inline std::vector<Slice> cut_evenly(uint64_t n, int size, uint32_t itemsize, uint64_t chunk_nbytes)
{
	uint64_t each = n / size, chunks = chunks_of(double(each) * itemsize, chunk_nbytes);
	std::vector<Slice> slices(size);

	for (int r = 0; r < size; r++)
		for (uint64_t i = 0; i < chunks; i++)
			slices[r].push_back(
				{r * each + share(each, i, chunks), r * each + share(each, i + 1, chunks), {}});
	return slices;
}

} // namespace codec::gloo::detail
