/* connect.h - create connected contexts; works with Debian's (older) version of Gloo and with current Gloo. */
#pragma once

#include <memory>
#include <utility>

#include <sched.h>

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>

namespace codec::gloo
{
namespace detail
{

/* Call connectFullMesh with a shared pointer to the store (current Gloo) or with a reference (older Gloo). */
template <class Context, class Store>
auto connect_full_mesh(Context &context, std::shared_ptr<Store> store,
		       std::shared_ptr<::gloo::transport::Device> &device, int)
	-> decltype(context.connectFullMesh(store, device))
{
	context.connectFullMesh(store, device);
}

template <class Context, class Store>
void connect_full_mesh(Context &context, std::shared_ptr<Store> store,
		       std::shared_ptr<::gloo::transport::Device> &device, long)
{
	context.connectFullMesh(*store, device);
}

/*
 * While an object of this class exists, threads that this thread starts have the scheduling policy SCHED_BATCH, so that
 * they do not preempt computing threads.
 */
class Patient
{
public:
	Patient() : changed_(sched_getscheduler(0) == SCHED_OTHER && !sched_setscheduler(0, SCHED_BATCH, &none_))
	{
	}

	~Patient()
	{
		if (changed_)
			sched_setscheduler(0, SCHED_OTHER, &none_);
	}

	Patient(const Patient &) = delete;
	Patient &operator=(const Patient &) = delete;

private:
	const sched_param none_{};
	const bool changed_;
};

} // namespace detail

/**
 * Create a device whose thread does not preempt computing threads, for ranks that share cores. Gloo's thread spins
 * while another thread holds the lock of a connection. If it preempts the thread that holds the lock, both are stuck
 * for milliseconds, until the time slice of Gloo's thread ends. `Group` yields to Gloo's thread between frames.
 */
inline std::shared_ptr<::gloo::transport::Device> create_device(const ::gloo::transport::tcp::attr &attr)
{
	const detail::Patient patient;

	return ::gloo::transport::tcp::CreateDevice(attr);
}

/** Create a rank's context and connect it to all ranks. The store must not have been used for another context. */
template <class Context = ::gloo::rendezvous::Context, class Store = ::gloo::rendezvous::Store>
std::shared_ptr<Context> connect(int rank, int size, std::shared_ptr<Store> store,
				 std::shared_ptr<::gloo::transport::Device> device)
{
	auto context = std::make_shared<Context>(rank, size);

	detail::connect_full_mesh(*context, std::move(store), device, 0);
	return context;
}

} // namespace codec::gloo
