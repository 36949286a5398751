/* delta_encode.h - write DELTA's bit streams; part of delta_loops.h. */

ALWAYS void put_gamma(struct bit_writer *w, uint64_t x)
{
	uint32_t n = 63 - (uint32_t)__builtin_clzll(x | 1); /* x can be 0 only if another thread changes values */

	put_bits(w, 0, n);
	put_bits(w, 1, 1);
	put_bits(w, x & ((1ull << n) - 1), n);
}

/*
 * Count the sampled values of the base by exponent. Each exponent has four counters, which successive values use in
 * turn: few exponents are frequent, and consecutive increments of one counter would wait for each other.
 */
ALWAYS void count_samples(const struct delta_kind *q, const void *base, size_t n, struct delta_bin *bin, uint32_t item)
{
	uint32_t count[4][256] = {{0}};
	size_t i = 0;

#define EXPONENT_AT(i) delta_exponent(q, delta_load(base, i, item))
	if (q->last < 256) {
		for (; i + 3 * DELTA_SAMPLE < n; i += 4 * DELTA_SAMPLE) {
			count[0][EXPONENT_AT(i)]++;
			count[1][EXPONENT_AT(i + DELTA_SAMPLE)]++;
			count[2][EXPONENT_AT(i + 2 * DELTA_SAMPLE)]++;
			count[3][EXPONENT_AT(i + 3 * DELTA_SAMPLE)]++;
		}
		for (uint32_t e = 1; e <= q->last; e++)
			bin[e].values = count[0][e] + count[1][e] + count[2][e] + count[3][e];
	}
	for (; i < n; i += DELTA_SAMPLE)
		bin[EXPONENT_AT(i)].values++;
#undef EXPONENT_AT
}

/* Fill in the bins, one per exponent, from samples of the base and from all changes. Return the number of bins. */
ALWAYS uint32_t fill_bins(const struct delta_kind *q, const void *base, const void *values, size_t n,
			  const uint32_t *at, size_t count, struct delta_bin *bin, uint32_t item)
{
	uint32_t used = 0;

	memset(bin, 0, (q->last + 1) * sizeof *bin);
	count_samples(q, base, n, bin, item);
	for (size_t c = 0; c < count; c++) {
		uint64_t x = delta_load(base, at[c], item), y = delta_load(values, at[c], item);
		uint64_t size = delta_magnitude(delta_step(q, x, y), item);
		struct delta_bin *b = bin + delta_exponent(q, x);

		b->codes += size < WIRE_DELTA_MORE + 1 ? size : WIRE_DELTA_MORE + 1;
		b->total += size < DELTA_TOTAL ? size : DELTA_TOTAL;
	}
	for (uint32_t e = 1; e <= q->last; e++)
		if (bin[e].values || bin[e].codes) {
			bin[used] = bin[e];
			bin[used++].exponent = e;
		}
	return used;
}

/*
 * Sort changes by class, and within a class by position. end[r] is the end of class r in `sorted`. Classes are computed
 * twice; if another thread changes the base meanwhile, no more entries are written than were counted.
 */
ALWAYS void sort_changes(const struct delta_kind *q, const void *base, int scale, const uint32_t *at, size_t count,
			 uint32_t *sorted, uint32_t *end, uint32_t item)
{
	uint32_t next[WIRE_DELTA_CLASSES + 2] = {0};

	for (size_t c = 0; c < count; c++)
		next[1 + delta_class(delta_exponent(q, delta_load(base, at[c], item)), scale)]++;
	for (int r = 1; r <= WIRE_DELTA_CLASSES + 1; r++)
		next[r] += next[r - 1];
	for (int r = 0; r <= WIRE_DELTA_CLASSES; r++)
		end[r] = next[r + 1];
	memset(sorted, 0, count * sizeof *sorted);
	for (size_t c = 0; c < count; c++) {
		uint32_t r = delta_class(delta_exponent(q, delta_load(base, at[c], item)), scale);

		if (next[r] < end[r])
			sorted[next[r]++] = at[c];
	}
}

ALWAYS void encode_small(const struct delta_kind *q, const void *base, const void *values, int scale,
			 const uint32_t *small, size_t n, struct bit_writer *w, uint32_t item)
{
	for (size_t s = 0; s < n && !w->full; s++) {
		uint64_t x = delta_load(base, small[s], item);
		uint64_t z = delta_zigzag(delta_step(q, x, delta_load(values, small[s], item)), item);

		put_rice(w, z, delta_small_k(delta_exponent(q, x), scale, item), 8 * item);
	}
}

