/*
 * delta/classes.cuh - bit planes of the class numbers of a block's values, and iteration over the values of a class, by
 * one warp.
 */
#ifndef CODEC_CUDA_DELTA_CLASSES_CUH
#define CODEC_CUDA_DELTA_CLASSES_CUH

#include "delta/delta.cuh"

#define GROUP 1024     /* number of values in a group; a bit plane of a group has 32 words */
#define CLASS_PLANES 4 /* bits of a class number */
#define NO_CLASS 15u   /* class of padding after the end of a block */

/*
 * Bytes of scratch memory for each 1,024 values of a block: bit planes of class numbers, then sums of the digest's
 * chunks. size: bytes per value.
 */
#define DELTA_ROOM(size) (GROUP / 8 * CLASS_PLANES + 8 * (size))

/* State of a block while it is decoded. `count`: number of changes, from the region's head. */
struct delta_block {
	delta_kind q;
	const uint8_t *base;
	uint8_t *to;    /* destination of the tensor's values, which may be the base; NULL: only check */
	uint64_t first; /* index of the first value */
	uint32_t m, mode, field, count;
	uint32_t *list;   /* output: entries of the block's changes, see write_list; NULL: do not list them */
	uint32_t *planes; /* bit planes of class numbers, in scratch memory */
	/*
	 * sums of the digest's chunks: first of the base, then of the result, as changes are added; NULL: do not
	 * compute the digest
	 */
	unsigned long long *sums;
};

/*
 * Constants to compute the classes of values of 2 bytes, in both halves of a word: 1 - S, where S is the scale, and
 * twice the class of exponent 1.
 */
struct class_pair {
	uint32_t field, add, least;
};

/*
 * Write the bit planes of the class numbers of a group of 2-byte values, which begin at a multiple of 16 bytes. A lane
 * computes the classes of 8 values, two at a time, and writes a byte of each plane. *most: twice the largest class so
 * far, in each half of the word; updated.
 */
DEVICE void put_planes(const uint8_t *values, uint32_t mbits, const class_pair &by, uint8_t *planes, uint32_t *most,
		       uint32_t lane)
{
	for (uint32_t s = 0; s < GROUP / 256; s++) {
		const uint4 w = global((const uint4 *)values)[32 * s + lane];
		const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
		uint32_t classes = 0; /* classes of values 0, 2, 4, 6, 1, 3, 5, 7, four bits each */

		for (uint32_t k = 0; k < 4; k++) {
			const uint32_t field = pairs[k] >> mbits & by.field;
			const uint32_t twice = __vminu2(__viaddmax_s16x2(field, by.add, by.least), 0x00110011);

			*most = __viaddmax_s16x2(twice, 0, *most);
			classes |= (twice >> 1 & 0x000f000f) << 4 * k;
		}
		for (uint32_t p = 0; p < CLASS_PLANES; p++) {
			uint32_t bits = classes >> p & 0x11111111;

			bits = (bits | bits >> 15) & 0x3333;
			bits = (bits | bits >> 2) & 0x0f0f;
			planes[GROUP / 8 * p + 32 * s + lane] = (uint8_t)(bits | bits >> 4);
		}
	}
}

/* Compute the bit planes of the class numbers of a block's values. Return the largest class. */
template <int SIZE> DEVICE uint32_t make_planes(const delta_block &o, int scale, uint32_t lane)
{
	const uint32_t least = 2 * delta_class(1, scale), add = (uint32_t)(1 - scale) & 0xffff;
	const class_pair by = {o.q.last | o.q.last << 16, add | add << 16, least | least << 16};
	uint32_t top = 0, most = 0;

	for (uint32_t from = 0; from < o.m; from += GROUP) {
		if (SIZE == 2 && o.m - from >= GROUP && (uint64_t)o.base % sizeof(uint4) == 0) {
			put_planes(o.base + SIZE * (o.first + from), o.q.mbits, by,
				   (uint8_t *)(o.planes + CLASS_PLANES * (from / 32)), &most, lane);
			continue;
		}
		uint32_t mine[CLASS_PLANES] = {0};

		for (uint32_t k = 0; k < 32; k++) {
			const uint32_t i = from + 32 * k + lane;
			const bool there = i < o.m;
			const uint32_t class_ =
				there ? delta_class(delta_exponent(&o.q, load_value<SIZE>(o.base, o.first + i)), scale)
				      : NO_CLASS;

			top = there && class_ > top ? class_ : top;
			for (uint32_t p = 0; p < CLASS_PLANES; p++) {
				const uint32_t word = __ballot_sync(FULL, class_ >> p & 1);

				mine[p] = lane == k ? word : mine[p];
			}
		}
		for (uint32_t p = 0; p < CLASS_PLANES; p++)
			o.planes[CLASS_PLANES * (from / 32) + 32 * p + lane] = mine[p];
	}
	__syncwarp();
	most = (most & 0xffff) > most >> 16 ? most & 0xffff : most >> 16;
	return warp_max(top > most / 2 ? top : most / 2);
}

/* Return this lane's 32 bits of the mask of the values in a class, for group g of 1,024 values. */
DEVICE uint32_t members_of(const delta_block &o, uint32_t class_, uint32_t g, uint32_t lane)
{
	const uint32_t *plane = global(o.planes) + 32 * CLASS_PLANES * g + lane;
	uint32_t word = FULL;

	for (uint32_t p = 0; p < CLASS_PLANES; p++)
		word &= plane[32 * p] ^ (class_ >> p & 1 ? 0 : FULL);
	return word;
}

/*
 * Cursor over the members of a class, which are the values in it, in a group of 1,024 values. The first `used` members
 * have been passed. upto: number of members up to and including this lane's word.
 */
struct class_cursor {
	uint32_t class_, group, word, upto, total, used;
};

DEVICE void open_group(const delta_block &o, class_cursor *c, uint32_t group, uint32_t lane)
{
	c->group = group;
	c->word = members_of(o, c->class_, group, lane);
	const uint32_t own = (uint32_t)__popc(c->word);

	c->upto = own + warp_scan(own, lane, &c->total);
	c->used = 0;
}

/*
 * Advance by `gap` >= 1 members of the class, and set *place to the index in the block of the last of them. Return
 * false if fewer members are left.
 */
DEVICE bool pass_members(const delta_block &o, class_cursor *c, uint32_t gap, uint32_t *place, uint32_t lane)
{
	uint32_t target = gap - 1;

	while (target >= c->total - c->used) {
		target -= c->total - c->used;
		if (GROUP * (c->group + 1) >= o.m)
			return false;
		open_group(o, c, c->group + 1, lane);
	}
	target += c->used;
	const uint32_t f = (uint32_t)__ffs((int)__ballot_sync(FULL, c->upto > target)) - 1;
	const uint32_t word = __shfl_sync(FULL, c->word, f), upto = __shfl_sync(FULL, c->upto, f);

	*place = GROUP * c->group + 32 * f + warp_select(word, target - (upto - (uint32_t)__popc(word)), lane);
	c->used = target + 1;
	return true;
}

#endif
