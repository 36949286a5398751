/*
 * test_hostile.cc - test two ranks, one of which violates the protocol: the other rank must throw, and leave its tensor
 * unchanged.
 */
#include <doctest/doctest.h>

#include <fcntl.h>

#include "hostile.h"
#include "ranks.h"

using namespace codec::gloo;
using namespace tensors;
using hostile::Peer;
using ranks::milliseconds;
using ranks::Rank;
using Message = hostile::Bytes;
using detail::Numbers;

namespace
{

constexpr size_t N_VALUES = 40000, VALUES_NBYTES = N_VALUES * sizeof(float), ROOM = VALUES_NBYTES + 4096;

/* A violation of the protocol, and the error class that the victim throws. */
struct Attack {
	std::string name;
	std::string error; /* error class; "none": the result is correct; "abort": Gloo ends the process */
	std::function<void(Peer &)> act;
	Algorithm algorithm = Algorithm::all_gather;
	codec_spec spec = spec_of(CODEC_LOSSLESS);
	int victim = -1;        /* rank that is attacked; -1: test both ranks */
	int collectives = 1;    /* number of the victim's all-reduces; all but the last succeed */
	std::string words = ""; /* text that the error's message must contain */
};

/*
 * Perform one all-reduce as the victim. If it throws, check that the tensor is unchanged, and return the error's class.
 */
std::string reduced(Group &group, const Attack &attack, int rank)
{
	Tensor x = tensor(rank, CODEC_FLOAT32, N_VALUES);
	Options options;
	std::string error, words;

	options.algorithm = attack.algorithm;
	try {
		group.allreduce(x.data(), N_VALUES, CODEC_FLOAT32, attack.spec, options);
		EXPECT(attack.spec.codec != CODEC_LOSSLESS || x == in_order(2, CODEC_FLOAT32, N_VALUES, Op::mean));
		return "none";
	} catch (const FrameError &e) {
		error = "FrameError", words = e.what();
	} catch (const PeerError &e) {
		error = "PeerError", words = e.what();
	}
	EXPECT(x == tensor(rank, CODEC_FLOAT32, N_VALUES));
	if (words.find(attack.words) == std::string::npos)
		throw std::logic_error("not in the message: " + words);
	return error;
}

std::string be_attacked(Rank &me, const Attack &attack)
{
	auto context = me.connect();

	context->setTimeout(milliseconds(3000));
	if (attack.error == "abort") { /* suppress the reports of doctest and std::terminate() */
		std::signal(SIGABRT, SIG_DFL);
		EXPECT(dup2(open("/dev/null", O_WRONLY), 2) == 2);
	}
	Group group(context);
	for (int i = 1; i < attack.collectives; i++)
		EXPECT(reduced(group, attack, me.rank) == "none");
	return reduced(group, attack, me.rank);
}

/* Perform an attack. Connection errors are ignored here, because the victim reports them. */
std::string attack_by(Rank &me, const Attack &attack)
{
	Peer peer(me.connect());

	try {
		attack.act(peer);
		peer.frame(ROOM); /* wait until the victim closes its connections */
	} catch (const ::gloo::Exception &) {
	}
	return "";
}

void check(const Attack &attack)
{
	for (int victim = 0; victim < 2; victim++) {
		if (attack.victim == 1 - victim)
			continue;
		ranks::Team team(2, [&](Rank &me) {
			return me.rank == victim ? be_attacked(me, attack) : attack_by(me, attack);
		});

		CAPTURE(attack.name);
		CAPTURE(victim);
		if (attack.error == "abort")
			CHECK(team.ended_by(victim, SIGABRT));
		else
			CHECK(team.result(victim) == attack.error);
	}
}

/* Return a frame with the attacker's test values. */
Message frame_of(const Peer &peer, const codec_spec &spec = spec_of(CODEC_LOSSLESS), size_t n = N_VALUES,
		 uint32_t dtype = CODEC_FLOAT32)
{
	return hostile::encoded(spec, dtype, n, peer.context()->rank);
}

/* Return an attack that follows the protocol, except that make() creates the message with the frame. */
std::function<void(Peer &)> sends_frame(std::function<Message(Peer &, uint64_t stamp)> make)
{
	return [=](Peer &peer) {
		const uint64_t stamp = peer.agree();

		peer.send_frame(make(peer, stamp));
		peer.frame(ROOM);
		peer.succeed();
	};
}

/* Return an attack whose message announces `nbytes` more bytes than its frame has, and is truncated to `cut` bytes. */
std::function<void(Peer &)> misannounces(int64_t nbytes, size_t cut = SIZE_MAX)
{
	return sends_frame([=](Peer &peer, uint64_t stamp) {
		const Message frame = frame_of(peer);
		Message message = Peer::message_of(frame, frame.size() + static_cast<uint64_t>(nbytes), stamp);

		message.resize(std::min(cut, message.size()));
		return message;
	});
}

} // namespace

