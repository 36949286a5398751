/* decode.c - a region, whatever it holds, to a block of values, and those to where they go. */
#include "rows.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* Scales of n values of whole rows, stored at frame[at], to w->scale; SIGN has two floats each. */
static codec_status read_scales(const uint8_t *frame, uint64_t at, const struct row_kind *q, int nbytes,
				const struct part *p, uint64_t n, struct work *w, codec_fault *f)
{
	uint64_t nrows = (n + p->row - 1) / p->row;

	for (uint64_t r = 0; r < nrows; r++, at += (uint64_t)nbytes) {
		uint32_t u;

		if (q->codec == CODEC_FLOAT4) {
			uint32_t last = q->variant == WIRE_FLOAT4_MXFP4 ? 252 : 126;

			if (frame[at] > last)
				BAD(at, frame[at], last);
			w->scale[r] = rows_small_scale(q, p, frame[at]);
			if (round_bits(w->scale[r]) >= ROUND_INF) /* that times the part's */
				BAD(at, round_bits(w->scale[r]), ROUND_MAX);
			continue;
		}
		u = load32(frame + at);
		if (u >= ROUND_INF || (q->codec == CODEC_FLOAT8 && !u))
			BAD(at, u, ROUND_INF);
		w->scale[r] = round_float(u);
		if (nbytes == 8) { /* at most a chunk of rows */
			u = load32(frame + at + 4);
			if (u >= ROUND_INF)
				BAD(at + 4, u, ROUND_INF);
			w->scale_below[r] = round_float(u);
		} else if (q->codec == CODEC_SIGN) {
			w->scale_below[r] = w->scale[r];
		}
	}
	return CODEC_OK;
}

static void sign_run(const struct kernels *k, const uint8_t *bits, uint64_t from, uint64_t n, uint64_t row,
		     const struct work *w, float *y)
{
	for (uint64_t i = 0; i < n; i += row) {
		float above = w->scale[i / row], below = w->scale_below[i / row];

		/* a scale of 0 says that all values were 0, whatever their sign */
		k->sign_values(bits, from + i, MIN(row, n - i), below > 0 ? -below : 0, above, y + i);
	}
}

/* Largest code that this codec writes. */
static uint8_t largest_code(const struct row_kind *q)
{
	if (q->codec == CODEC_TERNARY)
		return 2;
	return (uint8_t)(q->codec == CODEC_QUANTIZE ? q->odd ? 2 * q->levels : q->levels : 255);
}

