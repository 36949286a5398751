/* grammar.c - generate a frame: codec, shape, header and checksums. make_*.c generate the contents, by codec. */
#include "exact/bits.h"
#include "maker.h"

static uint64_t load(const uint8_t *p, int nbytes)
{
	uint64_t x = 0;

	while (nbytes-- > 0)
		x = x << 8 | p[nbytes];
	return x;
}

static void store(uint8_t *p, uint64_t x, int nbytes)
{
	for (int i = 0; i < nbytes; i++)
		p[i] = (uint8_t)(x >> 8 * i);
}

static uint64_t block_checksum(uint64_t d, uint64_t block)
{
	return bits_mix64(d ^ (block + 1) * 0x9e3779b97f4a7c15ull);
}

void grammar_recompute_checksums(uint8_t *f, size_t nbytes)
{
	uint64_t header = WIRE_AT_SHAPE + 8 * (uint64_t)(nbytes > 7 ? f[WIRE_AT_RANK] : 0), n = 1, side, nblocks, at,
		 sum;
	uint64_t stride, block;

	if (nbytes < header)
		return;
	nbytes = load(f + WIRE_AT_FRAME_NBYTES, 8) < nbytes ? (size_t)load(f + WIRE_AT_FRAME_NBYTES, 8) : nbytes;
	if (nbytes < header)
		return;
	store(f + WIRE_AT_CHECKSUM, 0, 8);
	sum = digest(f, (size_t)header, WIRE_SEED_HEADER);
	for (int i = 0; i < f[WIRE_AT_RANK]; i++)
		n *= load(f + WIRE_AT_SHAPE + 8 * i, 8);
	side = load(f + WIRE_AT_SIDE_NBYTES, 4);
	nblocks = load(f + WIRE_AT_NBLOCKS, 4);
	if (f[WIRE_AT_LAYOUT] == WIRE_LAYOUT_STORED) {
		sum += block_checksum(digest(f + header, nbytes - (size_t)header, WIRE_SEED_REGION), 0);
		store(f + WIRE_AT_CHECKSUM, sum, 8);
		return;
	}
	if (side > nbytes - header || 8 * nblocks > nbytes - header - side)
		return;
	stride = n < nbytes ? CEIL8(n) : nbytes + 8;
	block = 1ull << (f[WIRE_AT_BLOCK_LOG2] & 31);
	at = header + side + 8 * nblocks;
	for (int p = 0; p < 8; p++)
		if (f[WIRE_AT_FIXED] >> p & 1)
			at = stride > nbytes - at ? nbytes : at + stride;
	for (uint64_t b = 0; b < nblocks; b++) {
		uint8_t *entry = f + header + side + 8 * b;
		uint64_t end = 8 * load(entry, 4), plane = header + side + 8 * nblocks, d;

		if (end <= at || end > nbytes)
			break;
		d = digest(f + at, (size_t)(end - at), WIRE_SEED_REGION);
		for (uint32_t p = 0; p < 8; p++) {
			uint64_t first = b * block, m;

			if (!(f[WIRE_AT_FIXED] >> p & 1))
				continue;
			if (first >= n || stride > nbytes - plane)
				break;
			m = n - first < block ? n - first : block;
			d += digest(f + plane + first, (size_t)m, WIRE_SEED_PLANE + p);
			plane += stride;
		}
		d = block_checksum(d, b);
		store(entry + 4, d >> 32, 4);
		sum += d;
		at = end;
	}
	sum += digest(f + header, (size_t)side, WIRE_SEED_SIDE);
	sum += digest(f + header + side, (size_t)(8 * nblocks), WIRE_SEED_DIRECTORY);
	store(f + WIRE_AT_CHECKSUM, sum, 8);
}

/* Pick the number of values, mostly small: a frame of two blocks reaches the same code as a frame of a hundred. */
static uint64_t pick_n(struct maker *m)
{
	static const uint64_t MOST[] = {8, 700, 700, 1600, 1600, 5000, 9000, 17000, 40000, 100000};
	uint64_t most = MOST[one_in(&m->s, 4) ? below(&m->s, 10) : below(&m->s, 6)];

	return 1 + below(&m->s, most < m->most ? most : m->most);
}

