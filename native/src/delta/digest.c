/* digest.c - compute digests of values, and compare them with a frame's digests. */
#include "delta.h"

/*
 * The checksum sums are those of little-endian values. A chunk is copied first if it is short, or if this machine is
 * big-endian.
 */
void delta_sums(const struct kernels *k, const void *values, uint64_t nbytes, uint64_t item, uint64_t *sums)
{
	uint64_t whole = delta_whole_chunks(nbytes);
	const uint8_t *p = values;

	(void)item;
	if (whole)
		k->chunk_sums(p, whole, sums);
	for (uint64_t c = whole; DELTA_CHUNK * c < nbytes; c++) {
		uint64_t m = MIN(DELTA_CHUNK, nbytes - DELTA_CHUNK * c);
		uint8_t chunk[DELTA_CHUNK];

		memcpy(chunk, p + DELTA_CHUNK * c, m);
		memset(chunk + m, 0, DELTA_CHUNK - m);
#if CODEC_BIG_ENDIAN
		swap_bytes(chunk, m, item);
#endif
		k->chunk_sums(chunk, 1, sums + c);
	}
}

uint64_t delta_digest_of(const uint64_t *sums, uint64_t nbytes, uint64_t first)
{
	uint64_t digest = 0;

	for (uint64_t c = 0; DELTA_CHUNK * c < nbytes; c++)
		digest += checksum_of_chunk(sums[c], WIRE_SEED_VALUES, first + c);
	return digest;
}

uint64_t delta_digest(const struct kernels *k, const void *values, uint64_t at, uint64_t end, uint64_t item)
{
	uint64_t digest = 0, sums[64];

	for (; at < end; at += sizeof sums / 8 * DELTA_CHUNK) {
		uint64_t m = MIN(sizeof sums / 8 * DELTA_CHUNK, end - at);

		delta_sums(k, (const uint8_t *)values + at, m, item, sums);
		digest += delta_digest_of(sums, m, at / DELTA_CHUNK);
	}
	return digest;
}

/* Compare the digest of the caller's base with the base's digest in the frame. */
static codec_status compare_base(const struct job *j, uint64_t digest, const codec_context *with)
{
	codec_status status = digest == j->result_digest ? CODEC_ALREADY_APPLIED : CODEC_OTHER_BASE;

	return digest == j->base_digest ? CODEC_OK : fault(with->fault, status, j->h.side_at, j->base_digest, digest);
}

void delta_set_state(struct delta_block *block, uint32_t state)
{
	__atomic_store_n(&block->state, state, __ATOMIC_RELEASE);
	__atomic_thread_fence(__ATOMIC_RELEASE);
}

/*
 * Set *digest to the contribution of a decoded block's base values to the base's digest. Return 0 if the block is not
 * decoded yet.
 */
static int read_digest(const struct delta_block *block, uint64_t *digest)
{
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (__atomic_load_n(&block->state, __ATOMIC_ACQUIRE) == DELTA_UNKNOWN)
		return 0;
	*digest = block->base;
	return 1;
}

codec_status delta_check_base(const struct job *j, const codec_context *with)
{
	const uint64_t item = dtype_of(j->h.dtype)->nbytes;
	uint64_t digest = 0;

	for (uint64_t b = 0; b < j->h.nblocks; b++) {
		const struct delta_block *block = job_delta_blocks(j) + b;
		uint64_t m, at = delta_span(&j->h, b, &m) * item, own;

		if (!read_digest(block, &own)) {
			own = delta_digest(kernels_for(with), with->base->data, at, at + m * item, item);
			read_digest(block, &own); /* another thread may have decoded the block in place */
		}
		digest += own;
	}
	return compare_base(j, digest, with);
}

codec_status delta_open(const struct job *j, const codec_context *with)
{
	const codec_tensor *base = with->base;

	if (!base || !base->nbytes)
		return CODEC_OK; /* the tensor has no values */
	return compare_base(
		j, delta_digest(kernels_for(with), base->data, 0, base->nbytes, dtype_of(j->h.dtype)->nbytes), with);
}

codec_status delta_close(const struct job *j, const codec_context *with)
{
	const struct delta_block *block = job_delta_blocks(j);
	uint64_t base = 0, result = 0;

	for (uint64_t b = 0; b < j->h.nblocks; b++) {
		base += block[b].base;
		result += block[b].result;
	}
	TRY(compare_base(j, base, with));
	return result == j->result_digest
		       ? CODEC_OK
		       : fault(with->fault, CODEC_CHECKSUM, j->h.side_at + 8, j->result_digest, result);
}

void delta_copy(const struct job *j, const codec_context *with, const codec_tensor *dst)
{
	(void)j;
	if (with->base && dst->nbytes && dst->data != with->base->data)
		memcpy(dst->data, with->base->data, dst->nbytes);
}
