/*
 * select.c - find the largest magnitudes of a chunk. The guess of the threshold affects only the time, not the result.
 */
#include "topk.h"

/*
 * Return the largest key in [low, high), in steps of `step`, that the magnitudes of at least `kept` of n values reach.
 * At least `kept` values must reach `low`.
 */
static uint32_t last_key(const struct kernels *k, const float_any *x, uint64_t n, uint64_t kept, uint32_t low,
			 uint32_t high, uint32_t step)
{
	while (high - low > step) {
		uint32_t middle = low + (high - low) / 2;

		if (k->count_above(x, n, middle) >= kept)
			low = middle;
		else
			high = middle;
	}
	return low;
}

#define COARSE (1u << 21) /* step of the coarse search, in patterns: at most a quarter of an octave */
#define SLACK (1u << 20)  /* half of COARSE: a good threshold yields 1.5 times as many candidates as are kept */

codec_status topk_select(const struct kernels *k, const float_any *x, uint64_t n, uint64_t kept, uint32_t *guess,
			 struct work *w)
{
	uint64_t room = MIN(n, 4 * kept + 64), count = 0, above = 0, ties;
	uint32_t low = *guess, key, most = 0;

	if (low)
		count = k->list_above(x, n, low, room, w->at);
	if (count < kept || count > room) {
		low = last_key(k, x, n, kept, 0, ROUND_ABS + 1, COARSE);
		count = k->list_above(x, n, low, n, w->at);
	}
	for (uint64_t i = 0; i < count; i++) {
		w->candidate[i] = x[w->at[i]];
		most = MAX(most, round_bits(w->candidate[i]) & ROUND_ABS);
	}
	if (most >= ROUND_INF)
		return CODEC_NONFINITE;
	key = last_key(k, (const float_any *)w->candidate, count, kept, low, most + 1, 1);
	*guess = key > SLACK ? key - SLACK : 0;
	above = k->count_above((const float_any *)w->candidate, count, key + 1);
	ties = kept - above;
	for (uint64_t i = 0, to = 0; to < kept && i < count; i++) {
		uint32_t own = round_bits(w->candidate[i]) & ROUND_ABS;

		if (own < key || (own == key && !ties))
			continue;
		ties -= own == key;
		w->at[to] = w->at[i];
		w->candidate[to++] = w->candidate[i];
	}
	return CODEC_OK;
}
