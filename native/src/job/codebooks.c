/* codebooks.c - agreed codebooks: build from counts, serialize, deserialize. */
#include "api.h"

codec_status codec_codebook_check(const codec_codebook *book)
{
	codebook b;

	return book ? book_load(book, &b) : CODEC_BAD_ARGUMENT;
}

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
	book_from_counts(&b, scaled, h.max_code_length);
	memset(out, 0, sizeof *out);
	memcpy(out->length, b.length, 256);
	out->escape_length = b.length[WIRE_ESCAPE];
	out->symbols = family_of(&h)->symbols(&h);
	out->id = codebook_id(&b, out->symbols);
	return CODEC_OK;
}
