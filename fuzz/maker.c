/* maker.c - generate the parts of frames that several codecs share: fields, codebooks, coded planes, scale models. */
#include <math.h>

#include "exact/bits.h"
#include "maker.h"

int slip(struct maker *m)
{
	if (m->sites++ != m->fault)
		return 0;
	m->g->planted++;
	return 1;
}

void put_raw(struct bytes *b, const void *p, size_t n)
{
	if (b->room - b->n < n) {
		b->room = 2 * b->room + n + 4096;
		b->p = realloc(b->p, b->room);
		if (!b->p)
			abort();
	}
	if (n)
		memcpy(b->p + b->n, p, n);
	b->n += n;
}

void put_zeros(struct bytes *b, size_t n)
{
	static const uint8_t ZEROS[4096];

	for (size_t m; n; n -= m) {
		m = n < sizeof ZEROS ? n : sizeof ZEROS;
		put_raw(b, ZEROS, m);
	}
}

/* Return a value other than x for a field of nbytes bytes: close to x, or at an end of the field's range. */
static uint64_t other(struct maker *m, uint64_t x, int nbytes)
{
	uint64_t mask = nbytes == 8 ? ~0ull : (1ull << 8 * nbytes) - 1, y;

	switch (below(&m->s, 8)) {
	case 0: y = x + 1; break;
	case 1: y = x - 1; break;
	case 2: y = 0; break;
	case 3: y = ~0ull; break;
	case 4: y = noise(&m->s); break;
	case 5: y = 1ull << below(&m->s, 8 * (uint64_t)nbytes); break;
	default: y = x ^ 1ull << below(&m->s, 8 * (uint64_t)nbytes);
	}
	return (y ^ x) & mask ? y : x ^ 1;
}

static void little(uint8_t *p, uint64_t x, int nbytes)
{
	for (int i = 0; i < nbytes; i++)
		p[i] = (uint8_t)(x >> 8 * i);
}

void put(struct maker *m, uint64_t x, int nbytes)
{
	uint8_t b[8];

	little(b, slip(m) ? other(m, x, nbytes) : x, nbytes);
	put_raw(&m->out, b, (size_t)nbytes);
}

void put_at(struct maker *m, uint64_t at, uint64_t x, int nbytes)
{
	little(m->out.p + at, slip(m) ? other(m, x, nbytes) : x, nbytes);
}

void put_gap(struct maker *m)
{
	size_t n = (size_t)(CEIL8(m->out.n) - m->out.n);

	put_zeros(&m->out, n);
	if (n && slip(m))
		m->out.p[m->out.n - 1 - below(&m->s, n)] = (uint8_t)(1 + below(&m->s, 255));
	if (slip(m))
		put_zeros(&m->out, 8);
}

void end_region(struct maker *m, uint32_t b)
{
	put_gap(m);
	put_at(m, m->directory_at + WIRE_DIRECTORY_ENTRY * b, m->out.n / 8, 4);
}

uint64_t digest(const uint8_t *p, size_t n, uint32_t seed)
{
	uint64_t total = 0;

	for (uint64_t c = 0; 1024 * c < n; c++) {
		uint64_t sum = 0;

		for (size_t i = 0; i < 1024 && 1024 * c + i < n; i++)
			sum += ((uint64_t)p[1024 * c + i] << 8 * (i % 4)) * (bits_mix32((uint32_t)(i / 4 + 1)) | 1);
		total += bits_mix64(sum + (((uint64_t)seed << 40) + c) * 0x9e3779b97f4a7c15ull);
	}
	return total;
}

uint32_t pick_scale(struct maker *m, int may_be_zero)
{
	uint32_t mantissa = (uint32_t)noise(&m->s) & 0x7fffff;

	switch (below(&m->s, 12)) {
	case 0: return may_be_zero ? 0 : 1;
	case 1: return 0x7f7fffff;       /* largest finite */
	case 2: return 1 + mantissa / 2; /* subnormal */
	case 3: return (uint32_t)between(&m->s, 1, 254) << 23 | mantissa;
	case 4: return (uint32_t)between(&m->s, 230, 254) << 23 | mantissa; /* large exponent */
	case 5: return (uint32_t)between(&m->s, 1, 254) << 23;
	default: return (uint32_t)between(&m->s, 110, 140) << 23 | (mantissa & ~0xffu);
	}
}

uint32_t bad_scale(struct maker *m)
{
	/* -0, Inf, NaN, negative, 0 */
	static const uint32_t NONE[] = {0x80000000, 0x7f800000, 0x7fc00000, 0x7f800001, 0xff800000, 0xbf800000, 0};

	return NONE[below(&m->s, 7)];
}

/* Compute canonical codes from code lengths. Of codes of equal length, the escape is the last. */
static void book_codes_of(struct book *b)
{
	int at = 0;

	b->pad = ESCAPE;
	for (int l = 1; l <= 8; l++)
		for (int i = 0; i < 257; i++) {
			if (b->length[i] != l)
				continue;
			b->bits[i] = (uint8_t)l;
			b->code[i] = (uint8_t)(at >> (8 - l));
			b->pad = at == 0 ? (uint16_t)i : b->pad;
			for (int j = 0; j < 256 >> l; j++, at++)
				b->lookup[at & 255] = (uint16_t)i;
		}
}

