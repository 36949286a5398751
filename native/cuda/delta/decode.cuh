/*
 * delta/decode.cuh - decode the changes of a block by a warp. docs/spec/format.md, section 10.
 *
 * Codes have variable sizes, so all lanes read the same code at a time. For dtypes with exponents the warp first
 * computes bit planes of the values' class numbers, 1,024 values (32 words per plane) at a time. A code gives the
 * number of values of the same class since the last change; the changed value is found by a prefix sum over 32 words of
 * the class's mask. Changes are buffered, one per lane. When the buffer has 32, the warp loads the base values of all
 * of them together and applies the changes.
 */
#ifndef CODEC_CUDA_DELTA_DECODE_CUH
#define CODEC_CUDA_DELTA_DECODE_CUH

#include "coder/encode.cuh"
#include "common/bit_stream.cuh"
#include "delta/classes.cuh"
#include "delta/lists.cuh"

/* Buffer of changes, one per lane. The changes of lanes below `kept` were read but not applied yet. */
struct change_list {
	uint32_t count, kept;
	uint32_t place; /* index in the block of this lane's change */
	uint64_t step;  /* step of the change; mode PATCHES: mask of the bits to flip */
	bool bad;       /* true if a change has no effect, which is invalid */
};

/* Add the effect of changing value `place` from x to y to the checksum sum of the value's chunk. */
template <int SIZE> DEVICE void add_to_sum(unsigned long long *sums, uint32_t place, uint64_t x, uint64_t y)
{
	const uint32_t byte = place * SIZE, word = byte / 4 % WIRE_CHUNK_WORDS, shift = SIZE < 4 ? 8 * (byte & 3) : 0;
	unsigned long long *sum = sums + byte / (4 * WIRE_CHUNK_WORDS);

	if (SIZE == 8)
		atomicAdd(sum, (unsigned long long)(((y & FULL) - (x & FULL)) * CHECKSUM_KEY[word] +
						    ((y >> 32) - (x >> 32)) * CHECKSUM_KEY[word + 1]));
	else
		atomicAdd(sum, (unsigned long long)(((y << shift) - (x << shift)) * CHECKSUM_KEY[word]));
}

/* Apply the changes in the buffer, one per lane. */
template <int SIZE> DEVICE void apply_changes(const delta_block &o, change_list *l, uint32_t lane)
{
	if (lane < l->kept) {
		const uint64_t i = o.first + l->place, x = load_value<SIZE>(o.base, i);
		const uint64_t y = o.mode == WIRE_DELTA_PATCHES ? x ^ l->step : delta_apply(&o.q, x, l->step);

		l->bad |= x == y;
		if (o.sums)
			add_to_sum<SIZE>(o.sums, l->place, x, y);
		if (o.to)
			store_value<SIZE>(o.to, i, y);
		if (o.list) {
			uint32_t *e = global(o.list) + ENTRY_WORDS(SIZE) * (l->count - l->kept + lane);

			e[0] = l->place;
			e[1] = (uint32_t)y;
			if (SIZE == 8)
				e[2] = (uint32_t)(y >> 32);
		}
	}
	l->kept = 0;
	__syncwarp();
}

/* Append a change to the buffer. Return false if the region's head announces fewer changes. */
template <int SIZE>
DEVICE bool add_change(const delta_block &o, change_list *l, uint32_t place, uint64_t step, uint32_t lane)
{
	if (l->count == o.count)
		return false;
	if (l->kept == 32)
		apply_changes<SIZE>(o, l, lane);
	if (lane == l->kept) {
		l->place = place;
		l->step = step;
	}
	l->count++;
	l->kept++;
	return true;
}

/* Read the steps of the values of class 0 (small values). Return false if the stream is invalid. */
template <int SIZE>
DEVICE bool read_small(const delta_block &o, int scale, bit_reader *r, change_list *l, uint32_t lane)
{
	bool bad = false;

	for (uint32_t g = 0; GROUP * g < o.m; g++) {
		const uint32_t mine = members_of(o, 0, g, lane);

		for (uint32_t words = __ballot_sync(FULL, mine != 0); words; words &= words - 1) {
			const uint32_t f = (uint32_t)__ffs((int)words) - 1, place = GROUP * g + 32 * f;
			uint32_t word = __shfl_sync(FULL, mine, f), k = 0;

			if (word >> lane & 1)
				k = delta_small_k(
					delta_exponent(&o.q, load_value<SIZE>(o.base, o.first + place + lane)), scale,
					SIZE);
			for (; word; word &= word - 1) {
				const uint32_t bit = (uint32_t)__ffs((int)word) - 1;
				const uint64_t z = read_rice(r, __shfl_sync(FULL, k, bit), 8 * SIZE, &bad);

				if (z && !add_change<SIZE>(o, l, place + bit, delta_unzigzag(z, SIZE), lane))
					return false;
			}
		}
	}
	return !bad && r->at <= 32ull * r->nwords;
}

