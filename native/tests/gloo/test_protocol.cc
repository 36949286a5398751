/* test_protocol.cc - test that the messages of codec/gloo.h are those that docs/spec/protocol/cpp.md specifies. */
#include <doctest/doctest.h>

#include "hostile.h"
#include "ranks.h"

using namespace codec::gloo;
using namespace tensors;
using detail::Numbers;
using hostile::Bytes;
using hostile::Peer;
using ranks::Rank;

namespace
{

/* Return the FNV-1a hash of words of 8 bytes. */
uint64_t fnv(const Numbers &words)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (uint64_t word : words)
		for (int i = 0; i < 8; i++)
			hash = (hash ^ (word >> 8 * i & 0xff)) * 0x100000001b3;
	return hash;
}

/* Return the stamp of collective number `round`. */
uint64_t stamp(uint64_t round)
{
	uint64_t z = round * 0x9E3779B97F4A7C15;

	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
	z = (z ^ z >> 27) * 0x94D049BB133111EB;
	return z ^ z >> 31;
}

/* Return the signature of an all-reduce of float32 values: mean, no metric, no codebook. */
uint64_t signature(const codec_spec &spec, uint64_t n, Algorithm algorithm, const Numbers &segments)
{
	const auto used = static_cast<uint64_t>(algorithm == Algorithm::automatic ? Algorithm::all_gather : algorithm);
	Numbers words = {7,
			 0,
			 1,
			 spec.codec,
			 spec.max_code_length,
			 spec.model,
			 spec.variant,
			 spec.options,
			 spec.bits,
			 spec.group_size,
			 spec.kept,
			 spec.seed,
			 detail::bits_of(spec.scale),
			 detail::bits_of(spec.clip),
			 static_cast<uint32_t>(spec.guard),
			 CODEC_FLOAT32,
			 n,
			 0,
			 0,
			 used,
			 0,
			 0};

	words.insert(words.end(), segments.begin(), segments.end());
	return fnv(words);
}

/* Return the words of a request, except the final count. */
Numbers request(uint64_t signature, uint64_t key, uint64_t round)
{
	return {signature, 0, key, round, 0, 0, 0};
}

const Numbers SUCCESS = {0, 0, 0, 0, 0, 0, 0};

Bytes bytes_of(const std::vector<float> &values, size_t begin, size_t end)
{
	const auto *p = reinterpret_cast<const uint8_t *>(values.data());

	return {p + begin * sizeof(float), p + end * sizeof(float)};
}

/*
 * Check the messages of rank 0 in a raw all-reduce of 2,048 values: two slices of one chunk each. If the signature has
 * a key, rank 0 must send its values before it receives this rank's request.
 */
void check_raw(Peer &peer, uint64_t key, uint64_t round)
{
	constexpr size_t N = 2048, HALF = N / 2;
	const std::vector<float> theirs = tensor(0, CODEC_FLOAT32, N).floats();
	const std::vector<float> ours = tensor(1, CODEC_FLOAT32, N).floats();
	const std::vector<float> sums = in_order(2, CODEC_FLOAT32, N, Op::mean).floats();
	const auto digest = [](const std::vector<float> &x, size_t begin) {
		return detail::digest_of(&x[begin], HALF * sizeof(float));
	};

	const Numbers wanted = request(signature(spec_of(CODEC_LOSSLESS), N, Algorithm::raw, {}), key, round);
	const auto answer = [&] { peer.send_numbers(Peer::message_of({wanted[0], wanted[1], wanted[2], wanted[3]})); };

	EXPECT(peer.numbers() == wanted);
	if (!key)
		answer();
	peer.key = key ? key : round;
	EXPECT(peer.numbers(Peer::DIGESTS) == (Numbers{digest(theirs, 0), digest(theirs, HALF), 0, 0, 0, 0, 0}));
	EXPECT(peer.frame(HALF * sizeof(float)) == bytes_of(theirs, HALF, N));
	if (key)
		answer();
	peer.send_numbers(Peer::message_of({digest(ours, 0), digest(ours, HALF)}), Peer::DIGESTS);
	peer.send_frame(bytes_of(ours, 0, HALF));
	EXPECT(peer.frame(HALF * sizeof(float), Peer::SUMS) == bytes_of(sums, 0, HALF));
	peer.send_frame(bytes_of(sums, HALF, N), Peer::SUMS);
	EXPECT(peer.numbers(Peer::DIGESTS) == (Numbers{digest(sums, 0), 0, 0, 0, 0, 0, 0}));
	peer.send_numbers(Peer::message_of({digest(sums, HALF)}), Peer::DIGESTS);
	peer.send_numbers(Peer::message_of({0, 1}), Peer::REPORT);
	EXPECT(peer.numbers(Peer::REPORT) == SUCCESS);
}

