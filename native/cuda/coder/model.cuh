/*
 * coder/model.cuh - offsets of values under the scale model. docs/spec/format.md, section 5.2.
 *
 * An offset is base + row offset + column offset. It is subtracted from a value's pattern (the integer of exponent and
 * upper mantissa bits), modulo 32768 - zero. Comments call the range of these patterns, which wraps around, the circle.
 *
 * Frames store offsets in eighths of an octave (a factor of two), those of float8 in numbers of the type. On the
 * device, the array codec_view.offsets has uint16_t in patterns, reduced to the circle; bases of parts remain in units
 * of frames.
 */
#ifndef CODEC_CUDA_CODER_MODEL_CUH
#define CODEC_CUDA_CODER_MODEL_CUH

#include "common/job.cuh"

/* Return the number of patterns in an octave (a factor of two); 0: the dtype has no pattern. */
DEVICE int octave_of(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16                ? 128
	       : dtype == CODEC_FLOAT16                                         ? 1024
	       : dtype == CODEC_FLOAT64                                         ? 16
	       : dtype == CODEC_FLOAT8_E4M3FN || dtype == CODEC_FLOAT8_E4M3FNUZ ? 2048
	       : dtype == CODEC_FLOAT8_E5M2 || dtype == CODEC_FLOAT8_E5M2FNUZ   ? 1024
										: 0;
}

/* Return true for floats of 8 bits with a pattern. Their only plane has sign and pattern. */
DEVICE bool is_float8(uint32_t dtype)
{
	return dtype >= CODEC_FLOAT8_E4M3FN && dtype <= CODEC_FLOAT8_E5M2FNUZ;
}

/* Return true if plane 0 has bits of the pattern only. */
DEVICE bool has_top(uint32_t dtype)
{
	return octave_of(dtype) && !is_float8(dtype);
}

/* Index of the lowest bit of a pattern in plane 0, for values of `size` bytes. */
#define SHIFT_OF(size) ((size) == 8 ? 4 : (size) == 1 ? 8 : 7)

/* Return log2 of the unit of offsets, in patterns: an eighth of an octave, for float8 (size 1) a number of the type. */
DEVICE int grain_log2(int octave, uint32_t size)
{
	return size == 1 ? SHIFT_OF(1) : __ffs(octave) - 4;
}

/* Return the unit of offsets, in patterns. */
DEVICE uint32_t grain_of(const codec_view *v)
{
	return is_float8(v->dtype) ? 1u << SHIFT_OF(1) : (uint32_t)octave_of(v->dtype) / 8;
}

/* Return `zero`, the smallest pattern to which offsets are applied; 0 if the dtype has no pattern. */
DEVICE uint32_t zero_of(const codec_view *v)
{
	const int octave = octave_of(v->dtype);

	return (uint32_t)(v->codec == CODEC_TRUNCATE || is_float8(v->dtype) || octave < 128 ? octave : 128);
}

/* Return the number of patterns on the circle. The dtype has a pattern. */
DEVICE uint32_t circle_of(const codec_view *v)
{
	return (uint32_t)WIRE_CIRCLE(zero_of(v));
}

/* Return the number of patterns on the circle, for lossless values of SIZE bytes. */
template <int SIZE> DEVICE uint32_t circle_for(const codec_view *v)
{
	return SIZE == 1 ? circle_of(v) : (uint32_t)WIRE_CIRCLE(1 << SHIFT_OF(SIZE));
}

/* Return how many bits of each value follow the symbols of coded plane p raw. */
DEVICE int raw_bits_of(const codec_view *v, uint32_t p)
{
	return WIRE_RAW_BITS(v->halved, p, is_float8(v->dtype) ? 1 : 2);
}

/* Return the byte x of a float8 with its pattern lowered by `offset` patterns. raised8: the inverse. */
DEVICE uint32_t lowered8(uint32_t x, uint32_t offset, uint32_t zero)
{
	return (x & 128) | bits_lower((uint16_t)((x & 127) << 8), (uint16_t)offset, (uint16_t)zero) >> 8;
}

DEVICE uint32_t raised8(uint32_t x, uint32_t offset, uint32_t zero)
{
	return (x & 128) | bits_raise((uint16_t)((x & 127) << 8), (uint16_t)offset, (uint16_t)zero) >> 8;
}

/* Reduce x, less than two circles, to a circle of `circle` patterns. */
DEVICE uint32_t once_round(uint32_t x, uint32_t circle)
{
	const uint32_t less = x - circle;

	return less < x ? less : x;
}

