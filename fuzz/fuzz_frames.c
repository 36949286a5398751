/*
 * fuzz_frames.c - libFuzzer: decode generated frames (grammar.h) in all ways. Frames without a planted fault must
 * decode.
 */
#include "check.h"
#include "grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct grammar g, other;
	struct source s = source_open(data, size);
	struct given given, more;
	codec_status status;
	uint8_t bytes[4];

	grammar_make(&g, data, size, 100000, NULL);
	given = (struct given){g.frame, g.nbytes, g.has_book ? &g.book : NULL, g.has_metric ? g.metric : NULL};
	for (size_t i = 0; i < 4; i++)
		bytes[i] = (uint8_t)noise(&s);
	grammar_make(&other, bytes, sizeof bytes, 100000, &g);
	more = (struct given){other.frame, other.nbytes, other.has_book ? &other.book : NULL,
			      other.has_metric ? other.metric : NULL};
	s.p = s.end;
	status = check_frame(&given, &more, 1, &s);
	if (!g.planted)
		CHECK(status == CODEC_OK, status, g.codec);
	grammar_free(&g);
	grammar_free(&other);
	return 0;
}
