/*
 * common/warp.cuh - loads and stores at unaligned addresses, operations on the bytes of words, and reductions over the
 * 32 lanes of a warp.
 *
 * A "quad" is four consecutive values of a tensor or plane. A "row" is 128 values, of which each lane processes one
 * quad: values 4 * lane to 4 * lane + 3.
 */
#ifndef CODEC_CUDA_COMMON_WARP_CUH
#define CODEC_CUDA_COMMON_WARP_CUH

#include "codec/codec_engine.h"
#include "exact/bits.h"
#include "exact/checksum.h"
#include "exact/wire.h"

#define DEVICE static __device__ __forceinline__
#define DEVICE_CALL static __device__ __noinline__ /* large functions that are not called in loops over values */
#define FULL 0xffffffffu
#define ONES 0x01010101u

static_assert(WIRE_LANES == 32, "a lane of the coder is a lane of a warp");

/* Declare that p points to global memory, which the compiler cannot infer for an address loaded from memory. */
template <class T> DEVICE T *global(T *p)
{
	__builtin_assume(__isGlobal(p));
	return p;
}

/* Declare to the compiler that p points to shared memory. */
template <class T> DEVICE T *shared(T *p)
{
	__builtin_assume(__isShared(p));
	return p;
}

/* Return x unchanged, so that the compiler keeps it in a register instead of computing it again. */
DEVICE uint32_t opaque(uint32_t x)
{
#ifdef __CUDA_ARCH__
	asm volatile("" : "+r"(x));
#endif
	return x;
}

/* Load global memory that is read only once, with a hint that the L2 cache evicts it first. */
template <class T> DEVICE T load_once(const T *p)
{
#ifdef __CUDA_ARCH__
	return __ldcs(global(p));
#else
	return *p;
#endif
}

/* Store to global memory that is not read again soon, with a hint that the L2 cache evicts it first. */
template <class T> DEVICE void store_once(T *p, T x)
{
#ifdef __CUDA_ARCH__
	__stcs(global(p), x);
#else
	*p = x;
#endif
}

/* Prefetch the cache line at p into the L2 cache. */
DEVICE void prefetch(const void *p)
{
#ifdef __CUDA_ARCH__
	asm volatile("prefetch.global.L2 [%0];" ::"l"(global(p)));
#else
	(void)p;
#endif
}

#define LINE_NBYTES 128 /* bytes of a cache line */

/* Return the sum of x over all lanes of the warp. */
DEVICE uint32_t warp_sum(uint32_t x)
{
	return __reduce_add_sync(FULL, x);
}

/*
 * Return the sum of x over all lanes of the warp. Parts of 27 bits are added separately, because 32 parts cannot
 * overflow 32 bits.
 */
DEVICE uint64_t warp_sum(uint64_t x)
{
	const uint32_t part = (1u << 27) - 1;

	return warp_sum((uint32_t)x & part) + ((uint64_t)warp_sum((uint32_t)(x >> 27) & part) << 27) +
	       ((uint64_t)warp_sum((uint32_t)(x >> 54)) << 54);
}

DEVICE uint32_t warp_max(uint32_t x)
{
	return __reduce_max_sync(FULL, x);
}

/*
 * Return the exclusive prefix sum of x over lanes (the sum over lanes with a smaller index). Set *total to the sum over
 * all lanes.
 */
DEVICE uint32_t warp_scan(uint32_t x, uint32_t lane, uint32_t *total)
{
	uint32_t sum = x;

	for (uint32_t by = 1; by < 32; by *= 2) {
		uint32_t y = __shfl_up_sync(FULL, sum, by);

		sum += lane >= by ? y : 0;
	}
	*total = __shfl_sync(FULL, sum, 31);
	return sum - x;
}

/* Load a little-endian word at any address. Only the aligned words that contain its bytes are read. */
DEVICE uint32_t load32(const uint8_t *p)
{
	const uint32_t *w = (const uint32_t *)((uint64_t)p & ~3ull);
	uint32_t by = (uint32_t)((uint64_t)p & 3) * 8;

	return by ? w[0] >> by | w[1] << (32 - by) : w[0];
}