static void pick_shape(struct maker *m)
{
	struct grammar *g = m->g;
	uint64_t n = pick_n(m), large;

	g->rank = (uint32_t)below(&m->s, 3) ? 1 + (uint32_t)below(&m->s, 3) : (uint32_t)below(&m->s, 9);
	large = g->rank ? below(&m->s, g->rank) : 0;
	for (uint32_t i = 0; i < g->rank; i++) {
		g->shape[i] = i == large ? 1 : 1 + below(&m->s, n < 70 ? n : one_in(&m->s, 4) ? 70 : 4);
		n /= g->shape[i];
	}
	if (g->rank)
		g->shape[large] = n;
	g->n = 1;
	for (uint32_t i = 0; i < g->rank; i++)
		g->n *= g->shape[i];
}

/* Pick a shape with a dimension of 0. The product of the other dimensions may be any number below 2^60. */
static void pick_empty(struct maker *m)
{
	struct grammar *g = m->g;
	uint64_t product = 1; /* product of the preceding dimensions, below 2^60 */

	g->rank = 1 + (uint32_t)below(&m->s, 8);
	for (uint32_t i = 0; i < g->rank; i++) {
		uint64_t limit = ((1ull << 60) - 1) / product; /* largest valid dimension */

		g->shape[i] = 1 + below(&m->s, one_in(&m->s, 3) ? limit : limit < 5 ? limit : 5);
		product *= g->shape[i];
		if (slip(m))
			g->shape[i] = (limit + 1) << below(&m->s, 4);
	}
	g->shape[below(&m->s, g->rank)] = g->n = 0;
}

/* dtypes that all codecs accept */
static const uint8_t FLOATS[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};

static int is_float(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 || dtype == CODEC_FLOAT16;
}

static uint32_t pick_dtype(struct maker *m)
{
	static const uint8_t DTYPES[] = {1, 2, 3, 4,  1,  2,  3,  4,  1,  2,  5,  6,
					 7, 8, 9, 16, 17, 18, 19, 20, 21, 22, 23, 24};

	return m->g->codec == CODEC_LOSSLESS ? DTYPES[below(&m->s, sizeof DTYPES)] : FLOATS[below(&m->s, 3)];
}

/*
 * Pick codec, dtype, shape and params of a frame. If `like` is not NULL, use its shape, and perhaps its dtype and
 * codec.
 */
static void pick(struct maker *m, const struct grammar *like)
{
#define NUMBER(name, ...) CODEC_##name,
	static const uint8_t CODECS[] = {WIRE_CODECS(NUMBER) CODEC_LOSSLESS, CODEC_LOSSLESS, CODEC_TRUNCATE};
#undef NUMBER
	struct grammar *g = m->g;
	int same = like && below(&m->s, 3);

	g->codec = same ? like->codec : CODECS[below(&m->s, sizeof CODECS)];
	if (g->codec == CODEC_DELTA) /* make_delta.c makes frames that need a base */
		g->codec = CODEC_LOSSLESS;
	if (like) {
		g->dtype = like->dtype;
		if (is_float(g->dtype) && one_in(&m->s, 4)) /* frames of different dtypes may be reduced together */
			g->dtype = FLOATS[below(&m->s, 3)];
		g->rank = like->rank;
		g->n = like->n;
		memcpy(g->shape, like->shape, sizeof g->shape);
		if (!is_float(g->dtype))
			g->codec = CODEC_LOSSLESS;
	} else {
		g->dtype = pick_dtype(m);
		if (one_in(&m->s, 24))
			pick_empty(m);
		else
			pick_shape(m);
	}
	m->layout = WIRE_LAYOUT_BLOCKS;
	if (g->codec == CODEC_LOSSLESS) {
		g->params[WIRE_PARAM_MAX_CODE_LENGTH] = (uint8_t)between(&m->s, 2, 8);
		g->params[WIRE_PARAM_VARIANT] = (uint8_t)below(&m->s, 3);
	} else if (g->codec == CODEC_TRUNCATE) {
		pick_truncate_params(m);
	} else if (g->codec == CODEC_TOPK) {
		pick_topk_params(m);
	} else {
		pick_rows_params(m);
	}
	if (same && below(&m->s, 4))
		memcpy(g->params, like->params, 8);
	if (!g->n || ((g->codec == CODEC_LOSSLESS || g->codec == CODEC_TRUNCATE) && one_in(&m->s, 10)))
		m->layout = WIRE_LAYOUT_STORED;
}

