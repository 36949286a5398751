/* cpu.c - detect the instruction sets of this CPU, and select kernels. */
#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdatomic.h>

#define X86_AVX2 1u
#define X86_AVX512 2u
#define X86_KNOWN 4u

static uint64_t enabled_state(void)
{
	uint32_t lo, hi;

	__asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
	return (uint64_t)hi << 32 | lo;
}

static unsigned detect(void)
{
	uint32_t a, b, c, d, b7, c7;
	unsigned found = X86_KNOWN;
	uint64_t state;
	const uint32_t avx2 = bit_AVX2 | bit_BMI | bit_BMI2;
	const uint32_t avx512_2 =
		bit_AVX512VBMI | bit_AVX512VBMI2 | bit_AVX512VPOPCNTDQ; /* Ice Lake, Zen 4 and later have all */
	const uint32_t avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;

	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_POPCNT) || !(c & bit_FMA) ||
	    !(c & bit_F16C))
		return found;
	state = enabled_state();
	if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d) || (state & 6) != 6 || (b7 & avx2) != avx2)
		return found;
	found |= X86_AVX2;
	if ((state & 0xe6) == 0xe6 && (b7 & avx512) == avx512 && (c7 & avx512_2) == avx512_2)
		found |= X86_AVX512;
	return found;
}

/*
 * Return the instruction sets that detect() finds. The result is cached, because CPUID traps in virtual machines, which
 * takes microseconds; it never changes.
 */
static unsigned cpu(void)
{
	static _Atomic unsigned known;
	unsigned found = atomic_load_explicit(&known, memory_order_relaxed);

	if (!found) {
		found = detect();
		atomic_store_explicit(&known, found, memory_order_relaxed);
	}
	return found;
}
#else
static unsigned cpu(void)
{
	return 0;
}
#endif

#if defined(__x86_64__)
#include <xmmintrin.h>

uint64_t call_enter(void)
{
	uint64_t saved = _mm_getcsr();

	_mm_setcsr(0x1f80);
	return saved;
}

void call_leave(uint64_t saved)
{
	_mm_sfence(); /* order non-temporal stores before the caller's later stores */
	_mm_setcsr((unsigned)saved);
}
#elif defined(__aarch64__)
uint64_t call_enter(void)
{
	uint64_t saved;

	__asm__ volatile("mrs %0, fpcr" : "=r"(saved));
	__asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
	return saved;
}

void call_leave(uint64_t saved)
{
	__asm__ volatile("msr fpcr, %0" ::"r"(saved));
}
#else
uint64_t call_enter(void)
{
	return 0;
}

void call_leave(uint64_t saved)
{
	(void)saved;
}
#endif

/*
 * Kernels of each instruction set, slowest first. To add a set, add a file that includes the loops, and an entry here.
 */
extern const struct kernels kernels_avx2, kernels_avx512, kernels_neon;

static const struct {
	const struct kernels *kernels;
	unsigned needs; /* bits of detect() that these kernels require */
} ALL[] = {
	{&kernels_scalar, 0},
#if defined(__x86_64__)
	{&kernels_avx2, X86_AVX2},
#if defined(CODEC_EMULATED)
	{&kernels_avx512, 0},
#else
	{&kernels_avx512, X86_AVX512},
#endif
#elif defined(CODEC_NEON)
	{&kernels_neon, 0},
#endif
};

#define COUNT (sizeof ALL / sizeof *ALL)

const char *codec_isa_name(uint32_t index)
{
	return index < COUNT ? ALL[index].kernels->name : NULL;
}

int codec_isa_usable(uint32_t index)
{
	return index < COUNT && (!ALL[index].needs || cpu() & ALL[index].needs);
}

/* Return the kernels for a call, or NULL if the requested instruction set does not exist or this CPU lacks it. */
const struct kernels *kernels_for(const codec_context *with)
{
	if (with && with->isa)
		return with->isa <= COUNT && codec_isa_usable(with->isa - 1) ? ALL[with->isa - 1].kernels : NULL;
	for (uint32_t i = COUNT - 1; i > 0; i--)
		if (codec_isa_usable(i))
			return ALL[i].kernels;
	return ALL[0].kernels;
}
