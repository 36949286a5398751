/* codebook.c - check and load agreed codebooks. */
#include "codebook.h"

/* Return CODEC_OK if frames of this header's dtype and layout code exponents, the only symbols of agreed codebooks. */
codec_status has_exponents(const struct header *h)
{
	if (!family_of(h)->symbols)
		return CODEC_BAD_SPEC;
	return dtype_has_top(dtype_of(h->dtype)) ? CODEC_OK : CODEC_BAD_DTYPE;
}

/* Return the id of a codebook: a digest of its code lengths and of `symbols` (CODEC_SYMBOLS_*), never 0. */
uint64_t codebook_id(const codebook *b, uint8_t symbols)
{
	uint8_t image[258];
	uint64_t id;

	memcpy(image, b->length, 257);
	image[257] = symbols;
	id = kernels_scalar.digest(image, sizeof image, WIRE_SEED_SIDE);
	return id ? id : 1;
}

/* Check a caller's codebook, and convert it to `b`. */
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

/* Check that a caller's codebook is valid and codes the symbols of this frame, and convert it to `b`. */
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b)
{
	TRY(book_load(c, b));
	return c->symbols == family_of(h)->symbols(h) ? CODEC_OK : CODEC_BAD_CODEBOOK;
}
