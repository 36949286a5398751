/*
 * test_coder.c - test tables and codebooks, and the kernels of all instruction sets for the lane coder and for planes.
 */
#include <stdlib.h>

#include "job/api.h"
#include "guard.h"
#if defined(__x86_64__)
#include "isa/permute_avx2.h"
#endif

static void test_tables_match_their_formulas(void **unused)
{
	static const uint32_t key[] = {CHECKSUM_KEYS};

	(void)unused;
	for (uint32_t i = 0; i < WIRE_CHUNK_WORDS; i++)
		assert_int_equal(key[i], bits_mix32(i + 1) | 1);
#if defined(__x86_64__)
	for (unsigned m = 0; m < 256; m++) {
		unsigned n = (unsigned)__builtin_popcount(m), seen = 0;

		for (unsigned lane = 0; lane < 8; lane++) {
			if (!(m >> lane & 1))
				continue;
			assert_int_equal(EXPAND[m] >> 8 * lane & 255, seen);
			assert_int_equal(COMPRESS[m] >> 8 * (8 - n + seen) & 255, lane);
			seen++;
		}
	}
#endif
}

static void test_bits_round_trip(void **unused)
{
	(void)unused;
	for (uint32_t x = 0; x < 1 << 16; x++)
		for (int shift = 4; shift <= 7; shift += 3) { /* 4: float64; 7: other dtypes */
			uint16_t zero = (uint16_t)(1 << shift), p = x & 0x7fff;
			uint16_t o = (uint16_t)(next_random() % WIRE_CIRCLE(zero)), u = bits_lower(p, o, zero);
			uint16_t y = bits_turn((uint16_t)x, o, shift);

			assert_true(u < WIRE_PATTERNS && (u < zero) == (p < zero));
			assert_int_equal(bits_raise(u, o, zero), p);
			assert_int_equal(bits_lower(p, 0, zero), p);
			if (p >= zero)
				assert_int_equal((u - zero + o) % WIRE_CIRCLE(zero), p - zero);
			assert_int_equal(y >> 8, u >> shift & 255);
			assert_int_equal(bits_unturn(y, o, shift), x);
		}
	assert_int_equal(bits_mean(-7, 2), -3);
	assert_int_equal(bits_mean(7, 2), 4);
	assert_int_equal(bits_mean(-8, 3), -3);
}

/* Return the minimum of sum(weight * code length) for k weights and codes of limited length, by exhaustive search. */
static uint64_t cheapest(const uint32_t *w, int k, int max_code_length, int left, uint64_t kraft)
{
	uint64_t best = UINT64_MAX;

	if (left == 0)
		return kraft == 256 ? 0 : UINT64_MAX;
	for (int l = 1; l <= max_code_length; l++) {
		uint64_t rest;

		if (kraft + (256u >> l) > 256)
			continue;
		rest = cheapest(w, k, max_code_length, left - 1, kraft + (256u >> l));
		if (rest != UINT64_MAX && rest + w[left - 1] * (uint64_t)l < best)
			best = rest + w[left - 1] * (uint64_t)l;
	}
	return best;
}

static void test_codebooks_are_optimal_and_round_trip(void **unused)
{
	(void)unused;
	for (int round = 0; round < 3000; round++) {
		uint32_t counts[256] = {0}, w[6];
		int max_code_length = 3 + round % 3, k = 1 + (int)(next_random() % 5);
		uint64_t cost = 0;
		codebook b;

		for (int i = 0; i < k; i++)
			counts[40 + i] = w[i] = 1000 + (uint32_t)(next_random() % 60000);
		w[k] = 1; /* weight of the escape */
		book_from_counts(&b, counts, max_code_length);
		for (int i = 0; i < k; i++)
			cost += (uint64_t)w[i] * b.length[40 + i];
		cost += b.length[WIRE_ESCAPE];
		assert_true(book_valid(&b));
		assert_int_equal(cost, cheapest(w, k + 1, max_code_length, k + 1, 0));
	}
	for (int round = 0; round < 20000; round++) {
		uint32_t counts[256] = {0};
		int max_code_length = 2 + round % 7, spread = 1 + round % 256;
		uint8_t packed[BOOK_MAX_NBYTES];
		codebook b, again;
		book_lookup lookup;
		book_codes codes;
		int n;

		for (int i = 0; i < spread; i++)
			counts[next_random() & 255] += (uint32_t)(next_random() >> (next_random() % 32 + 32));
		book_from_counts(&b, counts, max_code_length);
		assert_true(book_valid(&b));
		book_from_counts(&again, counts, max_code_length);
		assert_memory_equal(&b, &again, sizeof b);
		n = book_pack(&b, packed);
		assert_true(n <= BOOK_MAX_NBYTES);
		assert_int_equal(book_unpack(&again, packed, (uint64_t)n), n);
		assert_memory_equal(&b, &again, sizeof b);
		for (int m = 0; m < n; m++)
			assert_int_equal(book_unpack(&again, packed, (uint64_t)m), 0);
		book_to_codes(&b, &codes);
		book_to_lookup(&b, &lookup);
		assert_int_equal(codes.escape, lookup.escape);
		assert_int_equal(codes.pad, lookup.pad);
		for (int v = 0; v < 256; v++) {
			int l = codes.length[v] & 15, first = codes.code[v] << (8 - l);

			assert_true(l >= 1 && l <= max_code_length);
			for (int j = 0; j < 256 >> l; j++) {
				assert_int_equal(lookup.length[first + j], l);
				assert_int_equal(lookup.symbol[first + j], b.length[v] ? v : codes.escape);
			}
		}
	}
}