/* Convert an offset, more than minus one circle and less than two, from eighths of an octave to patterns. */
DEVICE uint16_t on_circle(int eighths, uint32_t grain, uint32_t circle)
{
	const int x = eighths * (int)grain;

	return (uint16_t)once_round((uint32_t)(x < 0 ? x + (int)circle : x), circle);
}

/* Position of a value in the scale model: its part, and its row and column in the part. */
struct place {
	const codec_model_part *part;
	uint64_t left;                /* number of values of the part from this position on */
	uint32_t row, column, length; /* length: number of values per row; 0: the part has no rows */
	uint32_t offset;              /* base + row offset, in patterns, reduced to the circle */
	const uint16_t *rows, *cols;  /* offsets of rows and of columns, in patterns; NULL: there are none */
};

/* Return base + row offset, in patterns. grain: patterns in an eighth of an octave. */
DEVICE uint32_t offset_of_row(const codec_model_part *part, const uint16_t *rows, uint32_t row, uint32_t grain,
			      uint32_t circle)
{
	return once_round(part->base * grain + (rows ? rows[row] : 0), circle);
}

DEVICE void enter_row(const job *j, place *o)
{
	o->offset = offset_of_row(o->part, o->rows, o->row, grain_of(&j->v), circle_of(&j->v));
}

/* Return the position of value `first` in the scale model. Slow: needs a binary search and a division. */
DEVICE_CALL place place_at(const job *j, uint64_t first)
{
	const codec_model_part *part =
		part_at(model_parts(&j->v, j->memory), j->v.model_parts.count, &codec_model_part::start, first);
	const uint16_t *offsets = (const uint16_t *)(j->memory + j->v.offsets.at) + 2ull * part->nibbles_at;
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
	enter_row(j, &o);
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
	enter_row(j, o);
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
		enter_row(j, o);
	}
	o->column -= n;
}

/*
 * Add `by` to two patterns, in the halves of word u, modulo WIRE_CIRCLE (the circle). upper: bits 7 to 14 of each
 * pattern; patterns where these bits are 0 are below `zero` and remain unchanged. by: two numbers up to the circle's
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

/* Load the column offsets of four values, two in each word. p: address of the first of them, a multiple of 4. */
DEVICE uint2 columns_at(const uint16_t *p)
{
	const uint32_t *two = global((const uint32_t *)p);

	return {two[0], two[1]};
}

/* Reduce two numbers, in the halves of a word, each less than two circles, to a circle of `circle` patterns. */
DEVICE uint32_t once_round_pair(uint32_t x, uint32_t circle)
{
	return __viaddmin_u16x2(x, (0x10000 - circle) * 0x10001, x);
}

/* Return the offset, in patterns, of the value at position *o. */
DEVICE uint16_t offset_at(const place *o, uint32_t circle)
{
	return (uint16_t)once_round(o->offset + (o->cols ? o->cols[o->column] : 0), circle);
}

/* Compute the offsets, in patterns, of n consecutive values, which may lie in different rows and parts. */
DEVICE_CALL void scattered_offsets(const job *j, const place *o, uint32_t n, uint32_t circle, uint16_t *offset)
{
	place at = *o;

	for (uint32_t k = 0; k < n; k++) {
		offset[k] = offset_at(&at, circle);
		if (k + 1 < n)
			move_on(j, &at, 1);
	}
}

/* Return the offsets, in patterns, of n values (1 to 4) from position *o on, two in each word. */
DEVICE uint2 quad_offsets_here(const job *j, const place *o, uint32_t n, uint32_t circle)
{
	if (o->left >= 4 && (!o->length || o->column + 4 <= o->length)) {
		const uint8_t *at = (const uint8_t *)(o->cols + o->column);
		const uint32_t row = 0x10001 * o->offset;

		return {once_round_pair(row + (o->cols ? load32(at) : 0), circle),
			once_round_pair(row + (o->cols ? load32(at + 4) : 0), circle)};
	}
	uint16_t some[4] = {0};

	scattered_offsets(j, o, n, circle, some);
	return {some[0] | (uint32_t)some[1] << 16, some[2] | (uint32_t)some[3] << 16};
}

/* Return the offsets of n values as quad_offsets_here does, then move *o 128 values forward. */
DEVICE uint2 quad_offsets(const job *j, place *o, uint32_t n, uint32_t circle)
{
	const uint2 offsets = quad_offsets_here(j, o, n, circle);

	if (n == 4)
		move_on(j, o, WIRE_ROW);
	return offsets;
}

/* Return offset k (0 to 3) of quad_offsets. */
DEVICE uint16_t offset_in(uint2 offsets, uint32_t k)
{
	return (uint16_t)((k < 2 ? offsets.x : offsets.y) >> 16 * (k % 2));
}

#endif
