/*
 * open.cu - kernel that opens frames whose bytes are on the device: it reads and validates header and side section,
 * and writes the job (codec_view and its arrays) that decoding kernels read, as codec_decode_plan does on the host.
 */
#include "kernels/side.cuh"
#include "common/cta.cuh"

/* Layout of a frame's arrays in the workspace: lookup tables, then parts and offsets. plan.c computes the size. */
#define TABLES_NBYTES (WIRE_MAX_PLANES * TABLE_NBYTES) /* followed by parts and offsets */

/* State of opening a frame, which the threads of a CTA share. */
struct open_state {
	opening a;
	codec_view v;
	side s;
	uint64_t header[CODEC_HEADER_NBYTES / 8]; /* a copy, which concurrent writes to the frame cannot change */
	uint8_t lead[LEAD_NBYTES];
	codebook books[WIRE_MAX_PLANES];
	uint64_t nbytes, n;
	uint64_t base, result; /* DELTA: digests in the side section */
	uint32_t status;
};

/*
 * Copy the header's bytes to shared memory, and determine the frame's size and the plan's number of values. Called by
 * all threads.
 */
DEVICE void take_header(open_state *o)
{
	uint8_t *to = (uint8_t *)o->header;

	if (threadIdx.x == 0) {
		const uint64_t *at = (const uint64_t *)o->a.frame_nbytes_at, given = at ? *at : o->a.frame_nbytes;

		o->nbytes = given;
		o->n = 1;
		for (uint32_t i = 0; i < o->a.rank; i++)
			o->n *= o->a.shape[i];
		o->status = given > o->a.frame_nbytes ? CODEC_TRUNCATED : CODEC_OK;
	}
	__syncthreads();
	const uint64_t have = o->status ? 0 : o->nbytes;

	for (uint32_t i = threadIdx.x; i < CODEC_HEADER_NBYTES; i += blockDim.x)
		to[i] = i < have ? ((const uint8_t *)o->a.frame)[i] : 0;
	__syncthreads();
}

/* Read and check the header, and derive the view from it. Called by thread 0. */
DEVICE_CALL void open_header(open_state *o)
{
	const opening &a = o->a;
	uint32_t status = o->status;

	if (!status)
		status = read_header((const uint8_t *)o->header, o->nbytes, a, o->n, &o->v);
	if (!status)
		status = check_span(&o->v, o->nbytes, a.flags);
	if (!status)
		status = check_sections(&o->v, (const uint8_t *)a.frame);
	if (!status && a.codec == CODEC_TRUNCATE && o->v.layout && o->v.variant == CODEC_LEVEL_CODING_SHARED)
		status = CODEC_MISSING_STATE;
	o->status = status;
	if (!status)
		o->s = {(const uint8_t *)a.frame, o->v.side_offset, o->v.directory_offset};
}

/* Read the side section's codebooks and part records. Called by thread 0. */
DEVICE_CALL void open_side(open_state *o, uint8_t *memory)
{
	if (o->v.codec == CODEC_DELTA) {
		o->base = load64(o->lead);
		o->result = load64(o->lead + 8);
		o->s.at += WIRE_DELTA_SIDE_NBYTES;
		o->status = !o->v.nblocks && o->base != o->result ? CODEC_BAD_SIDE : CODEC_OK;
		return;
	}
	o->v.tables = {0, o->v.coded ? 32u - (uint32_t)__clz((int)o->v.coded) : 0, TABLE_NBYTES};
	o->status = read_books(&o->s, o->lead, &o->v, o->books);
	if (o->status || !o->v.layout)
		return;
	o->status = is_rows(o->v.codec) ? read_row_parts(&o->s, &o->v, (codec_row_part *)(memory + TABLES_NBYTES))
					: read_model_parts(&o->s, &o->v, (codec_model_part *)(memory + TABLES_NBYTES));
	o->v.row_parts.at = o->v.model_parts.at = TABLES_NBYTES;
	o->v.offsets.at = TABLES_NBYTES + sizeof(codec_model_part) * o->v.model_parts.count;
}

/* Compute the checksum of header and side section. Called by all threads. */
DEVICE_CALL uint64_t head_checksum(open_state *o)
{
	const uint32_t lane = threadIdx.x % 32;
	uint64_t sum = 0;

	if (threadIdx.x == 0)
		o->header[WIRE_AT_CHECKSUM / 8] = 0;
	__syncthreads();
	for (uint64_t i = threadIdx.x / 32; 4 * WIRE_CHUNK_WORDS * i < o->v.side_nbytes; i += CTA_WARPS)
		sum += digest_chunk((const uint8_t *)o->a.frame + o->v.side_offset, o->v.side_nbytes, WIRE_SEED_SIDE, i,
				    lane);
	if (threadIdx.x < 32)
		sum += digest_bytes((const uint8_t *)o->header, o->v.side_offset, WIRE_SEED_HEADER, lane);
	return cta_sum(lane == 0 ? sum : 0);
}