/*
 * Return the number of codes that encode a change of `size` steps: 1, plus 1 per further step, at most WIRE_DELTA_MORE.
 */
ALWAYS uint64_t codes_of(uint64_t size)
{
	return size <= WIRE_DELTA_MORE ? size : WIRE_DELTA_MORE + 1;
}

ALWAYS void encode_class(const struct delta_kind *q, const void *base, const void *values, uint32_t class_,
			 const struct delta_buffers *b, const uint32_t *at, const uint32_t *end, struct bit_writer *w,
			 uint32_t item)
{
	uint32_t k = delta_class_k(class_), next = 0;
	uint64_t codes = 0;

	for (const uint32_t *c = at; c < end; c++)
		codes += codes_of(
			delta_magnitude(delta_step(q, delta_load(base, *c, item), delta_load(values, *c, item)), item));
	put_gamma(w, codes + 1);
	for (; at < end && !w->full; at++) {
		uint64_t step = delta_step(q, delta_load(base, *at, item), delta_load(values, *at, item));
		uint64_t size = delta_magnitude(step, item), below = (1ull << (*at & 63)) - 1;
		uint32_t number = b->before[*at / 64] + (uint32_t)__builtin_popcountll(b->member[*at / 64] & below);

		put_rice(w, number - next + 1, k, WIRE_RICE_GAP_BITS);
		put_bits(w, delta_negative(step, item), 1);
		for (uint64_t i = 1; i < codes_of(size); i++)
			put_bits(w, 1, k + 1);
		if (size > WIRE_DELTA_MORE)
			put_gamma(w, size - WIRE_DELTA_MORE);
		next = number + 1;
	}
}

ALWAYS size_t delta_encode_as(const struct delta_kind *q, const void *base, const void *values, size_t n,
			      const struct delta_buffers *b, size_t count, int *scale, uint8_t *dst, size_t room,
			      uint32_t item)
{
	struct bit_writer w = {0, 0, 0, dst, dst + room};
	uint32_t end[WIRE_DELTA_CLASSES + 1], top;

	*scale = delta_scale(q, b->bin, fill_bins(q, base, values, n, b->at, count, b->bin, item));
	top = classes(q, base, n, *scale, b->plane, NULL, item);
	members(b, n, 0);
	encode_small(q, base, values, *scale, b->sorted, list_changes(b->member, n, b->sorted), &w, item);
	sort_changes(q, base, *scale, b->at, count, b->sorted, end, item);
	for (uint32_t c = 1; c <= top && !w.full; c++) {
		if (end[c] > end[c - 1])
			members(b, n, c);
		encode_class(q, base, values, c, b, b->sorted + end[c - 1], b->sorted + end[c], &w, item);
	}
	return close_bits(&w, dst);
}

static size_t delta_encode(const struct delta_kind *q, const void *base, const void *values, size_t n,
			   const struct delta_buffers *b, size_t count, int *scale, uint8_t *dst, size_t room)
{
#define DELTA_ENCODE(kind, item) delta_encode_as(kind, base, values, n, b, count, scale, dst, room, item)
	return BY_KIND(q, DELTA_ENCODE);
}

ALWAYS size_t delta_encode_patches_as(const struct delta_kind *q, const void *base, const void *values,
				      const uint32_t *at, size_t count, uint32_t k, int steps, uint8_t *dst,
				      size_t room, uint32_t item)
{
	struct bit_writer w = {0, 0, 0, dst, dst + room};
	uint32_t from = 0;

	for (size_t c = 0; c < count && !w.full; c++) {
		uint64_t x = delta_load(base, at[c], item), y = delta_load(values, at[c], item);

		put_rice(&w, at[c] - from, k, WIRE_RICE_GAP_BITS);
		from = at[c] + 1;
		if (steps) {
			uint64_t step = delta_step(q, x, y);

			put_bits(&w, delta_negative(step, item), 1);
			put_gamma(&w, delta_magnitude(step, item));
		} else {
			put_bits(&w, x ^ y, 8 * item);
		}
	}
	return close_bits(&w, dst);
}

static size_t delta_encode_patches(const struct delta_kind *q, const void *base, const void *values, const uint32_t *at,
				   size_t count, uint32_t k, int steps, uint8_t *dst, size_t room)
{
#define DELTA_ENCODE_PATCHES(item) delta_encode_patches_as(q, base, values, at, count, k, steps, dst, room, item)
	return BY_ITEM(q->item, DELTA_ENCODE_PATCHES);
}
