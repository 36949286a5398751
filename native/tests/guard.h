/* guard.h - random numbers, and memory followed by a page that must not be accessed. */
#ifndef CODEC_TESTS_GUARD_H
#define CODEC_TESTS_GUARD_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static uint64_t state = 88172645463325252ull;

static inline uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* Memory of n bytes that ends where a page without access rights begins. */
struct guarded {
	uint8_t *p;
	void *map;
	size_t mapped;
};

static inline struct guarded guard(size_t n)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (n + page - 1) / page * page;
	struct guarded g = {.mapped = body + 2 * page};

	g.map = mmap(NULL, g.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_true(g.map != MAP_FAILED);
	if (body)
		assert_int_equal(mprotect((char *)g.map + page, body, PROT_READ | PROT_WRITE), 0);
	g.p = (uint8_t *)g.map + page + body - n;
	return g;
}

static inline void unguard(struct guarded g)
{
	munmap(g.map, g.mapped);
}

#define STACK (1 << 18)
#define PAINT 0x5a

/* Run f in a thread, and return the number of bytes of stack that the thread has used. */
static inline size_t stack_of(void *(*f)(void *))
{
	struct guarded g = guard(STACK);
	pthread_attr_t attr;
	pthread_t thread;
	size_t untouched = 0;

	memset(g.p, PAINT, STACK);
	pthread_attr_init(&attr);
	assert_int_equal(pthread_attr_setstack(&attr, g.p, STACK), 0);
	assert_int_equal(pthread_create(&thread, &attr, f, NULL), 0);
	pthread_join(thread, NULL);
	while (untouched < STACK && g.p[untouched] == PAINT)
		untouched++;
	unguard(g);
	return STACK - untouched;
}

/* Check that `work` needs at most 16 KiB of stack more than `nothing`; AddressSanitizer makes stack frames larger. */
static inline void check_stack_use(void *(*work)(void *), void *(*nothing)(void *))
{
#if defined(__SANITIZE_ADDRESS__)
	(void)work;
	(void)nothing;
#else
	assert_true(stack_of(work) < stack_of(nothing) + 16384);
#endif
}

#endif
