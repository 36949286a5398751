/* make_lossless.c - frames of the lossless codec: docs/format.md, sections 3 to 7. */
#include "maker.h"

/* Plane 0 of float64 holds exponents seen through a window: those that are some exponent. */
static void window_range(uint32_t window, int *least, int *most)
{
	int low = 129 - (int)window, high = 2047 + 128 - (int)window;

	*least = low > 1 ? low : 1;
	*most = high < 255 ? high : 255;
}

static void put_side(struct maker *m, uint32_t *window)
{
	int wide = m->g->dtype == CODEC_FLOAT64;

	if (wide) {
		*window = (uint32_t)(one_in(&m->s, 3) ? below(&m->s, 2048) : between(&m->s, 1000, 1040));
		m->flags |= WIRE_FLAG_WINDOW;
		put(m, *window, 8);
	}
	for (int p = 0; p < m->planes; p++) {
		struct book *b = m->book + p;
		int least = 0, most = m->halved >> p & 1 ? 15 : wide && p == 1 ? 31 : 255;

		if (!(m->coded >> p & 1))
			continue;
		if (wide && p == 0)
			window_range(*window, &least, &most);
		if ((least > 0 || most < 255) && slip(m)) {
			least = 0;
			most = 255;
		}
		book_make(m, b, least, most, 1);
		if (p == 0 && m->octave && one_in(&m->s, 4))
			put_prior(m, b, 0);
		else
			book_put(m, b);
	}
	if (m->coded & 1 && m->octave && below(&m->s, 4)) {
		m->flags |= WIRE_FLAG_SEGMENTS;
		put_scale_model(m, 0);
	}
	put_gap(m);
}

/* n bytes of plane p, with no codebook, to m->plane. */
static void contents(struct maker *m, int p, uint32_t mode, size_t n)
{
	uint8_t mask = m->g->dtype == CODEC_FLOAT64 && p == 1 && !slip(m) ? 31 : 255;
	uint64_t dense = below(&m->s, 5), runs = noise(&m->s) | noise(&m->s);

	for (size_t i = 0; i < n; i++) {
		uint64_t x = noise(&m->s);

		m->plane[i] = x >> 8 & 255 & mask;
		if (mode == WIRE_MODE_ROWS ? runs >> i / WIRE_ROW % 64 & 1 : x >> 32 & ((1ull << dense) - 1))
			m->plane[i] = 0;
	}
	if (mode == WIRE_MODE_CONSTANT && n)
		memset(m->plane, below(&m->s, 2) ? m->plane[0] : 0, n);
}

static void put_runs(struct maker *m, size_t n)
{
	size_t nruns = (n + WIRE_ROW - 1) / WIRE_ROW, bitmap = m->out.n;

	put_zeros(&m->out, (nruns + 7) / 8);
	for (size_t r = 0; r < nruns; r++) {
		const uint8_t *run = m->plane + WIRE_ROW * r;
		size_t nbytes = n - WIRE_ROW * r < WIRE_ROW ? n - WIRE_ROW * r : WIRE_ROW;
		int any = one_in(&m->s, 16); /* a run of zeros may be there all the same */

		for (size_t i = 0; i < nbytes; i++)
			any |= run[i];
		if (!any)
			continue;
		m->out.p[bitmap + r / 8] |= (uint8_t)(1 << r % 8);
		put_raw(&m->out, run, nbytes);
	}
	if (nruns && slip(m))
		m->out.p[bitmap + (nruns - 1) / 8] ^= (uint8_t)(0x80 >> below(&m->s, 8));
}

/* High nibbles of n values: those of the second half above those of the first. */
static void put_high(struct maker *m, size_t n)
{
	for (size_t i = 0; i < (n + 1) / 2; i++) {
		uint8_t two = (uint8_t)noise(&m->s);

		if (i + (n + 1) / 2 >= n && !slip(m))
			two &= 15;
		put_raw(&m->out, &two, 1);
	}
}

/* What a region has for plane p, of n values; 0 for those that are pruned to m->zero_at. */
static void put_plane(struct maker *m, int p, uint32_t mode, size_t n, uint32_t window)
{
	int wide = m->g->dtype == CODEC_FLOAT64, least = 1, most = 255;
	const struct book *b = m->book + p;
	uint32_t literals = 256;

	if (wide && p == 0) {
		window_range(window, &least, &most);
		literals = 2048;
	} else if (m->halved >> p & 1) {
		literals = 16;
	} else if (wide && p == 1) {
		literals = 32;
	}
	switch (mode) {
	case WIRE_MODE_CODED:
		draw(m, b, n, literals);
		put_coded(m, b, n, wide && p == 0 ? 2 : 1);
		if (m->halved >> p & 1)
			put_high(m, n);
		break;
	case WIRE_MODE_RAW:
		contents(m, p, mode, n);
		put_raw(&m->out, m->plane, n);
		break;
	case WIRE_MODE_ROWS:
		contents(m, p, mode, n);
		put_runs(m, n);
		break;
	default:
		contents(m, p, mode, n);
		if (wide && p == 0)
			m->plane[0] = (uint8_t)(below(&m->s, 3) ? between(&m->s, (uint64_t)least, (uint64_t)most) : 0);
		put(m, n ? m->plane[0] : 0, 1);
		memset(m->plane, m->plane[0], n);
	}
	if (p == 0)
		for (size_t i = 0; i < n; i++)
			m->zero_at[i] = mode == WIRE_MODE_CODED && m->symbol[i] == ESCAPE && wide ? !m->literal[i]
												  : !m->plane[i];
}

