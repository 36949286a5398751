/* common/scratch.cuh - scratch memory of a call, in units that warps take and give back.
 *
 * A launch encodes or decodes any number of frames, but only as many warps run at once as the GPU has room for. They
 * share units of scratch memory. No more warps work on a frame than find units at once (useful_warps). If several
 * frames need more, warps wait: a warp that has units never waits for one that has none, because a warp takes its units
 * before its first block.
 */
#ifndef CODEC_CUDA_COMMON_SCRATCH_CUH
#define CODEC_CUDA_COMMON_SCRATCH_CUH

#include "common/warp.cuh"

/* Scratch memory that all frames of a call share. */
struct codec_units {
	uint32_t *taken; /* one bit a unit, set while a warp has it; 0 at first */
	uint8_t *memory; /* memory of all units */
	uint64_t each;   /* bytes of a unit */
	uint32_t count;  /* number of units; 0: this frame needs no scratch memory */
	uint32_t reserved;
};

/* Units that a warp has acquired; memory: NULL without units. */
struct taken_units {
	uint8_t *memory;
	uint32_t first, count;
};

/* Return the number of units for `nbytes` bytes, which are not 0. */
DEVICE uint32_t units_for(const codec_units &s, uint64_t nbytes)
{
	return (uint32_t)((nbytes + s.each - 1) / s.each);
}

/*
 * Return how many of a frame's warps, if each takes `nbytes` bytes, find units at once. CTAs are whole, and there is at
 * least one.
 */
DEVICE uint32_t useful_warps(const codec_units &s, uint64_t nbytes, uint32_t warps)
{
	if (!s.count || !nbytes)
		return warps;
	const uint32_t count = units_for(s, nbytes), each = blockDim.x / 32;
	const uint32_t groups = s.count / 32 * (32 / count) + s.count % 32 / count;
	const uint32_t most = groups < each ? each : groups / each * each;

	return warps < most ? warps : most;
}

/*
 * Return a mask of the groups of `count` units, by the number of their first one, that are free in word `word` of
 * s.taken. A group begins at a multiple of `count` within its word.
 */
DEVICE uint32_t free_groups(const codec_units &s, uint32_t word, uint32_t count)
{
	const uint32_t there = s.count - 32 * word;
	uint32_t units = ~((const volatile uint32_t *)s.taken)[word] & (there < 32 ? (1u << there) - 1 : FULL);
	uint32_t groups = 0;

	for (uint32_t bit = 0, all = FULL >> (32 - count); bit + count <= 32; bit += count)
		groups |= (uint32_t)((units >> bit & all) == all) << bit;
	return groups;
}

/*
 * Take enough units for `nbytes` bytes that no other warp has, by all lanes of a warp. There are at least as many
 * units, and they are at most 32.
 */
static __device__ taken_units take_units(const codec_units &s, uint64_t nbytes, uint32_t lane)
{
	const uint32_t none = ~0u, words = (s.count + 31) / 32;
	uint32_t first = none;

	if (!s.count || !nbytes)
		return {NULL, 0, 0};
	const uint32_t count = units_for(s, nbytes), groups = 32 / count;
	/* warps of a first frame find the units of their own numbers free */
	const uint32_t own = (gridDim.x * blockIdx.y + blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
	const uint32_t wanted = own % groups * count;

	for (uint32_t from = own / groups % words; first == none; from = (from + 32) % words) {
		uint32_t word = (from + lane) % words, found = free_groups(s, word, count);
		uint32_t some = __ballot_sync(FULL, found != 0), finder = some ? (uint32_t)__ffs((int)some) - 1 : 32;

		if (lane == finder) {
			uint32_t turned = __funnelshift_r(found, found, wanted);
			uint32_t bit = ((uint32_t)__ffs((int)turned) - 1 + wanted) % 32;
			uint32_t all = FULL >> (32 - count) << bit, before = atomicOr(s.taken + word, all) & all;

			if (!before)
				first = 32 * word + bit;
			else /* another warp has acquired the unit */
				atomicAnd(s.taken + word, ~(all & ~before));
		}
		if (finder < 32)
			first = __shfl_sync(FULL, first, (int)finder);
		else
			wait_briefly();
	}
	device_fence(); /* acquire: the former warp's accesses to the units come before this warp's */
	__syncwarp();
	return {s.memory + s.each * first, first, count};
}

/* Release units, by all lanes of a warp. */
static __device__ void give_units(const codec_units &s, const taken_units &t, uint32_t lane)
{
	__syncwarp(); /* no lane uses the memory any more */
	if (lane == 0 && t.memory) {
		device_fence(); /* release, for all lanes */
		atomicAnd(s.taken + t.first / 32, ~(FULL >> (32 - t.count) << t.first % 32));
	}
}

#endif
