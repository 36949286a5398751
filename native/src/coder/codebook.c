/* codebook.c - codebooks that both sides hold: made from counts, named, checked. */
#include "codebook.h"

#include "job/api.h"

/* Does such a frame have exponents, for which a codebook may be agreed upon? */
codec_status has_exponents(const struct header *h)
{
	if (codec_is_rows(h->codec))
		return CODEC_BAD_SPEC;
	return dtype_of(h->dtype)->octave ? CODEC_OK : CODEC_BAD_DTYPE;
}

/* What a codebook's id is: one id, one book. */
static uint64_t codebook_id(const codebook *b, uint8_t symbols)
{
	uint8_t image[258];
	uint64_t id;

	memcpy(image, b->length, 257);
	image[257] = symbols;
	id = kernels_scalar.digest(image, sizeof image, WIRE_SEED_SIDE);
	return id ? id : 1;
}

/* What the symbols of plane 0 are: CODEC_SYMBOLS_*. */
static uint8_t codebook_symbols(const struct header *h)
{
	if (h->codec != CODEC_TRUNCATE)
		return CODEC_SYMBOLS_PATTERN;
	if (h->variant != WIRE_LEVELS_CODED)
		return CODEC_SYMBOLS_EXPONENT;
	return h->dtype == CODEC_FLOAT16 ? CODEC_SYMBOLS_JOINT16 : CODEC_SYMBOLS_JOINT;
}

/* A caller's codebook as ours, if it is one. */
static codec_status book_load(const codec_codebook *c, codebook *b)
{
	for (int i = 0; i < 6; i++)
		if (c->reserved[i])
			return CODEC_BAD_CODEBOOK;
	memcpy(b->length, c->length, 256);
	b->length[WIRE_ESCAPE] = c->escape_length;
	return book_valid(b) && c->symbols <= CODEC_SYMBOLS_JOINT16 && c->id == codebook_id(b, c->symbols)
		       ? CODEC_OK
		       : CODEC_BAD_CODEBOOK;
}

codec_status codec_codebook_check(const codec_codebook *book)
{
	codebook b;

	return book ? book_load(book, &b) : CODEC_BAD_ARGUMENT;
}

/* A caller's codebook for the symbols of this frame. */
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b)
{
	TRY(book_load(c, b));
	return c->symbols == codebook_symbols(h) ? CODEC_OK : CODEC_BAD_CODEBOOK;
}

/* Bytes: id | what its symbols are | lengths as in a frame's side section */
codec_status codec_codebook_pack(const codec_codebook *book, void *dst, size_t capacity, size_t *written)
{
	uint8_t image[CODEC_CODEBOOK_NBYTES];
	size_t nbytes;
	codebook b;

	if (!book || !written || (!dst && capacity))
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	TRY(book_load(book, &b));
	store64(image, book->id);
	image[8] = book->symbols;
	nbytes = 9 + (size_t)book_pack(&b, image + 9);
	if (nbytes > capacity)
		return CODEC_SHORT_OUTPUT;
	memcpy(dst, image, nbytes);
	*written = nbytes;
	return CODEC_OK;
}

codec_status codec_codebook_unpack(const void *src, size_t nbytes, codec_codebook *book)
{
	const uint8_t *p = src;
	codec_codebook out = {0};
	codebook b;

	if (!book || (!p && nbytes))
		return CODEC_BAD_ARGUMENT;
	if (nbytes < 9 || (size_t)book_unpack(&b, p + 9, nbytes - 9) != nbytes - 9)
		return CODEC_BAD_CODEBOOK;
	out.id = load64(p);
	out.symbols = p[8];
	memcpy(out.length, b.length, 256);
	out.escape_length = b.length[WIRE_ESCAPE];
	TRY(book_load(&out, &b));
	*book = out;
	return CODEC_OK;
}

codec_status codec_codebook_build(const codec_spec *spec, uint32_t dtype, const uint64_t counts[256],
				  codec_codebook *out)
{
	const codec_tensor like = {.struct_nbytes = sizeof like, .dtype = dtype};
	uint32_t scaled[256];
	struct header h;
	codec_tensor t;
	uint64_t most = 0;
	int shift = 0;
	codebook b;

	if (!counts || !out)
		return CODEC_BAD_ARGUMENT;
	TRY(request(spec, &like, 0, &h, &t));
	TRY(has_exponents(&h));
	for (int i = 0; i < 256; i++)
		most = MAX(most, counts[i]);
	while (most >> shift > UINT32_MAX)
		shift++;
	for (int i = 0; i < 256; i++)
		scaled[i] = (uint32_t)(counts[i] >> shift);
	book_from_counts(&b, scaled, h.cap);
	memset(out, 0, sizeof *out);
	memcpy(out->length, b.length, 256);
	out->escape_length = b.length[WIRE_ESCAPE];
	out->symbols = codebook_symbols(&h);
	out->id = codebook_id(&b, out->symbols);
	return CODEC_OK;
}