constexpr size_t FRAMED = 3000; /* number of values of the all-gather */

codec_spec framed_spec()
{
	codec_spec spec = spec_of(CODEC_TERNARY);

	spec.seed = 5;
	spec.clip = 2.5f;
	return spec;
}

/*
 * Check the messages of rank 0 in an all-gather. Rank 1 sends no frame, and proposes 40 as the number of the
 * collective.
 */
void check_frames(Peer &peer)
{
	const uint64_t signed_by = signature(framed_spec(), FRAMED, Algorithm::all_gather, {7, 10, 30, 2});
	uint64_t length, end;

	EXPECT(peer.numbers() == request(signed_by, 0, 1));
	peer.send_numbers(Peer::message_of({signed_by, 0, 0, 40}));
	peer.key = 40;
	peer.send_frame(Peer::message_of({}, 0, stamp(40)));
	const Bytes message = peer.frame(FRAMED * sizeof(float));
	std::memcpy(&length, message.data(), sizeof length);
	EXPECT(length > 48 && length < FRAMED);
	std::memcpy(&end, &message[8 + length], sizeof end);
	EXPECT(end == stamp(40));
	peer.send_numbers(Peer::message_of({2, 1}), Peer::REPORT);
	EXPECT(peer.numbers(Peer::REPORT) == (Numbers{2, 1, 0, 0, 0, 0, 0}));
}

/* Check the messages of rank 0 in a steady all-gather, which it must send before it receives this rank's request. */
void check_automatic(Peer &peer)
{
	const uint64_t signed_by = signature(spec_of(CODEC_LOSSLESS), FRAMED, Algorithm::automatic, {});
	const Bytes frame = hostile::encoded(spec_of(CODEC_LOSSLESS), CODEC_FLOAT32, FRAMED, 0);
	const Bytes mine = hostile::encoded(spec_of(CODEC_LOSSLESS), CODEC_FLOAT32, FRAMED, 1);

	for (uint64_t round = 43; round < 45; round++) {
		const uint64_t key = round == 43 ? 0 : 43;
		const auto answer = [&] { peer.send_numbers(Peer::message_of({signed_by, 0, key, round})); };

		EXPECT(peer.numbers() == request(signed_by, key, round));
		if (!key)
			answer();
		peer.key = 43;
		const Bytes message = peer.frame(2 * FRAMED * sizeof(float));
		const Bytes wanted = Peer::message_of(frame, frame.size(), stamp(round));
		EXPECT(std::equal(wanted.begin(), wanted.end(), message.begin()));
		if (key)
			answer();
		peer.send_frame(Peer::message_of(mine, mine.size(), stamp(round)));
		peer.send_numbers(Peer::message_of({0, 1}), Peer::REPORT);
		EXPECT(peer.numbers(Peer::REPORT) == SUCCESS);
	}
}

/* Perform all collectives as rank 0. */
void reduce(Group &group)
{
	std::vector<float> x = tensor(0, CODEC_FLOAT32, FRAMED).floats();
	codec_segment segment{};
	Options options;

	segment.offset = 7;
	segment.rank = 2;
	segment.shape[0] = 10;
	segment.shape[1] = 30;
	options.algorithm = Algorithm::all_gather;
	options.segments = {segment};
	ranks::thrown<PeerError>([&] { group.allreduce(x.data(), FRAMED, CODEC_FLOAT32, framed_spec(), options); },
				 "rank 1 could not do its part");
	options.algorithm = Algorithm::raw;
	options.segments.clear();
	for (int i = 0; i < 2; i++) {
		x = tensor(0, CODEC_FLOAT32, 2048).floats();
		group.allreduce(x.data(), x.size(), CODEC_FLOAT32, spec_of(CODEC_LOSSLESS), options);
	}
	for (int i = 0; i < 2; i++) {
		x = tensor(0, CODEC_FLOAT32, FRAMED).floats();
		group.allreduce(x.data(), x.size(), CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
	}
}

} // namespace

TEST_CASE("Requests, frames, raw values and verdicts are those of docs/spec/protocol/cpp.md")
{
	ranks::run(2, [](Rank &me) {
		if (me.rank) {
			Peer peer(me.connect());

			check_frames(peer);
			check_raw(peer, 0, 41);
			check_raw(peer, 41, 42);
			check_automatic(peer);
		} else {
			Group group(me.connect());

			reduce(group);
		}
		return std::string();
	});
}
