/*
 * ranks.h - run a function in processes, each a rank of a Gloo context, and collect results, errors and signals.
 *
 * Processes are forked, which is safe only while the parent has one thread: the device of a rank, and with it Gloo's
 * thread, is created in the child.
 */
#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <codec/gloo.h>
#include <codec/gloo/connect.h>

/* LeakSanitizer's check, which ends the process if memory has leaked. Null without AddressSanitizer. */
extern "C" void __lsan_do_leak_check(void) __attribute__((weak));

namespace ranks
{

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/* Throw std::logic_error unless a condition holds. A failed rank must throw, because other ranks would wait for it. */
#define EXPECT(...)                                                                                                    \
	((__VA_ARGS__)                                                                                                 \
		 ? (void)0                                                                                             \
		 : throw std::logic_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #__VA_ARGS__))

/*
 * Return the status of the error that work() throws. Throw unless the error's class is E and its message contains
 * `words`.
 */
template <class E, class F> codec_status thrown(F &&work, const std::string &words = "")
{
	try {
		work();
	} catch (const codec::gloo::Error &e) {
		if (typeid(e) != typeid(E) || std::string(e.what()).find(words) == std::string::npos)
			throw std::logic_error(std::string(typeid(e).name()) + " was not expected: " + e.what());
		return e.status();
	}
	throw std::logic_error(std::string("nothing was thrown, but expected: ") + typeid(E).name());
}

/* A rank in its own process: number, size of the team, folder for files. */
struct Rank {
	int rank, size;
	std::string folder; /* folder for files that the team's processes share */

	/* Create a Gloo context over loopback. Contexts of one team need different names. */
	std::shared_ptr<::gloo::Context> connect(const std::string &name = "first") const
	{
		::gloo::transport::tcp::attr attr;

		attr.iface = "lo";
		std::filesystem::create_directories(folder + "/" + name);
		auto store = std::make_shared<::gloo::rendezvous::FileStore>(folder + "/" + name);
		auto context = codec::gloo::connect(rank, size, store, codec::gloo::create_device(attr));
		context->setTimeout(milliseconds(20000));
		return context;
	}

	/*
	 * Wait, by files instead of the network, until all ranks have called meet() with the same name. A rank must
	 * call meet() before and after it closes connections, because other ranks may still connect or read its
	 * messages.
	 */
	void meet(const std::string &name) const
	{
		const auto file = [&](int each) { return folder + "/" + name + "-" + std::to_string(each); };
		const Clock::time_point end = Clock::now() + milliseconds(40000);

		std::fclose(std::fopen(file(rank).c_str(), "w"));
		for (int each = 0; each < size; each++) {
			while (!std::filesystem::exists(file(each))) {
				EXPECT(Clock::now() < end);
				std::this_thread::sleep_for(milliseconds(1));
			}
		}
	}
};

using Function = std::function<std::string(Rank &)>;

/* Processes that run the same function, each as a different rank. */
class Team
{
public:
	/* Start `size` processes, which must end within `limit`. */
	Team(int size, const Function &function, milliseconds limit = milliseconds(300000)) : end_(Clock::now() + limit)
	{
		char name[] = "/tmp/codec-ranks-XXXXXX";

		if (!mkdtemp(name))
			throw std::runtime_error("no folder can be made for the ranks");
		folder_ = name;
		for (int rank = 0; rank < size; rank++)
			begin({rank, size, folder_}, function);
	}

	~Team()
	{
		for (Process &each : processes_) {
			if (!each.ended) {
				kill(each.pid, SIGKILL);
				waitpid(each.pid, nullptr, 0);
			}
			close(each.pipe);
		}
		std::filesystem::remove_all(folder_);
	}

	Team(const Team &) = delete;
	Team &operator=(const Team &) = delete;

	/* Start another process, which replaces a lost rank. */
	void replace(int rank, const Function &function)
	{
		begin({rank, static_cast<int>(processes_.size()), folder_}, function);
	}

	/*
	 * Wait for the i-th process that was started, and return its result. Throw if the process threw, died or does
	 * not end.
	 */
	std::string result(size_t i)
	{
		Process &p = processes_[i];
		const std::string who = "process " + std::to_string(i);

		read(p);
		if (!p.ended)
			throw std::runtime_error(who + " hangs");
		if (WIFSIGNALED(p.status))
			throw std::runtime_error(who + " was ended by signal " + std::to_string(WTERMSIG(p.status)) +
						 error_of(p));
		if (WEXITSTATUS(p.status) || p.said.empty())
			throw std::runtime_error(who + " ended with " + std::to_string(WEXITSTATUS(p.status)) +
						 error_of(p));
		if (p.said[0] != GOOD)
			throw std::runtime_error(who + error_of(p));
		return p.said.substr(1);
	}

	/*
	 * Return the results of the processes `of`. If several fail, throw one error with all messages, because one
	 * failure may be a consequence of another.
	 */
	std::vector<std::string> results(const std::vector<size_t> &of)
	{
		std::vector<std::string> found;
		std::string wrong;

		for (size_t i : of) {
			try {
				found.push_back(result(i));
			} catch (const std::exception &e) {
				wrong += std::string(wrong.empty() ? "" : "\n") + e.what();
			}
		}
		if (!wrong.empty())
			throw std::runtime_error(wrong);
		return found;
	}

	/* Return the results of all processes. */
	std::vector<std::string> results()
	{
		std::vector<size_t> all(processes_.size());

		std::iota(all.begin(), all.end(), 0);
		return results(all);
	}

	/* Wait for a process, and return true if signal `number` ended it. */
	bool ended_by(size_t i, int number)
	{
		Process &p = processes_[i];

		read(p);
		return p.ended && WIFSIGNALED(p.status) && WTERMSIG(p.status) == number;
	}

	/* Wait until a process is stopped by SIGSTOP, and continue it. */
	void thaw(size_t i)
	{
		int status;

		if (waitpid(processes_[i].pid, &status, WUNTRACED) < 0 || !WIFSTOPPED(status))
			throw std::runtime_error("process " + std::to_string(i) + " did not freeze");
		kill(processes_[i].pid, SIGCONT);
	}

private:
	static constexpr char GOOD = '+', BAD = '-';

	struct Process {
		pid_t pid;
		int pipe;
		std::string said;
		int status = 0;
		bool ended = false;
	};

	void begin(Rank as, const Function &function)
	{
		int ends[2];

		if (pipe2(ends, O_CLOEXEC))
			throw std::runtime_error("no pipe");
		fflush(nullptr);
		const pid_t pid = fork();
		if (pid < 0)
			throw std::runtime_error("no process");
		if (!pid)
			serve(as, function, ends[1]);
		close(ends[1]);
		processes_.push_back({pid, ends[0], {}, 0, false});
	}

	/* Run the function in the child, write its result to the pipe, and exit without handlers of atexit(). */
	[[noreturn]] static void serve(Rank as, const Function &function, int pipe)
	{
		std::string said;

		try {
			said = GOOD + function(as);
		} catch (const std::exception &e) {
			said = BAD + std::string(e.what());
		}
		for (size_t i = 0; i < said.size();) {
			const ssize_t n = write(pipe, said.data() + i, said.size() - i);

			if (n < 0)
				break;
			i += static_cast<size_t>(n);
		}
		if (__lsan_do_leak_check && said[0] == GOOD)
			__lsan_do_leak_check();
		_exit(0);
	}

	/* Read the output and the exit status of a process, before the team's limit expires. */
	void read(Process &p)
	{
		std::vector<char> room(1 << 20);

		while (!p.ended) {
			const auto left = std::chrono::duration_cast<milliseconds>(end_ - Clock::now()).count();
			pollfd waiting{p.pipe, POLLIN, 0};

			if (left <= 0 || poll(&waiting, 1, static_cast<int>(left)) <= 0)
				return;
			const ssize_t n = ::read(p.pipe, room.data(), room.size());
			if (n > 0)
				p.said.append(room.data(), static_cast<size_t>(n));
			else
				p.ended = waitpid(p.pid, &p.status, 0) == p.pid;
		}
	}

	static std::string error_of(const Process &p)
	{
		return p.said.empty() ? "" : ": " + p.said.substr(1);
	}

	Clock::time_point end_;
	std::string folder_;
	std::vector<Process> processes_;
};

/* Run a function on `size` ranks, each in a process, and return the results by rank. */
inline std::vector<std::string> run(int size, const Function &function)
{
	return Team(size, function).results();
}

/* Run a function on `size` ranks, each in a process, check that all results are equal, and return the result. */
inline std::string run_alike(int size, const Function &function)
{
	const std::vector<std::string> all = run(size, function);

	for (const std::string &each : all)
		if (each != all[0])
			throw std::runtime_error("ranks differ in what they return");
	return all[0];
}

} // namespace ranks