TEST_CASE("A message of a frame that is shorter or longer than announced is a FrameError")
{
	check({"right", "none", misannounces(0)});
	check({"announces 5 bytes more", "FrameError", misannounces(5)});
	check({"announces 5 bytes fewer", "FrameError", misannounces(-5)});
	check({"announces more than room", "FrameError", misannounces(1 << 20)});
	check({"announces 2^62", "FrameError", misannounces(int64_t(1) << 62)});
	check({"announces almost 2^64", "FrameError", misannounces(-(int64_t(1) << 20))});
	for (size_t cut : {0, 4, 8, 500})
		check({"cut after " + std::to_string(cut), "FrameError", misannounces(0, cut)});
	check({"no frame", "PeerError",
	       sends_frame([](Peer &, uint64_t stamp) { return Peer::message_of(Message(), 0, stamp); })});
	check({"no frame, no stamp", "FrameError",
	       sends_frame([](Peer &, uint64_t) { return Message(sizeof(uint64_t)); })});
	check({"a stamp of another collective", "FrameError", sends_frame([](Peer &peer, uint64_t stamp) {
		       const Message frame = frame_of(peer);
		       return Peer::message_of(frame, frame.size(), stamp + 1);
	       })});
}

TEST_CASE("A frame that arrives in part is not completed by the frame of the previous collective")
{
	const auto again = [](Peer &peer) {
		const Message frame = frame_of(peer);
		const Message whole = Peer::message_of(frame, frame.size(), peer.agree());

		peer.send_frame(whole);
		peer.frame(ROOM);
		peer.succeed();
		peer.agree();
		peer.send_frame(Message(whole.begin(), whole.begin() + sizeof(uint64_t)));
		peer.frame(ROOM);
		peer.succeed();
	};

	check({"only the length", "FrameError", again, Algorithm::all_gather, spec_of(CODEC_LOSSLESS), -1, 2});
}

namespace
{

/*
 * Return an attack on a raw all-reduce that follows the protocol, except that change() modifies one message of values.
 */
std::function<void(Peer &)> sends_values(bool of_terms, std::function<Message(Message)> change)
{
	return [=](Peer &peer) {
		const int me = peer.context()->rank, other = 1 - me;
		const auto slices = detail::cut(N_VALUES, 2, sizeof(float), {}, 3 << 18);
		const Tensor x = tensor(me, CODEC_FLOAT32, N_VALUES),
			     y = in_order(2, CODEC_FLOAT32, N_VALUES, Op::mean);
		const auto part = [&](const Tensor &of, int rank) {
			const detail::Piece &piece = slices[rank].at(0);

			return Message(of.bytes.begin() + piece.begin * sizeof(float),
				       of.bytes.begin() + piece.end * sizeof(float));
		};
		const auto digest = [&](const Message &values) {
			return detail::digest_of(values.data(), values.size());
		};
		const Message terms = part(x, other), sums = part(y, me);

		peer.agree();
		peer.numbers(Peer::DIGESTS);
		peer.send_numbers(Peer::message_of({digest(part(x, 0)), digest(part(x, 1))}), Peer::DIGESTS);
		peer.send_frame(of_terms ? change(terms) : terms);
		peer.frame(ROOM);
		peer.send_frame(of_terms ? sums : change(sums), Peer::SUMS);
		peer.frame(ROOM, Peer::SUMS);
		peer.send_numbers(Peer::message_of({digest(sums)}), Peer::DIGESTS);
		peer.numbers(Peer::DIGESTS);
		peer.succeed();
	};
}

std::function<Message(Message)> flipped(size_t at)
{
	return [=](Message values) {
		values[at] ^= 64;
		return values;
	};
}

std::function<Message(Message)> cut_by(size_t nbytes)
{
	return [=](Message values) {
		values.resize(values.size() - std::min(values.size(), nbytes));
		return values;
	};
}

} // namespace

