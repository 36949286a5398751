/*
 * lossless/encode.cuh - the loop over blocks for kernels that encode lossless frames, and the encoder of blocks whose
 * regions contain only plane 0. docs/spec/encoder.md, sections 4.2 and 6.
 */
#ifndef CODEC_CUDA_LOSSLESS_ENCODE_CUH
#define CODEC_CUDA_LOSSLESS_ENCODE_CUH

#include "coder/encode.cuh"
#include "coder/fit.cuh"
#include "frame/encode.cuh"
#include "lossless/regions.cuh"

/* Return true if regions contain only plane 0, and plane 0 is coded. size: bytes per value. */
DEVICE bool has_single_plane(const codec_view &v, int size)
{
	return size > 1 && octave_of(v.dtype) && v.coded & 1 && !(v.halved & 1) && v.fixed == (1u << size) - 2;
}

/*
 * Split the m values from value `first` on into planes, and encode plane 0, from the last row of 128 values to the
 * first. Planes 1 and above are written to their sections of the frame. sums: checksums of fixed planes. same: OR and
 * AND of the symbols of plane 0.
 *
 * code_chunks(values, section, coding, sums, same, place, rows) encodes whole chunks of CHUNK_ROWS rows, the last of
 * which ends at row `rows`, finishes the chunks' checksums, and returns the number of rows encoded. If that is 0,
 * code_values encodes the last row. values, section: begin of the block's values, and of the block's part of plane 1.
 */
template <int SIZE, class F>
DEVICE void code_values(const codec_encoding &e, const job *j, uint64_t first, uint32_t m, coding *s, digest *sums,
			common *same, uint32_t lane, F code_chunks)
{
	const codec_view &v = j->v;
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW, pad = table_of(j, 0)[TABLE_PAD] * ONES;
	const bool has_model = v.model_parts.count > 0;
	const uint32_t zero = zero_of(&v);
	const uint8_t *values = e.source.values + SIZE * first;
	uint8_t *section = e.frame + v.planes_offset + first;
	place o = last_place(j, first, m, lane);

	for (uint32_t r = rows; r > 0;) {
		const uint32_t done = code_chunks(values, section, s, sums, same, &o, r);

		if (done) {
			r -= done;
			continue;
		}
		uint32_t n = there(--r, lane, m), word[SIZE], i = WIRE_ROW * r + 4 * lane;
		uint2 offsets = {0, 0};

		if (has_model && n) {
			offsets = quad_offsets_here(j, &o, n, circle_for<SIZE>(&v));
			if (r)
				move_back(j, &o, WIRE_ROW);
		}
		split_quad<SIZE>(values, i, n, zero, offsets, word);
		for (int p = 1; p < SIZE; p++) {
			digest_word(&sums[p], word[p], r, lane);
			put_fixed(&v, e.frame, v.planes_offset + (p - 1) * v.plane_stride, first + i, word[p]);
		}
		same->some |= keep_bytes(word[0], n);
		same->all &= word[0] | ~keep_bytes(FULL, n);
		code_quad(s, filled(word[0], n, pad), r, n, lane);
		if (r % CHUNK_ROWS == 0)
			for (int p = 1; p < SIZE; p++)
				digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
	}
}

/*
 * Encode block b of a tensor for which has_single_plane() is true. Values are read once. The region is written to the
 * frame as soon as its size is known. Return false if coding plane 0 of this block would not save bytes, or all its
 * bytes are equal; then only fixed planes have been written. literals, words: see begin_plane. code_chunks: see
 * code_values.
 */
template <int SIZE, class F>
DEVICE bool write_single_plane(const codec_encoding &e, const job *j, uint64_t b, uint8_t *literals, uint32_t *words,
			       uint32_t lane, F code_chunks)
{
	const codec_view &v = j->v;
	const uint32_t m = (uint32_t)block_values(&v, b);
	const uint32_t chunks = (m + WIRE_ROW * CHUNK_ROWS - 1) / (WIRE_ROW * CHUNK_ROWS);
	coding s = begin_plane(j, 0, words, literals, false);
	common same = {0, FULL};
	digest sums[SIZE] = {};
	uint32_t size = 0;
	uint64_t at = 0, checksum = 0;

	code_values<SIZE>(e, j, b * v.block_nvalues, m, &s, sums, &same, lane, code_chunks);
	auto place_for = [&](uint32_t nbytes) -> uint8_t * {
		if (!differs(same))
			return NULL;
		size = (4 + nbytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
		at = v.regions_offset + look_back(e.places, b, size, lane);
		return at + size <= e.capacity ? e.frame + at + 4 : NULL;
	};
	uint32_t got = end_plane(s, (uint32_t)choose_coded_most(m, 0), place_for, lane);

	if (!size)
		return false;
	if (got) {
		for (int p = 1; p < SIZE; p++)
			checksum += digest_sum(&sums[p], 0, chunks, WIRE_SEED_PLANE + p, lane);
		put32(e.frame + at, WIRE_MODE_CODED, lane);
		end_region(e.frame + at, 4 + got, lane);
		checksum = checksum_of_block(checksum + digest_bytes(e.frame + at, size, WIRE_SEED_REGION, lane), b);
	}
	put_entry(&v, e, b, at + size, checksum, lane);
	return true;
}

/* Size in bytes of a unit of scratch memory; the host reads this symbol. See scratch_nbytes. */
extern "C" __device__ const uint64_t encode_lossless_nbytes[] = {CODER_NBYTES};

/*
 * Encode blocks: write directory entries, fixed planes and regions. SINGLE: write_single_plane encodes blocks for which
 * has_single_plane() is true. code_chunks(job, first, m, ..., lane): see code_values. codes: 256 * SIZE words of shared
 * memory. room_of(w) returns ROOM_WORDS(SIZE) words of shared memory for warp w, which code_chunks may use, too.
 */
template <int SIZE, bool SINGLE, class R, class F>
DEVICE void encode_blocks(const codec_encoding *encodings, uint32_t *codes, R room_of, F code_chunks)
{
	const codec_encoding &e = encoding_of(encodings);
	uint32_t lane = threadIdx.x % 32;
	const job &j = share_coding(e.view, e.memory, codes, SIZE);
	const bool single = SINGLE && has_single_plane(j.v, SIZE);
	const uint64_t nbytes = scratch_nbytes(j.v);

	if (blockIdx.x * WARPS >= useful_warps(e.scratch, nbytes, e.warps))
		return;
	const taken_units units = take_units(e.scratch, nbytes, lane);
	uint8_t *scratch = units.memory;

	for (uint64_t b; (b = next_block(e.out, lane)) < j.v.nblocks;) {
		const uint32_t m = (uint32_t)block_values(&j.v, b);

		if (j.v.model_parts.count)
			fit_rows(&j, e.memory, e.source.values, SIZE, octave_of(j.v.dtype), zero_of(&j.v),
				 b * j.v.block_nvalues, m, lane);
		if constexpr (SINGLE)
			if (single &&
			    write_single_plane<SIZE>(e, &j, b, scratch, (uint32_t *)(scratch + PLANE_ROOM), lane,
						     [&](const uint8_t *values, uint8_t *section, coding *s,
							 digest *sums, common *same, place *o, uint32_t r) {
							     return code_chunks(j, b * j.v.block_nvalues, m, values,
										section, s, sums, same, o, r, lane);
						     }))
				continue;
		write_block<SIZE>(e, &j, b, single ? 0 : j.v.coded, scratch, room_of(opaque(threadIdx.x / 32)), lane);
	}
	give_units(e.scratch, units, lane);
}

#endif
