/* maker.h - what the parts of the grammar share: the frame so far, planted faults, codebooks, coded planes. */
#ifndef FUZZ_MAKER_H
#define FUZZ_MAKER_H

#include <stdlib.h>
#include <string.h>

#include "grammar.h"
#include "source.h"
#include "exact/wire.h"

#define BLOCK (1u << WIRE_MAX_BLOCK_LOG2)
#define ESCAPE WIRE_ESCAPE
#define CEIL8(x) (((x) + 7) & ~7ull)

struct bytes {
	uint8_t *p;
	size_t n, room;
};

/* A codebook: lengths, codes (right-justified) and theirs, at most 8, and what each 8 bits begin with. */
struct book {
	uint8_t length[257], code[257], bits[257];
	uint16_t lookup[256];
	uint16_t pad; /* the symbol of the first code */
};

/*
 * Every field that is written is a site. A frame is made once to count them, and perhaps again with one of them wrong:
 * so all are hit equally often, however many there are.
 */
struct maker {
	struct source s;
	struct grammar *g;
	struct bytes out;
	uint64_t sites, fault; /* met so far; the one that is to be wrong */
	uint64_t most;         /* values */
	int planes;
	uint32_t octave, zero; /* 0: the dtype has no pattern */
	uint8_t layout, block_log2, fixed, coded, halved, flags;
	uint32_t nblocks;
	uint64_t side_at, directory_at;
	struct book book[WIRE_MAX_PLANES];
	uint16_t symbol[BLOCK + WIRE_ROW], literal[BLOCK]; /* of the plane in hand; ESCAPE: then the literal counts */
	uint8_t plane[BLOCK], zero_at[BLOCK];
	uint16_t *raise; /* NULL: no scale model; else patterns that are added to each value's */
};

/* 1 where something is to be wrong: where the format asks for something that is no field's value. */
int slip(struct maker *m);
void put(struct maker *m, uint64_t x, int nbytes);
void put_at(struct maker *m, uint64_t at, uint64_t x, int nbytes); /* over zeros, a site too */
void put_raw(struct bytes *b, const void *p, size_t n);
void put_zeros(struct bytes *b, size_t n);
/* Fewer than 8 zero bytes up to a multiple of 8. */
void put_gap(struct maker *m);
/* The end of block b's region. */
void end_region(struct maker *m, uint32_t b);

/* A book of values lowest..highest, and perhaps 0. */
void book_make(struct maker *m, struct book *b, int lowest, int highest, int zero);
void book_put(struct maker *m, const struct book *b);
/* n symbols from a book: to m->symbol, m->literal (below `literals`) and m->plane, the bytes they stand for. */
void draw(struct maker *m, const struct book *b, size_t n, uint32_t literals);
/* m->symbol as a coded plane of n values, literals of `nbytes` bytes. */
void put_coded(struct maker *m, const struct book *b, size_t n, int nbytes);
void put_scale_model(struct maker *m, int octaves);
/* A codebook known to both sides is what plane 0 has; its symbols as in the format, section 5.1. */
void put_prior(struct maker *m, const struct book *b, uint8_t symbols);

uint64_t digest(const uint8_t *p, size_t n, uint32_t seed);
/* A scale's bits; and such as are none, or 0. */
uint32_t pick_scale(struct maker *m, int may_be_zero);
uint32_t bad_scale(struct maker *m);

void make_lossless(struct maker *m);
void make_rows(struct maker *m);
void make_truncate(struct maker *m);
void pick_rows_params(struct maker *m);
void pick_truncate_params(struct maker *m);

#endif
