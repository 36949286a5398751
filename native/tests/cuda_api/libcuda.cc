/* libcuda.cc - a CUDA driver for tests: device memory is host memory, and kernels are functions that run on the CPU.
 *
 * fake_cuda_kernels() names the libraries that export the kernels (NAME_launch, see tests/cuda_on_cpu/cuda_on_cpu.h).
 * Streams are not queues: each call completes before it returns. fake_cuda_fail() makes calls of one driver function
 * fail. fake_cuda_log() returns the names of launched kernels, and reports of undefined behaviour in them.
 */
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace
{
constexpr int INVALID_VALUE = 1, NOT_FOUND = 500, LAUNCH_FAILED = 719, INVALID_CONTEXT = 201, NO_DEVICE = 100;
using launcher = const char *(void **, uint32_t, uint32_t, uint32_t, size_t);

struct function {
	std::string name;
	launcher *launch;
};

std::mutex mutex; /* allows one launch at a time, because the kernels' __shared__ variables are static */
std::vector<void *> libraries;
std::map<std::string, function> functions;
std::string failing, log;
int result, arch = 90, processors = 1, context_token, module_token;
bool dry;
thread_local int contexts;

void *find(const std::string &name)
{
	for (void *library : libraries)
		if (void *symbol = dlsym(library, name.c_str()))
			return symbol;
	return nullptr;
}

int fails(const char *function)
{
	return failing == function ? result : 0;
}
} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define CHECK(name)                                                                                                    \
	if (int failed = fails(#name))                                                                                 \
		return failed;

EXPORT void fake_cuda_kernels(const char *path)
{
	libraries.push_back(dlopen(path, RTLD_NOW | RTLD_LOCAL));
}
EXPORT void fake_cuda_fail(const char *function, int with)
{
	failing = function, result = with;
}
EXPORT void fake_cuda_arch(int number)
{
	arch = number;
}
/*
 * Set the number of multiprocessors of devices that are opened later. If `number` is above 1, no kernel runs; launches
 * are only logged, with their grids.
 */
EXPORT void fake_cuda_processors(int number)
{
	processors = number, dry = number > 1;
}
EXPORT const char *fake_cuda_log(void)
{
	static std::string last;

	last.swap(log), log.clear();
	return last.c_str();
}

EXPORT int cuInit(unsigned)
{
	CHECK(cuInit)
	return 0;
}
EXPORT int cuDeviceGet(int *device, int ordinal)
{
	CHECK(cuDeviceGet)
	*device = 0;
	return ordinal == 0 ? 0 : NO_DEVICE;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int)
{
	CHECK(cuDeviceGetAttribute)
	*value = attribute == 16 ? processors : attribute == 75 ? arch / 10 : arch % 10;
	return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int)
{
	CHECK(cuDevicePrimaryCtxRetain)
	*context = &context_token;
	return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int)
{
	return 0;
}
EXPORT int cuCtxPushCurrent_v2(void *context)
{
	CHECK(cuCtxPushCurrent)
	contexts++;
	return context == &context_token ? 0 : INVALID_CONTEXT;
}
EXPORT int cuCtxPopCurrent_v2(void **context)
{
	*context = &context_token;
	return contexts-- > 0 ? 0 : INVALID_CONTEXT;
}
EXPORT int fake_cuda_contexts(void)
{
	return contexts;
}
EXPORT int cuModuleLoadData(void **module, const void *image)
{
	CHECK(cuModuleLoadData)
	*module = &module_token;
	return contexts && !strcmp((const char *)image, "kernels on the CPU") ? 0 : INVALID_VALUE;
}
EXPORT int cuModuleUnload(void *)
{
	return contexts ? 0 : INVALID_CONTEXT;
}
EXPORT int cuModuleGetFunction(void **found, void *, const char *name)
{
	CHECK(cuModuleGetFunction)
	std::string symbol = name;

	if (size_t at = symbol.find('<'); at != std::string::npos)
		symbol = symbol.substr(0, at) + "_" + symbol.substr(at + 1, symbol.size() - at - 2);
	std::lock_guard<std::mutex> lock(mutex);
	function &f = functions[name];
	f = {name, (launcher *)find(symbol + "_launch")};
	*found = &f;
	return f.launch ? 0 : NOT_FOUND;
}
EXPORT int cuModuleGetGlobal_v2(uint64_t *at, size_t *nbytes, void *, const char *name)
{
	CHECK(cuModuleGetGlobal)
	void *symbol = find(name);
	const ElfW(Sym) *entry = nullptr;
	Dl_info info;

	if (!symbol || !dladdr1(symbol, &info, (void **)&entry, RTLD_DL_SYMENT))
		return NOT_FOUND;
	*at = (uint64_t)symbol;
	*nbytes = entry->st_size;
	return 0;
}
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t at, size_t nbytes)
{
	CHECK(cuMemcpyDtoH)
	memcpy(to, (const void *)at, nbytes);
	return 0;
}
EXPORT int cuMemsetD8Async(uint64_t at, unsigned char value, size_t nbytes, void *)
{
	CHECK(cuMemsetD8Async)
	if (!dry)
		memset((void *)at, value, nbytes);
	return contexts ? 0 : INVALID_CONTEXT;
}
EXPORT int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
			  unsigned shared, void *, void **args, void **)
{
	CHECK(cuLaunchKernel)
	function *f = (function *)kernel;
	std::lock_guard<std::mutex> lock(mutex);

	if (!contexts || !x || !y || y > 65535 || z != 1)
		return INVALID_VALUE;
	if (dry) {
		log += f->name + " " + std::to_string(x) + " " + std::to_string(y) + "\n";
		return 0;
	}
	log += f->name + "\n";
	std::string said = f->launch(args, x, y, threads, shared);
	if (!said.empty())
		log += "error: " + said + "\n";
	return said.empty() ? 0 : LAUNCH_FAILED;
}
