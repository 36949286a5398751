/* codebook.h - codebooks that both sides hold. */
#ifndef CODEC_CODEBOOK_H
#define CODEC_CODEBOOK_H

#include "frame/family.h"

codec_status has_exponents(const struct header *h);
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b);

#endif
