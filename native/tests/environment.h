/* environment.h - read the floating-point environment, to check that library calls restore it. */
#ifndef CODEC_TESTS_ENVIRONMENT_H
#define CODEC_TESTS_ENVIRONMENT_H

#include <fenv.h>
#include <string.h>

/*
 * Return the floating-point environment. On x86, clear the addresses of the last x87 operation: if it raised no
 * exception, some processors lose the addresses at a context switch, or show those of another thread.
 */
static inline fenv_t environment(void)
{
	fenv_t now;

	memset(&now, 0, sizeof now);
	fegetenv(&now);
#if defined(__GLIBC__) && defined(__x86_64__)
	now.__eip = 0;
	now.__cs_selector = 0;
	now.__opcode = 0;
	now.__data_offset = 0;
	now.__data_selector = 0;
#endif
	return now;
}

#endif