#define LANES_ROWS 40
#define LANES_WORDS (WIRE_ROW / 4 * LANES_ROWS + WIRE_LANES)

struct coded {
	uint8_t symbol[WIRE_ROW * LANES_ROWS];
	uint32_t escaped[4 * LANES_ROWS];
	int good;
};

/* Decode `count` streams together, where stream i has the first nwords[i] of `words`. */
static void decode_with(const struct kernels *k, const book_lookup *book, const uint8_t *words, const size_t *nwords,
			const lanes *start, size_t rows, int count, struct symbol_pairs *pairs, struct coded *out)
{
	lanes state[2] = {*start, *start};
	struct stream s[2];
	const struct ahead ahead = {0};

	for (int i = 0; i < count; i++)
		s[i] = (struct stream){words, nwords[i], state + i, out[i].symbol, out[i].escaped, pairs, 0};
	k->decode_lanes(book, s, count == 2 ? s + 1 : NULL, rows, &ahead);
	for (int i = 0; i < count; i++)
		out[i].good = s[i].good;
}

/* All instruction sets encode to equal words, and decode any words to equal symbols or failures, for any codebook. */
static void test_instruction_sets_agree_on_lanes(void **unused)
{
	struct symbol_pairs *pairs = malloc(sizeof *pairs);
	uint64_t refused = 0;

	(void)unused;
	for (int round = 0; round < 3000; round++) {
		const int spread = 1 + (int)(next_random() % (round % 2 ? 256 : 12)), max_code_length = 2 + round % 7;
		const size_t rows = 1 + next_random() % LANES_ROWS;
		static uint32_t room[LANES_WORDS + 2 * LANES_SLACK], first_room[LANES_WORDS + 2 * LANES_SLACK];
		static struct coded plain, half, got[2];
		uint32_t counts[256] = {0}, escaped[4 * LANES_ROWS], *words = NULL;
		uint8_t symbol[WIRE_ROW * LANES_ROWS];
		const struct ahead ahead = {0};
		lanes last, first_last;
		book_lookup lookup;
		book_codes codes;
		struct guarded at;
		size_t nwords = 0, lengths[2];
		codebook book;

		for (int i = 0; i < spread; i++)
			counts[next_random() & 255] += (uint32_t)(next_random() >> (next_random() % 32 + 32));
		book_from_counts(&book, counts, max_code_length);
		book_to_codes(&book, &codes);
		book_to_lookup(&book, &lookup);
		for (size_t i = 0; i < WIRE_ROW * rows; i++) /* symbols mostly distributed as the codes imply */
			symbol[i] = next_random() % 400 ? lookup.symbol[next_random() & 255] : (uint8_t)next_random();
		for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
			codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa};
			uint32_t *end = room + LANES_WORDS + LANES_SLACK, *first;

			if (!codec_isa_usable(isa))
				continue;
			first = kernels_for(&with)->encode_lanes(&codes, symbol, rows, end, &last, escaped, &ahead);
			if (isa == 0) {
				nwords = (size_t)(end - first);
				words = memcpy(first_room, first, 4 * nwords);
				first_last = last;
			}
			assert_int_equal(end - first, nwords);
			assert_memory_equal(first, words, 4 * nwords);
			assert_memory_equal(&last, &first_last, sizeof last);
		}
		for (int l = 0; l < WIRE_LANES; l++) {
			uint32_t t = first_last.tail[l];
			uint64_t lane = (uint64_t)first_last.part[l] << 32 | first_last.word[l];

			last.word[l] = (uint32_t)(lane >> t);
			last.part[l] = t ? (uint32_t)lane << (32 - t) : 0;
			last.tail[l] = t;
		}
		if (round % 3 == 1 && nwords)
			words[next_random() % nwords] ^= 1u << next_random() % 32;
		if (round % 3 == 2)
			nwords = nwords < 40 ? 0 : nwords - next_random() % 40;
		at = guard(4 * nwords);
		for (size_t i = 0; i < nwords; i++)
			store32(at.p + 4 * i, words[i]);
		pairs->of = NULL;
		lengths[0] = nwords;
		lengths[1] = nwords / 2; /* the second stream is shorter, to detect kernels that mix up the streams */
		decode_with(&kernels_scalar, &lookup, at.p, lengths + 1, &last, rows, 1, pairs, &half);
		decode_with(&kernels_scalar, &lookup, at.p, lengths, &last, rows, 1, pairs, &plain);
		for (uint32_t isa = 0; codec_isa_name(isa); isa++)
			for (int count = 1; count <= 2; count++) {
				codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa};

				if (!codec_isa_usable(isa))
					continue;
				decode_with(kernels_for(&with), &lookup, at.p, lengths, &last, rows, count, pairs, got);
				for (int i = 0; i < count; i++) {
					const struct coded *same = i ? &half : &plain;

					assert_memory_equal(got[i].symbol, same->symbol, WIRE_ROW * rows);
					assert_memory_equal(got[i].escaped, same->escaped, 16 * rows);
					assert_int_equal(got[i].good, same->good);
				}
			}
		refused += !plain.good;
		if (round % 3 == 0) {
			assert_true(plain.good);
			for (size_t i = 0; i < WIRE_ROW * rows; i++) {
				int has = book.length[symbol[i]] != 0;

				assert_int_equal(plain.symbol[i], has ? symbol[i] : lookup.escape);
				assert_int_equal(plain.escaped[i / 32] >> i % 32 & 1, !has);
			}
		}
		unguard(at);
	}
	assert_true(refused > 500);
	free(pairs);
}

