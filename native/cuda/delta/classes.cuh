/* delta/classes.cuh - planes of the classes of a block's values, and the values of a class in order. By a warp. */
#ifndef CODEC_CUDA_DELTA_CLASSES_CUH
#define CODEC_CUDA_DELTA_CLASSES_CUH

#include "delta/delta.cuh"

#define GROUP 1024     /* values whose planes are 32 words each */
#define CLASS_PLANES 4 /* bits of a class */
#define NO_CLASS 15u   /* class of values behind the end of a block */

/* Bytes of scratch memory for each 1,024 values of a block: planes, then sums of chunks. */
#define DELTA_ROOM(size) (GROUP / 8 * CLASS_PLANES + 8 * (size))

/* Block being decoded. `count`: number of changes in its head. */
struct delta_block {
	delta_kind q;
	const uint8_t *base;
	uint8_t *to;    /* destination of all values of the tensor, which may be the base; NULL: none */
	uint64_t first; /* index of the first value */
	uint32_t m, mode, field, count;
	uint32_t *list;           /* output: entries of all changes, see write_list; NULL: not wanted */
	uint32_t *planes;         /* scratch memory */
	unsigned long long *sums; /* sums of chunks: of the base, to which changes are added; NULL: not wanted */
};

/* Constants of classes of values of 2 bytes, two in a word: 1 - S, and twice the class of exponent 1. */
struct class_pair {
	uint32_t field, add, least;
};

/*
 * Write the planes of a group of values of 2 bytes, at a multiple of 16. A lane computes the classes of 8 values, two
 * at a time, and writes a byte of each plane. *most: twice the largest class of both halves, which may grow.
 */
DEVICE void put_planes(const uint8_t *values, uint32_t mbits, const class_pair &by, uint8_t *planes, uint32_t *most,
		       uint32_t lane)
{
	for (uint32_t s = 0; s < GROUP / 256; s++) {
		const uint4 w = global((const uint4 *)values)[32 * s + lane];
		const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
		uint32_t classes = 0; /* four bits each: values 0, 2, 4, 6, 1, 3, 5, 7 */

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

/* Make the planes of a block's classes. Returns the largest class. */
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

/* Return this lane's word of the members of a class in group g. */
DEVICE uint32_t members_of(const delta_block &o, uint32_t class_, uint32_t g, uint32_t lane)
{
	const uint32_t *plane = global(o.planes) + 32 * CLASS_PLANES * g + lane;
	uint32_t word = FULL;

	for (uint32_t p = 0; p < CLASS_PLANES; p++)
		word &= plane[32 * p] ^ (class_ >> p & 1 ? 0 : FULL);
	return word;
}

/* Members of a class in a group of values, of which the first `used` are passed. upto: members up to this lane's word.
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

/* Skip `gap` >= 1 members; set *place to the position of the last one. Returns false if there are fewer. */
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