/* Load the first n < 4 bytes at p as a little-endian word. */
DEVICE_CALL uint32_t load_few(const uint8_t *p, uint32_t n)
{
	uint32_t x = 0;

	for (uint32_t i = 0; i < n; i++)
		x |= (uint32_t)p[i] << 8 * i;
	return x;
}

/* Load the first min(n, 4) bytes at p as a little-endian word. If n < 4, no byte after them is read. */
DEVICE uint32_t load_bytes(const uint8_t *p, uint32_t n)
{
	return n >= 4 ? load32(p) : load_few(p, n);
}

/*
 * Load n <= 4 values of SIZE bytes from p, a multiple of SIZE; set the other elements of x to 0. Four aligned values
 * need one load.
 */
template <int SIZE> DEVICE void load_quad(const uint8_t *p, uint32_t n, uint64_t x[4])
{
	if (n == 4 && (uint64_t)p % (SIZE < 8 ? 4 * SIZE : 16) == 0) {
		if (SIZE == 1) {
			uint32_t w = *(const uint32_t *)p;

			for (int k = 0; k < 4; k++)
				x[k] = w >> 8 * k & 255;
		} else if (SIZE == 2) {
			uint2 w = *(const uint2 *)p;

			x[0] = w.x & 0xffff, x[1] = w.x >> 16, x[2] = w.y & 0xffff, x[3] = w.y >> 16;
		} else {
			uint4 w = *(const uint4 *)p, u = w;

			if (SIZE == 8)
				u = *(const uint4 *)(p + 16);
			x[0] = SIZE == 4 ? w.x : w.x | (uint64_t)w.y << 32;
			x[1] = SIZE == 4 ? w.y : w.z | (uint64_t)w.w << 32;
			x[2] = SIZE == 4 ? w.z : u.x | (uint64_t)u.y << 32;
			x[3] = SIZE == 4 ? w.w : u.z | (uint64_t)u.w << 32;
		}
		return;
	}
	for (uint32_t k = 0; k < 4; k++)
		x[k] = k >= n      ? 0
		       : SIZE == 1 ? p[k]
		       : SIZE == 2 ? ((const uint16_t *)p)[k]
		       : SIZE == 4 ? ((const uint32_t *)p)[k]
				   : ((const uint64_t *)p)[k];
}

/* Store n <= 4 values of SIZE bytes at p, a multiple of SIZE. Four aligned values need one store. */
template <int SIZE> DEVICE void store_quad(uint8_t *p, uint32_t n, const uint64_t x[4])
{
	if (n == 4 && (uint64_t)p % (SIZE < 8 ? 4 * SIZE : 16) == 0) {
		if (SIZE == 1) {
			*(uint32_t *)p = (uint32_t)(x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24);
		} else if (SIZE == 2) {
			*(uint2 *)p = {(uint32_t)(x[0] | x[1] << 16), (uint32_t)(x[2] | x[3] << 16)};
		} else if (SIZE == 4) {
			*(uint4 *)p = {(uint32_t)x[0], (uint32_t)x[1], (uint32_t)x[2], (uint32_t)x[3]};
		} else {
			for (int k = 0; k < 4; k += 2)
				*(uint4 *)(p + 8 * k) = {(uint32_t)x[k], (uint32_t)(x[k] >> 32), (uint32_t)x[k + 1],
							 (uint32_t)(x[k + 1] >> 32)};
		}
		return;
	}
	for (uint32_t k = 0; k < n; k++)
		if (SIZE == 1)
			p[k] = (uint8_t)x[k];
		else if (SIZE == 2)
			((uint16_t *)p)[k] = (uint16_t)x[k];
		else if (SIZE == 4)
			((uint32_t *)p)[k] = (uint32_t)x[k];
		else
			((uint64_t *)p)[k] = x[k];
}

/*
 * Copy n bytes between any addresses, in words that are aligned at the destination. Called by one warp. GLOBAL: the
 * source is in global memory.
 */
