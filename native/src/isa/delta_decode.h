/* delta_decode.h - read DELTA's bit streams; part of delta_loops.h. */

/* Read an Elias gamma code of a number of at least 1. Returns 0 if the number is 2^64 or more. */
ALWAYS uint64_t read_gamma(struct bit_reader *r)
{
	uint32_t n = 0, zeros;

	do {
		zeros = (uint32_t)__builtin_ctzll(peek_bits(r) | 1ull << 32);
		r->at += zeros;
		n += zeros;
	} while (zeros == 32 && n < 64);
	if (n >= 64)
		return 0;
	r->at++;
	return 1ull << n | read_bits(r, n);
}

/*
 * Read the Rice code of a gap, with parameter k <= 16, and the sign bit after it. One call of peek_bits returns both
 * unless the code is an escape.
 */
ALWAYS uint32_t read_gap(struct bit_reader *r, uint32_t k, uint32_t *negative, uint32_t *bad)
{
	uint64_t v = peek_bits(r);
	uint32_t q = (uint32_t)__builtin_ctzll(v | 1ull << WIRE_RICE_LONGEST), nbits = q + 1 + k, gap;

	if (__builtin_expect(q == WIRE_RICE_LONGEST, 0)) {
		gap = (uint32_t)read_rice(r, k, WIRE_RICE_GAP_BITS, bad);
		if (gap)
			*negative = (uint32_t)read_bits(r, 1);
		return gap;
	}
	gap = q << k | (uint32_t)(v >> (q + 1) & ((1ull << k) - 1));
	*bad |= gap >> WIRE_RICE_GAP_BITS;
	*negative = gap ? (uint32_t)(v >> nbits & 1) : *negative;
	r->at += nbits + (gap != 0);
	return gap;
}

/* Return the position of the k-th set bit of x. */
ALWAYS uint32_t select_bit(uint64_t x, uint32_t k)
{
#ifdef __BMI2__
	return (uint32_t)__builtin_ctzll(_pdep_u64(1ull << k, x));
#else
	for (; k; k--)
		x &= x - 1;
	return (uint32_t)__builtin_ctzll(x);
#endif
}

/*
 * Read the steps of the n values of class 0, at the positions `small`. Return 0 if the stream is invalid. Every value
 * is written to the list, which has room for it, but the list's count advances only if the step is not 0, because a
 * branch would be mispredicted.
 */
ALWAYS int decode_small(const struct delta_kind *q, const void *base, int scale, const uint32_t *small, size_t n,
			struct bit_reader *r, struct delta_list *list, uint32_t item)
{
	size_t count = 0, room = list->room;
	uint32_t bad = 0;

	for (size_t s = 0; s < n; s++) {
		uint64_t x = delta_load(base, small[s], item), z;

		z = read_rice(r, delta_small_k(delta_exponent(q, x), scale, item), 8 * item, &bad);
		if (__builtin_expect(count == room, 0)) {
			if (z)
				return 0;
			continue;
		}
		list->at[count] = small[s];
		delta_store(list->value, count, item, delta_apply(q, x, delta_unzigzag(z, item)));
		count += z != 0;
	}
	list->count = count;
	return !bad && r->at <= 8 * r->nbytes;
}

/* Process a gap of 0, which extends the preceding change by one step. Return 0 if the stream is invalid. */
ALWAYS int decode_more(const struct delta_kind *q, uint64_t x, uint32_t negative, uint32_t *more, struct bit_reader *r,
		       struct delta_list *list, uint32_t item)
{
	uint64_t size;

	if (*more == WIRE_DELTA_MORE)
		return 0;
	size = ++*more + 1;
	if (*more == WIRE_DELTA_MORE) {
		uint64_t rest = read_gamma(r);

		size = WIRE_DELTA_MORE + rest;
		if (!rest || size > 1ull << (8 * item - 1) || size < rest)
			return 0;
	}
	size = (negative ? 0 - size : size) & delta_mask(item);
	delta_store(list->value, list->count - 1, item, delta_apply(q, x, size));
	return 1;
}

