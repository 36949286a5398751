/* head.h - read and write the bytes of a header. */
#ifndef CODEC_HEAD_H
#define CODEC_HEAD_H

#include "family.h"

codec_status header_read(const uint8_t *frame, size_t nbytes, struct header *h, codec_fault *f);
void header_write(const struct header *h, uint8_t *frame);
/* Return the contribution of header and side section to the frame's checksum. */
uint64_t head_checksum(const struct header *h, const struct kernels *k, const uint8_t *side);

/* Check the header field block_log2, for families that cut tensors into blocks of 2^block_log2 values. */
codec_status header_check_blocks(const struct header *h, codec_fault *f);

#endif
