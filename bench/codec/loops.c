/*
 * loops.c - speed of each loop of isa/kernels.h with data in cache, for each instruction set, and of memcpy.
 *
 *   loops [NAME]    only loops whose name contains NAME
 *
 * Prints values per second. Use this to compare versions of a loop; coder.c measures the coder as the library runs it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "coder/model.h"
#include "isa/cpu.h"
#include "truncate/truncate.h"

#define N ((size_t)1 << WIRE_MAX_BLOCK_LOG2)
#define WORDS (N / 2 + 2 * LANES_SLACK)
#define MOST_ISAS 8

/* Two blocks: decoding processes two at a time. */
static struct fixture {
	const struct kernels *k;
	book_codes codes;
	book_lookup lookup;
	/* aligned to cache lines, as a thread's buffers are */
	_Alignas(64) uint8_t values[4 * N];
	_Alignas(64) uint8_t back[4 * N + 64];
	_Alignas(64) uint8_t plane[4][N + 64];
	_Alignas(64) uint8_t symbol[N + 64];
	_Alignas(64) uint8_t decoded[2][N + 64];
	_Alignas(64) uint16_t offset[N], pattern[N];
	int8_t cols[N];
	uint8_t exponent[N], drop[N], width[N]; /* input of Truncate's loops */
	uint32_t words[WORDS], escaped[2][N / 32], *first;
	lanes state, start, scratch[2];
	size_t nwords;
	struct symbol_pairs pairs;
	uint64_t sink;
} f;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t noise(void)
{
	static uint64_t s = 88172645463325252ull;

	s ^= s << 13;
	s ^= s >> 7;
	s ^= s << 17;
	return (uint32_t)(s >> 32);
}

static const struct ahead NOTHING;

static void encode(void)
{
	f.first =
		f.k->encode_lanes(&f.codes, f.symbol, N / WIRE_ROW, f.words + WORDS, &f.state, f.escaped[0], &NOTHING);
}

/* Prepare the input of the decoder as encode_plane and open_plane do. */
static void begin(int spread)
{
	uint32_t counts[256] = {0};
	codebook book;

	for (size_t i = 0; i < N; i++) {
		uint32_t top = noise() % 3, e = 127 - (uint32_t)__builtin_ctz(noise() | 1u << 20);

		f.symbol[i] = (uint8_t)(spread ? noise() % 48 + noise() % 48 : top ? e : e + 1 - noise() % 2);
		counts[f.symbol[i]]++;
	}
	book_from_counts(&book, counts, WIRE_MAX_CODE_LENGTH);
	book_to_codes(&book, &f.codes);
	book_to_lookup(&book, &f.lookup);
	encode();
	for (int l = 0; l < WIRE_LANES; l++) {
		uint32_t t = f.state.tail[l];
		uint64_t lane = (uint64_t)f.state.part[l] << 32 | f.state.word[l];

		f.start.word[l] = (uint32_t)(lane >> t);
		f.start.part[l] = t ? (uint32_t)lane << (32 - t) : 0;
		f.start.tail[l] = t;
	}
	f.nwords = (size_t)(f.words + WORDS - f.first);
}

static void decode(int count)
{
	struct stream s[2];

	for (int i = 0; i < count; i++) {
		f.scratch[i] = f.start;
		s[i] = (struct stream){(const uint8_t *)f.first, f.nwords, f.scratch + i, f.decoded[i], f.escaped[i],
				       .pairs = &f.pairs};
	}
	f.k->decode_lanes(&f.lookup, s, count == 2 ? s + 1 : NULL, N / WIRE_ROW, &NOTHING);
	if (!s[0].good || memcmp(f.decoded[0], f.symbol, 64))
		exit(1);
}

static void decode_one(void)
{
	decode(1);
}

static void decode_two(void)
{
	decode(2);
}

