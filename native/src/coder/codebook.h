/* codebook.h - codebooks that both sides hold. */
#ifndef CODEC_CODEBOOK_H
#define CODEC_CODEBOOK_H

#include "frame/family.h"

codec_status has_exponents(const struct header *h);
uint64_t codebook_id(const codebook *b, uint8_t symbols);
/* A caller's codebook as ours, if it is one. */
codec_status book_load(const codec_codebook *c, codebook *b);
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b);

#endif
