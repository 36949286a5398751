/* side.c - write and read the side section: codebooks, then data of the codec's family. */
#include "api.h"

/*
 * Write the side section: codebook id, codebooks, scale model or parts. Return its size in bytes. dst NULL: only return
 * the size.
 */
uint64_t side_write(const struct job *j, uint8_t *dst)
{
	uint8_t packed[BOOK_MAX_NBYTES + 1];
	uint64_t at = 0;

	if (j->h.flags & WIRE_FLAG_PRIOR) {
		if (dst)
			store64(dst, j->codebook_id);
		at += 8;
	}
	for (int p = 0; p < WIRE_MAX_PLANES; p++)
		if (j->h.coded >> p & 1 && !(p == 0 && j->h.flags & WIRE_FLAG_PRIOR)) {
			int n = book_pack(j->books + p, packed);

			if (dst)
				memcpy(dst + at, packed, (size_t)n);
			at += (uint64_t)n;
		}
	if (dst)
		family_of(&j->h)->side_write(j, dst + at);
	at += family_of(&j->h)->side_nbytes(j);
	if (dst)
		memset(dst + at, 0, ALIGN8(at) - at);
	return ALIGN8(at);
}

/*
 * Write the header and side section of a frame in blocks. `checksum`: sum of the checksums of all later sections;
 * frame_nbytes 0: not yet known.
 */
void head_write(const struct job *j, uint64_t frame_nbytes, uint64_t checksum, uint8_t *head)
{
	struct header h = j->h;

	side_write(j, head + h.side_at);
	h.frame_nbytes = frame_nbytes;
	h.checksum = 0;
	if (frame_nbytes)
		h.checksum = head_checksum(&h, &kernels_scalar, head + h.side_at) + checksum;
	header_write(&h, head);
}

#define SIDE(where, found, expected) return fault(f, CODEC_BAD_SIDE, where, found, expected)

codec_status side_read(const uint8_t *frame, const codec_context *with, struct job *j)
{
	uint64_t at = j->h.side_at, end = at + j->h.side_nbytes;
	codec_fault *f = with->fault;

	if (j->h.flags & WIRE_FLAG_PRIOR) {
		const codec_codebook *c = NULL;

		if (end - at < 8 || !load64(frame + at))
			SIDE(at, 0, 1);
		j->codebook_id = load64(frame + at);
		for (uint64_t i = 0; i < with->ncodebooks && !c; i++)
			if (with->codebooks[i].id == j->codebook_id)
				c = with->codebooks + i;
		if (!c)
			return fault(f, CODEC_UNKNOWN_CODEBOOK, at, j->codebook_id, 0);
		TRY(codebook_load(c, &j->h, j->books));
		at += 8;
	}
	for (int p = 0; p < WIRE_MAX_PLANES; p++) {
		int symbols = 256 >> WIRE_RAW_BITS(j->h.halved, p, dtype_of(j->h.dtype)->nbytes);

		if (!(j->h.coded >> p & 1))
			continue;
		if (!(p == 0 && j->h.flags & WIRE_FLAG_PRIOR)) {
			int n = book_unpack(j->books + p, frame + at, end - at);

			if (!n)
				SIDE(at, end - at, 0);
			for (int i = symbols; i < 256; i++)
				if (j->books[p].length[i])
					SIDE(at, i, symbols - 1);
			at += (uint64_t)n;
		}
		book_to_lookup(j->books + p, j->lookup + p);
	}
	if (j->h.layout == WIRE_LAYOUT_BLOCKS)
		TRY(family_of(&j->h)->side_read(frame, at, end, j, &at, f));
	if (end - at >= WIRE_ALIGN)
		SIDE(at, end - at, WIRE_ALIGN - 1);
	for (; at < end; at++)
		if (frame[at])
			SIDE(at, frame[at], 0);
	return CODEC_OK;
}
