/*
 * compressor_backend.h - lossless compression for a transport that has an interface for compressors, such as UCCL's
 * ICompressorBackend. A compressor compresses the bytes of a send request, and decompresses received bytes, on its own
 * CUDA stream.
 *
 * A transport's class derives from its interface, and forwards compress() and decompress() to a GpuCompressor.
 * compress() waits for the number of bytes to send. The transport sends that number to the receiver, or the receiver
 * reads it in the frame's header. native/tests/cuda_api/transport.cc has such a class.
 */
#pragma once
#include <codec/codec_cuda.h>

#include <cstdint>
#include <stdexcept>
#include <string>

/* Device memory that the transport allocates once, before the first message. */
struct GpuMemory {
	void *workspace; /* at least GpuCompressor::workspace_nbytes bytes */
	uint64_t workspace_nbytes;
	codec_cuda_result *result;
};

/* Compressor of messages of one dtype. `Copy` copies bytes from the device after waiting for the stream. */
template <class Copy> class GpuCompressor
{
public:
	GpuCompressor(int ordinal, uint32_t dtype, struct CUstream_st *stream, Copy copy)
	    : dtype_(dtype), stream_(stream), copy_(copy)
	{
		check(codec_cuda_open(ordinal, &gpu_));
	}
	~GpuCompressor()
	{
		codec_cuda_close(gpu_);
	}
	GpuCompressor(const GpuCompressor &) = delete;
	GpuCompressor &operator=(const GpuCompressor &) = delete;

	/* Return the workspace that messages of up to `nbytes` bytes need. */
	uint64_t workspace_nbytes(uint64_t nbytes) const
	{
		const Plan plan(*this, nbytes);
		codec_cuda_encode_item encode{};
		codec_cuda_decode_item decode{};
		uint64_t most, other;

		encode.struct_nbytes = sizeof encode, encode.plan = plan.plan;
		decode.struct_nbytes = sizeof decode, decode.plan = plan.plan;
		check(codec_cuda_encode_workspace(&encode, 1, &most));
		check(codec_cuda_decode_workspace(&decode, 1, &other));
		return most > other ? most : other;
	}

	/*
	 * Compress a message. Returns the bytes of the frame; 0: the frame does not fit into `capacity`, so send the
	 * message uncompressed.
	 */
	uint64_t compress(const void *message, uint64_t nbytes, void *frame, uint64_t capacity, const GpuMemory &memory)
	{
		const Plan plan(*this, nbytes);
		codec_cuda_encode_item item{};

		item.struct_nbytes = sizeof item, item.plan = plan.plan, item.tensor = message, item.frame = frame;
		item.capacity = capacity, item.result = memory.result;
		check(codec_cuda_encode(&item, 1, memory.workspace, memory.workspace_nbytes, stream_));
		const codec_cuda_result result = read(memory);
		if (result.status != CODEC_SHORT_OUTPUT)
			check(static_cast<int>(result.status));
		return result.nbytes;
	}

	/* Decompress a received frame into a message of `nbytes` bytes. Returns false, and changes nothing, if it is
	 * damaged. */
	bool decompress(const void *frame, uint64_t frame_nbytes, void *message, uint64_t nbytes,
			const GpuMemory &memory)
	{
		const Plan plan(*this, nbytes);
		codec_cuda_decode_item item{};

		item.struct_nbytes = sizeof item, item.plan = plan.plan, item.frame = frame;
		item.frame_nbytes = frame_nbytes, item.tensor = message, item.result = memory.result;
		check(codec_cuda_decode(&item, 1, CODEC_VERIFY_FIRST | CODEC_ALLOW_SLACK, memory.workspace,
					memory.workspace_nbytes, stream_));
		return read(memory).status == CODEC_OK;
	}

private:
	/* Plan of a message as a flat tensor. */
	struct Plan {
		codec_cuda_plan *plan = nullptr;

		Plan(const GpuCompressor &owner, uint64_t nbytes)
		{
			codec_spec spec{};
			codec_tensor like{};

			spec.struct_nbytes = sizeof spec, spec.codec = CODEC_LOSSLESS;
			like.struct_nbytes = sizeof like, like.dtype = owner.dtype_, like.rank = 1;
			like.shape[0] = nbytes / codec_dtype_nbytes(owner.dtype_);
			check(codec_cuda_plan_open(owner.gpu_, &spec, &like, nullptr, 0, &plan));
		}
		~Plan()
		{
			codec_cuda_plan_close(plan);
		}
		Plan(const Plan &) = delete;
		Plan &operator=(const Plan &) = delete;
	};

	static void check(int status)
	{
		if (status)
			throw std::runtime_error(std::string("libcodec_cuda: ") + codec_cuda_strerror(status));
	}
	codec_cuda_result read(const GpuMemory &memory)
	{
		codec_cuda_result result;

		copy_(&result, memory.result, sizeof result, stream_);
		return result;
	}

	codec_cuda_device *gpu_ = nullptr;
	uint32_t dtype_;
	struct CUstream_st *stream_;
	Copy copy_;
};
