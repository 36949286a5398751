/*
 * lossless/planes.cuh - planes of regions that are not coded: find their runs of zeros, and write these planes directly
 * from values, without a buffer for planes. docs/spec/format.md, section 6.
 */
#ifndef CODEC_CUDA_LOSSLESS_PLANES_CUH
#define CODEC_CUDA_LOSSLESS_PLANES_CUH

#include "coder/encode.cuh"
#include "lossless/split.cuh"

/*
 * A lane's copy of the plan for a region, in shared memory. Fields marked "lane p" describe plane p; all other fields
 * are equal in all lanes.
 */
struct region_plan {
	place at;          /* position in the scale model, if there are offsets */
	uint8_t *to;       /* lane p: address at which plane p is written */
	uint64_t checksum; /* checksum of the block's parts of fixed planes */
	uint64_t first;    /* index of the block's first value */
	uint32_t m, k;     /* number of values; number of bytes of each plane from plane 1 on that is not fixed */
	uint32_t top;      /* number of bytes of plane 0: of values in quad rows that are not left out */
	uint32_t rows;     /* if the block has gaps: quad rows in the region, see quad_rows */
	uint32_t head;     /* head of the region */
	uint16_t constant; /* mask of planes whose bytes are all equal */
	/* mask of planes that must still be searched for runs of zeros, or for bytes that are not all equal */
	uint16_t unknown;
	/* mask of planes to encode if that saves bytes, except plane 0 of floats */
	uint16_t coded;
	uint16_t value;  /* lane p: OR of all bytes of plane p */
	uint32_t nbytes; /* lane p: bytes of plane p */
	/* lanes 4 p to 4 p + 3: bitmap of the runs that are not all zero, if plane p has mode ROWS */
	uint32_t kept;
	uint16_t nwaiting; /* number of coded planes that wait in scratch memory until they are written */
	uint16_t waiting;  /* lane p: 1 + index of plane p among the waiting planes; 0: it does not wait */
	/*
	 * the coded plane in the coder's memory: index p of the plane, size in bytes (0: there is no such plane), state
	 * of the coder, sizes
	 */
	uint16_t p, coded_nbytes;
	uint32_t low, more, nwords, nliterals;
	coded_sizes sizes;
};

/*
 * Number of words of shared memory for a warp that encodes values of `size` bytes: for each plane a buffer for put_raw
 * (two lines of 128 bytes and 3 bytes more), then the region_plan of each lane.
 */
#define LINE_WORDS 66
#define LINES_WORDS(size) (LINE_WORDS * (size))
#define ROOM_WORDS(size) (LINES_WORDS(size) + 32 * sizeof(region_plan) / 4)
static_assert(LINE_WORDS % 2 == 0 && sizeof(region_plan) % 8 == 0, "alignment of plans");

/* Return the lane's region_plan, in the warp's shared memory. */
template <int SIZE> DEVICE region_plan *plan_of(uint32_t *room, uint32_t lane)
{
	return (region_plan *)(room + LINES_WORDS(SIZE)) + lane;
}

DEVICE bool has_gaps(const region_plan *o)
{
	return o->head & WIRE_REGION_GAPS;
}

/*
 * Set o->at to the position of the lane's first value in the scale model, and return its address; NULL if there are no
 * offsets.
 */
DEVICE place *to_first(const job *j, region_plan *o, uint32_t lane)
{
	if (!j->v.model_parts.count)
		return NULL;
	o->at = place_at(j, o->first + (4 * lane < o->m ? 4 * lane : 0));
	return &o->at;
}

/*
 * Selectors of __byte_perm, indexed by the mask of live values (plane 0 is not 0) among four: they move the bytes of
 * live values together.
 */
static __device__ const uint16_t SQUEEZE[16] = {0x4444, 0x4440, 0x4441, 0x4410, 0x4442, 0x4420, 0x4421, 0x4210,
						0x4443, 0x4430, 0x4431, 0x4310, 0x4432, 0x4320, 0x4321, 0x3210};

/* Bytes of a lane's four values in a plane: index of the first byte, and number of bytes. */
struct squeezed {
	uint32_t at, count, selector;
};

/*
 * Return which bytes of a plane belong to the lane's four values in the next row of 128, and advance *seen, the number
 * of bytes of all earlier rows. word: the values' bytes of plane 0. n: how many of the four values exist.
 */
DEVICE squeezed squeeze_row(uint32_t word, uint32_t n, bool pruned, uint32_t *seen, uint32_t lane)
{
	const uint32_t mask = (pruned ? ~equal_bytes(word, 0) : FULL) & ((1u << n) - 1);
	uint32_t total;
	squeezed o = {*seen, (uint32_t)__popc(mask), SQUEEZE[mask]};

	o.at += warp_scan(o.count, lane, &total);
	*seen += total;
	return o;
}