template <bool GLOBAL = true>
static __device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n, uint32_t lane)
{
	uint64_t skip = (4 - (uint64_t)to % 4) % 4, whole = n > skip ? (n - skip) / 4 : 0;
	uint32_t *words = global((uint32_t *)(to + skip));

	const uint8_t *source = (GLOBAL ? global(from) : from) + skip;
	uint64_t i = lane;

	if ((uint64_t)source % 4 == 0)
		for (; i + 7 * 32 < whole; i += 8 * 32) {
			uint32_t word[8];

			for (uint32_t k = 0; k < 8; k++)
				word[k] = ((const uint32_t *)source)[i + 32 * k];
			for (uint32_t k = 0; k < 8; k++)
				words[i + 32 * k] = word[k];
		}
	for (; i < whole; i += 32)
		words[i] = load32(source + 4 * i);
	if (lane < skip && lane < n)
		to[lane] = from[lane];
	for (i = skip + 4 * whole + lane; i < n; i += 32)
		to[i] = from[i];
}

/* Return word x with all bytes except the first n set to 0. */
DEVICE uint32_t keep_bytes(uint32_t x, uint32_t n)
{
	return n < 4 ? x & ((1u << 8 * n) - 1) : x;
}

/* Return a mask of four bits: bit i is set if byte i of x equals `byte`. */
DEVICE uint32_t equal_bytes(uint32_t x, uint32_t byte)
{
	uint32_t d = x ^ byte * ONES;
	uint32_t zero = ~(((d & 0x7f7f7f7fu) + 0x7f7f7f7fu) | d) &
			0x80808080u; /* high bit of each byte that is 0; exact, no carry between bytes */

	return (zero >> 7 & 1) | (zero >> 14 & 2) | (zero >> 21 & 4) | (zero >> 28 & 8);
}

/* Return a word whose bytes are 255 where bytes of x equal `byte`, and 0 elsewhere. */
DEVICE uint32_t equal_mask(uint32_t x, uint32_t byte)
{
	uint32_t d = x ^ byte * ONES;

	return (~(((d & 0x7f7f7f7fu) + 0x7f7f7f7fu) | d) >> 7 & ONES) * 255;
}

/* Return a word whose bytes are 255 where a, b, c and d (lowest byte first) are negative, and 0 elsewhere. */
DEVICE uint32_t sign_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
#ifdef __CUDA_ARCH__
	uint32_t low, high;

	/* selectors of 8 and above make prmt replicate the sign of a byte */
	asm("prmt.b32 %0, %1, %2, 0xfb;" : "=r"(low) : "r"(a), "r"(b));
	asm("prmt.b32 %0, %1, %2, 0xfb;" : "=r"(high) : "r"(c), "r"(d));
	return __byte_perm(low, high, 0x5410);
#else
	return (a >> 31) * 255 | (b >> 31) * 255 << 8 | (c >> 31) * 255 << 16 | (d >> 31) * 255 << 24;
#endif
}

/*
 * OR up to 32 bits into a region from bit index `bit` on. The region's address is a multiple of 4 bytes. Other lanes
 * may write other bits of the same words.
 */
DEVICE void or_bits(uint8_t *region, uint64_t bit, uint32_t x)
{
	uint32_t *word = global((uint32_t *)region) + bit / 32;
	uint32_t low = x << bit % 32, high = __funnelshift_l(x, 0, (uint32_t)(bit % 32));

	if (low)
		atomicOr(word, low);
	if (high)
		atomicOr(word + 1, high);
}

/* Sleep for about half a microsecond, so that a loop that polls memory leaves the GPU to other warps. */
DEVICE void wait_briefly()
{
#ifdef __CUDA_ARCH__
	__nanosleep(500);
#endif
}

/*
 * Acquire and release fence, device scope. __threadfence() is sequentially consistent, which costs more and is not
 * needed for flags and counters.
 */
DEVICE void device_fence()
{
#ifdef __CUDA_ARCH__
	asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
	__threadfence();
#endif
}

#endif
