/*
 * simd_loops.h - loops of row_loops.h and truncate_loops.h in vectors of LANES 32-bit words; common to all instruction
 * sets.
 *
 * Included by avx2.c and avx512.c, which define, besides the operations of encode_lanes.h:
 *   - F, SETF, LOADF, STOREF: a vector of floats
 *   - AS_F AS_V: reinterpret bits as floats, as words
 *   - ADDF MULF DIVF MINF: on floats; MINF gives b where a is NaN
 *   - FMA FNMA (a, b, c): a * b + c, c - a * b, rounded once
 *   - TRUNC: floats to integers, toward zero
 *   - FLOAT (v): integers to floats
 *   - SLL SRL SRA (v, n): shift all lanes by one count
 *   - XOR XOR3 MIN MAX: on words; signed
 *   - LEAST LARGEST (v): the smallest, the largest lane; signed
 *   - GT EQ EITHER: signed comparisons, as MASK; or of two masks
 *   - MULU ADDQ SRLQ: products of the lower halves of 64-bit lanes; sums, shifts
 *   - SETQ SEQUENCE: a 64-bit constant; lane 2i holds i, lane 2i + 1 holds i + BLOCKS / 2
 *   - UNPACKLOQ UNPACKHIQ: even, odd 64-bit lanes of a and b, interleaved
 *   - ODD_WORDS (a, b): a's lower words, and b's as upper ones
 *   - WIDEN8 WIDEN16 (p): bytes, halves to words
 *   - FROM_HALVES TO_HALVES: float16 at p to floats; floats, to nearest even, to float16 at p
 *   - STORE16 (p, v): store numbers below 65536 as LANES halves
 *   - NARROW (p, v[4]): store numbers below 256 as 4 * LANES bytes
 *   - SHLQ (v, w): shift each 64-bit lane by its own count
 *   - TABLE, TABLE_LOAD (x, by): 16 floats, each multiplied by `by`
 *   - TABLE_FIND (t, v, few): entries v, which is below 16, or below 8 if few
 *   - SIGNS: highest bits of the lanes, the first lane's lowest
 *   - PUT_NONTEMPORAL (p, v): non-temporal store; p is a multiple of SETTLE_ALIGN
 *   - CHAINS: number of random generators interleaved
 *
 * Each loop returns the number of values processed; the portable loops process the rest.
 */
#define STEP (4 * (size_t)LANES)

/*
 * There are 32 running sums, in NV vectors. A loop step loads four vectors of values, and adds vector k to the sums in
 * vector k mod NV. Value i must be added to sum i mod 32, so a step must begin at sum 0.
 */
_Static_assert(NV *LANES == 32 && 4 % NV == 0, "a step must begin at sum 0: for shorter vectors make V a pair of them");
_Static_assert(16 % LANES == 0, "the shortest rows that share a scale are 16 values, whole vectors");

/* Prefetch distance in bytes: memory is read while values are encoded. */
#define AHEAD 16384

static inline void fetch_ahead(const float_any *x)
{
	for (size_t i = 0; i < 4 * STEP; i += 64)
		_mm_prefetch((const char *)((uintptr_t)x + AHEAD + i), _MM_HINT_T1);
}

/* Return the maximum of v's lanes and x. */
static inline int32_t largest(V v, int32_t x)
{
	int32_t most = LARGEST(v);

	return most > x ? most : x;
}

/* Return the minimum of v's lanes and x. */
static inline int32_t least(V v, int32_t x)
{
	int32_t low = LEAST(v);

	return low < x ? low : x;
}

#include "simd_floats.h"
#include "simd_codes.h"
#include "simd_truncate.h"