/* The m codes of a block at frame[at], scales at frame[scales]. */
static codec_status decode_codes(const struct job *j, const struct kernels *k, const struct part *p,
				 const uint8_t *frame, uint64_t scales, uint64_t at, const uint8_t *codes,
				 uint64_t first, uint64_t m, const struct sink *sink, struct work *w, codec_fault *f)
{
	uint64_t tile = p->row && p->row <= WIRE_ROW_BLOCK ? m : ROW_TILE;
	int nbytes = rows_scale_nbytes(&j->h), half = j->h.dtype == CODEC_FLOAT16;
	/* what is added up is what decoding gives */
	int rounds = j->h.dtype != CODEC_FLOAT32 && sink->into != CODEC_INTO_STORE && !sink->unscaled;
	int checking = sink->into == SINK_NONE;
	struct row_kind q;

	rows_kind(&j->h, &q);
	w->scale[0] = sink->unscaled ? 1 : p->scale[0];
	w->scale_below[0] = q.variant == WIRE_SIGN_TWO_MEAN ? p->scale[1] : p->scale[0];
	for (uint64_t t = 0; t < m; t += tile) {
		uint64_t end = MIN(t + tile, m), n;
		const uint8_t *code = q.bits == 8 ? codes + t : w->code;
		uint8_t most = largest_code(&q);
		int all = q.bits ? most >= (1 << q.bits) - 1
				 : 1; /* codes of so many bits, or trits, can be nothing else */

		if (q.codec == CODEC_SIGN) {
			if (end == m && m % 8 && codes[m / 8] >> m % 8)
				BAD(at + m / 8, codes[m / 8], 0);
		} else if (q.bits) {
			uint64_t nbits = (end - t) * q.bits, last = t * q.bits / 8 + nbits / 8;
			uint8_t rest = nbits % 8 ? codes[last] >> nbits % 8 : 0;
			uint8_t fill = nbits % 8 && q.codec == CODEC_TERNARY ? 0x55 >> nbits % 8 : 0;

			if (q.bits < 8 && !(checking && all))
				k->unpack_codes(codes + t * q.bits / 8, end - t, q.bits, w->code);
			if (rest != fill)
				BAD(at + last, rest, fill);
		} else {
			uint64_t from = checking ? (end - t - 1) / 5 * 5 : 0;

			if (k->max_byte(codes + t / 5, (end - t + 4) / 5) > 242)
				BAD(at + t / 5, 243, 242);
			n = (end - t + 4) / 5 * 5;
			k->unpack_trits(codes + (t + from) / 5, n - from, w->code + from);
			while (n-- > end - t)
				if (w->code[n] != 1)
					BAD(at + (end - 1) / 5, w->code[n], 1);
		}
		if (!all && k->max_byte(code, end - t) > most)
			BAD(at, k->max_byte(code, end - t), most);
		for (uint64_t i = t; i < end; i += n) {
			uint64_t row = p->row && p->row <= ROW_CHUNK ? p->row : 0;

			n = rows_run(p->row, i, end);
			if (row || (p->row && i % p->row == 0))
				TRY(read_scales(frame, scales + i / p->row * (uint64_t)nbytes, &q, nbytes, p,
						row ? n : 1, w, f));
			if (checking)
				continue;
			if (q.codec == CODEC_SIGN)
				sign_run(k, codes, i, n, row ? row : n, w, w->y);
			else
				k->decode_rows(&q, code + i - t, n, row ? row : n, w->scale, w->y);
			if (rounds) {
				k->from_float[half](w->y, n, w->half);
				k->to_float[half](w->half, n, w->y);
			}
			sink_put(k, sink, first + i, n, w->y);
		}
	}
	return CODEC_OK;
}

/* Block b, whose region is frame[at, end). */
codec_status rows_decode_block(const struct job *j, const struct kernels *k, const uint8_t *frame, uint64_t b,
			       uint64_t at, uint64_t end, const struct sink *sink, struct work *w, codec_fault *f)
{
	struct place p = rows_place(j, b);
	uint64_t ncodes = rows_codes_nbytes(&j->h, p.n), codes_at = at + p.nscales;
	const uint8_t *codes = frame + codes_at;
	struct sink last = *sink;

	if (rows_entropy(&j->h)) {
		struct cursor c = {frame, codes_at, end};

		if (end - at < p.nscales + 4)
			BAD(at, end - at, p.nscales + 4);
		TRY(decode_bytes(j, k, w, &c, ncodes, &codes, f));
		TRY(close_region(&c, f));
	} else {
		if (end - at != ALIGN8(p.nscales + ncodes))
			BAD(at, end - at, ALIGN8(p.nscales + ncodes));
		for (uint64_t i = codes_at + ncodes; i < end; i++)
			if (frame[i])
				BAD(i, frame[i], 0);
	}
	last.scale = p.part->scale[0];
	return decode_codes(j, k, p.part, frame, at, codes_at, codes, p.first, p.n, &last, w, f);
}

/* What block b, just encoded at frame[at], leaves of src. */
codec_status rows_residual(const struct job *j, const struct kernels *k, const codec_tensor *src, const uint8_t *frame,
			   uint64_t b, uint64_t at, float *residual, struct work *w)
{
	const codec_tensor dst = {.dtype = CODEC_FLOAT32, .data = residual, .nbytes = 4 * j->h.n};
	const struct sink sink = {.into = SINK_RESIDUAL, .dst = &dst, .src = src};
	struct place p = rows_place(j, b);
	const uint8_t *codes = rows_entropy(&j->h) ? w->plane[0] : frame + at + p.nscales;

	return decode_codes(j, k, p.part, frame, at, at + p.nscales, codes, p.first, p.n, &sink, w, NULL);
}
