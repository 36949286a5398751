/* cpu.h - which loops a call runs, and what it finds the CPU set to. */
#ifndef CODEC_CPU_H
#define CODEC_CPU_H

#include "codec/codec.h"
#include "kernels.h"

const struct kernels *kernels_for(const codec_context *with);

/* Around a call's work: the floating-point environment that the format is written for, and back; stores in order. */
uint64_t call_enter(void);
void call_leave(uint64_t saved);

#endif
