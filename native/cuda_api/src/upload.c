/* upload.c - write the host's bytes to device memory by launches of store_bytes. */
#include "upload.h"

#include <string.h>

int upload_end(struct upload *u)
{
	void *args[] = {&u->s};

	if (!u->s.nbytes)
		return CODEC_OK;
	TRY(device_launch(u->device, KERNEL_STORE_BYTES, 1, 1, args, u->stream));
	u->s.to += u->s.nbytes;
	u->s.nbytes = 0;
	return CODEC_OK;
}

int upload_add(struct upload *u, const void *bytes, uint64_t nbytes)
{
	const uint8_t *from = bytes;
	uint64_t end = upload_nbytes(nbytes);

	for (uint64_t at = 0; at < end;) {
		uint64_t room = STORED_NBYTES - u->s.nbytes, piece = end - at < room ? end - at : room;
		uint64_t given = at < nbytes ? (piece < nbytes - at ? piece : nbytes - at) : 0;
		uint8_t *to = (uint8_t *)u->s.words + u->s.nbytes;

		memcpy(to, from + at, given);
		memset(to + given, 0, piece - given);
		u->s.nbytes += piece;
		at += piece;
		if (u->s.nbytes == STORED_NBYTES)
			TRY(upload_end(u));
	}
	return CODEC_OK;
}
