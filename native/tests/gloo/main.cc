/* main.cc - main function of the tests, and the writev() that wire.h declares. */
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "wire.h"

namespace
{

constexpr uint64_t NEVER = ~uint64_t(0);

std::mutex mutex; /* needed because the calling thread and Gloo's thread both call writev() */
uint64_t sent = 0, moment = NEVER, number = NEVER, offset = 0, framed = 0;
uint8_t bits = 0;
std::function<void()> act;

/* Send a copy of a message with a flipped byte. Not the message itself, which may be the caller's tensor. */
ssize_t send_damaged(int fd, const iovec *parts)
{
	std::vector<uint8_t> message(parts[0].iov_len + parts[1].iov_len);

	std::memcpy(message.data(), parts[0].iov_base, parts[0].iov_len);
	std::memcpy(message.data() + parts[0].iov_len, parts[1].iov_base, parts[1].iov_len);
	message[parts[0].iov_len + offset] ^= bits;
	return syscall(SYS_write, fd, message.data(), message.size());
}

/* Send at most `most` bytes of a message. */
ssize_t send_some(int fd, const iovec *parts, int count, uint64_t most)
{
	std::vector<iovec> some(parts, parts + count);

	for (iovec &each : some) {
		each.iov_len = std::min<uint64_t>(each.iov_len, most);
		most -= each.iov_len;
	}
	return syscall(SYS_writev, fd, some.data(), count);
}

} // namespace

/*
 * Return LeakSanitizer's suppressions: Gloo leaks the list of network interfaces if the requested one does not exist.
 */
extern "C" const char *__lsan_default_suppressions()
{
	return "leak:gloo::transport::tcp::CreateDeviceAttr";
}

extern "C" ssize_t writev(int fd, const iovec *parts, int count)
{
	const std::lock_guard<std::mutex> lock(mutex);
	ssize_t n;

	if (sent >= moment) {
		moment = NEVER;
		act();
	}
	/*
	 * damage only messages that are sent from their start: the rest of a partly sent message is a single part with
	 * another offset
	 */
	if (number != NEVER && count == 2 && parts[0].iov_len == wire::HEADER &&
	    parts[1].iov_len > std::max(wire::NUMBERS, offset) && framed++ == number) {
		n = send_damaged(fd, parts);
		if (n > static_cast<ssize_t>(wire::HEADER + offset))
			number = NEVER;
		else
			framed--; /* the damaged byte was not sent: damage the next attempt to send it */
	} else {
		n = send_some(fd, parts, count, moment == NEVER ? NEVER : moment - sent);
	}
	sent += n > 0 ? static_cast<uint64_t>(n) : 0;
	return n;
}

uint64_t wire::sent_nbytes()
{
	const std::lock_guard<std::mutex> lock(mutex);

	return sent;
}

void wire::restart()
{
	const std::lock_guard<std::mutex> lock(mutex);

	sent = 0;
	moment = NEVER;
}

void wire::at(uint64_t nbytes, const std::function<void()> &what)
{
	const std::lock_guard<std::mutex> lock(mutex);

	sent = 0;
	moment = nbytes;
	act = what;
}

void wire::flip(uint64_t which, uint64_t at, uint8_t what)
{
	const std::lock_guard<std::mutex> lock(mutex);

	number = which;
	offset = at;
	bits = what;
	framed = 0;
}

bool wire::flipped()
{
	const std::lock_guard<std::mutex> lock(mutex);

	return std::exchange(number, NEVER) == NEVER;
}
