/*
 * neon.c - kernels for NEON, which every aarch64 CPU has: the lane coder, planes and the checksum. The other loops are
 * those of plain C, which the compiler vectorizes.
 */
#include "planes_neon.h"
#include "encode_lanes_neon.h"
#include "encode_lanes.h"
#include "decode_lanes_neon.h"
#include "plane_loops.h"
#include "row_loops.h"
#include "truncate_loops.h"
#include "delta_loops.h"
#include "topk_loops.h"

const struct kernels kernels_neon = {.name = "neon",
				     .encode_lanes = encode_lanes,
				     .decode_lanes = decode_lanes,
				     KERNEL_LOOPS,
				     ROW_LOOPS,
				     TRUNCATE_LOOPS,
				     DELTA_LOOPS,
				     TOPK_LOOPS};
