/* layout.cuh - check that the host's structs (src/layout.h) have the layout of the kernels' structs in native/cuda. */
#ifndef CODEC_CUDA_KERNELS_LAYOUT_CUH
#define CODEC_CUDA_KERNELS_LAYOUT_CUH

#include "layout.h"
#include "frame/decode.cuh"
#include "frame/encode.cuh"

#define SAME(ours, theirs) static_assert(ours == theirs, #theirs)
SAME(sizeof(units), sizeof(codec_units));
SAME(sizeof(encoding), sizeof(codec_encoding));
SAME(sizeof(decoding), sizeof(codec_decoding));
SAME(sizeof(found), sizeof(codec_found));
SAME(sizeof(written), sizeof(codec_written));
SAME(WRITTEN_NBYTES, sizeof(codec_written));
SAME(sizeof(lists), sizeof(codec_lists));
static_assert(sizeof(opening) % 16 == 0, "uploads pad each struct to 16 bytes, and kernels index an array");
#ifndef __CUDACC_RTC__ /* NVRTC has no offsetof, so only the tests' build compares offsets */
#define AT(type, field) __builtin_offsetof(type, field)
SAME(AT(encoding, values), AT(codec_encoding, source.values));
SAME(AT(encoding, residual), AT(codec_encoding, source.residual));
SAME(AT(encoding, capacity), AT(codec_encoding, capacity));
SAME(AT(units, each), AT(codec_units, each));
SAME(AT(units, count), AT(codec_units, count));
SAME(AT(encoding, scratch), AT(codec_encoding, scratch));
SAME(AT(encoding, found), AT(codec_encoding, found));
SAME(AT(encoding, places), AT(codec_encoding, places));
SAME(AT(encoding, out), AT(codec_encoding, out));
SAME(AT(encoding, levels), AT(codec_encoding, by.levels));
SAME(AT(encoding, warps), AT(codec_encoding, warps));
SAME(AT(decoding, scratch), AT(codec_decoding, scratch));
SAME(AT(decoding, exponents), AT(codec_decoding, exponents));
SAME(AT(decoding, found), AT(codec_decoding, found));
SAME(AT(decoding, data), AT(codec_decoding, sink.data));
SAME(AT(decoding, into), AT(codec_decoding, sink.into));
SAME(AT(decoding, divide), AT(codec_decoding, sink.divide));
SAME(AT(decoding, rescale), AT(codec_decoding, sink.rescale));
SAME(AT(decoding, checks), AT(codec_decoding, checks));
SAME(AT(decoding, warps), AT(codec_decoding, warps));
SAME(AT(decoding, lists), AT(codec_decoding, lists));
SAME(AT(found, checksum), AT(codec_found, checksum));
SAME(AT(found, base), AT(codec_found, base));
SAME(AT(found, result), AT(codec_found, result));
SAME(AT(found, damage), AT(codec_found, damage));
SAME(AT(written, nbytes), AT(codec_written, nbytes));
SAME(AT(written, fault), AT(codec_written, fault));
SAME(AT(lists, room), AT(codec_lists, room));
#endif

#endif