/* Read the steps of the values in a class above 0. Return false if their codes are invalid. */
template <int SIZE>
DEVICE bool read_class(const delta_block &o, uint32_t class_, bit_reader *r, change_list *l, uint32_t lane)
{
	const uint64_t nbits = 32ull * r->nwords;
	uint64_t codes = read_gamma(r) - 1;
	/*
	 * more: number of gaps of 0 since the last change, each of which enlarges that change's step; no gap of 0 may
	 * come before the first change
	 */
	uint32_t more = WIRE_DELTA_MORE, place = 0;
	bool negative = false, bad = false;
	class_cursor c = {class_, 0, 0, 0, 0, 0};

	if (r->at > nbits || codes > nbits - r->at)
		return false;
	if (codes)
		open_group(o, &c, 0, lane);
	for (; codes; codes--) {
		const uint32_t gap = read_gap(r, delta_class_k(class_), &negative, &bad);
		uint64_t step = 1;

		if (gap) {
			if (bad || !pass_members(o, &c, gap, &place, lane) ||
			    !add_change<SIZE>(o, l, place, negative ? delta_mask(SIZE) : 1, lane))
				return false;
			more = 0;
			continue;
		}
		if (more == WIRE_DELTA_MORE)
			return false;
		step = ++more + 1; /* enlarge the step of the previous change by one */
		if (more == WIRE_DELTA_MORE) {
			const uint64_t rest = read_gamma(r);

			step = more + rest;
			if (!rest || step > 1ull << (8 * SIZE - 1) || step < rest)
				return false;
		}
		if (lane == l->kept - 1)
			l->step = (negative ? 0 - step : step) & delta_mask(SIZE);
	}
	return !bad && r->at <= nbits;
}

/* Read the steps of a block whose dtype has exponents. Returns false if the stream is invalid. */
template <int SIZE> DEVICE bool read_steps(const delta_block &o, bit_reader *r, change_list *l, uint32_t lane)
{
	const int scale = (int)o.field - WIRE_DELTA_BIAS;
	const uint32_t top = make_planes<SIZE>(o, scale, lane);

	if (!read_small<SIZE>(o, scale, r, l, lane))
		return false;
	for (uint32_t c = 1; c <= top; c++)
		if (!read_class<SIZE>(o, c, r, l, lane))
			return false;
	return true;
}

/* Read patches, or the steps of a block whose dtype has no exponents. Returns false if the stream is invalid. */
template <int SIZE> DEVICE bool read_patches(const delta_block &o, bit_reader *r, change_list *l, uint32_t lane)
{
	bool bad = false;

	for (uint32_t i = 0; l->count < o.count; i++) {
		const uint64_t gap = read_rice(r, o.field, WIRE_RICE_GAP_BITS, &bad);
		uint64_t step;

		if (gap >= o.m - i)
			return false;
		i += (uint32_t)gap;
		if (o.mode == WIRE_DELTA_STEPS) {
			const bool negative = read_bits(r, 1) != 0;
			const uint64_t size = read_gamma(r);

			if (!size || size > 1ull << (8 * SIZE - 1))
				return false;
			step = (negative ? 0 - size : size) & delta_mask(SIZE);
		} else {
			step = read_bits(r, 8 * SIZE);
		}
		if (r->at > 32ull * r->nwords || !add_change<SIZE>(o, l, i, step, lane))
			return false;
	}
	return !bad;
}

