/* codebook.h - check and load agreed codebooks. */
#ifndef CODEC_CODEBOOK_H
#define CODEC_CODEBOOK_H

#include "frame/family.h"

codec_status has_exponents(const struct header *h);
uint64_t codebook_id(const codebook *b, uint8_t symbols);
/* Check a caller's codebook, and convert it to `b`. */
codec_status book_load(const codec_codebook *c, codebook *b);
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b);

#endif
