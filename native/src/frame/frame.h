/* frame.h - check a frame without decoding it: sections and checksums. */
#ifndef CODEC_FRAME_H
#define CODEC_FRAME_H

#include "head.h"

codec_status frame_head(const uint8_t *head, size_t head_nbytes, uint64_t nbytes, const codec_context *with,
			struct header *h);
codec_status frame_open(const uint8_t *frame, size_t nbytes, const codec_context *with, struct header *h);
codec_status frame_region(const uint8_t *frame, const struct header *h, uint64_t b, uint64_t *at, uint64_t *end,
			  codec_fault *f);
codec_status frame_check_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			       uint64_t at, uint64_t end, uint64_t *checksum, codec_fault *f);
uint64_t frame_outer_checksum(const uint8_t *frame, const struct header *h, const struct kernels *k);
codec_status frame_compare_checksum(const struct header *h, uint64_t checksum, codec_fault *f);
codec_status frame_verify(const uint8_t *frame, const struct header *h, const struct kernels *k, codec_fault *f);

#endif
