/* coder/model.cuh - the scale model's offsets. docs/format.md, section 5.2. */
#ifndef CODEC_CUDA_CODER_MODEL_CUH
#define CODEC_CUDA_CODER_MODEL_CUH

#include "common/job.cuh"

/* Patterns from one power of two to the next; 0: no pattern. */
DEVICE int octave_of(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 ? 128
	       : dtype == CODEC_FLOAT16                          ? 1024
	       : dtype == CODEC_FLOAT64                          ? 16
								 : 0;
}

/* Patterns from 1 << this on are lowered; by how wide a value is. */
#define SHIFT_OF(size) ((size) == 8 ? 4 : 7)

/* Where a value is: its part; under rows, its row and column there. */
struct place {
	const codec_model_part *part;
	uint64_t left;                /* values of the part from here on */
	uint32_t row, column, length; /* length: values of a row; 0: there are none */
	int eighths;                  /* offset of the row, the base included */
	const int8_t *rows, *cols;    /* offsets of rows, of columns; NULL: there are none */
};

DEVICE int eighths_of(const codec_model_part *part, const int8_t *rows, uint32_t row)
{
	return part->base + (rows ? rows[row] : 0);
}

DEVICE void enter_row(place *o)
{
	o->eighths = eighths_of(o->part, o->rows, o->row);
}

/* Of value `first`. */
DEVICE_CALL place place_at(const job *j, uint64_t first)
{
	const codec_model_part *part =
		part_at(model_parts(&j->v, j->memory), j->v.model_parts.count, &codec_model_part::start, first);
	const int8_t *offsets = (const int8_t *)(j->memory + j->v.offsets.at) + 2ull * part->nibbles_at;
	uint64_t i = first - part->start;
	place o = {part, part->count - i, 0, 0, 0, 0, NULL, NULL};

	if (part->kind & WIRE_SEGMENT_ROWS) {
		o.length = part->row;
		o.row = (uint32_t)(i / part->row);
		o.column = (uint32_t)(i % part->row);
		o.rows = offsets;
	}
	if (part->kind & WIRE_SEGMENT_COLS)
		o.cols = offsets + ((part->count + part->row - 1) / part->row + 1) / 2 * 2;
	enter_row(&o);
	return o;
}

/* On by n values; beyond the tensor's end it is nowhere. */
DEVICE void move_on(const job *j, place *o, uint32_t n)
{
	if (n >= o->left) { /* a part may be shorter than that */
		uint64_t next = o->part->start + o->part->count - o->left + n;

		if (next < j->v.n)
			*o = place_at(j, next);
		return;
	}
	o->left -= n;
	o->column += n;
	if (!o->length || o->column < o->length)
		return;
	for (; o->column >= o->length; o->row++) /* rows have 64 values at least: no division */
		o->column -= o->length;
	enter_row(o);
}

/* Back by n values, where the tensor has some. */
DEVICE void move_back(const job *j, place *o, uint32_t n)
{
	uint64_t i = o->part->count - o->left;

	if (n > i) {
		*o = place_at(j, o->part->start + i - n);
		return;
	}
	o->left += n;
	if (o->length && o->column < n) {
		for (; o->column < n; o->row--)
			o->column += o->length;
		enter_row(o);
	}
	o->column -= n;
}

/* How many eighths of an octave, of so many patterns, a circle has. */
#define ROUND_OF(octave) (8 * WIRE_CIRCLE(128) / (octave))

/*
 * Two values at once, in the halves of a word: patterns that move turned by less than a circle. `u`: patterns;
 * `upper`: their upper eight bits, which are 0 where they stay. To turn them back, turn them by the rest of the circle.
 */
DEVICE uint32_t turn_pair(uint32_t u, uint32_t upper, uint32_t by)
{
	static_assert(WIRE_CIRCLE(128) == 0x10000 - 0x8080, "what is taken off once round, in both halves");
	uint32_t v = u + by, moves = __vminu2(upper, 0x10001) * 0xffff;

	/* beyond the circle a half is negative, and once round less it is not; else it is the other way round */
	return (__viaddmax_s16x2(v, 0x80808080, v) & moves) | (u & ~moves);
}

/* Eighths of a row, less 128, on the circle, in both halves. */
DEVICE uint32_t row_pair(int eighths, int round)
{
	int e = eighths - 128;

	e += e < 0 ? round : 0;
	return (uint32_t)(e < round ? e : e - round) * 0x10001;
}

/* Four columns' offsets at an even place. */
DEVICE uint32_t columns_at(const int8_t *p)
{
	const uint16_t *two = global((const uint16_t *)p);

	return two[0] | (uint32_t)two[1] << 16;
}

/* Eighths of the columns of two values, plus 128, and of their row to patterns. */
DEVICE uint32_t pair_offset(uint32_t columns, uint32_t row, int octave)
{
	uint32_t e = columns + row;

	return __viaddmin_u16x2(e, (uint32_t)(0x10000 - ROUND_OF(octave)) * 0x10001, e) * (octave / 8);
}

/*
 * Eighths of an octave, each of `grain` patterns, on the circle of `around`: base, row and column add up to less than
 * two rounds.
 */
DEVICE uint16_t on_circle(int eighths, int grain, int around)
{
	int x = eighths * grain;

	x += x < 0 ? around : 0;
	return (uint16_t)(x - (x >= around ? around : 0));
}

/* A value's offset in patterns. */
DEVICE uint16_t offset_at(const place *o, int grain, int around)
{
	return on_circle(o->eighths + (o->cols ? o->cols[o->column] : 0), grain, around);
}

/* Of n values that need not be in one row or part. */
DEVICE_CALL void scattered_offsets(const job *j, const place *o, uint32_t n, int grain, int around, uint16_t *offset)
{
	place at = *o;

	for (uint32_t k = 0; k < n; k++) {
		offset[k] = offset_at(&at, grain, around);
		if (k + 1 < n)
			move_on(j, &at, 1);
	}
}

/* Of n values, 1 to 4. */
DEVICE void quad_offsets_here(const job *j, const place *o, uint32_t n, int grain, int around, uint16_t offset[4])
{
	if (o->left >= 4 && (!o->length || o->column + 4 <= o->length)) {
		uint32_t cols = o->cols ? load32((const uint8_t *)o->cols + o->column) : 0;

		for (int k = 0; k < 4; k++)
			offset[k] = on_circle(o->eighths + (int8_t)(cols >> 8 * k), grain, around);
	} else {
		uint16_t some[4] = {0};

		scattered_offsets(j, o, n, grain, around, some);
		for (int k = 0; k < 4; k++)
			offset[k] = some[k];
	}
}

/* The same; then on to where those of the next row of 128 are. */
DEVICE void quad_offsets(const job *j, place *o, uint32_t n, int grain, int around, uint16_t offset[4])
{
	quad_offsets_here(j, o, n, grain, around, offset);
	if (n == 4)
		move_on(j, o, WIRE_ROW);
}

#endif
