/*
 * common/scratch.cuh - scratch memory of a call, divided into units of equal size that warps acquire and release.
 *
 * A launch encodes or decodes any number of frames, but the GPU runs only a limited number of warps at once. These
 * warps share the units of scratch memory. At most as many warps work on a frame as can own units at the same time
 * (useful_warps). If several frames need more units than exist, warps wait for units. There is no deadlock: a warp
 * acquires its units before its first block, so a warp that has units never waits for a warp that has none.
 */
#ifndef CODEC_CUDA_COMMON_SCRATCH_CUH
#define CODEC_CUDA_COMMON_SCRATCH_CUH

#include "common/warp.cuh"

/* Scratch memory that all frames of a call share. */
struct codec_units {
	uint32_t *taken; /* bit mask, one bit per unit, set while a warp owns the unit; 0 before the launch */
	uint8_t *memory; /* memory of all units */
	uint64_t each;   /* bytes of a unit */
	uint32_t count;  /* number of units; 0: this frame needs no scratch memory */
	uint32_t reserved;
};

/* Adjacent units that a warp has acquired; memory NULL: no units. */
struct taken_units {
	uint8_t *memory;
	uint32_t first, count;
};

/* Return the number of units that hold `nbytes` > 0 bytes. */
DEVICE uint32_t units_for(const codec_units &s, uint64_t nbytes)
{
	return (uint32_t)((nbytes + s.each - 1) / s.each);
}

/*
 * Return how many of a frame's warps can own `nbytes` bytes of units at the same time, rounded down to whole CTAs, at
 * least one CTA.
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
 * Find free groups of `count` units in word `word` of the bit mask s.taken. Return a mask in which the bit of a group's
 * first unit is set if all units of the group are free. Groups begin at multiples of `count` within the word.
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
 * Acquire adjacent units for `nbytes` bytes, at most 32 units and at most s.count, and wait until they are free. Return
 * their address; NULL if the frame needs none. Called by all lanes of a warp.
 */
static __device__ taken_units take_units(const codec_units &s, uint64_t nbytes, uint32_t lane)
{
	const uint32_t none = ~0u, words = (s.count + 31) / 32;
	uint32_t first = none;

	if (!s.count || !nbytes)
		return {NULL, 0, 0};
	const uint32_t count = units_for(s, nbytes), groups = 32 / count;
	/*
	 * start at the group with this warp's number in the grid: the first warps of a launch then find free groups at
	 * once
	 */
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
			else /* another warp has acquired one of these units */
				atomicAnd(s.taken + word, ~(all & ~before));
		}
		if (finder < 32)
			first = __shfl_sync(FULL, first, (int)finder);
		else
			wait_briefly();
	}
	device_fence(); /* acquire fence: the previous owner's accesses to the units come before this warp's */
	__syncwarp();
	return {s.memory + s.each * first, first, count};
}

/* Release units. Called by all lanes of a warp. */
static __device__ void give_units(const codec_units &s, const taken_units &t, uint32_t lane)
{
	__syncwarp(); /* all lanes have finished using the memory */
	if (lane == 0 && t.memory) {
		device_fence(); /* release fence, for all lanes */
		atomicAnd(s.taken + t.first / 32, ~(FULL >> (32 - t.count) << t.first % 32));
	}
}

#endif
