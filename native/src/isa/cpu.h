/* cpu.h - select kernels, and set the floating-point environment. */
#ifndef CODEC_CPU_H
#define CODEC_CPU_H

#include "codec/codec.h"
#include "kernels.h"

const struct kernels *kernels_for(const codec_context *with);

/*
 * Set the floating-point environment that the format requires for the duration of a call. call_leave restores the
 * caller's, and orders non-temporal stores before later ones.
 */
uint64_t call_enter(void);
void call_leave(uint64_t saved);

#endif