static uint32_t pick_mode(struct maker *m, int p)
{
	static const uint32_t MODES[] = {WIRE_MODE_CODED, WIRE_MODE_CODED, WIRE_MODE_CODED,
					 WIRE_MODE_RAW,   WIRE_MODE_ROWS,  WIRE_MODE_CONSTANT};
	int coded = m->coded >> p & 1 || slip(m), wide = m->g->dtype == CODEC_FLOAT64 && p == 0;
	uint32_t mode = MODES[coded ? below(&m->s, 6) : 3 + below(&m->s, 3)];

	if (wide && !slip(m))
		mode = mode == WIRE_MODE_RAW || mode == WIRE_MODE_ROWS ? WIRE_MODE_CODED : mode;
	return mode;
}

static void put_region(struct maker *m, uint32_t b, const uint64_t *fixed_at, uint32_t window)
{
	uint64_t first = (uint64_t)b << m->block_log2, left = m->g->n - first, block = 1ull << m->block_log2;
	size_t n = (size_t)(left < block ? left : block), k = n, head_at = m->out.n;
	uint32_t mode[WIRE_MAX_PLANES] = {0}, head = 0;
	int pruned;

	for (int p = 0; p < m->planes; p++)
		if (!(m->fixed >> p & 1))
			head |= (mode[p] = pick_mode(m, p)) << 2 * p;
	pruned = m->octave && !(m->fixed & 1) && mode[0] == WIRE_MODE_CODED && below(&m->s, 2);
	put_zeros(&m->out, 4);
	memset(m->zero_at, 0, n);
	for (int p = 0; p < m->planes; p++) {
		if (m->fixed >> p & 1)
			continue;
		put_plane(m, p, mode[p], p && pruned ? k : n, window);
		if (p || !pruned)
			continue;
		k = 0;
		for (size_t i = 0; i < n; i++)
			k += !m->zero_at[i];
		if (!k && !one_in(&m->s, 8)) { /* a block of which nothing is left is refused */
			pruned = 0;
			k = n;
		}
		m->g->planted += !k;
	}
	if (slip(m))
		pruned = !pruned;
	put_at(m, head_at, head | (pruned ? WIRE_REGION_PRUNED : 0), 4);
	end_region(m, b);
	for (int p = 0; p < m->planes; p++) {
		int wrong;

		if (!(m->fixed >> p & 1))
			continue;
		contents(m, p, WIRE_MODE_RAW, n);
		wrong = pruned && slip(m);
		for (size_t i = 0; i < n && pruned && !wrong; i++)
			if (m->zero_at[i])
				m->plane[i] = 0;
		memcpy(m->out.p + fixed_at[p] + first, m->plane, n);
	}
}

void make_lossless(struct maker *m)
{
	uint64_t fixed_at[WIRE_MAX_PLANES] = {0};
	uint32_t window = 0;

	m->block_log2 = (uint8_t)between(&m->s, WIRE_MIN_BLOCK_LOG2, below(&m->s, 3) ? 10 : WIRE_MAX_BLOCK_LOG2);
	m->nblocks = (uint32_t)((m->g->n + (1ull << m->block_log2) - 1) >> m->block_log2);
	for (int p = 0; p < m->planes; p++) {
		uint64_t what = p == 0 && m->octave ? below(&m->s, 6) : below(&m->s, 4);

		if (what == 3 && !(p == 0 && m->g->dtype == CODEC_FLOAT64))
			m->fixed |= (uint8_t)(1 << p);
		else if (what != 2 || (p == 0 && m->g->dtype == CODEC_FLOAT64))
			m->coded |= (uint8_t)(1 << p);
		if (m->coded >> p & 1 && !(p == 0 && m->octave) && one_in(&m->s, 3))
			m->halved |= (uint8_t)(1 << p);
	}
	m->halved &= m->g->dtype == CODEC_FLOAT64 ? (uint8_t)~2 : (uint8_t)~0;
	put_side(m, &window);
	m->directory_at = m->out.n;
	put_zeros(&m->out, WIRE_DIRECTORY_ENTRY * m->nblocks);
	for (int p = 0; p < m->planes; p++)
		if (m->fixed >> p & 1) {
			fixed_at[p] = m->out.n;
			put_zeros(&m->out, (size_t)CEIL8(m->g->n));
			if (m->g->n % 8 && slip(m))
				m->out.p[m->out.n - 1] = 1;
		}
	for (uint32_t b = 0; b < m->nblocks; b++)
		put_region(m, b, fixed_at, window);
}
