/* cpu.h - select kernels, and set the floating-point environment. */
#ifndef CODEC_CPU_H
#define CODEC_CPU_H

#include "codec/codec.h"
#include "kernels.h"

const struct kernels *kernels_for(const codec_context *with);

/*
 * Set the floating-point environment that the format requires, and return the caller's environment, to pass to
 * call_leave. call_leave restores it, and orders non-temporal stores before later stores.
 */
uint64_t call_enter(void);
void call_leave(uint64_t saved);

#endif
