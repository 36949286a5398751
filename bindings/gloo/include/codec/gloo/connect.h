/* connect.h - a context whose ranks are connected, with Gloo as Debian has it and as it is today. */
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

/* Gloo took a reference to the store once, and takes a shared pointer now. */
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

/* Threads that this one starts interrupt nobody who computes: they get a core that is free, or their turn. */
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

/*
 * A device for ranks that share cores, with others or with Gloo's own thread. That spins while another thread holds the
 * lock of a connection: where it interrupts the one that does, both lose milliseconds, until its slice of time is over.
 * Here it interrupts nobody, and `Group` gives way to it between frames.
 */
inline std::shared_ptr<::gloo::transport::Device> create_device(const ::gloo::transport::tcp::attr &attr)
{
	const detail::Patient patient;

	return ::gloo::transport::tcp::CreateDevice(attr);
}

/* A rank's context, once all ranks are connected. The store is one that nobody has used for this before. */
template <class Context = ::gloo::rendezvous::Context, class Store = ::gloo::rendezvous::Store>
std::shared_ptr<Context> connect(int rank, int size, std::shared_ptr<Store> store,
				 std::shared_ptr<::gloo::transport::Device> device)
{
	auto context = std::make_shared<Context>(rank, size);

	detail::connect_full_mesh(*context, std::move(store), device, 0);
	return context;
}

} // namespace codec::gloo
