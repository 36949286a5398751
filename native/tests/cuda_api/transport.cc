/* transport.cc - a transport with an interface for compressors, and its implementation by examples/cuda. */
#include "compressor_backend.h"

#include <cstring>
#include <memory>
#include <vector>

struct Memory {
	void *addr;
	uint64_t size;
};
struct SendRequest {
	Memory local, compressed;
};

class Compressor
{
public:
	virtual ~Compressor() = default;
	virtual bool compress(std::shared_ptr<SendRequest> req) = 0;
	virtual bool decompress(const Memory &input, Memory &output) = 0;
};

static void copy(void *to, const void *from, size_t nbytes, struct CUstream_st *)
{
	memcpy(to, from, nbytes); /* a GPU's transport: cudaMemcpyAsync, then cudaStreamSynchronize */
}

class CodecCompressor : public Compressor
{
public:
	explicit CodecCompressor(uint64_t most) : gpu_(0, CODEC_BFLOAT16, nullptr, copy)
	{
		memory_.workspace_nbytes = gpu_.workspace_nbytes(most);
		workspace_.reset(
			static_cast<char *>(std::aligned_alloc(256, (memory_.workspace_nbytes + 255) / 256 * 256)));
		memory_.workspace = workspace_.get();
		memory_.result = &result_;
	}
	bool compress(std::shared_ptr<SendRequest> req) override
	{
		Memory &to = req->compressed;

		to.size = gpu_.compress(req->local.addr, req->local.size, to.addr, to.size, memory_);
		return to.size != 0;
	}
	bool decompress(const Memory &input, Memory &output) override
	{
		return gpu_.decompress(input.addr, input.size, output.addr, output.size, memory_);
	}

private:
	struct Free {
		void operator()(void *p) const
		{
			free(p);
		}
	};
	GpuCompressor<decltype(&copy)> gpu_;
	GpuMemory memory_{};
	codec_cuda_result result_{};
	std::unique_ptr<char, Free> workspace_;
};

/* Send a message through the compressor. Returns the frame's size in bytes, or 0 on any error. */
extern "C" uint64_t send_message(void *message, uint64_t nbytes, void *frame, uint64_t capacity, void *received)
{
	CodecCompressor codec(nbytes);
	auto request = std::make_shared<SendRequest>(SendRequest{{message, nbytes}, {frame, capacity}});
	Memory output{received, nbytes};

	if (!codec.compress(request) || !codec.decompress(request->compressed, output))
		return 0;
	auto small = std::make_shared<SendRequest>(SendRequest{{message, nbytes}, {frame, 64}});
	std::vector<char> kept(static_cast<char *>(received), static_cast<char *>(received) + nbytes);
	static_cast<char *>(frame)[request->compressed.size - 1] ^= 1;
	if (codec.decompress(request->compressed, output) || memcmp(kept.data(), received, nbytes))
		return 0;
	return codec.compress(small) ? 0 : request->compressed.size;
}
