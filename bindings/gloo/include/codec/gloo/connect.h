/* connect.h - a context whose ranks are connected, with Gloo as Debian has it and as it is today. */
#pragma once

#include <memory>
#include <utility>

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/device.h>

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

} // namespace detail

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
