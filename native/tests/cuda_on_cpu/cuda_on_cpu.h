/* cuda_on_cpu.h - run CUDA kernels as C++ on a CPU, for tests without a GPU. Include before the kernels.
 *
 * Each thread of a thread block is a fiber. The scheduler switches fibers only in a warp collective, which waits for
 * the lanes of its mask, or in a barrier, which waits for the block. Undefined behaviour ends the launch with a
 * message: threads that wait for ever (the message names the operation and line), a shuffle from a lane outside of the
 * mask, a lane that is not in its own mask.
 *
 * Blocks run one after the other. __shared__ variables are static, so AddressSanitizer detects accesses out of range;
 * dynamic_shared is heap memory of exactly the requested size. -DCUDA_ON_CPU_WORKERS=n runs n blocks at once, to test
 * protocols between blocks. The environment variable CUDA_ON_CPU_ORDER (up, down, or a seed) sets the order in which
 * threads run between collectives: if results depend on the order, a barrier is missing.
 */
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define __asan_unpoison_memory_region(p, n) ((void)(p), (void)(n))
#endif

#define CUDA_ON_CPU 1
#ifdef CUDA_ON_CPU_WORKERS
#define __shared__ thread_local
#define FAST_TLS
#else
#define FAST_TLS __attribute__((tls_model("initial-exec"))) /* access without a call; for a few bytes only */
#define CUDA_ON_CPU_WORKERS 1
#define __shared__ static
#endif

/* x86-64: save registers, store the stack pointer in *from, and continue at the saved stack pointer `to`. */
extern "C" void cuda_on_cpu_switch(void **from, void *to);
asm(".weak cuda_on_cpu_switch\ncuda_on_cpu_switch:\n"
    "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret\n");

