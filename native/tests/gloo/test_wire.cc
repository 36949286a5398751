/*
 * test_wire.cc - test that bytes damaged in transit cause an error on all ranks and change no tensor, and that the next
 * collective succeeds.
 */
#include <doctest/doctest.h>

#include <sstream>

#include "ranks.h"
#include "tensors.h"
#include "wire.h"

using namespace codec::gloo;
using namespace tensors;
using ranks::Rank;

namespace
{

constexpr int SIZE = 3, SENDER = 1;
constexpr size_t SMALL = 30000, LARGE = 2200000; /* numbers of values; frames of LARGE are decoded after the verdict */

struct Way {
	const char *name;
	Algorithm algorithm;
	uint32_t codec;
	size_t n = SMALL;
};

constexpr Way WAYS[] = {{"two-shot", Algorithm::two_shot, CODEC_LOSSLESS},
			{"two-shot", Algorithm::two_shot, CODEC_QUANTIZE},
			{"all-gather", Algorithm::all_gather, CODEC_SIGN},
			{"all-gather", Algorithm::all_gather, CODEC_LOSSLESS},
			{"ring", Algorithm::ring, CODEC_TERNARY},
			{"large two-shot", Algorithm::two_shot, CODEC_QUANTIZE, LARGE},
			{"large all-gather", Algorithm::all_gather, CODEC_SIGN, LARGE},
			{"large ring", Algorithm::ring, CODEC_TERNARY, LARGE}};

/* Bits to flip in a message. */
struct Flip {
	uint64_t number; /* index of the message among messages with frames */
	uint64_t offset; /* offset of the byte in the message */
	uint8_t bits;    /* mask of the bits to flip */
};

/* Perform one all-reduce in which one rank sends a damaged byte. Return this rank's error. */
std::string damaged(Group &group, const Rank &me, const Way &way, const Flip &flip)
{
	const bool feedback = way.codec != CODEC_LOSSLESS && way.algorithm != Algorithm::ring;
	Tensor x = tensor(me.rank, CODEC_FLOAT32, way.n);
	std::vector<float> residual(feedback ? way.n : 0, 0.125f), before = residual;
	std::string raised = "nothing";
	Options options;

	options.algorithm = way.algorithm;
	options.residual = feedback ? residual.data() : nullptr;
	if (me.rank == SENDER)
		wire::flip(flip.number, flip.offset, flip.bits);
	try {
		group.allreduce(x.data(), way.n, CODEC_FLOAT32, spec_of(way.codec), options);
	} catch (const FrameError &e) {
		raised = e.status() == CODEC_LIMIT ? "too long" : "FrameError";
	} catch (const PeerError &) {
		raised = "PeerError";
	}
	EXPECT(wire::flipped() || me.rank != SENDER);
	if (raised != "nothing") {
		EXPECT(x == tensor(me.rank, CODEC_FLOAT32, way.n));
		EXPECT(residual == before);
	}
	EXPECT(!group.closed());
	Tensor y = tensor(me.rank, CODEC_FLOAT32, 100);
	group.allreduce(y.data(), 100, CODEC_FLOAT32, spec_of(CODEC_LOSSLESS));
	EXPECT(y == in_order(SIZE, CODEC_FLOAT32, 100, Op::mean));
	return raised;
}

/* Return the errors of each rank, a line for each flip. */
std::vector<std::istringstream> errors_of(const Way &way, const std::vector<Flip> &flips)
{
	std::vector<std::istringstream> said;
	const auto results = ranks::run(SIZE, [&](Rank &me) {
		Group group(me.connect());
		std::string found;

		for (const Flip &flip : flips)
			found += damaged(group, me, way, flip) + "\n";
		return found;
	});

	for (const std::string &each : results)
		said.emplace_back(each);
	return said;
}

} // namespace

TEST_CASE("A flipped byte of a frame is a FrameError on its receiver and a PeerError elsewhere")
{
	for (const Way &way : WAYS) {
		std::vector<Flip> flips;
		Random random(3);

		/* fields of the header, and random bytes of the first messages */
		for (uint64_t offset : {8, 12, 16, 40, 80})
			flips.push_back({random.below(2), offset, 1});
		for (int i = 0; i < (way.n == SMALL ? 20 : 3); i++)
			flips.push_back({random.below(2), 100 + random.below(900), /* zeros follow a frame */
					 static_cast<uint8_t>(1 << random.below(8))});
		std::vector<std::istringstream> said = errors_of(way, flips);
		CAPTURE(way.name);
		for (size_t i = 0; i < flips.size(); i++) {
			std::string all;
			int frame_errors = 0;

			CAPTURE(flips[i].number);
			CAPTURE(flips[i].offset);
			for (int rank = 0; rank < SIZE; rank++) {
				std::string raised;

				std::getline(said[rank], raised);
				CHECK(raised != "nothing");
				frame_errors += raised == "FrameError";
			}
			/* a damaged frame may be sent to several ranks */
			CHECK(frame_errors >= 1);
			CHECK(frame_errors < SIZE);
		}
	}
}

TEST_CASE("An impossible length is a FrameError or PeerError, and nothing is read beyond the message")
{
	for (const Way &way : WAYS) {
		/* flips that change a length by 1, 16 MiB, 255 TiB and 2^63 bytes */
		const std::vector<Flip> flips = {{0, 0, 1}, {0, 3, 1}, {1, 5, 255}, {0, 7, 128}};
		std::vector<std::istringstream> said = errors_of(way, flips);
		for (const Flip &flip : flips) {
			int too_long = 0;

			for (auto &each : said) {
				std::string raised;

				std::getline(each, raised);
				CHECK(raised != "nothing");
				too_long += raised == "too long";
			}
			CHECK((too_long > 0 || !flip.offset));
		}
	}
}