static void put_header(struct maker *m)
{
	const struct grammar *g = m->g;
	const uint64_t fields[][3] = {
		{0, 0x43444f43, 4},
		{WIRE_AT_VERSION, 1, 1},
		{WIRE_AT_CODEC, g->codec, 1},
		{WIRE_AT_DTYPE, g->dtype, 1},
		{WIRE_AT_RANK, g->rank, 1},
		{WIRE_AT_LAYOUT, m->layout, 1},
		{WIRE_AT_BLOCK_LOG2, m->block_log2, 1},
		{WIRE_AT_FIXED, m->fixed, 1},
		{WIRE_AT_CODED, m->coded, 1},
		{WIRE_AT_SIDE_NBYTES, m->side_at, 4},
		{WIRE_AT_FRAME_NBYTES, m->out.n, 8},
		{WIRE_AT_FLAGS, m->flags, 1},
		{WIRE_AT_HALVED, m->halved, 1},
		{WIRE_AT_RESERVED, 0, 2},
		{WIRE_AT_NBLOCKS, m->nblocks, 4},
	};

	for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
		put_at(m, fields[i][0], fields[i][1], (int)fields[i][2]);
	for (uint64_t i = 0; i < 8; i++)
		put_at(m, WIRE_AT_PARAMS + i, g->params[i], 1);
	for (uint64_t i = 0; i < g->rank; i++)
		put_at(m, WIRE_AT_SHAPE + 8 * i, g->shape[i], 8);
}

/* Set the constants of the dtype's patterns: docs/spec/format.md, section 3. */
static void patterns_of(struct maker *m, uint32_t dtype)
{
	m->octave = dtype == CODEC_FLOAT64 ? 16 : dtype == CODEC_FLOAT16 ? 1024 : dtype < 5 ? 128 : 0;
	m->zero = dtype == CODEC_FLOAT64 ? 16 : 128;
	m->grain = m->octave / 8;
	if (dtype < CODEC_FLOAT8_E4M3FN || dtype > CODEC_FLOAT8_E5M2FNUZ)
		return;
	m->octave = m->zero = dtype == CODEC_FLOAT8_E5M2 || dtype == CODEC_FLOAT8_E5M2FNUZ ? 1024 : 2048;
	m->grain = 256;
}

static void make(struct maker *m, const struct grammar *like)
{
	struct grammar *g = m->g;
	uint64_t header;

	m->out.n = 0;
	m->sites = 0;
	m->raise = NULL;
	pick(m, like);
	m->planes = (int)codec_dtype_nbytes(g->dtype);
	patterns_of(m, g->dtype);
	header = WIRE_AT_SHAPE + 8 * (uint64_t)g->rank;
	put_zeros(&m->out, (size_t)header);
	if (m->layout == WIRE_LAYOUT_STORED) {
		for (uint64_t i = 0; i < g->n * (uint64_t)m->planes; i++)
			put_raw(&m->out, &(uint8_t){(uint8_t)noise(&m->s)}, 1);
		if (slip(m))
			put_zeros(&m->out, 1);
	} else {
		m->directory_at = 0;
		if (g->codec == CODEC_LOSSLESS)
			make_lossless(m);
		else if (g->codec == CODEC_TRUNCATE)
			make_truncate(m);
		else if (g->codec == CODEC_TOPK)
			make_topk(m);
		else
			make_rows(m);
		m->side_at = m->directory_at - header;
	}
	put_header(m);
	free(m->raise);
}

/*
 * Remove the end of a section from the frame, and adjust sizes in the header to be consistent. A decoder that does not
 * notice this reads bytes of the next section, or past the frame's end.
 */