static void swap(uint16_t *a, uint16_t *b)
{
	uint16_t t = *a;

	*a = *b;
	*b = t;
}

void book_make(struct maker *m, struct book *b, int lowest, int highest, int zero)
{
	int span = highest - lowest + 1 + (zero && lowest > 0), most = span < 255 ? span : 255, n = 1, k, from;
	uint8_t length[256] = {0};
	uint16_t value[256];

	/*
	 * build a tree of k leaves by splitting leaves: a random one, or always the newest, which gives the longest
	 * codes
	 */
	k = 2 + (int)below(&m->s, one_in(&m->s, 3) || most < 12 ? (uint64_t)most : 12);
	for (int deep = one_in(&m->s, 3); n < k;) {
		int i = deep ? n - 1 : (int)(noise(&m->s) % (uint64_t)n);

		while (length[i] == 8)
			i = (i + 1) % n;
		length[n++] = ++length[i];
	}
	/* choose which byte values have codes: adjacent or random values */
	from = (int)below(&m->s, (uint64_t)span);
	for (int i = 0; i < span; i++) {
		int v = lowest + (from + i) % span;

		value[i] = (uint16_t)(v > highest ? 0 : v);
	}
	if (one_in(&m->s, 2))
		for (int i = 0; i < span; i++)
			swap(value + i, value + i + noise(&m->s) % (uint64_t)(span - i));
	zero = (int)below(&m->s, 2);
	for (int i = 0; i < span && !zero; i++)
		if (value[i] == 0) /* value 0 is the symbol of pruned values */
			swap(value, value + i);
	memset(b, 0, sizeof *b);
	b->length[ESCAPE] = length[0];
	for (int i = 1; i < k; i++)
		b->length[value[i - 1]] = length[i];
	if (slip(m)) { /* nearly valid: a Kraft sum other than 1, a code too long, or an escape without a code */
		int i = one_in(&m->s, 4) ? ESCAPE : value[below(&m->s, (uint64_t)(k - 1))];

		b->length[i] = (b->length[i] + 1 + below(&m->s, 15)) & 15;
	}
	book_codes_of(b);
}

void book_put(struct maker *m, const struct book *b)
{
	int first = 1, last = 255;

	while (last && !b->length[last])
		last--;
	while (first < last && !b->length[first])
		first++;
	put(m, b->length[ESCAPE] | (uint64_t)b->length[0] << 4, 1);
	put(m, (uint64_t)first, 1);
	put(m, (uint64_t)last, 1);
	for (int i = first; i <= last; i += 2) {
		uint8_t two = (uint8_t)(b->length[i] | (i < last ? b->length[i + 1] << 4 : 0));

		put_raw(&m->out, &two, 1);
	}
	if (slip(m)) /* plant a fault: change the code length of the last value, or the padding */
		m->out.p[m->out.n - 1] ^= 0x10;
}

void draw(struct maker *m, const struct book *b, size_t n, uint32_t literals)
{
	int style = (int)below(&m->s, 8), run = (int)below(&m->s, 256);

	for (size_t i = 0; i < n; i++) {
		uint64_t x = noise(&m->s);

		/*
		 * symbols distributed as the code lengths imply; or long runs of one symbol with rare exceptions; or
		 * escapes only
		 */
		if (style == 1 || (style == 2 && x >> 56) || (style == 3 && i % 100))
			m->symbol[i] = i && style > 1 ? m->symbol[i - 1] : b->lookup[run];
		else
			m->symbol[i] = style == 4 ? ESCAPE : b->lookup[x & 255];
		m->literal[i] = (uint16_t)((x >> 8 & 0xffff) % literals);
		if (style == 5) /* literals of byte values that also have codes, mostly of 0 */
			m->literal[i] = x >> 32 & 1 ? 0 : m->literal[i];
		m->plane[i] = (uint8_t)(m->symbol[i] == ESCAPE ? m->literal[i] : m->symbol[i]);
	}
	if (n && slip(m)) {
		m->symbol[n / 2] = ESCAPE;
		m->literal[n / 2] = (uint16_t)(literals + below(&m->s, 0x10000 - literals));
	}
}

/* Append n bits of x, most significant first in each byte. *have: number of bits written so far. */
static void put_bits(struct bytes *b, uint32_t *have, uint64_t x, uint32_t n)
{
	while (n-- > 0) {
		if (*have % 8 == 0)
			put_zeros(b, 1);
		b->p[b->n - 1] |= (uint8_t)((x >> n & 1) << (7 - *have % 8));
		++*have;
	}
}

/*
 * Encode the symbols m->symbol, last row of 128 first. Store the lanes' remaining bits in `lane`, their number in
 * `have`, and the words in `pushed`. Return the number of words.
 */
