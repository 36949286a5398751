/*
 * source.h - read decisions from a fuzzer's input and, when the input is used up, from a random generator that the
 * input seeds.
 */
#ifndef FUZZ_SOURCE_H
#define FUZZ_SOURCE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Source of decisions. Equal inputs give equal decisions on every machine. A short input mostly gives random decisions;
 * with a long input the fuzzer controls them.
 */
struct source {
	const uint8_t *p, *end;
	uint64_t state;
};

/* Return 64 random bits for tensor contents, from the generator: the input would be used up soon. */
static inline uint64_t noise(struct source *s)
{
	uint64_t x = s->state += 0x9e3779b97f4a7c15ull;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* Open an input. Its first 4 bytes seed the generator of noise(). */
static inline struct source source_open(const uint8_t *data, size_t size)
{
	struct source s = {data, data + size, size};

	for (int i = 0; i < 4 && s.p < s.end; i++)
		s.state = s.state << 8 | *s.p++;
	noise(&s);
	return s;
}

/* Return a decision in 0 .. n - 1. */
static inline uint64_t below(struct source *s, uint64_t n)
{
	uint64_t x = 0;

	if (n < 2)
		return 0;
	if (s->p == s->end)
		return noise(s) % n;
	for (uint64_t left = n - 1; left && s->p < s->end; left >>= 8)
		x = x << 8 | *s->p++;
	return x % n;
}

static inline uint64_t between(struct source *s, uint64_t least, uint64_t most)
{
	return most <= least ? least : least + below(s, most - least + 1);
}

/* Return 1 with probability 1 / n, else 0. If the input's bytes are 0, return 0. */
static inline int one_in(struct source *s, uint64_t n)
{
	return below(s, n) == n - 1;
}

#endif
