/* head.h - the header's bytes. */
#ifndef CODEC_HEAD_H
#define CODEC_HEAD_H

#include "family.h"

codec_status header_read(const uint8_t *frame, size_t nbytes, struct header *h, codec_fault *f);
void header_write(const struct header *h, uint8_t *frame);
/* The header's and side section's part of the checksum. */
uint64_t header_seal(const struct header *h, const struct kernels *k, const uint8_t *side);

/* What families that cut tensors into blocks of 2^block_log2 values have in common. */
codec_status header_check_blocks(const struct header *h, codec_fault *f);

#endif