/* Process OFFSETS values at a time, as the library does. */
#define IN_PIECES(width, call)                                                                                         \
	for (size_t i = 0; i < N; i += OFFSETS) {                                                                      \
		uint8_t *at[4] = {f.plane[0] + i, f.plane[1] + i, f.plane[2] + i, f.plane[3] + i};                     \
		const uint8_t *from[4] = {at[0], at[1], at[2], at[3]};                                                 \
		uint8_t *values = f.values + width * i, *back = f.back + width * i;                                    \
                                                                                                                       \
		(void)at, (void)from, (void)values, (void)back;                                                        \
		call;                                                                                                  \
	}
#define LOOP(name, width, call)                                                                                        \
	static void name(void)                                                                                         \
	{                                                                                                              \
		IN_PIECES(width, call)                                                                                 \
	}
LOOP(split_float2, 2, f.k->split[FORM_FLOAT2](values, OFFSETS, f.offset, at))
LOOP(split_bytes2, 2, f.k->split[FORM_BYTES2](values, OFFSETS, NULL, at))
LOOP(split_float4, 4, f.k->split[FORM_FLOAT4](values, OFFSETS, f.offset, at))
LOOP(split_bytes4, 4, f.k->split[FORM_BYTES4](values, OFFSETS, NULL, at))
LOOP(merge_float2, 2, f.k->merge[FORM_FLOAT2](from, OFFSETS, f.offset, back, 0))
LOOP(merge_bytes2, 2, f.k->merge[FORM_BYTES2](from, OFFSETS, NULL, back, 0))
LOOP(merge_float4, 4, f.k->merge[FORM_FLOAT4](from, OFFSETS, f.offset, back, 0))
LOOP(merge_bytes4, 4, f.k->merge[FORM_BYTES4](from, OFFSETS, NULL, back, 0))
LOOP(merge_float2_past, 2, f.k->merge[FORM_FLOAT2](from, OFFSETS, f.offset, back, 1))
LOOP(merge_float4_past, 4, f.k->merge[FORM_FLOAT4](from, OFFSETS, f.offset, back, 1))
LOOP(patterns_float2, 2, f.k->patterns[FORM_FLOAT2](values, OFFSETS, f.pattern + i))
LOOP(patterns_float4, 4, f.k->patterns[FORM_FLOAT4](values, OFFSETS, f.pattern + i))
LOOP(offsets, 1, f.k->offsets(f.cols + i, (int)(i % 97), 16, 128, OFFSETS, f.offset))
LOOP(stream, 1, f.k->stream(back, values, OFFSETS))

static void sum(void)
{
	uint32_t total, count;

	f.k->sum(f.pattern, N, 128, &total, &count);
	f.sink += total + count;
}

static void digest(void)
{
	f.sink += f.k->digest(f.values, N, 1);
}

static void halve(void)
{
	f.k->halve(f.plane[1], N, f.decoded[0], f.decoded[1]);
}

static void unhalve(void)
{
	f.k->unhalve(f.decoded[0], f.decoded[1], N);
}

static void rows(void)
{
	uint8_t bitmap[N / WIRE_ROW / 8];

	f.sink += f.k->rows(f.plane[3], N, bitmap);
}

/* Truncate float32 under AdamW, by level or by bit, a tile at a time as the library does. */
static const struct metric_terms TERMS = {1.0f, 1e5f, 1000.0f, 1e-8f, 0.1f};
static const struct truncate_kind LEVELS = {23, 31, 127, 255, -3, 0, WIRE_DROPS_FLOAT32, WIRE_PIECES_FLOAT32};
static const struct truncate_kind BITS = {23, 31, 127, 255, -3, 1, WIRE_DROPS_FLOAT32, WIRE_PIECES_FLOAT32};