namespace cuda_on_cpu
{
struct dim {
	uint32_t x, y, z;
};
enum op { NOTHING, BARRIER, WARP, SHUFFLE, BALLOT, ADD, OR, MAX };
constexpr const char *NAMES[] = {"", " __syncthreads", " __syncwarp", " shuffle", " vote", " add", " or", " max"};
constexpr size_t STACK_NBYTES = 256 << 10;

struct fiber {
	std::unique_ptr<char[]> stack;
	void *sp;
	bool done;
	op waits; /* collective in which the fiber waits */
	int line;
	uint32_t mask, source;
	uint64_t value; /* argument of the collective, then its result */
};

struct block {
	dim index, size, grid;
	std::function<void()> body;
	void *shared;
	std::vector<fiber> fibers;
	uint32_t self, order;
	void *home;
	std::string error;
};
inline thread_local block *now FAST_TLS;
inline thread_local dim thread FAST_TLS;
inline thread_local std::vector<fiber> idle; /* fibers of the last launch, whose stacks the next launch reuses */

/* Return the thread that follows thread i, of n threads, in scheduling order. */
inline uint32_t after(const block &b, uint32_t i, uint32_t n)
{
	if (b.order == 1)
		return i ? i - 1 : n - 1;
	return i + 1 < n ? i + 1 : 0;
}

/* Switch to a runnable thread, or end the block if there is none. */
inline void next()
{
	block &b = *now;
	void **from = &b.fibers[b.self].sp;
	uint32_t n = b.size.x, i = b.self;
	bool stuck = b.error.empty();

	if (b.order > 1)
		i = (b.order = (b.order * 1664525u + 1013904223u) | 2) / 16 % n;
	for (uint32_t k = 0; k < n && stuck; k++) {
		i = after(b, i, n);
		if (!b.fibers[i].done && b.fibers[i].waits == NOTHING) {
			b.self = thread.x = i;
			return cuda_on_cpu_switch(from, b.fibers[i].sp);
		}
	}
	for (i = 0; stuck && i < n; i++)
		if (!b.fibers[i].done)
			b.error += (b.error.empty() ? "waiting for ever: thread " : ", ") + std::to_string(i) +
				   NAMES[b.fibers[i].waits] + " in line " + std::to_string(b.fibers[i].line);
	cuda_on_cpu_switch(from, b.home);
}

inline void entry()
{
	try {
		now->body();
	} catch (const std::exception &e) {
		now->error = e.what();
	}
	now->fibers[now->self].done = true;
	next();
}

/* Return the result of a shuffle for lane `me`. Throw std::runtime_error if the source lane is outside of the mask. */
inline uint64_t shuffled(const fiber *lane, const fiber &me)
{
	if (!(me.mask >> me.source & 1))
		throw std::runtime_error("shuffle from outside of the mask in line " + std::to_string(me.line));
	return lane[me.source].value;
}

/* Return the result of a warp vote or reduction, equal for all lanes of the mask. */
inline uint64_t reduced(const fiber *lane, const fiber &me)
{
	uint64_t r = 0;

	for (uint32_t i = 0; i < 32; i++)
		if (me.mask >> i & 1)
			r = me.waits == ADD ? r + lane[i].value
			    : me.waits == MAX
				    ? std::max(r, lane[i].value)
				    : r | (me.waits == OR ? lane[i].value : (uint64_t)(lane[i].value != 0) << i);
	return r;
}

/*
 * Perform a warp collective: wait for the lanes of `mask`; at a barrier, wait for the block. The last lane to arrive
 * computes the results of all lanes.
 */
inline uint64_t collective(op what, uint32_t mask, uint64_t value, uint32_t source, int line)
{
	block &b = *now;
	bool all = what == BARRIER;
	uint32_t first = all ? 0 : b.self / 32 * 32, count = all ? b.size.x : 32;
	fiber *lane = &b.fibers[first], &me = b.fibers[b.self];
	uint64_t result[32];

	if (!all && !(mask >> b.self % 32 & 1))
		throw std::runtime_error("thread " + std::to_string(b.self) + " is not in its own mask in line " +
					 std::to_string(line));
	me.waits = what, me.line = line, me.mask = mask, me.source = source, me.value = value;
	for (uint32_t k = 1, i = b.self - first; k <= count;
	     k++) { /* test a lane first that has probably not arrived */
		i = after(b, i, count);
		if ((all || mask >> i & 1) &&
		    (first + i >= b.size.x || lane[i].waits != what || lane[i].line != line || lane[i].mask != mask))
			return next(), me.value;
	}
	value = what > SHUFFLE ? reduced(lane, me) : 0;
	for (uint32_t i = 0; i < 32; i++)
		result[i] = what == SHUFFLE && mask >> i & 1 ? shuffled(lane, lane[i]) : value;
	for (uint32_t i = 0; i < count; i++)
		if (all || mask >> i & 1)
			lane[i].waits = NOTHING, lane[i].value = result[i % 32];
	return me.value;
}

inline void run_block(block &b, size_t shared_nbytes)
{
	std::string order = getenv("CUDA_ON_CPU_ORDER") ? getenv("CUDA_ON_CPU_ORDER") : "up";
	std::unique_ptr<char[]> memory(new char[shared_nbytes]);

	b.order = order == "up" ? 0 : order == "down" ? 1 : (uint32_t)atoi(order.c_str()) | 2;
	b.shared = memset(memory.get(), 0xa5, shared_nbytes);
	if (b.fibers.size() < b.size.x)
		b.fibers.resize(b.size.x);
	for (uint32_t i = 0; i < b.size.x; i++) {
		fiber &f = b.fibers[i];

		if (!f.stack)
			f.stack.reset(new char[STACK_NBYTES]);
		__asan_unpoison_memory_region(f.stack.get(), STACK_NBYTES); /* the last launch ended inside of it */
		f.sp = (void *)(((uintptr_t)f.stack.get() + STACK_NBYTES - 64) & ~(uintptr_t)15);
		((void **)f.sp)[6] = (void *)entry; /* return address, above six saved registers */
		f.done = false, f.waits = NOTHING;
	}
	now = &b;
	b.self = thread.x = b.order == 0 ? 0 : b.order == 1 ? b.size.x - 1 : b.order % b.size.x;
	cuda_on_cpu_switch(&b.home, b.fibers[b.self].sp);
}

/* Launch a kernel; `args` are pointers to the arguments, as for cuLaunchKernel. Return an error message, or "". */
template <class... A>
std::string launch(void (*kernel)(A...), void **args, uint32_t grid, uint32_t many, uint32_t threads, size_t shared)
{
	std::vector<std::thread> workers;
	std::atomic<uint32_t> todo{0};
	bool down = getenv("CUDA_ON_CPU_ORDER") && !strcmp(getenv("CUDA_ON_CPU_ORDER"), "down"); /* order of blocks */
	std::string error[CUDA_ON_CPU_WORKERS];
	auto call = [&]<size_t... I>(std::index_sequence<I...>) { kernel(*(A *)args[I]...); };
	auto work = [&](int w) {
		block b{};

		b.fibers.swap(idle);
		b.size = {threads, 1, 1}, b.grid = {grid, many, 1},
		b.body = [&] { call(std::index_sequence_for<A...>()); };
		for (uint32_t i; error[w].empty() && (i = todo++) < grid * many;) {
			i = down ? grid * many - 1 - i : i;
			b.index = {i % grid, i / grid, 0};
			run_block(b, shared);
			error[w] = b.error;
		}
		b.fibers.swap(idle);
	};

	if (CUDA_ON_CPU_WORKERS == 1)
		return work(0), error[0];
	for (int w = 0; w < CUDA_ON_CPU_WORKERS; w++)
		workers.emplace_back(work, w);
	for (auto &w : workers)
		w.join();
	for (auto &e : error)
		error[0] = error[0].empty() ? e : error[0];
	return error[0];
}

inline thread_local std::string message; /* one for all kernels: a library has little thread-local memory */
} // namespace cuda_on_cpu

/* const char *NAME_launch(void **args, uint32_t grid_x, uint32_t grid_y, uint32_t threads, size_t shared_nbytes) */
#define CUDA_ON_CPU_EXPORT(name, ...)                                                                                  \
	extern "C" const char *name##_launch(void **a, uint32_t g, uint32_t m, uint32_t t, size_t s)                   \
	{                                                                                                              \
		return (cuda_on_cpu::message = cuda_on_cpu::launch(__VA_ARGS__, a, g, m, t, s)).c_str();               \
	}
#include "cuda_builtins.h"
