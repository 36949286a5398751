/* The floating-point environment: what a caller notices of it, and calls must leave alone. */
#ifndef CODEC_TESTS_ENVIRONMENT_H
#define CODEC_TESTS_ENVIRONMENT_H

#include <fenv.h>
#include <string.h>

/* Of x86 without the addresses of the x87's last operation: where it had no exception, some processors forget them, or
 * show those of another thread, when threads are switched. */
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