/*
 * Copy those of the bytes [begin, end) of the buffer `line` that lie in its word `w` to the plane. to: destination of
 * byte 0, a multiple of 4.
 */
DEVICE void put_part(uint8_t *to, const uint32_t *line, uint32_t w, uint32_t begin, uint32_t end)
{
	if (begin <= 4 * w && 4 * w + 4 <= end) {
		*global((uint32_t *)to + w) = line[w];
		return;
	}
	for (uint32_t i = 4 * w; i < 4 * w + 4; i++)
		if (begin <= i && i < end)
			*global(to + i) = (uint8_t)(line[w] >> 8 * (i % 4));
}

/*
 * Write the raw planes in the mask `planes`, as aligned words, which bytes of live values fill without gaps. room: see
 * ROOM_WORDS.
 */
template <int SIZE>
DEVICE_CALL void put_raw(const job *j, const uint8_t *values, uint32_t planes, uint32_t *room, uint32_t lane)
{
	uint32_t *const line = shared(room);
	region_plan *plan = plan_of<SIZE>(line, 0);
	uint8_t *bytes = (uint8_t *)line;
	const bool pruned = plan[lane].head & WIRE_REGION_PRUNED;
	uint32_t seen = 0, put = 0; /* number of bytes per plane that were read so far, and that were written */
	uint32_t skew = 0;          /* lowest two bits of the address of each plane, two bits per plane */

	__syncwarp();
	for (int p = 0; p < SIZE; p++)
		skew |= ((uint32_t)(uint64_t)plan[p].to & 3) << 2 * p;
	split_rows<SIZE>(j, values + SIZE * plan[lane].first, plan[lane].m, to_first(j, plan + lane, lane),
			 has_gaps(plan + lane), lane, [&](uint32_t n, const uint32_t *word) {
				 const squeezed q = squeeze_row(word[0], n, pruned, &seen, lane);

				 for (int p = 0; p < SIZE; p++) {
					 uint8_t *at = bytes + 4 * LINE_WORDS * p + (skew >> 2 * p & 3) + (q.at - put);
					 const uint32_t some = __byte_perm(word[p], 0, q.selector);

					 if (planes >> p & 1)
						 for (uint32_t i = 0; i < 4; i++)
							 if (i < q.count)
								 at[i] = (uint8_t)(some >> 8 * i);
				 }
				 __syncwarp();
				 if (seen - put < WIRE_ROW)
					 return;
				 for (int p = 0; p < SIZE; p++) {
					 uint8_t *out = plan[p].to - (skew >> 2 * p & 3) + put;
					 uint32_t *own = line + LINE_WORDS * p;

					 if (!(planes >> p & 1))
						 continue;
					 put_part(out, own, lane, put ? 0 : skew >> 2 * p & 3, WIRE_ROW);
					 /* no barrier is needed: no other lane uses these words */
					 own[lane] = own[32 + lane];
					 if (lane == 0)
						 own[32] = own[64];
				 }
				 put += WIRE_ROW;
				 __syncwarp();
			 });
	for (int p = 0; p < SIZE; p++) {
		uint8_t *out = plan[p].to - (skew >> 2 * p & 3) + put;
		const uint32_t by = skew >> 2 * p & 3;

		for (uint32_t w = lane; planes >> p & 1 && 4 * w < by + seen - put; w += 32)
			put_part(out, line + LINE_WORDS * p, w, put ? 0 : by, by + seen - put);
	}
	__syncwarp();
}

/* Return the size in bytes of the bitmap of a plane of k bytes (mode ROWS). */
DEVICE uint32_t bitmap_nbytes(uint32_t k)
{
	return ((k + WIRE_ROW - 1) / WIRE_ROW + 7) / 8;
}

/* Return how many of plane p's k bytes lie in runs that are not all zero. kept: see region_plan. */
DEVICE uint32_t kept_nbytes(uint32_t kept, uint32_t p, uint32_t k, uint32_t lane)
{
	const uint32_t last = (k - 1) / WIRE_ROW;
	const uint32_t count = warp_sum(lane / 4 == p ? (uint32_t)__popc(kept) : 0);
	const uint32_t ends = __shfl_sync(FULL, kept, (int)(4 * p + last / 32)) >> last % 32 & 1;

	return WIRE_ROW * count - (ends ? WIRE_ROW * (last + 1) - k : 0);
}

/*
 * Find the runs that are not all zero, and the planes whose bytes are all equal, among the planes in the mask
 * `unknown`. Results are stored in the lane's region_plan.
 */
