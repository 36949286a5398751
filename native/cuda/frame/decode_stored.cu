/* frame/decode_stored.cu - kernel that decodes frames of tensors that are stored uncompressed. */
#include "frame/decode.cuh"
#include "common/values.cuh"

/* Store values i to i + 3 of a stored frame to the sink. SIZE: bytes per value. */
template <int SIZE> DEVICE void put_four(const codec_view &v, const uint8_t *frame, const codec_sink &sink, uint64_t i)
{
	uint32_t n = v.n - i < 4 ? (uint32_t)(v.n - i) : 4;
	uint64_t x[4];

	load_quad<SIZE>(frame + v.side_offset + SIZE * i, n, x);
	put_quad<SIZE>(&sink, v.dtype, i, n, x);
}

/*
 * Kernel: decode stored tensors, or only check them. Grid: (CTAs, frames). Warps check chunks of bytes, and store rows
 * of 128 values, round-robin.
 */
extern "C" __global__ void __launch_bounds__(32 * WARPS) decode_stored(const codec_decoding *decodings)
{
	const codec_decoding &d = decoding_of(decodings);
	const codec_view &v = share_job(d.view, d.memory).v;
	const uint8_t *frame = d.frame;
	codec_found *found = d.found;
	const uint64_t nbytes = v.frame_nbytes - v.side_offset, chunk = 4 * WIRE_CHUNK_WORDS,
		       size = v.n ? nbytes / v.n : 1;
	const uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = d.warps;
	const uint32_t lane = threadIdx.x % 32;
	uint64_t digest = 0;

	if (warp >= warps)
		return;
	for (uint64_t i = warp; d.checks && chunk * i < nbytes; i += warps)
		digest += digest_chunk(frame + v.side_offset, nbytes, WIRE_SEED_REGION, i, lane);
	for (uint64_t i = 4 * (32 * warp + lane); d.sink.data && i < v.n; i += 128 * warps)
		size == 1   ? put_four<1>(v, frame, d.sink, i)
		: size == 2 ? put_four<2>(v, frame, d.sink, i)
		: size == 4 ? put_four<4>(v, frame, d.sink, i)
			    : put_four<8>(v, frame, d.sink, i);
	if (lane)
		return;
	atomicAdd(&found->checksum, (unsigned long long)digest);
	__threadfence();
	if (atomicAdd(&found->done, 1u) == warps - 1) {
		__threadfence();
		found->checksum = checksum_of_block(((volatile codec_found *)found)->checksum, 0);
	}
}
