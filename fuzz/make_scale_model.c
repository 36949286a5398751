/* make_scale_model.c - generate segments and their offsets in the scale model. */
#include "exact/bits.h"
#include "maker.h"

/* Part of the scale model: base and offsets of rows and columns, in units of m->grain patterns. */
struct segment {
	uint64_t count, cols, nrows;
	int kind, shift[2], base;
};

static struct segment segment_make(struct maker *m, uint64_t left, int last, int octaves)
{
	struct segment s = {.count = left};
	uint64_t bases = (WIRE_PATTERNS - m->zero) / m->grain, shifts = m->grain == 256 ? 3 : 4;

	if (!last)
		s.count = one_in(&m->s, 6) ? 1 : 1 + below(&m->s, left);
	s.kind = (int)below(&m->s, 2);
	if (s.count >= 64 * 64 && below(&m->s, 2)) {
		uint64_t cols = between(&m->s, 64, s.count / 64);

		if (!last || s.count % cols == 0) {
			s.kind = 3;
			s.cols = cols;
			s.count -= s.count % cols;
			s.kind = s.count / cols >= 64 ? 3 : 0;
		}
	}
	s.cols = s.kind == 3 ? s.cols : s.kind ? WIRE_FLAT_ROW : 0;
	s.nrows = s.kind ? (s.count + s.cols - 1) / s.cols : 0;
	for (int i = 0; i < 2; i++)
		s.shift[i] = s.kind >> i & 1 ? octaves ? 3 : (int)below(&m->s, shifts) : 0;
	s.base = (int)(octaves ? 8 * below(&m->s, bases / 8) : below(&m->s, bases));
	return s;
}

/* Write n random offsets as nibbles, and store the offsets in q. */
static void put_nibbles(struct maker *m, uint64_t n, int shift, int *q)
{
	for (uint64_t i = 0; i < n; i += 2) {
		uint8_t two = (uint8_t)noise(&m->s);

		if (i + 1 == n && !slip(m))
			two &= 15;
		put_raw(&m->out, &two, 1);
		q[i] = (((two & 15) ^ 8) - 8) * (1 << shift);
		q[i + 1] = (((two >> 4) ^ 8) - 8) * (1 << shift);
	}
}

void put_scale_model(struct maker *m, int octaves)
{
	uint64_t n = m->g->n, most = WIRE_MAX_PARTS(n), nsegments = 0, done = 0;
	int circle = WIRE_PATTERNS - (int)m->zero;
	struct segment list[64];

	most = most < 64 ? most : 64;
	for (uint64_t goal = 1 + below(&m->s, most); done < n; done += list[nsegments++].count)
		list[nsegments] = segment_make(m, n - done, nsegments + 1 >= goal, octaves);
	m->raise = malloc(sizeof *m->raise * n);
	put(m, nsegments, 4);
	for (uint64_t i = 0; i < nsegments; i++) {
		const struct segment *s = list + i;

		put(m, s->count, 8);
		put(m, s->cols, 4);
		put(m, (uint64_t)s->kind, 1);
		put(m, (uint64_t)(s->shift[0] | s->shift[1] << 4), 1);
		put(m, (uint64_t)s->base, 2);
	}
	done = 0;
	for (uint64_t i = 0; i < nsegments; i++) {
		const struct segment *s = list + i;
		int *rows = calloc(s->nrows + s->cols + 4, sizeof *rows), *cols = rows + s->nrows + 2;

		put_nibbles(m, s->nrows, s->shift[0], rows);
		put_nibbles(m, s->kind == 3 ? s->cols : 0, s->shift[1], cols);
		for (uint64_t v = 0; v < s->count; v++) {
			int q = s->base;

			q += s->kind ? rows[v / s->cols] : 0;
			q += s->kind == 3 ? cols[v % s->cols] : 0;
			q = q * (int)m->grain % circle;
			m->raise[done + v] = (uint16_t)(q < 0 ? q + circle : q);
		}
		done += s->count;
		free(rows);
	}
}