TEST_CASE("Raw values that arrive in part or damaged are a FrameError for any previous contents of memory")
{
	for (bool terms : {true, false}) {
		for (size_t at : {size_t(0), VALUES_NBYTES / 4})
			check({"flipped bit in byte " + std::to_string(at), "FrameError",
			       sends_values(terms, flipped(at)), Algorithm::raw});
		check({"right", "none", sends_values(terms, cut_by(0)), Algorithm::raw});
		for (size_t nbytes : {size_t(4), size_t(8), size_t(1000), VALUES_NBYTES})
			check({"cut by " + std::to_string(nbytes), "FrameError", sends_values(terms, cut_by(nbytes)),
			       Algorithm::raw});
	}
}

namespace
{

/* Return an attack that answers the victim's request with an invalid request, which make() creates. */
std::function<void(Peer &)> answers(std::function<Message(Numbers)> make)
{
	return [=](Peer &peer) {
		Numbers wanted = peer.numbers();

		wanted.resize(4);
		peer.send_numbers(make(wanted));
	};
}

Numbers with(Numbers numbers, size_t i, uint64_t value)
{
	numbers[i] = value;
	return numbers;
}

} // namespace

TEST_CASE("Numbers of another count, in part or out of range are a PeerError")
{
	for (uint64_t count : {uint64_t(0), uint64_t(3), uint64_t(9), uint64_t(1) << 62, ~uint64_t(0)})
		check({"count " + std::to_string(count), "PeerError",
		       answers([=](Numbers wanted) { return Peer::message_of(wanted, count); })});
	for (size_t cut : {0, 8, 48, 56})
		check({"cut after " + std::to_string(cut), "PeerError", answers([=](Numbers wanted) {
			       Message message = Peer::message_of(wanted);

			       message.resize(cut);
			       return message;
		       })});
	check({"another signature", "PeerError",
	       answers([](Numbers wanted) { return Peer::message_of(with(wanted, 0, 7)); })});
	check({"unable", "PeerError",
	       answers([](Numbers wanted) { return Peer::message_of(with(wanted, 1, ~uint64_t(0))); })});
	check({"number of the collective", "PeerError",
	       answers([](Numbers wanted) { return Peer::message_of(with(wanted, 3, ~uint64_t(0))); })});
	check({"a key", "none",
	       [](Peer &peer) { /* without a key, the victim sends data after the requests, in other slots */
				Numbers wanted = peer.numbers();
				const Message frame = frame_of(peer);

				peer.send_numbers(Peer::message_of({wanted[0], 0, 77, 1}));
				peer.key = 1;
				peer.send_frame(Peer::message_of(frame, frame.size(), detail::Channel::stamp_of(1)));
				peer.frame(ROOM);
				peer.succeed();
	       }});
}

namespace
{

/* Return an attack that follows the protocol, except that `message` replaces the report of the outcome. */
std::function<void(Peer &)> reports(Message message)
{
	return [=](Peer &peer) {
		const uint64_t stamp = peer.agree();
		const Message frame = frame_of(peer);

		peer.send_frame(Peer::message_of(frame, frame.size(), stamp));
		peer.frame(ROOM);
		peer.send_numbers(message, Peer::REPORT);
		peer.numbers(Peer::REPORT);
	};
}

Attack outcome(const std::string &name, const Message &message, int victim, const std::string &words)
{
	return {name, "PeerError", reports(message), Algorithm::all_gather, spec_of(CODEC_LOSSLESS), victim, 1, words};
}

} // namespace