/* Read the changes of the values in a class. Return 0 if the codes are invalid. */
ALWAYS int decode_class(const struct delta_kind *q, const void *base, size_t n, uint32_t class_,
			const struct delta_buffers *b, struct bit_reader *r, struct delta_list *list, uint32_t item)
{
	uint64_t codes = read_gamma(r) - 1, x = 0;
	/* `more`: number of gaps of 0 since the last change; starts at the limit, since the first gap may not be 0 */
	uint32_t k = delta_class_k(class_), more = WIRE_DELTA_MORE, negative = 0, bad = 0, next = 0, total;
	struct delta_list l = *list;
	size_t j = 0;

	if (r->at > 8 * r->nbytes || codes > 8 * r->nbytes - r->at)
		return 0;
	if (!codes)
		return 1;
	members(b, n, class_);
	total = b->before[DELTA_WORDS(n)];
	for (; codes; codes--) {
		uint32_t gap = read_gap(r, k, &negative, &bad);
		size_t i;

		if (__builtin_expect(!gap, 0)) {
			if (!decode_more(q, x, negative, &more, r, &l, item))
				return 0;
			continue;
		}
		if (gap > total - next || l.count == l.room)
			return 0;
		next += gap;
		j = FIND_WORD(b->before, j, next - 1);
		i = 64 * j + select_bit(b->member[j], next - 1 - b->before[j]);
		x = delta_load(base, i, item);
		l.at[l.count] = (uint32_t)i;
		delta_store(l.value, l.count++, item, delta_apply(q, x, negative ? delta_mask(item) : 1));
		more = 0;
	}
	list->count = l.count;
	return !bad && r->at <= 8 * r->nbytes;
}

ALWAYS int delta_decode_as(const struct delta_kind *q, const void *base, size_t n, int scale,
			   const struct delta_buffers *b, const uint8_t *stream, size_t nbytes, struct delta_list *list,
			   uint64_t *sums, uint32_t item)
{
	struct bit_reader r = {stream, nbytes, 0};
	uint32_t top = classes(q, base, n, scale, b->plane, sums, item);

	members(b, n, 0);
	if (!decode_small(q, base, scale, b->sorted, list_changes(b->member, n, b->sorted), &r, list, item))
		return 0;
	for (uint32_t c = 1; c <= top; c++)
		if (!decode_class(q, base, n, c, b, &r, list, item))
			return 0;
	return stream_ends(&r);
}

static int delta_decode(const struct delta_kind *q, const void *base, size_t n, int scale,
			const struct delta_buffers *b, const uint8_t *stream, size_t nbytes, struct delta_list *list,
			uint64_t *sums)
{
#define DELTA_DECODE(kind, item) delta_decode_as(kind, base, n, scale, b, stream, nbytes, list, sums, item)
	return BY_KIND(q, DELTA_DECODE);
}

ALWAYS int delta_patches_as(const struct delta_kind *q, const void *base, size_t n, uint32_t k, int steps,
			    const uint8_t *stream, size_t nbytes, struct delta_list *list, uint32_t item)
{
	struct bit_reader r = {stream, nbytes, 0};
	uint32_t bad = 0;
	size_t i = 0;

	for (; list->count < list->room; i++) {
		uint64_t gap = read_rice(&r, k, WIRE_RICE_GAP_BITS, &bad), x, y;

		if (gap >= n - i)
			return 0;
		i += gap;
		x = delta_load(base, i, item);
		if (steps) {
			uint32_t negative = (uint32_t)read_bits(&r, 1);
			uint64_t step = read_gamma(&r);

			if (!step || step > 1ull << (8 * item - 1))
				return 0;
			y = delta_apply(q, x, (negative ? 0 - step : step) & delta_mask(item));
		} else {
			y = x ^ read_bits(&r, 8 * item);
		}
		if (x == y || r.at > 8 * nbytes)
			return 0;
		list->at[list->count] = (uint32_t)i;
		delta_store(list->value, list->count++, item, y);
	}
	return !bad && stream_ends(&r);
}

static int delta_patches(const struct delta_kind *q, const void *base, size_t n, uint32_t k, int steps,
			 const uint8_t *stream, size_t nbytes, struct delta_list *list)
{
#define DELTA_PATCHES(item) delta_patches_as(q, base, n, k, steps, stream, nbytes, list, item)
	return BY_ITEM(q->item, DELTA_PATCHES);
}
