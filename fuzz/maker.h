/* maker.h - state of the frame generator: the frame written so far, planted faults, codebooks, coded planes. */
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

/* Codebook: code lengths of at most 8 bits, right-justified codes, and a table from the next 8 bits to the symbol. */
struct book {
	uint8_t length[257], code[257], bits[257];
	uint16_t lookup[256];
	uint16_t pad; /* symbol of the first code */
};

/*
 * State while a frame is generated. Each field that is written is a "site". A frame is generated once to count its
 * sites, and perhaps a second time with a wrong value at one site. So every site gets a fault equally often.
 */
struct maker {
	struct source s;
	struct grammar *g;
	struct bytes out;
	uint64_t sites, fault; /* number of sites so far; site that gets the fault */
	uint64_t most;         /* maximum number of values of the frame */
	int planes;
	uint32_t octave, zero, grain; /* octave 0: the dtype has no patterns */
	uint8_t layout, block_log2, fixed, coded, halved, flags;
	uint32_t nblocks;
	uint64_t side_at, directory_at;
	struct book book[WIRE_MAX_PLANES];
	uint16_t symbol[BLOCK + WIRE_ROW], literal[BLOCK]; /* symbols and literals of the current plane; if symbol[i] is
							      ESCAPE, literal[i] is used */
	uint8_t plane[BLOCK], zero_at[BLOCK];
	uint32_t at[BLOCK]; /* index in the block of each value in the region */
	uint16_t *raise;    /* pattern offset of each value; NULL: no scale model */
};

/*
 * Begin a site, and return 1 if the caller must plant a fault here. For rules of the format that do not concern the
 * value of a field.
 */
int slip(struct maker *m);
void put(struct maker *m, uint64_t x, int nbytes);
void put_at(struct maker *m, uint64_t at, uint64_t x, int nbytes); /* overwrite zeros; also a site */
void put_raw(struct bytes *b, const void *p, size_t n);
void put_zeros(struct bytes *b, size_t n);
/* Pad the frame with fewer than 8 zero bytes to a multiple of 8 bytes. */
void put_gap(struct maker *m);
/* Pad the region of block b, and write its directory entry. */
void end_region(struct maker *m, uint32_t b);

/* Generate a codebook that gives codes to byte values in lowest..highest, and perhaps to 0. */
void book_make(struct maker *m, struct book *b, int lowest, int highest, int zero);
void book_put(struct maker *m, const struct book *b);
/*
 * Generate n random symbols for a book. Store them in m->symbol, their literals, below `literals`, in m->literal, and
 * the decoded bytes in m->plane.
 */
void draw(struct maker *m, const struct book *b, size_t n, uint32_t literals);
/* Write m->symbol as a coded plane of n values with literals of `nbytes` bytes. */
void put_coded(struct maker *m, const struct book *b, size_t n, int nbytes);
void put_scale_model(struct maker *m, int octaves);
/* Use an agreed codebook for plane 0. symbols: as in docs/spec/format.md, section 5.1. */
void put_prior(struct maker *m, const struct book *b, uint8_t symbols);

uint64_t digest(const uint8_t *p, size_t n, uint32_t seed);
/* Return the float32 bits of a random valid scale. bad_scale returns the bits of an invalid scale, or 0. */
uint32_t pick_scale(struct maker *m, int may_be_zero);
uint32_t bad_scale(struct maker *m);

/*
 * If `gaps`, write the bitmap of a block of n values that leaves out some quad rows. Set m->at, and return the number
 * of values in the region: all n without gaps.
 */
size_t put_gaps(struct maker *m, size_t n, int gaps);

void make_lossless(struct maker *m);
void make_rows(struct maker *m);
void make_truncate(struct maker *m);
void make_topk(struct maker *m);
void pick_rows_params(struct maker *m);
void pick_truncate_params(struct maker *m);
void pick_topk_params(struct maker *m);

#endif