#define TRUNCATE_LOOP(name, call)                                                                                      \
	static void name(void)                                                                                         \
	{                                                                                                              \
		for (size_t i = 0; i < N; i += TRUNCATE_TILE) {                                                        \
			uint8_t *e = f.exponent + i, *drop = f.drop + i, *width = f.width + i;                         \
			static uint8_t piece[4][TRUNCATE_TILE];                                                        \
			uint8_t *const to[] = {piece[0], piece[1], piece[2], piece[3]};                                \
			const uint8_t *const from[] = {piece[0], piece[1], piece[2], piece[3]};                        \
			const float_any *x = (const float_any *)f.values + i;                                          \
			uint32_t *y = (uint32_t *)f.back + i;                                                          \
                                                                                                                       \
			(void)e, (void)drop, (void)width, (void)to, (void)from, (void)x, (void)y;                      \
			call;                                                                                          \
		}                                                                                                      \
	}
#define TILE TRUNCATE_TILE
TRUNCATE_LOOP(metric_exponents, f.k->metric_exponents(&TERMS, x, x, x, TILE, f.decoded[0]))
TRUNCATE_LOOP(exponents, f.k->exponents((const uint32_t *)x, TILE, 23, 255, f.decoded[0]))
TRUNCATE_LOOP(drop_levels, f.k->drops_of(&LEVELS, e, e, TILE, f.decoded[0]))
TRUNCATE_LOOP(drop_bits, f.k->drops_of(&BITS, e, e, TILE, f.decoded[0]))
TRUNCATE_LOOP(truncate, f.k->truncate(&LEVELS, drop, 1, TILE, y, f.decoded[0]))
TRUNCATE_LOOP(widths, f.k->widths(e, drop, TILE, 24, 24, f.decoded[0]))
TRUNCATE_LOOP(any_bits, f.sink += f.k->any_bits((const uint32_t *)x, TILE))
TRUNCATE_LOOP(pack_fields, f.k->pack_fields(&BITS, (const uint32_t *)x, width, TILE, (uint8_t *)y))
TRUNCATE_LOOP(unpack_fields, f.k->unpack_fields(f.values + i, 3 * TILE, width, TILE, 24, y))
TRUNCATE_LOOP(assemble, f.k->assemble(&BITS, (const uint32_t *)x, e, TILE, y))
TRUNCATE_LOOP(split_pieces, f.k->split_pieces(&LEVELS, (const uint32_t *)x, TILE, to))
TRUNCATE_LOOP(join_pieces, f.k->join_pieces(&LEVELS, from, e, TILE, y))
TRUNCATE_LOOP(count, f.sink += f.k->count(width, 12, TILE))
TRUNCATE_LOOP(prune, f.k->prune(width, 12, e, TILE, f.decoded[0]))
TRUNCATE_LOOP(unprune, f.k->unprune(width, 12, e, TILE, f.decoded[0]))
static void pack_six(void)
{
	f.k->pack_codes(f.plane[3], N, 6, f.decoded[0]);
}

static void unpack_six(void)
{
	f.k->unpack_codes(f.plane[3], N, 6, f.decoded[0]);
}

TRUNCATE_LOOP(lower_exponents, f.k->lower_exponents(e, f.offset, 255, 7, TILE, f.decoded[0]))
TRUNCATE_LOOP(raise_exponents, f.k->raise_exponents(e, f.offset, 255, 7, TILE, f.decoded[0]))
TRUNCATE_LOOP(join, f.sink += f.k->join(e, f.drop + i, TILE, 96, f.pattern, f.decoded[0]))

static void copy(void)
{
	memcpy(f.back, f.values, N);
	__asm__ volatile("" ::"r"(f.back) : "memory");
}

