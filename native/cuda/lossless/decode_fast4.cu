/* lossless/decode_fast4.cu - decode_lossless_fast<4>, whose CTAs have 384 threads. */
#include "lossless/decode_fast.cuh"
