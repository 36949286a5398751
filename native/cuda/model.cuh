/* model.cuh - the scale model's offsets. docs/format.md, section 5.2. */
#ifndef CODEC_MODEL_CUH
#define CODEC_MODEL_CUH

#include "job.cuh"

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
	uint64_t left; /* values of the part from here on */
	uint32_t row, column;
};

/* Of value `first`. */
static __device__ place place_at(const job *j, uint64_t first)
{
	const codec_model_part *part =
		part_at(model_parts(&j->v, j->memory), j->v.model_parts.count, &codec_model_part::start, first);
	uint64_t i = first - part->start;

	return {part, part->count - i, part->row ? (uint32_t)(i / part->row) : 0,
		part->row ? (uint32_t)(i % part->row) : 0};
}

/* On by n values, not beyond the tensor's end. */
DEVICE void move_on(const job *j, place *o, uint32_t n)
{
	if (n >= o->left) { /* a part may be shorter than that */
		*o = place_at(j, o->part->start + o->part->count - o->left + n);
		return;
	}
	o->left -= n;
	o->column += n;
	if (o->part->row && o->column >= o->part->row) {
		o->row += o->column / o->part->row;
		o->column %= o->part->row;
	}
}

/* Its offset in patterns, around the circle of `around`; grain: patterns of an eighth of an octave. */
DEVICE uint16_t offset_at(const job *j, const place *o, int grain, int around)
{
	const int8_t *offsets = (const int8_t *)(j->memory + j->v.offsets.at) + 2ull * o->part->nibbles_at;
	int t = o->part->base;

	if (o->part->kind & WIRE_SEGMENT_ROWS) {
		uint64_t rows = (o->part->count + o->part->row - 1) / o->part->row;

		t += offsets[o->row];
		if (o->part->kind & WIRE_SEGMENT_COLS)
			t += offsets[(rows + 1) / 2 * 2 + o->column];
	}
	t = t * grain % around;
	return (uint16_t)(t < 0 ? t + around : t);
}

#endif