/*
 * Write the arguments of all kernels that may decode a frame, or only check it. decoder: the kernel that processes this
 * frame (enum decoder), the only one that gets warps; NDECODERS: none.
 */
DEVICE void put_decodings(const opening &a, const uint64_t to[NDECODERS], bool checks, bool writes, int decoder)
{
	decoding d = {};

	d.view = a.view, d.memory = a.memory, d.frame = a.frame, d.scratch = a.scratch, d.found = a.found;
	d.exponents = a.base;
	d.data = writes ? a.tensor : 0;
	d.into = a.into, d.weight = a.weight, d.divide = a.divide;
	d.checks = checks;
	for (int k = 0; k < NDECODERS; k++) {
		d.warps = k == decoder ? a.warps[k] : 0;
		*(decoding *)to[k] = d;
	}
}

/*
 * Write the structs that later kernels of the call read. For an invalid frame, write a view that is safe to read, and
 * assign no warps, so that nothing is decoded. Called by thread 0.
 */
DEVICE_CALL void put_results(const open_state *o, uint64_t checksum, uint64_t head)
{
	const opening &a = o->a;
	const bool valid = !o->status, first = a.checking[0] != 0;
	const bool plain = WIRE_ONLY_PLANE_0(o->v.fixed, o->v.halved, size_of(o->v.dtype));
	const bool fast = a.warps[FAST_BLOCKS] && o->v.coded & 1 && plain;
	const int decoder = !valid ? NDECODERS : !o->v.layout ? STORED : fast ? FAST_BLOCKS : BLOCKS;
	codec_view v = o->v;

	if (!valid) {
		v = {};
		v.codec = a.codec;
		v.dtype = a.dtype;
		v.bits = 1;
	}
	v.struct_nbytes = sizeof v;
	*(codec_view *)a.view = v;
	*(found *)a.found = {~0ull, 0, 0, 0, 0, 0, 0};
	*(opened *)a.opened = {v.frame_nbytes, checksum, head, o->base, o->result, o->status, (uint32_t)decoder};
	if (first)
		put_decodings(a, a.checking, true, false, decoder);
	put_decodings(a, a.decoding, !first, true, first ? NDECODERS : decoder);
}

/* Kernel: open frames, one per CTA. Grid: (1, frames). */
extern "C" __global__ void __launch_bounds__(CTA_THREADS) open_frames(const opening *openings)
{
	__shared__ open_state o;
	uint64_t checksum, head = 0;
	bool bad = false;

	share(&o.a, openings + blockIdx.y);
	if (threadIdx.x == 0)
		o.base = o.result = 0; /* remains 0 for codecs other than Delta */
	for (uint32_t i = threadIdx.x; i < sizeof o.v / 8; i += blockDim.x)
		((uint64_t *)&o.v)[i] = 0;
	take_header(&o);
	checksum = load64((const uint8_t *)o.header + WIRE_AT_CHECKSUM);
	if (threadIdx.x == 0)
		open_header(&o);
	__syncthreads();
	uint8_t *memory = (uint8_t *)o.a.memory;
	if (!o.status) {
		for (uint32_t i = threadIdx.x; i < LEAD_NBYTES; i += blockDim.x)
			o.lead[i] = i < o.s.end - o.s.at ? o.s.frame[o.s.at + i] : 0;
		__syncthreads();
		if (threadIdx.x == 0)
			open_side(&o, memory);
		__syncthreads();
	}
	if (!o.status) {
		if (threadIdx.x % 32 == 0 && o.v.coded >> threadIdx.x / 32 & 1)
			book_to_lookup(o.books + threadIdx.x / 32,
				       (book_lookup *)(memory + TABLE_NBYTES * (threadIdx.x / 32)));
		bad = read_offsets(&o.s, &o.v, (const codec_model_part *)(memory + o.v.model_parts.at),
				   (uint16_t *)(memory + o.v.offsets.at));
		head = head_checksum(&o);
	}
	bad = cta_max(bad) != 0;
	if (threadIdx.x == 0) {
		if (!o.status)
			o.status = bad ? CODEC_BAD_SIDE : close_side(&o.s);
		put_results(&o, checksum, head);
	}
}