static void shorten(struct grammar *g)
{
	struct source s = {.state = g->nbytes + g->frame[g->nbytes - 1]};
	uint64_t side_at = WIRE_AT_SHAPE + 8 * (uint64_t)g->rank, side, nblocks, b = 0, end, cut, room;
	uint8_t *directory;

	if (g->frame[WIRE_AT_LAYOUT] == WIRE_LAYOUT_STORED)
		return;
	side = load(g->frame + WIRE_AT_SIDE_NBYTES, 4);
	nblocks = load(g->frame + WIRE_AT_NBLOCKS, 4);
	directory = g->frame + side_at + side;
	if (side && below(&s, 3) == 0) {
		end = side_at + side;
		room = side;
	} else {
		b = below(&s, 2) ? nblocks - 1 : below(&s, nblocks);
		end = 8 * load(directory + 8 * b, 4);
		room = b ? end - 8 * load(directory + 8 * (b - 1), 4) : 8 * (1 + below(&s, 4));
	}
	cut = 8 * (1 + below(&s, room / 8 < 4 ? room / 8 : one_in(&s, 3) ? room / 8 : 4));
	if (end == side_at + side)
		store(g->frame + WIRE_AT_SIDE_NBYTES, side - cut, 4);
	for (uint64_t i = b; i < nblocks; i++)
		store(directory + 8 * i, load(directory + 8 * i, 4) - cut / 8, 4);
	store(g->frame + WIRE_AT_FRAME_NBYTES, g->nbytes - cut, 8);
	memmove(g->frame + end - cut, g->frame + end, g->nbytes - end);
	g->nbytes -= cut;
}

/*
 * Add a fault other than a wrong value of one field: change any bytes, a checksum, or the frame's size. `what` selects.
 */
static void spoil(struct maker *m, uint64_t what)
{
	struct grammar *g = m->g;

	for (uint64_t i = what == 1 ? 1 + below(&m->s, 4) : 0; i; i--) {
		uint64_t at = below(&m->s, 2) ? below(&m->s, g->nbytes) : noise(&m->s) % g->nbytes;

		g->frame[at] = (uint8_t)(one_in(&m->s, 2) ? noise(&m->s) : g->frame[at] ^ 1u << below(&m->s, 8));
	}
	if (what == 5)
		shorten(g);
	g->planted += what > 0;
	grammar_recompute_checksums(g->frame, g->nbytes);
	if (what == 2)
		g->frame[noise(&m->s) % g->nbytes] ^= (uint8_t)(1 << below(&m->s, 8));
	if (what == 3)
		g->frame[WIRE_AT_CHECKSUM + below(&m->s, 8)] ^= (uint8_t)(1 << below(&m->s, 8));
	if (what == 4) /* truncated frame; bytes after a frame are tested where the header declares a smaller frame */
		g->nbytes = below(&m->s, 2) ? below(&m->s, g->nbytes) : g->nbytes - 1;
}

static void reset(struct maker *m, struct grammar *g, struct source s)
{
	struct bytes out = m->out;

	grammar_free(g);
	memset(m, 0, sizeof *m);
	m->s = s;
	m->g = g;
	m->out = out;
	m->fault = UINT64_MAX;
}

void grammar_make(struct grammar *g, const uint8_t *data, size_t size, uint64_t most, const struct grammar *like)
{
	static struct maker m;
	struct source s = source_open(data, size);
	uint64_t what = below(&s, 14), which = below(&s, 1 << 16), sites;

	memset(g, 0, sizeof *g);
	reset(&m, g, s);
	m.most = most;
	make(&m, like);
	sites = m.sites;
	if (what >= 11) { /* 3 of 14 frames have one wrong field, the rest have other faults */
		reset(&m, g, s);
		m.most = most;
		m.fault = which % sites;
		make(&m, like);
	}
	g->nbytes = m.out.n;
	g->frame = malloc(g->nbytes);
	memcpy(g->frame, m.out.p, g->nbytes);
	spoil(&m, what >= 5 && what < 11 ? what < 10 ? what - 4 : 5 : 0);
}

void grammar_free(struct grammar *g)
{
	free(g->frame);
	free(g->ea);
	free(g->a);
	free(g->theta.data);
	free(g->v.data);
	free(g->m.data);
	memset(g, 0, sizeof *g);
}
