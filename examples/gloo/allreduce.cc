/*
 * allreduce.cc - average the gradients of all ranks over Gloo, sent as FP8 with error feedback.
 *
 *     g++ -std=c++17 -O2 allreduce.cc $(python -m codec --cflags --libs) -lgloo -pthread -o allreduce
 *     store=$(mktemp -d)    # a new store for each run
 *     for rank in 0 1; do ./allreduce $rank 2 $store & done; wait
 */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <codec/gloo.h>
#include <codec/gloo/connect.h>

static void train(int rank, int size, const char *folder)
{
	constexpr size_t N = 1 << 20;
	constexpr int STEPS = 10;
	::gloo::transport::tcp::attr attr;

	attr.iface = std::getenv("GLOO_SOCKET_IFNAME") ? std::getenv("GLOO_SOCKET_IFNAME") : "lo";
	auto context = codec::gloo::connect(rank, size, std::make_shared<::gloo::rendezvous::FileStore>(folder),
					    codec::gloo::create_device(attr));
	codec::gloo::Group group(context);
	codec_spec spec = codec::gloo::spec_of(CODEC_FLOAT8);
	std::vector<float> gradient(N), residual(N), sums_residual(N), theta(N);

	spec.group_size = 128; /* values that share a scale */
	for (int step = 0; step < STEPS; step++) {
		for (size_t i = 0; i < N; i++) /* in place of a model's backward pass */
			gradient[i] = std::sin(static_cast<float>(i + 1) * 0.37f) * static_cast<float>(rank + 1);

		codec::gloo::Options options;
		options.algorithm = codec::gloo::Algorithm::two_shot;
		options.stream = static_cast<uint64_t>(step);
		options.residual = residual.data(); /* encoding errors are sent in the next step */
		options.sums_residual = sums_residual.data();
		group.allreduce(gradient.data(), N, CODEC_FLOAT32, spec, options);
		for (size_t i = 0; i < N; i++)
			theta[i] -= 0.1f * gradient[i];
	}

	double error = 0, all = 0;
	for (size_t i = 0; i < N; i++) {
		double want = -0.1 * STEPS * std::sin(static_cast<float>(i + 1) * 0.37f) * (size + 1) / 2;

		error += (theta[i] - want) * (theta[i] - want);
		all += want * want;
	}
	std::printf("rank %d: sent %.2f MB where values would be %.2f, parameters are off by %.1e\n", rank,
		    static_cast<double>(group.sent_nbytes()) / 1e6, 8e-6 * STEPS * N * (size - 1) / size,
		    std::sqrt(error / all));
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		std::fprintf(stderr, "usage: allreduce RANK SIZE STORE\n");
		return 2;
	}
	try {
		train(std::atoi(argv[1]), std::atoi(argv[2]), argv[3]);
	} catch (const std::exception &e) { /* for example, a rank is lost: create a new context */
		std::fprintf(stderr, "allreduce: %s\n", e.what());
		return 1;
	}
	return 0;
}
