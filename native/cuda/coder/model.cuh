/*
 * coder/model.cuh - offsets of values under the scale model. docs/spec/format.md, section 5.2.
 *
 * An offset is base + row offset + column offset, in eighths of an octave (a factor of two). It is subtracted from a
 * value's pattern (the integer of exponent and upper mantissa bits), modulo 32768 - zero. Comments call the range of
 * these patterns, which wraps around, the circle.
 */
#ifndef CODEC_CUDA_CODER_MODEL_CUH
#define CODEC_CUDA_CODER_MODEL_CUH

#include "common/job.cuh"

/* Return the number of patterns in an octave (a factor of two); 0: the dtype has no pattern. */
DEVICE int octave_of(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 ? 128
	       : dtype == CODEC_FLOAT16                          ? 1024
	       : dtype == CODEC_FLOAT64                          ? 16
								 : 0;
}

/* log2 of `zero`, the smallest pattern to which offsets are applied, for values of `size` bytes. */
#define SHIFT_OF(size) ((size) == 8 ? 4 : 7)

/* Position of a value in the scale model: its part, and its row and column in the part. */
struct place {
	const codec_model_part *part;
	uint64_t left;                /* number of values of the part from this position on */
	uint32_t row, column, length; /* length: number of values per row; 0: the part has no rows */
	int eighths;                  /* base + row offset, in eighths of an octave */
	const int8_t *rows, *cols;    /* offsets of rows and of columns, one byte each; NULL: there are none */
};

/* Return base + row offset, in eighths of an octave. */
DEVICE int eighths_of(const codec_model_part *part, const int8_t *rows, uint32_t row)
{
	return part->base + (rows ? rows[row] : 0);
}

DEVICE void enter_row(place *o)
{
	o->eighths = eighths_of(o->part, o->rows, o->row);
}

/* Return the position of value `first` in the scale model. Slow: needs a binary search and a division. */
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

/* Move the position n values forward. After the tensor's last value the position is undefined. */
DEVICE void move_on(const job *j, place *o, uint32_t n)
{
	if (n >= o->left) { /* parts may have fewer than n values */
		uint64_t next = o->part->start + o->part->count - o->left + n;

		if (next < j->v.n)
			*o = place_at(j, next);
		return;
	}
	o->left -= n;
	o->column += n;
	if (!o->length || o->column < o->length)
		return;
	for (; o->column >= o->length;
	     o->row++) /* rows have at least 64 values, so a few subtractions replace a division */
		o->column -= o->length;
	enter_row(o);
}

/* Move the position n values back. The tensor must have at least n values before the position. */
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

/*
 * Number of eighths of an octave in the range of patterns that offsets wrap around, for octaves of `octave` patterns.
 */
#define ROUND_OF(octave) (8 * WIRE_CIRCLE(128) / (octave))

/*
 * Add `by` to two patterns, in the halves of word u, modulo WIRE_CIRCLE (the circle). upper: bits 7 to 14 of each
 * pattern; patterns where these bits are 0 are below `zero` and remain unchanged. by: two numbers below the circle's
 * size; to subtract an offset, pass the circle's size - offset.
 */
DEVICE uint32_t turn_pair(uint32_t u, uint32_t upper, uint32_t by)
{
	static_assert(WIRE_CIRCLE(128) == 0x10000 - 0x8080, "what is taken off once round, in both halves");
	uint32_t v = u + by, moves = __vminu2(upper, 0x10001) * 0xffff;

	/*
	 * A half beyond the circle is negative as a signed number, and becomes non-negative when the circle's size is
	 * subtracted. A half within the circle is non-negative, and becomes negative. So the maximum of both is
	 * correct.
	 */
	return (__viaddmax_s16x2(v, 0x80808080, v) & moves) | (u & ~moves);
}

/*
 * Return (eighths - 128) modulo `round`, in both halves of a word. eighths: base + row offset. round: ROUND_OF, the
 * number of eighths after which offsets wrap around.
 */
DEVICE uint32_t row_pair(int eighths, int round)
{
	int e = eighths - 128;

	e += e < 0 ? round : 0;
	return (uint32_t)(e < round ? e : e - round) * 0x10001;
}

/* Load the column offsets of four values, one byte each. p: address of the first of them, an even number. */
DEVICE uint32_t columns_at(const int8_t *p)
{
	const uint16_t *two = global((const uint16_t *)p);

	return two[0] | (uint32_t)two[1] << 16;
}

/*
 * Return the offsets of two values, in patterns. columns: two column offsets in eighths, plus 128 each. row: result of
 * row_pair.
 */
DEVICE uint32_t pair_offset(uint32_t columns, uint32_t row, int octave)
{
	uint32_t e = columns + row;

	return __viaddmin_u16x2(e, (uint32_t)(0x10000 - ROUND_OF(octave)) * 0x10001, e) * (octave / 8);
}

/*
 * Convert an offset from eighths of an octave to patterns, `grain` patterns per eighth, modulo `around` patterns. The
 * offset in patterns must be more than -around and less than 2 * around.
 */
DEVICE uint16_t on_circle(int eighths, int grain, int around)
{
	int x = eighths * grain;

	x += x < 0 ? around : 0;
	return (uint16_t)(x - (x >= around ? around : 0));
}

/* Return the offset, in patterns, of the value at position *o. */
DEVICE uint16_t offset_at(const place *o, int grain, int around)
{
	return on_circle(o->eighths + (o->cols ? o->cols[o->column] : 0), grain, around);
}

/* Compute the offsets, in patterns, of n consecutive values, which may lie in different rows and parts. */
DEVICE_CALL void scattered_offsets(const job *j, const place *o, uint32_t n, int grain, int around, uint16_t *offset)
{
	place at = *o;

	for (uint32_t k = 0; k < n; k++) {
		offset[k] = offset_at(&at, grain, around);
		if (k + 1 < n)
			move_on(j, &at, 1);
	}
}

/* Compute the offsets, in patterns, of n values (1 to 4) from position *o on. */
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

/* Compute the offsets of n values (1 to 4) from position *o on, then move *o 128 values forward. */
DEVICE void quad_offsets(const job *j, place *o, uint32_t n, int grain, int around, uint16_t offset[4])
{
	quad_offsets_here(j, o, n, grain, around, offset);
	if (n == 4)
		move_on(j, o, WIRE_ROW);
}

#endif
