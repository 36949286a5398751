/*
 * peer.cc - C++ ranks that perform the collectives listed in a file: `gloo_peer JOBS RESULTS`.
 *
 * tests/torch/protocol/test_gloo_interoperability.py writes the file JOBS, and compares the results with those of
 * Python ranks. Each rank writes its results to RESULTS.rank. All numbers are in the byte order of the machine.
 */
#include <cstdio>
#include <fstream>
#include <iterator>

#include "ranks.h"

using namespace codec::gloo;

namespace
{

enum Kind : uint32_t { ALLREDUCE, REDUCE_SCATTER, ALLGATHER };
enum Part : uint32_t { THETA, V, M, PARTS };

/*
 * Header of a job (one collective) in the file JOBS. These arrays follow: segments, metrics, state arrays whose dtype
 * is not 0, residuals, values of each rank.
 */
struct Head {
	Kind kind;
	uint32_t dtype, op, algorithm;
	uint32_t state_dtypes[PARTS]; /* 0: the state array is absent */
	uint32_t feedback;
	uint64_t n, stream, nsegments, nmetrics;
	codec_spec spec;
};

struct Metric {
	uint32_t theta_dtype;
	float theta_term, theta_v_term, v_term, eps, m_term;
	uint32_t has[PARTS]; /* 1: the metric uses the state array */
	uint32_t reserved;
	uint64_t until;
};

/* Reads structs and arrays from a file sequentially. */
class Reader
{
public:
	explicit Reader(const char *path)
	{
		std::ifstream file(path, std::ios::binary);

		bytes_.assign(std::istreambuf_iterator<char>(file), {});
		if (!file)
			throw std::runtime_error(std::string("cannot read ") + path);
	}

	template <class T> std::vector<T> take(uint64_t n)
	{
		std::vector<T> found(n);

		if (n > (bytes_.size() - at_) / sizeof(T))
			throw std::runtime_error("the file of jobs ends too early");
		std::memcpy(found.data(), bytes_.data() + at_, n * sizeof(T));
		at_ += n * sizeof(T);
		return found;
	}

	bool done() const
	{
		return at_ == bytes_.size();
	}

private:
	std::vector<char> bytes_;
	size_t at_ = 0;
};

void write(std::ofstream &to, const void *p, size_t nbytes)
{
	to.write(static_cast<const char *>(p), static_cast<std::streamsize>(nbytes));
}

/* Read the next job, perform it as rank `me`, and write the results. */
void do_next(Reader &jobs, const ranks::Rank &me, Group &group, std::ofstream &results)
{
	const Head head = jobs.take<Head>(1)[0];
	const size_t itemsize = codec_dtype_nbytes(head.dtype);
	const uint64_t n = head.kind == REDUCE_SCATTER ? head.n * me.size : head.n;
	std::vector<uint8_t> state[PARTS], x;
	codec_tensor tensors[PARTS];
	std::vector<codec_metric> metrics;
	Options options;

	options.cut_as_torch = true;
	options.segments = jobs.take<codec_segment>(head.nsegments);
	for (const Metric &given : jobs.take<Metric>(head.nmetrics)) {
		auto metric = detail::blank<codec_metric>();

		metric.theta_dtype = given.theta_dtype;
		metric.theta_term = given.theta_term;
		metric.theta_v_term = given.theta_v_term;
		metric.v_term = given.v_term;
		metric.eps = given.eps;
		metric.m_term = given.m_term;
		metric.until = given.until;
		metric.theta = given.has[THETA] ? &tensors[THETA] : nullptr;
		metric.v = given.has[V] ? &tensors[V] : nullptr;
		metric.m = given.has[M] ? &tensors[M] : nullptr;
		metrics.push_back(metric);
	}
	for (size_t i = 1; i < metrics.size(); i++)
		metrics[i - 1].next = &metrics[i];
	for (uint32_t part = 0; part < PARTS; part++) {
		const uint32_t dtype = head.state_dtypes[part];

		state[part] = jobs.take<uint8_t>(n * codec_dtype_nbytes(dtype));
		tensors[part] = detail::tensor_of(dtype, state[part].data(), n);
	}
	std::vector<float> residual = jobs.take<float>(head.feedback ? n : 0), sums = residual;
	for (int rank = 0; rank < me.size; rank++) {
		std::vector<uint8_t> values = jobs.take<uint8_t>(n * itemsize);

		if (rank == me.rank)
			x = std::move(values);
	}

	options.op = static_cast<Op>(head.op);
	if (head.kind == ALLREDUCE)
		options.algorithm = static_cast<Algorithm>(head.algorithm);
	options.stream = head.stream;
	options.metric = metrics.empty() ? nullptr : metrics.data();
	if (head.feedback) {
		options.residual = residual.data();
		options.sums_residual = sums.data();
	}
	if (head.kind == ALLREDUCE) {
		group.allreduce(x.data(), n, head.dtype, head.spec, options);
	} else {
		const bool gathered = head.kind == ALLGATHER;
		std::vector<uint8_t> out(head.n * itemsize * (gathered ? me.size : 1));

		if (gathered)
			group.allgather(x.data(), out.data(), head.n, head.dtype, head.spec, options);
		else
			group.reduce_scatter(x.data(), out.data(), head.n, head.dtype, head.spec, options);
		x = std::move(out);
	}
	write(results, x.data(), x.size());
	write(results, residual.data(), residual.size() * sizeof(float));
	write(results, sums.data(), sums.size() * sizeof(float));
}

} // namespace

int main(int argc, char **argv)
{
	if (argc != 3) {
		std::fprintf(stderr, "usage: %s JOBS RESULTS\n", argv[0]);
		return 2;
	}
	try {
		const int size = static_cast<int>(Reader(argv[1]).take<uint64_t>(1)[0]);

		ranks::run(size, [&](ranks::Rank &me) {
			Reader jobs(argv[1]);
			Group group(me.connect());
			std::ofstream results(argv[2] + std::string(".") + std::to_string(me.rank), std::ios::binary);

			jobs.take<uint64_t>(1);
			while (!jobs.done())
				do_next(jobs, me, group, results);
			results.close();
			EXPECT(results.good());
			return std::string();
		});
	} catch (const std::exception &e) {
		std::fprintf(stderr, "%s\n", e.what());
		return 1;
	}
	return 0;
}