/*
 * All instruction sets give equal planes, values and digests at any address, with normal and with non-temporal stores.
 */
static void test_instruction_sets_agree_on_planes(void **unused)
{
	enum { MOST = 700 };
	static const struct {
		int form, width, zero; /* zero: see dtype_zero; 0: no offsets */
	} FORMS[] = {{FORM_BYTES2, 2, 0},   {FORM_BYTES4, 4, 0},  {FORM_FLOAT2, 2, 128},
		     {FORM_FLOAT4, 4, 128}, {FORM_E4M3, 1, 2048}, {FORM_E5M2, 1, 1024}};

	(void)unused;
	for (int round = 0; round < 4000; round++) {
		size_t form = (size_t)round % 6, n = next_random() % MOST, nbytes = n * (size_t)FORMS[form].width;
		struct guarded src = guard(nbytes + 64),
			       back = guard(nbytes + next_random() % 2 * (next_random() % 64));
		uint8_t *values = src.p + next_random() % 64, plane[2][4][MOST];
		uint16_t offset[MOST];
		uint64_t digest = 0;
		codec_context with = {.struct_nbytes = sizeof with};

		for (size_t i = 0; i < nbytes; i++)
			values[i] = (uint8_t)(next_random() >> 20);
		for (size_t i = 0; i < n; i++) { /* include patterns at the wrap-around, and exponents of 0 */
			uint32_t circle = WIRE_CIRCLE(FORMS[form].zero ? FORMS[form].zero : 128);

			offset[i] = (uint16_t)(next_random() % 3 ? next_random() % circle
								 : next_random() % 2 * (circle - 1));
			if (FORMS[form].width == 1)
				offset[i] &= 0xff00;
			if (next_random() % 4 == 0)
				values[(i + 1) * (size_t)FORMS[form].width - 1] &= 0x80;
		}
		for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
			const uint8_t *from[4];
			uint8_t *at[4];

			if (!codec_isa_usable(isa))
				continue;
			with.isa = isa + 1;
			for (int p = 0; p < 4; p++)
				from[p] = at[p] = plane[isa > 0][p];
			kernels_for(&with)->split[FORMS[form].form](values, n, FORMS[form].zero ? offset : NULL, at);
			for (int p = 0; p < FORMS[form].width; p++)
				assert_memory_equal(at[p], plane[0][p], n);
			memset(back.p, 0x5a, nbytes);
			kernels_for(&with)->merge[FORMS[form].form](from, n, FORMS[form].zero ? offset : NULL, back.p,
								    round / 6 % 2);
			assert_memory_equal(back.p, values, nbytes);
			if (isa == 0)
				digest = kernels_for(&with)->digest(values, nbytes, 7);
			assert_int_equal(kernels_for(&with)->digest(values, nbytes, 7), digest);
			memset(back.p, 0x5a, nbytes);
			kernels_for(&with)->stream(back.p, values, nbytes);
			assert_memory_equal(back.p, values, nbytes);
		}
		unguard(src);
		unguard(back);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_tables_match_their_formulas),
		cmocka_unit_test(test_bits_round_trip),
		cmocka_unit_test(test_codebooks_are_optimal_and_round_trip),
		cmocka_unit_test(test_instruction_sets_agree_on_lanes),
		cmocka_unit_test(test_instruction_sets_agree_on_planes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