static size_t code_rows(const struct maker *m, const struct book *b, size_t rows, uint64_t *lane, uint32_t *have,
			uint32_t *pushed)
{
	size_t nwords = 0;

	for (size_t q = rows; q-- > 0;)
		for (int l = WIRE_LANES - 1; l >= 0; l--) {
			const uint16_t *quad = m->symbol + WIRE_ROW * q + 4 * l;
			uint32_t total = 0;

			for (int i = 0; i < 4; i++)
				total += b->bits[quad[i]];
			if (have[l] + total >= 64) {
				pushed[nwords++] = (uint32_t)lane[l];
				lane[l] >>= 32;
				have[l] -= 32;
			}
			for (int i = 3; i >= 0; i--) {
				lane[l] |= (uint64_t)b->code[quad[i]] << have[l];
				have[l] += b->bits[quad[i]];
			}
		}
	return nwords;
}

/* Write the lanes' tails, and padding up to the words of a plane that begins at `begin`. */
static void put_tails(struct maker *m, size_t begin, const uint64_t *lane, const uint32_t *have)
{
	uint32_t sum = 0;
	size_t at;

	for (int l = 0, wrong = slip(m) ? (int)below(&m->s, WIRE_LANES) : -1; l < WIRE_LANES; l++)
		put_bits(&m->out, &sum, (have[l] - 32) ^ (uint32_t)(l == wrong), 5);
	sum = 0;
	for (int l = 0; l < WIRE_LANES; l++)
		put_bits(&m->out, &sum, lane[l], have[l] - 32);
	if (sum % 8 && slip(m))
		m->out.p[m->out.n - 1] |= 1;
	at = m->out.n;
	while ((m->out.n - begin) % 4)
		put_zeros(&m->out, 1);
	if (m->out.n > at && slip(m))
		m->out.p[at] = (uint8_t)(1 + below(&m->s, 255));
}

static void put_literals(struct maker *m, size_t n, int nbytes)
{
	size_t at = m->out.n;

	for (size_t i = 0; i < n; i++)
		if (m->symbol[i] == ESCAPE) {
			uint8_t two[2] = {(uint8_t)m->literal[i], (uint8_t)(m->literal[i] >> 8)};

			put_raw(&m->out, two, (size_t)nbytes);
		}
	if (slip(m)) { /* write one literal too few, or too many bytes */
		if (m->out.n > at && one_in(&m->s, 2))
			m->out.n--;
		else
			put_zeros(&m->out, 1 + below(&m->s, 9));
	}
}

void put_coded(struct maker *m, const struct book *b, size_t n, int nbytes)
{
	size_t rows = (n + WIRE_ROW - 1) / WIRE_ROW, begin = m->out.n, nwords;
	uint64_t lane[WIRE_LANES] = {0};
	uint32_t have[WIRE_LANES];
	static uint32_t pushed[BLOCK], word[BLOCK + WIRE_LANES];
	uint8_t head[2] = {0};

	for (size_t i = n; i < WIRE_ROW * rows; i++)
		m->symbol[i] = b->pad;
	if (n % WIRE_ROW && slip(m))
		m->symbol[n + below(&m->s, WIRE_ROW - n % WIRE_ROW)] = b->lookup[below(&m->s, 256)];
	for (int l = 0; l < WIRE_LANES; l++)
		have[l] = 32;
	if (slip(m)) /* plant a lane that does not end with zero bits */
		lane[below(&m->s, WIRE_LANES)] = 1 + below(&m->s, 0xffff);
	nwords = code_rows(m, b, rows, lane, have, pushed);
	for (int l = 0; l < WIRE_LANES; l++)
		word[l] = (uint32_t)(lane[l] >> (have[l] - 32));
	for (size_t i = 0; i < nwords; i++)
		word[WIRE_LANES + i] = pushed[nwords - 1 - i];
	nwords += WIRE_LANES;
	while (nwords && !word[nwords - 1])
		nwords--;
	word[nwords] = 0;
	if (slip(m)) /* plant a last word of 0, or omit a word */
		nwords = nwords && one_in(&m->s, 2) ? nwords - 1 : nwords + 1;
	put_raw(&m->out, head, 2);
	little(m->out.p + begin, slip(m) ? other(m, nwords, 2) : nwords, 2);
	put_tails(m, begin, lane, have);
	for (size_t i = 0; i < nwords; i++) {
		uint8_t four[4];

		little(four, word[i], 4);
		put_raw(&m->out, four, 4);
	}
	put_literals(m, n, nbytes);
}

void put_prior(struct maker *m, const struct book *b, uint8_t symbols)
{
	codec_codebook *c = &m->g->book;
	uint8_t image[258];

	memcpy(image, b->length, 257);
	image[257] = symbols;
	m->flags |= WIRE_FLAG_PRIOR;
	m->g->has_book = 1;
	*c = (codec_codebook){.id = digest(image, sizeof image, WIRE_SEED_SIDE),
			      .escape_length = b->length[ESCAPE],
			      .symbols = symbols};
	c->id += c->id == 0;
	memcpy(c->length, b->length, 256);
	put(m, c->id, 8);
	if (slip(m)) { /* supply another valid book under the same id: two lengths are swapped */
		uint8_t *x = c->length + below(&m->s, 256), *y = c->length + below(&m->s, 256), t = *x;

		*x = *y;
		*y = t;
	}
}