template <int SIZE> DEVICE_CALL void find_runs(const job *j, const uint8_t *values, uint32_t *room, uint32_t lane)
{
	region_plan *plan = plan_of<SIZE>(shared(room), lane);
	const uint32_t planes = plan->unknown, value = plan->value;
	const bool pruned = plan->head & WIRE_REGION_PRUNED;
	uint32_t seen = 0, kept = 0, varied = 0;

	split_rows<SIZE>(j, values + SIZE * plan->first, plan->m, to_first(j, plan, lane), has_gaps(plan), lane,
			 [&](uint32_t n, const uint32_t *word) {
				 const uint32_t run = seen / WIRE_ROW;
				 const squeezed q = squeeze_row(word[0], n, pruned, &seen, lane);
				 /* number of the lane's bytes that lie in run `run` */
				 const uint32_t here = q.at / WIRE_ROW > run ? 0 : WIRE_ROW * (run + 1) - q.at;

				 for (int p = 0; p < SIZE; p++) {
					 const uint32_t some = __byte_perm(word[p], 0, q.selector),
							own = keep_bytes(some, here);
					 const uint32_t only = __shfl_sync(FULL, value, p) * ONES;

					 if (!(planes >> p & 1))
						 continue;
					 const bool now = __any_sync(FULL, own != 0),
						    then = __any_sync(FULL, (some ^ own) != 0);

					 if (lane == 4 * p + run / 32)
						 kept |= (uint32_t)now << run % 32;
					 if (lane == 4 * p + (run + 1) / 32)
						 kept |= (uint32_t)then << (run + 1) % 32;
					 varied |= (uint32_t)(keep_bytes(some ^ only, q.count) != 0) << p;
				 }
			 });
	plan->kept = kept;
	plan->constant |= planes & ~__reduce_or_sync(FULL, varied);
}

/* Write the planes in the mask `planes`, which have mode ROWS: bitmap, then the runs that are not all zero. */
template <int SIZE>
DEVICE_CALL void put_runs(const job *j, const uint8_t *values, uint32_t planes, uint32_t *room, uint32_t lane)
{
	region_plan *plan = plan_of<SIZE>(shared(room), 0);
	const uint32_t kept = plan[lane].kept, k = plan[lane].k, top = plan[lane].top;
	const bool pruned = plan[lane].head & WIRE_REGION_PRUNED;
	uint32_t seen = 0;

	__syncwarp();
	for (int p = 0; p < SIZE; p++) {
		const uint32_t bits = __shfl_sync(FULL, kept, (int)(4 * p + lane / 4) % 32);
		uint8_t *out = plan[p].to;

		if (planes >> p & 1 && lane < bitmap_nbytes(p ? k : top))
			out[lane] = (uint8_t)(bits >> 8 * (lane % 4));
	}
	split_rows<SIZE>(
		j, values + SIZE * plan[lane].first, plan[lane].m, to_first(j, plan + lane, lane),
		has_gaps(plan + lane), lane, [&](uint32_t n, const uint32_t *word) {
			const uint32_t run = seen / WIRE_ROW, next = run + 1, word_at = lane % 4;
			const squeezed q = squeeze_row(word[0], n, pruned, &seen, lane);
			/*
			 * number of stored runs before `run`, to be summed over the four lanes that hold a plane's
			 * bitmap
			 */
			uint32_t before = (uint32_t)__popc(word_at < run / 32    ? kept
							   : word_at == run / 32 ? kept & ((1u << run % 32) - 1)
										 : 0);

			before += __shfl_xor_sync(FULL, before, 1);
			before += __shfl_xor_sync(FULL, before, 2);
			for (int p = 0; p < SIZE; p++) {
				const uint32_t here = __shfl_sync(FULL, kept, (int)(4 * p + run / 32)) >> run % 32 & 1;
				const uint32_t then =
					__shfl_sync(FULL, kept, (int)(4 * p + next / 32) % 32) >> next % 32 & 1;
				const uint32_t from = __shfl_sync(FULL, before, 4 * p),
					       some = __byte_perm(word[p], 0, q.selector);
				uint8_t *out = plan[p].to;

				if (!(planes >> p & 1))
					continue;
				out += bitmap_nbytes(p ? k : top);
				for (uint32_t i = 0; i < q.count; i++) {
					const uint32_t at = q.at + i;
					const bool second = at / WIRE_ROW > run;

					if (second ? then : here)
						out[WIRE_ROW * (from + (second ? here : 0)) + at % WIRE_ROW] =
							(uint8_t)(some >> 8 * i);
				}
			}
		});
	__syncwarp();
}

#endif
