/* upload.h - write the host's bytes to device memory by launches of store_bytes, in pieces of STORED_NBYTES. */
#ifndef CODEC_CUDA_UPLOAD_H
#define CODEC_CUDA_UPLOAD_H

#include "device.h"
#include "layout.h"

/*
 * State of an upload: bytes are buffered in `s`, and written to device memory in order. `s.to`: device address of the
 * first byte that no launch has written yet.
 */
struct upload {
	const codec_cuda_device *device;
	CUstream stream;
	struct stored_bytes s;
};

/* Begin an upload to device address `to`, a multiple of 16. */
static inline void upload_begin(struct upload *u, const codec_cuda_device *d, CUstream stream, uint64_t to)
{
	u->device = d;
	u->stream = stream;
	u->s.to = to;
	u->s.nbytes = 0;
}

/* Append nbytes bytes of host memory to the upload, padded with zeros to a multiple of 16 bytes. */
int upload_add(struct upload *u, const void *bytes, uint64_t nbytes);

/* Write the bytes that are still buffered to device memory. */
int upload_end(struct upload *u);

/* Return the number of bytes that upload_add appends for nbytes bytes: with padding. */
static inline uint64_t upload_nbytes(uint64_t nbytes)
{
	return (nbytes + 15) / 16 * 16;
}

#endif