/* Read a region's head to *o. Returns false if the head or the region's size is invalid. */
DEVICE bool open_delta(const delta_kind &q, uint32_t m, const cursor &c, delta_block *o, uint32_t lane)
{
	const uint32_t head = load32(here(&c)), raw = 4 + m * q.item;

	o->mode = head & 3;
	o->field = head >> WIRE_DELTA_SCALE_AT & WIRE_DELTA_SCALE;
	o->count = (head >> WIRE_DELTA_CHANGES_AT) + 1;
	if (o->mode == WIRE_DELTA_SAME) {
		o->count = 0;
		return !head && left(&c) == WIRE_ALIGN && !load32(here(&c) + 4);
	}
	if (o->count > m)
		return false;
	if (o->mode == WIRE_DELTA_RAW)
		return !o->field && left(&c) == (raw + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN &&
		       !__any_sync(FULL, lane < left(&c) - raw && here(&c)[raw + lane]);
	if (o->mode == WIRE_DELTA_STEPS && q.last)
		return (int)o->field - WIRE_DELTA_BIAS <= delta_most_scale(&q);
	return o->field <= WIRE_DELTA_MAX_GAP_K;
}

/* Mode RAW: store the block's values `raw`. Return the number of values that differ from the base. */
template <int SIZE> DEVICE uint32_t read_raw(const delta_block &o, const uint8_t *raw, uint32_t lane)
{
	uint32_t differ = 0;

	for (uint32_t i = lane; i < o.m; i += 32) {
		uint64_t x = load_bytes(raw + SIZE * i, SIZE < 4 ? SIZE : 4);

		if (SIZE == 8)
			x |= (uint64_t)load32(raw + SIZE * i + 4) << 32;
		differ += x != load_value<SIZE>(o.base, o.first + i);
		if (o.to)
			store_value<SIZE>(o.to, o.first + i, x);
	}
	return warp_sum(differ);
}

/* Copy the base's block to the destination, unless the destination is the base. */
template <int SIZE> DEVICE void copy_base(const delta_block &o, uint32_t lane)
{
	if (o.to && o.to != o.base)
		copy_bytes(o.to + SIZE * o.first, o.base + SIZE * o.first, o.m * SIZE, lane);
	__syncwarp();
}

/*
 * Add the contribution of `count` chunks of the base, from chunk `chunk` on, to the base's digest, and store the
 * chunks' sums in o.sums unless that is NULL. nbytes: bytes of the tensor.
 */
DEVICE void sum_base(const codec_decoding &d, const delta_block &o, uint64_t nbytes, uint64_t chunk, uint32_t count,
		     uint32_t lane)
{
	uint64_t digest = 0;

	for (uint32_t c = 0; c < count; c++) {
		const uint64_t sum = warp_sum(lane_sum(o.base, nbytes, chunk + c, lane));

		if (lane == 0 && o.sums)
			o.sums[c] = sum;
		digest += checksum_of_chunk(sum, WIRE_SEED_VALUES, chunk + c);
	}
	if (lane == 0)
		atomicAdd(&d.found->base, (unsigned long long)digest);
	__syncwarp();
}

/*
 * Return the block's contribution to the result's digest, computed from the values `raw` or, if that is NULL, from
 * o.sums.
 */
template <int SIZE>
DEVICE uint64_t digest_result(const delta_block &o, const uint8_t *raw, uint64_t chunk, uint32_t count, uint32_t lane)
{
	uint64_t digest = 0;

	for (uint32_t c = 0; raw && c < count; c++)
		digest += checksum_of_chunk(warp_sum(lane_sum(raw, (uint64_t)o.m * SIZE, c, lane)), WIRE_SEED_VALUES,
					    chunk + c);
	if (raw)
		return digest;
	__syncwarp();
	for (uint32_t c = lane; c < count; c += 32)
		digest += checksum_of_chunk(((volatile unsigned long long *)o.sums)[c], WIRE_SEED_VALUES, chunk + c);
	return warp_sum(digest);
}

/* Decode a region's changes. Returns false if the region is invalid. */
template <int SIZE> DEVICE bool read_changes(const delta_block &o, const cursor &c, uint32_t lane)
{
	const uint8_t *stream = here(&c) + 4;
	change_list l = {0, 0, 0, 0, false};
	bit_reader r = {(const uint32_t *)stream, (uint32_t)(left(&c) / 4 - 1), 0};
	bool good = true;

	if (o.mode == WIRE_DELTA_RAW)
		return read_raw<SIZE>(o, stream, lane) == o.count;
	copy_base<SIZE>(o, lane);
	if (o.mode == WIRE_DELTA_SAME)
		return true;
	if (o.mode == WIRE_DELTA_STEPS && o.q.last)
		good = read_steps<SIZE>(o, &r, &l, lane);
	else
		good = read_patches<SIZE>(o, &r, &l, lane);
	good = good && l.count == o.count && stream_ends(r);
	if (good)
		apply_changes<SIZE>(o, &l, lane);
	return good && !__any_sync(FULL, l.bad);
}

/*
 * Decode block b, or only check it, and add its contribution to the digests of base and result. scratch: scratch memory
 * of the warp. Return CODEC_OTHER_BASE if the changes are invalid with this base. The caller reports an invalid frame
 * instead if the base's digest equals the digest in the frame.
 */
template <int SIZE>
DEVICE codec_status read_delta(const codec_decoding &d, const codec_view &v, uint64_t b, const cursor &c,
			       uint8_t *scratch, uint32_t lane)
{
	delta_block o = {};

	o.q = kind_of_delta<SIZE>(v.dtype);
	o.base = d.base;
	o.to = d.sink.data;
	o.first = b * v.block_nvalues;
	o.m = (uint32_t)block_values(&v, b);
	o.planes = (uint32_t *)scratch;
	const uint64_t chunk = o.first * SIZE / (4 * WIRE_CHUNK_WORDS);
	const uint32_t count = chunks_of((uint64_t)o.m * SIZE);
	uint64_t result = 0, taken = ~0ull;

	if (o.to && d.lists) {
		const uint64_t record = records_of(d.lists)[b], entry = (record & ((1ull << RECORD_COUNT_AT) - 1)) - 1;

		if (record) {
			copy_base<SIZE>(o, lane);
			write_list<SIZE>(o.to, o.first, entries_of(d.lists, v.nblocks) + ENTRY_WORDS(SIZE) * entry,
					 (uint32_t)(record >> RECORD_COUNT_AT), lane);
			return CODEC_OK;
		}
	}
	if (d.checks) {
		o.sums = (unsigned long long *)(scratch + GROUP / 8 * CLASS_PLANES * ((o.m + GROUP - 1) / GROUP));
		sum_base(d, o, v.n * SIZE, chunk, count, lane);
	}
	if (!open_delta(o.q, o.m, c, &o, lane))
		return CODEC_BAD_REGION;
	if (!o.to && d.lists && o.count && o.mode != WIRE_DELTA_RAW && o.count <= o.m / LISTED_SHARE)
		taken = take_entries(d.lists, o.count, lane);
	if (taken != ~0ull)
		o.list = entries_of(d.lists, v.nblocks) + ENTRY_WORDS(SIZE) * taken;
	if (!read_changes<SIZE>(o, c, lane))
		return d.checks ? CODEC_OTHER_BASE : CODEC_BAD_REGION;
	if (d.checks) {
		result = digest_result<SIZE>(o, o.mode == WIRE_DELTA_RAW ? here(&c) + 4 : NULL, chunk, count, lane);
		if (lane == 0)
			atomicAdd(&d.found->result, (unsigned long long)result);
	}
	if (taken != ~0ull && lane == 0)
		records_of(d.lists)[b] = (taken + 1) | (uint64_t)o.count << RECORD_COUNT_AT;
	return CODEC_OK;
}

/*
 * Skip block b, whose directory entry is bad, but add its contribution to the base's digest, which covers all values.
 */
template <int SIZE> DEVICE void skip_delta(const codec_decoding &d, const codec_view &v, uint64_t b, uint32_t lane)
{
	delta_block o = {};

	o.base = d.base;
	if (d.checks)
		sum_base(d, o, v.n * SIZE, b * v.block_nvalues * SIZE / (4 * WIRE_CHUNK_WORDS),
			 chunks_of((uint64_t)block_values(&v, b) * SIZE), lane);
}

/* Decode a frame without blocks, whose result equals the base. Warps process the digest's chunks round-robin. */
template <int SIZE> DEVICE void read_unchanged(const codec_decoding &d, const codec_view &v, uint32_t lane)
{
	const uint64_t nbytes = v.n * SIZE, chunk = 4 * WIRE_CHUNK_WORDS, warp = blockIdx.x * WARPS + threadIdx.x / 32;
	uint64_t digest = 0;

	for (uint64_t i = warp; warp < d.warps && chunk * i < nbytes; i += d.warps) {
		const uint64_t at = chunk * i, some = nbytes - at < chunk ? nbytes - at : chunk;

		if (d.checks)
			digest += digest_chunk(d.base, nbytes, WIRE_SEED_VALUES, i, lane);
		if (d.sink.data && d.sink.data != d.base)
			copy_bytes(d.sink.data + at, d.base + at, (uint32_t)some, lane);
	}
	if (lane == 0 && digest) {
		atomicAdd(&d.found->base, (unsigned long long)digest);
		atomicAdd(&d.found->result, (unsigned long long)digest);
	}
}

#endif
