/* codebook.c - codebooks that both sides hold: named, checked. */
#include "codebook.h"

/* Does such a frame have exponents, for which a codebook may be agreed upon? */
codec_status has_exponents(const struct header *h)
{
	if (!family_of(h)->symbols)
		return CODEC_BAD_SPEC;
	return dtype_of(h->dtype)->octave ? CODEC_OK : CODEC_BAD_DTYPE;
}

/* What a codebook's id is: one id, one book. */
uint64_t codebook_id(const codebook *b, uint8_t symbols)
{
	uint8_t image[258];
	uint64_t id;

	memcpy(image, b->length, 257);
	image[257] = symbols;
	id = kernels_scalar.digest(image, sizeof image, WIRE_SEED_SIDE);
	return id ? id : 1;
}

/* A caller's codebook as ours, if it is one. */
codec_status book_load(const codec_codebook *c, codebook *b)
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

/* A caller's codebook for the symbols of this frame. */
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b)
{
	TRY(book_load(c, b));
	return c->symbols == family_of(h)->symbols(h) ? CODEC_OK : CODEC_BAD_CODEBOOK;
}

/* Bytes: id | what its symbols are | lengths as in a frame's side section */
