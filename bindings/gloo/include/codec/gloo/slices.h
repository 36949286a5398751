/*
 * slices.h - partition of a flat tensor into slices and chunks. The partition depends only on sizes and shapes, so that
 * all ranks compute the same partition (docs/spec/protocol/collectives.md, section 1.1).
 */
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

constexpr uint64_t CHUNK_NBYTES = 1 << 20; /* bytes of the tensor in a chunk */
/* cut_as_torch: target bytes of a chunk's frame; chunks of specs that compress well are larger */
constexpr uint64_t FRAME_NBYTES = 1 << 19;
constexpr uint64_t MOST_NBYTES = 1 << 22; /* cut_as_torch: upper bound of the bytes of the tensor in a chunk */
constexpr int MOST_CHUNKS = 16;           /* upper bound of the chunks in a slice */
constexpr uint64_t LONG_ROW = 1 << 16;    /* values; longer rows may be cut */
/*
 * Cut points are multiples of this number of values, so that they never split a block or group whose size is 1024
 * values or a smaller power of two.
 */
constexpr uint64_t CUT_ALIGN = 1024;

using Segments = std::vector<codec_segment>;

/* Values [begin, end) of a flat tensor, and its segments with offsets relative to `begin`. */
struct Piece {
	uint64_t begin, end;
	Segments segments;

	uint64_t n() const
	{
		return end - begin;
	}
};

using Slice = std::vector<Piece>;

/* Return the product of the dimensions of a segment from dimension `from` on. */
inline uint64_t values_of(const codec_segment &segment, uint32_t from = 0)
{
	uint64_t n = 1;

	for (uint32_t d = from; d < segment.rank; d++)
		n *= segment.shape[d];
	return n;
}

/* Throw ArgumentError unless segments ascend, do not overlap and end within n values. */
inline void check_segments(const Segments &segments, uint64_t n)
{
	uint64_t end = 0;

	for (const codec_segment &segment : segments) {
		bool good = segment.rank <= CODEC_MAX_RANK && !segment.reserved && segment.offset >= end &&
			    segment.offset <= n;
		uint64_t room = good ? n - segment.offset : 0, count = 1;

		/*
		 * if a dimension is 0, so is the product; skip the multiplication, since other dimensions could make it
		 * overflow
		 */
		for (uint32_t d = 0; good && d < segment.rank; d++)
			count = segment.shape[d] ? count : 0;
		for (uint32_t d = 0; good && count && d < segment.rank; d++) {
			good = segment.shape[d] <= room / count;
			count *= good ? segment.shape[d] : 1;
		}
		if (!good || count > room)
			throw ArgumentError(CODEC_BAD_SEGMENTS, codec_strerror(CODEC_BAD_SEGMENTS));
		end = segment.offset + count;
	}
}

/*
 * Return the target size of chunks in codec.torch, in bytes of the tensor. `frame_nbytes` is the upper bound of a
 * frame of CHUNK_NBYTES of the tensor.
 */
inline uint64_t torch_chunk_nbytes(uint64_t frame_nbytes)
{
	return std::clamp(CHUNK_NBYTES * FRAME_NBYTES / frame_nbytes, CHUNK_NBYTES, MOST_NBYTES);
}

/*
 * Return the number of chunks in a slice. A slice above CHUNK_NBYTES has at least two, so that sending one sum
 * overlaps with receiving the next terms.
 */
inline uint64_t chunks_of(double nbytes, uint64_t chunk_nbytes)
{
	double least = nbytes > double(CHUNK_NBYTES) ? 2 : 1;

	return static_cast<uint64_t>(
		std::clamp(std::nearbyint(nbytes / double(chunk_nbytes)), least, double(MOST_CHUNKS)));
}

/* Return i * n / m, rounded down, without overflow. */
inline uint64_t share(uint64_t n, uint64_t i, uint64_t m)
{
	return n / m * i + n % m * i / m;
}

/*
 * Return the cut point at or before `at`: the start of a row inside segments with short rows, otherwise a multiple of
 * CUT_ALIGN. If that lies in an earlier segment, whose row it would cut, return the end of the earlier segment.
 */
inline uint64_t near(uint64_t at, uint64_t n, const Segments &segments)
{
	if (at >= n)
		return n;
	auto behind = std::upper_bound(segments.begin(), segments.end(), at,
				       [](uint64_t v, const codec_segment &s) { return v < s.offset; });
	/*
	 * skip segments without values or dimensions, which have no rows and may have the same offset as the next
	 * segment
	 */
	while (behind != segments.begin() && (!behind[-1].rank || !values_of(behind[-1])))
		--behind;
	uint64_t first = 0;

	if (behind != segments.begin()) {
		const codec_segment &s = behind[-1];
		uint64_t row = values_of(s, 1), inside = at - s.offset, count = values_of(s);

		if (inside < count && row > 1)
			return row <= LONG_ROW ? at - inside % row : at;
		first = s.offset + (inside < count ? 0 : count);
	}
	return std::max(first, at - at % CUT_ALIGN);
}

/*
 * Return the segments in [begin, end), with offsets relative to `begin`. A segment that begins or ends outside is
 * reduced to its whole rows inside.
 */
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
 * Return a slice for each of `size` ranks. Each slice is cut into chunks, which may be empty. The beginning of a slice
 * does not depend on the chunk size. Short rows of segments are not cut.
 */
inline std::vector<Slice> cut(uint64_t n, int size, uint32_t itemsize, const Segments &segments,
			      uint64_t chunk_nbytes = CHUNK_NBYTES)
{
	uint64_t chunks = chunks_of(double(n) * itemsize / size, chunk_nbytes), m = size * chunks,
		 begin = near(0, n, segments);
	std::vector<Slice> slices(size);

	for (uint64_t i = 0; i < m; i++) {
		/*
		 * a cut past the end of a segment is rounded down to CUT_ALIGN, which may move it before the previous
		 * cut, inside the segment
		 */
		uint64_t end = std::max(begin, near(share(n, i + 1, m), n, segments));

		slices[i / chunks].push_back({begin, end, inside(segments, begin, end)});
		begin = end;
	}
	return slices;
}

/* Return slices of n / size values each, cut into chunks without regard to segments. `size` must divide n. */
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