TEST_CASE("Outcomes that are unknown, negative or arrive in part are a PeerError")
{
	const auto minus = [](uint64_t n) { return ~n + 1; };

	for (uint64_t status : {uint64_t(4), uint64_t(1) << 40, minus(1), minus(5)}) {
		const std::string name = "outcome " + std::to_string(status);

		check(outcome(name, Peer::message_of({status, 1}), 0, "rank 1 could not do its part"));
		check(outcome(name, Peer::message_of({status, 1}), 1, "unknown"));
	}
	for (uint64_t rank : {uint64_t(2), uint64_t(1) << 32, minus(1)})
		check(outcome("rank " + std::to_string(rank), Peer::message_of({0, rank}), 1, "unknown"));
	check(outcome("the victim's own rank", Peer::message_of({2, 0}), 0, "rank 1 could not do its part"));
	for (size_t cut : {0, 8, 16, 56}) {
		Message message = Peer::message_of({0, 0});

		message.resize(cut);
		check(outcome("cut after " + std::to_string(cut), message, -1, "only a part"));
	}
}

namespace
{

codec_spec changed(codec_spec spec, const std::function<void(codec_spec &)> &change)
{
	change(spec);
	return spec;
}

/* Return an attack that sends a frame whose spec, dtype or size differs from the agreed one. */
Attack of_other_spec(const codec_spec &agreed, const codec_spec &sent, size_t n = N_VALUES,
		     uint32_t dtype = CODEC_FLOAT32)
{
	const auto act = sends_frame([=](Peer &peer, uint64_t stamp) {
		const Message frame = frame_of(peer, sent, n, dtype);

		return Peer::message_of(frame, frame.size(), stamp);
	});

	return {"codec " + std::to_string(sent.codec) + " for " + std::to_string(agreed.codec), "FrameError", act,
		Algorithm::all_gather, agreed};
}

} // namespace

TEST_CASE("A frame of another codec, parameter, dtype or size than agreed is a FrameError")
{
	const codec_spec lossless = spec_of(CODEC_LOSSLESS), quantize = spec_of(CODEC_QUANTIZE);

	check(of_other_spec(lossless, spec_of(CODEC_SIGN)));
	check(of_other_spec(lossless, spec_of(CODEC_FLOAT8)));
	check(of_other_spec(lossless, changed(lossless, [](codec_spec &s) { s.max_code_length = 5; })));
	check(of_other_spec(quantize, spec_of(CODEC_SIGN)));
	check(of_other_spec(quantize, changed(quantize, [](codec_spec &s) { s.bits = 3; })));
	check(of_other_spec(quantize, changed(quantize, [](codec_spec &s) { s.group_size = 128; })));
	check(of_other_spec(lossless, lossless, N_VALUES / 2));
	check(of_other_spec(lossless, lossless, N_VALUES, CODEC_FLOAT16));
}

TEST_CASE("A frame of each codec is accepted for its own spec only")
{
	const std::vector<Case> cases = codecs();
	std::vector<uint8_t> memory;

	for (uint32_t dtype : DTYPES) {
		for (const Case &sent : cases) {
			const Message frame = hostile::encoded(sent.spec, dtype, 3000, 0);
			auto info = detail::blank<codec_info>();

			REQUIRE(codec_inspect(frame.data(), frame.size(), &info) == CODEC_OK);
			for (const Case &agreed : cases) {
				const detail::Parameters parameters(agreed.spec, dtype, false, memory);
				const auto row = [](const Case &c) { /* group_size 0: FLOAT8 has one scale per row */
								     return c.name == "float8" ? "float8, last"
											       : c.name;
				};

				CAPTURE(sent.name);
				CAPTURE(agreed.name);
				if (row(sent) == row(agreed))
					CHECK_NOTHROW(parameters.check(info, false));
				else
					CHECK_THROWS_AS(parameters.check(info, false), FrameError);
			}
		}
	}
}

TEST_CASE("A message longer than its receive ends the process, because of Gloo")
{
	check({"numbers", "abort", [](Peer &peer) {
		       peer.numbers();
		       peer.send_numbers(Message(640));
	       }});
	check({"frame", "abort", sends_frame([](Peer &, uint64_t) { return Message(4 * VALUES_NBYTES); })});
	check({"values", "abort",
	       sends_values(true,
			    [](Message values) {
				    values.resize(4 * VALUES_NBYTES);
				    return values;
			    }),
	       Algorithm::raw});
}