static const struct {
	const char *name;
	void (*run)(void);
	size_t count;
} LOOPS[] = {
	{"memcpy, a byte a value", copy, N},
	{"encode_lanes", encode, N},
	{"decode_lanes, one", decode_one, N},
	{"decode_lanes, two", decode_two, 2 * N},
	{"split float2", split_float2, N},
	{"split bytes2", split_bytes2, N},
	{"split float4", split_float4, N},
	{"split bytes4", split_bytes4, N},
	{"merge float2", merge_float2, N},
	{"merge bytes2", merge_bytes2, N},
	{"merge float4", merge_float4, N},
	{"merge bytes4", merge_bytes4, N},
	{"merge float2, past", merge_float2_past, N},
	{"merge float4, past", merge_float4_past, N},
	{"patterns float2", patterns_float2, N},
	{"patterns float4", patterns_float4, N},
	{"offsets", offsets, N},
	{"sum", sum, N},
	{"digest, a byte a value", digest, N},
	{"halve", halve, N},
	{"unhalve", unhalve, N},
	{"rows", rows, N},
	{"stream, a byte a value", stream, N},
	{"metric exponents", metric_exponents, N},
	{"exponents", exponents, N},
	{"drops, of levels", drop_levels, N},
	{"drops, by bit", drop_bits, N},
	{"truncate", truncate, N},
	{"widths", widths, N},
	{"any bits", any_bits, N},
	{"pack fields", pack_fields, N},
	{"unpack fields", unpack_fields, N},
	{"assemble", assemble, N},
	{"split pieces", split_pieces, N},
	{"join pieces", join_pieces, N},
	{"count", count, N},
	{"prune", prune, N},
	{"unprune", unprune, N},
	{"pack 6 bits", pack_six, N},
	{"unpack 6 bits", unpack_six, N},
	{"lower exponents", lower_exponents, N},
	{"raise exponents", raise_exponents, N},
	{"join levels", join, N},
};

/* Return the shortest time of several runs in seconds. */
static double seconds(void (*run)(void))
{
	double best = 1e9;

	for (int round = 0; round < 12; round++) {
		double start = now(), t;

		for (int i = 0; i < 20; i++)
			run();
		t = (now() - start) / 20;
		best = MIN(best, t);
	}
	return best;
}

static void table(const char *only)
{
	double rate[sizeof LOOPS / sizeof *LOOPS][MOST_ISAS] = {{0}};

	/* alternate between instruction sets, so that noise affects all of them alike */
	for (size_t i = 0; i < sizeof LOOPS / sizeof *LOOPS; i++)
		for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
			codec_context with = {.struct_nbytes = sizeof with, .isa = isa + 1};

			f.k = kernels_for(&with);
			f.pairs.of = NULL;
			if (f.k && (!only || strstr(LOOPS[i].name, only)))
				rate[i][isa] = (double)LOOPS[i].count / seconds(LOOPS[i].run) / 1e9;
		}
	printf("%-24s", "Gvalues/s");
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		printf(" %8s", codec_isa_name(isa));
	for (size_t i = 0; i < sizeof LOOPS / sizeof *LOOPS; i++) {
		if (only && !strstr(LOOPS[i].name, only))
			continue;
		printf("\n%-24s", LOOPS[i].name);
		for (uint32_t isa = 0; codec_isa_name(isa); isa++)
			printf(" %8.2f", rate[i][isa]);
	}
	printf("\n");
}

int main(int argc, char **argv)
{
	codec_context with = {.struct_nbytes = sizeof with};

	f.k = kernels_for(&with);
	for (size_t i = 0; i < N; i++) {
		uint32_t x = noise(), e = 120 + noise() % 9;

		store32(f.values + 4 * i, (x & 0x807fffff) | e << 23);
		f.cols[i] = (int8_t)(noise() % 16) - 8;
		f.offset[i] = (uint16_t)(noise() % WIRE_CIRCLE(128));
		for (int p = 0; p < 4; p++)
			f.plane[p][i] = (uint8_t)noise();
		f.exponent[i] = (uint8_t)e;
		f.drop[i] = (uint8_t)(noise() % 24);
		f.width[i] = (uint8_t)(noise() % 8 + (uint32_t)__builtin_ctz(noise() | 1u << 9)); /* 5.5 bits */
	}
	begin(0);
	table(argc > 1 ? argv[1] : NULL);
	if (argc > 1 && !strstr("lanes", argv[1]))
		return 0;
	printf("\nsymbols of 6.3 bits\n");
	begin(1);
	table("lanes");
	return 0;
}
