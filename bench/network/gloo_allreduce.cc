/*
 * gloo_allreduce.cc - one rank of bench/network/gloo_allreduce.py: all-reduces over Gloo, with and without compression.
 *
 *     gloo_allreduce PLAN STORE
 *
 * RANK, WORLD_SIZE and GLOO_SOCKET_IFNAME are environment variables. A plan is a text file with these lines:
 *
 *     n VALUES / repeat TIMES / seconds SECONDS / pause SECONDS
 *     data NAME FILE EXACT          files: values (float32; %r is the rank), exact mean over ranks (float64)
 *     segment NAME OFFSET SHAPE...  a parameter in the data NAME
 *     metric NAME HEX               the data's codec_metric, as bytes
 *     state NAME theta|v|m FILE     file of an array of the optimizer state
 *     row NAME DATA ALGORITHM HEX   an all-reduce; HEX is the codec_spec as bytes, ignored for Gloo's own algorithms
 *
 * Prints a line of JSON for each row: start and end time of each repetition, bytes sent, and a digest of the result.
 */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <codec/gloo.h>
#include <codec/gloo/connect.h>

namespace
{

using codec::gloo::Algorithm;

double seconds(clockid_t clock)
{
	timespec t;

	clock_gettime(clock, &t);
	return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class T> std::vector<T> read(const std::string &path, size_t n)
{
	std::vector<T> found(n);
	std::ifstream file(path, std::ios::binary);

	if (!file.read(reinterpret_cast<char *>(found.data()), static_cast<std::streamsize>(n * sizeof(T))))
		throw std::runtime_error(path + " cannot be read");
	return found;
}

template <class T> T struct_of(const std::string &hex)
{
	T found;

	if (hex.size() != 2 * sizeof found)
		throw std::runtime_error("a struct of the plan has another size");
	for (size_t i = 0; i < sizeof found; i++)
		reinterpret_cast<uint8_t *>(&found)[i] =
			static_cast<uint8_t>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
	return found;
}

struct Data {
	std::vector<float> values;
	std::vector<double> exact;
	std::map<std::string, std::vector<float>> state;
	std::map<std::string, codec_tensor> tensors;
	std::vector<codec_segment> segments;
	std::optional<codec_metric> metric;
};

struct Row {
	std::string name, data, algorithm;
	codec_spec spec;
};

struct Plan {
	size_t n = 0;
	uint64_t repeat = 5;
	double seconds = 0.5, pause = 0;
	std::map<std::string, Data> data;
	std::vector<Row> rows;
};

Plan plan_of(const std::string &path, int rank)
{
	std::ifstream file(path);
	std::string line;
	Plan plan;

	while (std::getline(file, line)) {
		std::istringstream words(line);
		std::string what, name, a, b;

		words >> what;
		if (what == "n") {
			words >> plan.n;
		} else if (what == "repeat") {
			words >> plan.repeat;
		} else if (what == "seconds") {
			words >> plan.seconds;
		} else if (what == "pause") {
			words >> plan.pause;
		} else if (what == "data") {
			words >> name >> a >> b;
			a.replace(a.find("%r"), 2, std::to_string(rank));
			plan.data[name].values = read<float>(a, plan.n);
			if (!rank)
				plan.data[name].exact = read<double>(b, plan.n);
		} else if (what == "segment") {
			codec_segment segment{};
			words >> name >> segment.offset;
			while (segment.rank < CODEC_MAX_RANK && words >> segment.shape[segment.rank])
				segment.rank++;
			plan.data[name].segments.push_back(segment);
		} else if (what == "metric") {
			words >> name >> a;
			auto metric = struct_of<codec_metric>(a);
			metric.theta = metric.v = metric.m = nullptr;
			plan.data[name].metric = metric;
		} else if (what == "state") {
			words >> name >> a >> b;
			Data &d = plan.data[name];
			d.state[a] = read<float>(b, plan.n);
			d.tensors[a] = codec::gloo::detail::tensor_of(CODEC_FLOAT32, d.state[a].data(), plan.n);
			(a == "theta" ? d.metric->theta : a == "v" ? d.metric->v : d.metric->m) = &d.tensors[a];
		} else if (what == "row") {
			Row row;
			words >> row.name >> row.data >> row.algorithm >> a;
			row.spec = struct_of<codec_spec>(a);
			plan.rows.push_back(row);
		} else if (!what.empty()) {
			throw std::runtime_error("the plan says " + what);
		}
	}
	return plan;
}

const std::map<std::string, Algorithm> ALGORITHMS = {
	{"auto", Algorithm::automatic}, {"two_shot", Algorithm::two_shot}, {"all_gather", Algorithm::all_gather},
	{"ring", Algorithm::ring},      {"raw", Algorithm::raw},
};
const std::map<std::string, ::gloo::AllreduceOptions::Algorithm> STOCK = {
	{"stock_ring", ::gloo::detail::AllreduceOptionsImpl::RING},
	{"stock_bcube", ::gloo::detail::AllreduceOptionsImpl::BCUBE},
};

class Rank
{
public:
	Rank(std::shared_ptr<::gloo::Context> context, Plan &plan)
	    : context_(context), group_(context), plan_(plan), out_(plan.n), tensor_(plan.n)
	{
	}

	/* Measure a row, and print its result. */
	void run(const Row &row)
	{
		const Data &data = plan_.data.at(row.data);
		const bool stock = STOCK.count(row.algorithm);
		std::vector<double> begins, ends, cpu;
		std::vector<uint64_t> digests;
		uint64_t sent = 0, count = 1 + plan_.repeat;

		for (uint64_t i = 0; i < count; i++) {
			const uint64_t before = group_.sent_nbytes();

			if (stock)
				std::copy(data.values.begin(), data.values.end(), tensor_.begin());
			std::this_thread::sleep_for(std::chrono::duration<double>(plan_.pause));
			barrier();
			const double busy = seconds(CLOCK_PROCESS_CPUTIME_ID), begin = seconds(CLOCK_MONOTONIC);
			if (stock)
				reduce_stock(STOCK.at(row.algorithm));
			else
				reduce(row, data, i);
			ends.push_back(seconds(CLOCK_MONOTONIC));
			cpu.push_back(seconds(CLOCK_PROCESS_CPUTIME_ID) - busy);
			begins.push_back(begin);
			sent = group_.sent_nbytes() - before;
			barrier(); /* a digest computed earlier would take a core from ranks that still reduce */
			digests.push_back(digest(stock ? tensor_ : out_));
			if (i == 0)
				count = same(1 + std::max(plan_.repeat,
							  std::min(8 * plan_.repeat,
								   uint64_t(plan_.seconds / (ends[0] - begin)))));
		}
		std::nth_element(cpu.begin() + 1, cpu.begin() + 1 + cpu.size() / 2, cpu.end());
		say(row, begins, ends, digests, sent, cpu[1 + cpu.size() / 2 - (cpu.size() == 2)],
		    error_of(stock ? tensor_ : out_, data.exact));
	}

private:
	void reduce(const Row &row, const Data &data, uint64_t repetition)
	{
		codec::gloo::Options options;

		options.algorithm = ALGORITHMS.at(row.algorithm);
		options.segments = data.segments;
		options.metric = data.metric ? &*data.metric : nullptr;
		options.stream = repetition;
		options.out = out_.data();
		group_.allreduce(const_cast<float *>(data.values.data()), plan_.n, CODEC_FLOAT32, row.spec, options);
	}

	/* Compute the mean with Gloo: a sum, then a division. */
	void reduce_stock(::gloo::AllreduceOptions::Algorithm algorithm)
	{
		::gloo::AllreduceOptions options(context_);
		void (*add)(void *, const void *, const void *, size_t) = &::gloo::sum<float>;

		options.setAlgorithm(algorithm);
		options.setOutput(tensor_.data(), plan_.n);
		options.setReduceFunction(add);
		::gloo::allreduce(options);
		codec::gloo::detail::divide(tensor_.data(), plan_.n, static_cast<float>(context_->size));
	}

	void barrier()
	{
		::gloo::BarrierOptions options(context_);

		::gloo::barrier(options);
	}

	/* Return rank 0's `value` on all ranks. */
	uint64_t same(uint64_t value)
	{
		::gloo::BroadcastOptions options(context_);

		options.setOutput(&value, 1);
		options.setRoot(0);
		::gloo::broadcast(options);
		return value;
	}

	static uint64_t digest(const std::vector<float> &values)
	{
		uint64_t found = 0xcbf29ce484222325;

		for (float x : values)
			found = (found ^ codec::gloo::detail::bits_of(x)) * 0x100000001b3;
		return found;
	}

	static double error_of(const std::vector<float> &values, const std::vector<double> &exact)
	{
		double error = 0, size = 0;

		for (size_t i = 0; i < exact.size(); i++) {
			error += (values[i] - exact[i]) * (values[i] - exact[i]);
			size += exact[i] * exact[i];
		}
		return exact.empty() ? 0 : std::sqrt(error / size);
	}

	/* Print a row's line of JSON, without the first repetition, which allocates memory and starts slow links. */
	void say(const Row &row, const std::vector<double> &begins, const std::vector<double> &ends,
		 const std::vector<uint64_t> &digests, uint64_t sent, double cpu, double error)
	{
		std::ostringstream out;

		out.precision(17);
		out << "{\"name\": \"" << row.name << "\", \"sent\": " << sent << ", \"cpu\": " << cpu
		    << ", \"error\": " << error << ", \"times\": [";
		for (size_t i = 1; i < begins.size(); i++)
			out << (i > 1 ? ", " : "") << "[" << begins[i] << ", " << ends[i] << "]";
		out << "], \"digests\": [";
		for (size_t i = 0; i < digests.size(); i++)
			out << (i ? ", " : "") << digests[i];
		out << "]}";
		std::cout << out.str() << std::endl;
	}

	std::shared_ptr<::gloo::Context> context_;
	codec::gloo::Group group_;
	Plan &plan_;
	std::vector<float> out_, tensor_;
};

std::string environment(const char *name)
{
	const char *value = std::getenv(name);

	if (!value)
		throw std::runtime_error(std::string(name) + " is not set");
	return value;
}

} // namespace

int main(int argc, char **argv)
{
	if (argc != 3) {
		std::cerr << "usage: gloo_allreduce PLAN STORE, with RANK, WORLD_SIZE and GLOO_SOCKET_IFNAME set\n";
		return 2;
	}
	try {
		const int rank = std::stoi(environment("RANK")), size = std::stoi(environment("WORLD_SIZE"));
		Plan plan = plan_of(argv[1], rank);
		::gloo::transport::tcp::attr attr;

		attr.iface = environment("GLOO_SOCKET_IFNAME");
		auto context =
			codec::gloo::connect(rank, size, std::make_shared<::gloo::rendezvous::FileStore>(argv[2]),
					     codec::gloo::create_device(attr));
		context->setTimeout(std::chrono::seconds(300));
		Rank of(context, plan);
		for (const Row &row : plan.rows)
			of.run(row);
	} catch (const std::exception &e) {
		std::cerr << e.what() << "\n";
		return 1;
	}
	return 0;
}
