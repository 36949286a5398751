/* make_lossless.c - generate LOSSLESS frames: docs/spec/format.md, sections 3 to 7. */
#include "maker.h"

/* Return 1 if plane 0 is a part of the pattern, without the sign. */
static int has_top(const struct maker *m)
{
	return m->octave && m->planes > 1;
}

static int raw_bits(const struct maker *m, int p)
{
	return WIRE_RAW_BITS(m->halved, p, m->planes);
}

static void put_side(struct maker *m)
{
	for (int p = 0; p < m->planes; p++) {
		struct book *b = m->book + p;

		if (!(m->coded >> p & 1))
			continue;
		book_make(m, b, 0, raw_bits(m, p) && !slip(m) ? 255 >> raw_bits(m, p) : 255, 1);
		if (p == 0 && has_top(m) && one_in(&m->s, 4))
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

/* Generate n bytes of a plane without a codebook, for the mode `mode`, in m->plane. */
static void contents(struct maker *m, uint32_t mode, size_t n)
{
	uint64_t dense = below(&m->s, 5), runs = noise(&m->s) | noise(&m->s);

	for (size_t i = 0; i < n; i++) {
		uint64_t x = noise(&m->s);

		m->plane[i] = x >> 8 & 255;
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
		int any = one_in(&m->s, 16); /* if 1, runs of zeros may be stored although encoders omit them */

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

/* Write random raw bits of a plane of n values. Bits after the last value's are 0. */
static void put_raw_bits(struct maker *m, int raw, size_t n)
{
	size_t nbits = n * (size_t)raw, nbytes = (nbits + 7) / 8;

	for (size_t i = 0; i < nbytes; i++) {
		uint8_t x = (uint8_t)noise(&m->s);

		if (i + 1 == nbytes && nbits % 8 && !slip(m))
			x &= (uint8_t)((1 << nbits % 8) - 1);
		put_raw(&m->out, &x, 1);
	}
}

/* Write plane p of n values. Plane 0: m->zero_at marks the values that are pruned. */
static void put_plane(struct maker *m, int p, uint32_t mode, size_t n)
{
	const struct book *b = m->book + p;

	if (mode == WIRE_MODE_CODED) {
		draw(m, b, n, 256u >> raw_bits(m, p));
		put_coded(m, b, n, 1);
		put_raw_bits(m, raw_bits(m, p), n);
	} else {
		contents(m, mode, n);
		if (mode == WIRE_MODE_RAW)
			put_raw(&m->out, m->plane, n);
		else if (mode == WIRE_MODE_ROWS)
			put_runs(m, n);
		else
			put(m, n ? m->plane[0] : 0, 1);
	}
	if (p == 0)
		for (size_t i = 0; i < n; i++)
			m->zero_at[i] = !m->plane[i];
}

size_t put_gaps(struct maker *m, size_t n, int gaps)
{
	uint32_t rows = (uint32_t)((n + WIRE_ROW - 1) / WIRE_ROW), word = 0;
	uint32_t first = (uint32_t)below(&m->s, rows), dense = 1 + (uint32_t)below(&m->s, 15);
	uint32_t none = gaps ? (first + 1 + (uint32_t)below(&m->s, rows - 1)) % rows : 0;
	int all = gaps && slip(m), nothing = gaps && slip(m); /* rules: some rows are left out, but not all */
	size_t kept = 0;

	for (uint32_t q = 0; q < rows; q++) {
		int has = q == first || (q != none && noise(&m->s) % 16 < dense);

		has = !gaps || all || (has && !nothing);
		word |= (uint32_t)has << q % 32;
		for (size_t i = (size_t)q * WIRE_ROW; has && i < n && i < ((size_t)q + 1) * WIRE_ROW; i++)
			m->at[kept++] = (uint32_t)i;
		if (q % 32 < 31 && q + 1 < rows)
			continue;
		if (gaps)
			put(m, word, 4);
		word = 0;
	}
	return kept;
}

static uint32_t pick_mode(struct maker *m, int p)
{
	static const uint32_t MODES[] = {WIRE_MODE_CODED, WIRE_MODE_CODED, WIRE_MODE_CODED,
					 WIRE_MODE_RAW,   WIRE_MODE_ROWS,  WIRE_MODE_CONSTANT};
	int coded = m->coded >> p & 1 || slip(m);

	return MODES[coded ? below(&m->s, 6) : 3 + below(&m->s, 3)];
}

static void put_region(struct maker *m, uint32_t b, const uint64_t *fixed_at)
{
	uint64_t first = (uint64_t)b << m->block_log2, left = m->g->n - first, block = 1ull << m->block_log2;
	size_t n = (size_t)(left < block ? left : block), kept, k, head_at = m->out.n;
	uint32_t mode[WIRE_MAX_PLANES] = {0}, head = 0;
	int pruned, gaps = !m->fixed && n > WIRE_ROW && one_in(&m->s, 3);

	for (int p = 0; p < m->planes; p++)
		if (!(m->fixed >> p & 1))
			head |= (mode[p] = pick_mode(m, p)) << 2 * p;
	pruned = has_top(m) && !(m->fixed & 1) && mode[0] == WIRE_MODE_CODED && below(&m->s, 2);
	put_zeros(&m->out, 4);
	k = kept = put_gaps(m, n, gaps);
	memset(m->zero_at, 0, n);
	for (int p = 0; p < m->planes; p++) {
		if (m->fixed >> p & 1)
			continue;
		put_plane(m, p, mode[p], p && pruned ? k : kept);
		if (p || !pruned)
			continue;
		k = 0;
		for (size_t i = 0; i < kept; i++)
			k += !m->zero_at[i];
		if (!k && !one_in(&m->s, 8)) { /* a pruned block must have a value that is not pruned */
			pruned = 0;
			k = kept;
		}
		m->g->planted += !k;
	}
	if (slip(m))
		pruned = !pruned;
	head |= (pruned ? WIRE_REGION_PRUNED : 0) | (gaps ? WIRE_REGION_GAPS : 0);
	put_at(m, head_at, head, 4);
	end_region(m, b);
	for (int p = 0; p < m->planes; p++) {
		int wrong;

		if (!(m->fixed >> p & 1))
			continue;
		contents(m, WIRE_MODE_RAW, n);
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

	m->block_log2 = (uint8_t)between(&m->s, WIRE_MIN_BLOCK_LOG2, below(&m->s, 3) ? 10 : WIRE_MAX_BLOCK_LOG2);
	m->nblocks = (uint32_t)((m->g->n + (1ull << m->block_log2) - 1) >> m->block_log2);
	for (int p = 0; p < m->planes; p++) {
		uint64_t what =
			p == 0 && m->octave ? below(&m->s, 6) : below(&m->s, 4); /* 3: fixed; 2: neither; else coded */

		if (what == 3)
			m->fixed |= (uint8_t)(1 << p);
		else if (what != 2)
			m->coded |= (uint8_t)(1 << p);
		if (m->coded >> p & 1 && !(p == 0 && has_top(m)) && one_in(&m->s, 3))
			m->halved |= (uint8_t)(1 << p);
		if (m->coded && m->octave && m->planes == 1 && below(&m->s, 4))
			m->halved = (uint8_t)(2 << below(&m->s, 2));
	}
	put_side(m);
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
		put_region(m, b, fixed_at);
}
