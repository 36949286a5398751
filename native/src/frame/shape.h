/* shape.h - number of values in the shapes of tensors and of segments. */
#ifndef CODEC_SHAPE_H
#define CODEC_SHAPE_H

#include "base.h"

codec_status shape_product(uint32_t rank, const uint64_t *shape, uint64_t *n);
uint64_t segment_count(const codec_segment *s);
codec_status segments_check(const codec_context *with, uint64_t n);

#endif
