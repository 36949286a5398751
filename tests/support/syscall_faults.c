/*
 * Faults of system calls, for LD_PRELOAD: the n-th call on a file below a folder fails, is cut short, or kills the
 * process. support/storage_faults.py arms the faults by ctypes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum fault { FAIL_ONCE, FAIL_FROM_HERE, SHORT_WRITE, KILL_BEFORE, KILL_AFTER };

static const char *folder; /* NULL: not armed */
static enum fault fault;
static int point, error, count;
static char last[PATH_MAX + 32];

void fault_arm(const char *path, int at, int how, int number)
{
	static char copy[PATH_MAX];

	snprintf(copy, sizeof copy, "%s", path);
	fault = how, point = at, error = number, count = 0, last[0] = 0;
	folder = copy;
}

/* Return the number of calls since fault_arm. */
int fault_disarm(void)
{
	folder = NULL;
	return count;
}

/* Return the name and path of the call that failed; "" if none did. */
const char *fault_last(void)
{
	return last;
}

static const char *path_of(int fd, char *buffer)
{
	char link[64];
	ssize_t n;

	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, buffer, PATH_MAX - 1);
	buffer[n > 0 ? n : 0] = 0;
	return buffer;
}

/* Count a call, and return 1 if it is to fail. A call that is killed afterwards is noted in `last`. */
static int reached(const char *name, const char *path)
{
	if (!folder || !path || strncmp(path, folder, strlen(folder)) != 0)
		return 0;
	int n = count++;
	if (n != point && !(fault == FAIL_FROM_HERE && n > point))
		return 0;
	snprintf(last, sizeof last, "%s %s", name, path);
	if (fault == KILL_BEFORE)
		kill(getpid(), SIGKILL);
	return 1;
}

static int fails(int hit)
{
	if (!hit || (fault != FAIL_ONCE && fault != FAIL_FROM_HERE))
		return 0;
	errno = error;
	return 1;
}

static void after(int hit)
{
	if (hit && fault == KILL_AFTER)
		kill(getpid(), SIGKILL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A function of a path. */
#define ON_PATH(name, path, parameters, arguments)                                                                     \
	int name parameters                                                                                            \
	{                                                                                                              \
		int hit = reached(#name, path);                                                                        \
		if (fails(hit))                                                                                        \
			return -1;                                                                                     \
		int result = REAL(name) arguments;                                                                     \
		after(hit);                                                                                            \
		return result;                                                                                         \
	}

ON_PATH(rename, from, (const char *from, const char *to), (from, to))
ON_PATH(renameat, from, (int a, const char *from, int b, const char *to), (a, from, b, to))
ON_PATH(unlink, path, (const char *path), (path))
ON_PATH(unlinkat, path, (int fd, const char *path, int flags), (fd, path, flags))
ON_PATH(mkdir, path, (const char *path, mode_t mode), (path, mode))

#define OPENS(name, parameters, arguments)                                                                             \
	int name parameters                                                                                            \
	{                                                                                                              \
		va_list rest;                                                                                          \
		va_start(rest, flags);                                                                                 \
		mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                \
		va_end(rest);                                                                                          \
		int hit = reached(#name, path);                                                                        \
		if (fails(hit))                                                                                        \
			return -1;                                                                                     \
		int result = REAL(name) arguments;                                                                     \
		after(hit);                                                                                            \
		return result;                                                                                         \
	}

OPENS(open, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
OPENS(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))

/* A function of a descriptor. */
#define ON_FD(type, name, parameters, arguments, failure)                                                              \
	type name parameters                                                                                           \
	{                                                                                                              \
		char path[PATH_MAX];                                                                                   \
		int hit = folder && reached(#name, path_of(fd, path));                                                 \
		if (fails(hit))                                                                                        \
			return failure;                                                                                \
		type result = REAL(name) arguments;                                                                    \
		after(hit);                                                                                            \
		return result;                                                                                         \
	}

ON_FD(int, fsync, (int fd), (fd), -1)
ON_FD(int, fdatasync, (int fd), (fd), -1)
ON_FD(int, ftruncate, (int fd, off_t n), (fd, n), -1)
ON_FD(int, ftruncate64, (int fd, off64_t n), (fd, n), -1)
ON_FD(int, fchmod, (int fd, mode_t mode), (fd, mode), -1)
ON_FD(int, posix_fallocate, (int fd, off_t at, off_t n), (fd, at, n), error)
ON_FD(int, posix_fallocate64, (int fd, off64_t at, off64_t n), (fd, at, n), error)
ON_FD(ssize_t, read, (int fd, void *data, size_t n), (fd, data, n), -1)
ON_FD(ssize_t, pread, (int fd, void *data, size_t n, off_t at), (fd, data, n, at), -1)
ON_FD(ssize_t, pread64, (int fd, void *data, size_t n, off64_t at), (fd, data, n, at), -1)
ON_FD(void *, mmap, (void *to, size_t n, int protection, int flags, int fd, off_t at),
      (to, n, protection, flags, fd, at), MAP_FAILED)
ON_FD(void *, mmap64, (void *to, size_t n, int protection, int flags, int fd, off64_t at),
      (to, n, protection, flags, fd, at), MAP_FAILED)

#define WRITES(name, parameters, arguments)                                                                            \
	ssize_t name parameters                                                                                        \
	{                                                                                                              \
		char path[PATH_MAX];                                                                                   \
		int hit = folder && reached(#name, path_of(fd, path));                                                 \
		if (fails(hit))                                                                                        \
			return -1;                                                                                     \
		if (hit && fault == SHORT_WRITE && n > 1)                                                              \
			n /= 2;                                                                                        \
		ssize_t result = REAL(name) arguments;                                                                 \
		after(hit);                                                                                            \
		return result;                                                                                         \
	}

WRITES(write, (int fd, const void *data, size_t n), (fd, data, n))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))

/* The descriptor is closed also if close() fails. */
int close(int fd)
{
	char path[PATH_MAX];
	int hit = folder && reached("close", path_of(fd, path)), failed = fails(hit);
	int result = REAL(close)(fd);

	if (failed) {
		errno = error;
		return -1;
	}
	after(hit);
	return result;
}
