/* lossless/decode_fast2.cu - decode_lossless_fast<2>, whose CTAs have 512 threads. */
#include "lossless/decode_fast.cuh"
