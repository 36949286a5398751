/*
 * gloo.h - collectives over Gloo that send compressed frames. C++17, headers only; needs codec.h and libgloo.
 *
 *     codec_spec spec = codec::gloo::spec_of(CODEC_FLOAT8);
 *     codec::gloo::Group group(context);                 // a connected gloo::Context
 *     group.allreduce(gradient, n, CODEC_FLOAT32, spec); // the mean of all ranks, in place
 *
 * docs/spec/protocol/cpp.md specifies the messages.
 *
 * Guarantees
 *   - All ranks receive bit-identical results. Values are summed in float32, in an order that does not depend on
 *     timing, and all ranks decode results from the same frames. With Lossless the result is the float32 sum in rank
 *     order. codec.torch computes the same bits.
 *   - An error on one rank is an error on all ranks: every rank throws an Error within the timeout, and tensors and
 *     residuals are unchanged (`out` is unspecified). One exception: if rank 0 is lost while it sends the verdict on
 *     the collective, some ranks have the result, and others throw PeerError after twice the timeout.
 *   - A PeerError because of a lost or silent rank closes the context's connections, as an exception of Gloo does.
 *     Create a new context to continue.
 *   - A Group ignores SIGPIPE for the whole process, unless the program handles it. Otherwise, writing to a lost rank
 *     would end the process.
 *   - FrameError: a frame is damaged, or has another codec or other parameters than the ranks agreed on, or a message
 *     (a frame or uncompressed values) is shorter than announced.
 *
 * Limits, because of Gloo
 *   - A message longer than the receive that was posted for it ends the receiving process: Gloo throws
 *     gloo::EnforceNotMet in its own thread, which calls std::terminate(). A damaged header of Gloo's protocol has the
 *     same effect. Ranks must therefore trust each other and their network. Ranks that run this header and call the
 *     same functions in the same order never send such a message.
 *   - Uncompressed values have no checksum except those of TCP and the network. Damaged values are not detected,
 *     except in the last 8 bytes of a message.
 *
 * The first call with given arguments (operation, size, dtype, spec) waits until all ranks have agreed on them. The
 * Group remembers the agreement: later calls with these arguments send data at once, and compare arguments meanwhile.
 * If they differ between ranks, all ranks throw PeerError, and the connections stay usable.
 *
 * A rank computes in the calling thread; Gloo's thread sends and receives in the background. All ranks call the same
 * functions in the same order. Collectives of different groups over one context may run at the same time in different
 * threads, if the groups have different tags.
 */
#ifndef CODEC_GLOO_H
#define CODEC_GLOO_H

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <codec/codec.h>
#include <gloo/context.h>

#include "gloo/algorithms.h"
#include "gloo/arguments.h"
#include "gloo/channel.h"
#include "gloo/errors.h"
#include "gloo/frames.h"
#include "gloo/keys.h"
#include "gloo/options.h"
#include "gloo/raw.h"
#include "gloo/verdict.h"

namespace codec::gloo
{

/**
 * Collectives over a connected gloo::Context. A group reuses its buffers from one call to the next. Only one thread at
 * a time may use a group.
 */
class Group
{
public:
	/** Use a connected context. Groups of one context that run at the same time need different tags. */
	explicit Group(std::shared_ptr<::gloo::Context> context, uint32_t tag = 0) : channel_(std::move(context), tag)
	{
	}

	/** Reduce n values of float32, bfloat16 or float16 over all ranks, in place. */
	void allreduce(void *values, size_t n, uint32_t dtype, const codec_spec &spec, const Options &options = {})
	{
		uint8_t *out = static_cast<uint8_t *>(options.out);

		run(
			detail::Kind::allreduce,
			[&] {
				detail::Reduction r = detail::reduction(work_, values, n, dtype, spec, options);

				if ((r.residual || r.sums_residual) && chosen(options, r) == Algorithm::ring)
					throw ArgumentError(CODEC_BAD_ARGUMENT,
							    "a ring has no error feedback, because each rank encodes "
							    "sums of other ranks' values: use "
							    "two_shot or all_gather");
				if (chosen(options, r) != Algorithm::raw)
					detail::require_feedback(r, chosen(options, r) != Algorithm::all_gather);
				return r;
			},
			[&](detail::Reduction &r, Algorithm algorithm) {
				r.late = !out && r.is_large() && detail::has_trait(r.spec, CODEC_TRAIT_FIXED_RATE) &&
					 algorithm != Algorithm::raw;
				place(r, r.late ? static_cast<uint8_t *>(values) : out, n);
				return collective(algorithm, r);
			},
			values, out ? 0 : n, options);
	}

	/**
	 * Reduce N * n values over all N ranks, and store this rank's n of them in `out`. `values` has n values for
	 * each rank, in rank order.
	 */
	void reduce_scatter(const void *values, void *out, size_t n, uint32_t dtype, const codec_spec &spec,
			    const Options &options = {})
	{
		run(
			detail::Kind::reduce_scatter,
			[&] {
				const size_t all = detail::of_all(n, channel_.size, out);
				detail::Reduction r = detail::reduction(work_, values, all, dtype, spec, options);

				detail::only_plain(options);
				detail::require_feedback(r, false);
				place(r, nullptr, n);
				return r;
			},
			[&](detail::Reduction &r, Algorithm) {
				return std::make_unique<detail::ReduceScatter>(channel_, r);
			},
			out, n, options);
	}

	/**
	 * Gather the n values of each rank in rank order. With a lossy codec a rank's own part of `out` is decoded
	 * from its frames, too, so that `out` is equal on all ranks.
	 */
	void allgather(const void *values, void *out, size_t n, uint32_t dtype, const codec_spec &spec,
		       const Options &options = {})
	{
		run(
			detail::Kind::allgather,
			[&] {
				const size_t all = detail::of_all(n, channel_.size, out);
				Options plain = options;
				plain.op = Op::sum; /* any operation: an all-gather reduces nothing */
				detail::Reduction r = detail::reduction(work_, values, n, dtype, spec, plain);

				detail::only_plain(options);
				place(r, nullptr, all);
				return r;
			},
			[&](detail::Reduction &r, Algorithm) { return std::make_unique<detail::Gather>(channel_, r); },
			out, n * channel_.size, options);
	}

	/**
	 * Return the number of bytes of frames and uncompressed values that this rank has sent, without the overhead
	 * of Gloo and TCP.
	 */
	uint64_t sent_nbytes() const
	{
		return channel_.sent_nbytes;
	}

	/** Return true if the connections were closed because a rank was lost. Every call throws PeerError then. */
	bool closed() const
	{
		return channel_.closed();
	}

private:
	/* Bytes of a tensor times number of ranks up to which all_gather is faster than two_shot, which has two phases
	 */
	static constexpr size_t SMALL = 2 << 16;
	static constexpr std::chrono::milliseconds MOST_TIMEOUT = std::chrono::hours(24 * 3652); /* about 10 years */
	static constexpr std::chrono::milliseconds GLOO_TIMEOUT = std::chrono::seconds(30); /* the default of Gloo */
	/* Set the destination of the result: `out`, or a buffer of the group if `out` is null. */
	void place(detail::Reduction &r, uint8_t *out, size_t n)
	{
		r.result = out ? out : detail::Workspace::room(work_.result, n * r.itemsize);
	}

	Algorithm chosen(const Options &options, const detail::Reduction &r) const
	{
		bool automatic = options.algorithm == Algorithm::automatic;

		if (channel_.size == 1 ||
		    (automatic && (channel_.size == 2 || r.n * r.itemsize <= SMALL / channel_.size)))
			return Algorithm::all_gather;
		return automatic ? Algorithm::two_shot : options.algorithm;
	}

	std::unique_ptr<detail::Collective> collective(Algorithm algorithm, detail::Reduction &r)
	{
		switch (algorithm) {
		case Algorithm::all_gather: return std::make_unique<detail::AllGather>(channel_, r);
		case Algorithm::ring: return std::make_unique<detail::Ring>(channel_, r);
		case Algorithm::raw: return std::make_unique<detail::Raw>(channel_, r);
		default: return std::make_unique<detail::TwoShot>(channel_, r);
		}
	}

	/*
	 * Set the timeout of a call; return false if it is invalid. After an invalid timeout, ranks use Gloo's default
	 * timeout to agree that the call fails.
	 */
	bool set_timeout(const Options &options)
	{
		const auto asked = options.timeout.count() ? options.timeout : channel_.context()->getTimeout();
		const bool valid = asked.count() > 0 && asked <= MOST_TIMEOUT;

		channel_.timeout = valid ? asked : GLOO_TIMEOUT;
		return valid;
	}

	/*
	 * Perform a collective: prepare the arguments, agree on them with all ranks, reduce, exchange outcomes, and
	 * write the caller's n values. If ranks have agreed on the same signature (hash of the arguments) before, data
	 * is sent without waiting for the agreement.
	 */
	template <class Prepare, class Make>
	void run(detail::Kind kind, Prepare &&prepare, Make &&make, void *values, size_t n, const Options &options)
	{
		std::optional<detail::Reduction> r;
		std::optional<detail::Backup> backup;
		std::exception_ptr error;
		Algorithm algorithm{};
		detail::Request mine;

		const bool in_time = set_timeout(options);
		try {
			if (!in_time)
				throw ArgumentError(
					CODEC_BAD_ARGUMENT,
					"the timeout must be from 1 ms to 10 years, in Options or in the context");
			r.emplace(prepare());
			algorithm = chosen(options, *r);
			mine.signature = detail::signature_of(*r, kind, algorithm);
			backup.emplace(work_.residuals, options, *r, channel_);
			mine.key = keys_.of(mine.signature);
			mine.able = true;
		} catch (const std::exception &) { /* an Error, or std::bad_alloc */
			error = std::current_exception();
			mine = {};
		}
		std::unique_ptr<detail::Collective> of;

		counted_on([&] {
			channel_.request(mine);
			if (mine.able) {
				of = make(*r, algorithm);
				of->prepare();
			}
			if (mine.key)
				of->run();
			if (!channel_.agree())
				keys_.clear();
		});
		if (error)
			std::rethrow_exception(error);
		check_agreed(mine.signature);
		counted_on([&] {
			if (mine.key && channel_.agree())
				return;
			if (mine.key) { /* another rank has no key for this signature: restart the collective */
				backup->restore();
				of = make(*r, algorithm);
				of->prepare();
			}
			keys_.add(mine.signature, channel_.open());
			of->run();
		});
		error = of->error();
		conclude(error);
		backup->commit();
		counted_on([&] { of->deliver(); });
		if (n && r->result != values)
			std::memcpy(values, r->result, n * r->itemsize);
	}

	/*
	 * Call work(), which sends messages that other ranks wait for. If it throws, close the connections, so that no
	 * rank waits for this one.
	 */
	template <class F> void counted_on(F &&work)
	{
		try {
			work();
		} catch (...) {
			channel_.close();
			throw;
		}
	}

	/* Throw PeerError unless all ranks have valid arguments, with the same signature. */
	void check_agreed(uint64_t signature) const
	{
		for (int rank = 0; rank < channel_.size; rank++) {
			const detail::Request request = channel_.request_of(rank);

			if (!request.able)
				throw PeerError(detail::Channel::name(rank) + " could not begin: nothing was changed");
			if (request.signature != signature)
				throw PeerError(detail::Channel::name(rank) +
						" has begun another collective, or passed other arguments, than " +
						detail::Channel::name(channel_.rank) + ": nothing was changed");
		}
	}

	/* Exchange outcomes with all ranks. Returns only if all ranks have succeeded. */
	void conclude(std::exception_ptr error)
	{
		using detail::Outcome;
		const Outcome mine = outcome_of(error);
		const detail::Verdict verdict = channel_.verdict(mine);
		const std::string who = detail::Channel::name(verdict.rank);

		if (error && mine != Outcome::lost_peer)
			std::rethrow_exception(error);
		if (verdict.outcome == Outcome::not_finite)
			throw PeerError(who + " has NaN or Inf: nothing was changed", CODEC_NONFINITE);
		if (verdict.outcome == Outcome::refused)
			throw PeerError(who + " could not do its part: nothing was changed");
		if (error)
			std::rethrow_exception(error);
		if (verdict.outcome != Outcome::success)
			throw PeerError("a rank has lost another rank: nothing was changed");
	}

	/* Return the outcome to report to the other ranks for `error`; success if it is null. */
	static detail::Outcome outcome_of(std::exception_ptr error)
	{
		try {
			if (error)
				std::rethrow_exception(error);
		} catch (const PeerError &) {
			return detail::Outcome::lost_peer;
		} catch (const Error &e) {
			return e.status() == CODEC_NONFINITE ? detail::Outcome::not_finite : detail::Outcome::refused;
		}
		return detail::Outcome::success;
	}

	detail::Channel channel_;
	detail::Workspace work_;
	detail::Keys keys_; /* of the signatures on which all ranks have agreed */
};

/**
 * Perform one all-reduce. For several, a Group is faster: it reuses buffers, and sends data before ranks have
 * compared arguments.
 */
inline void allreduce(const std::shared_ptr<::gloo::Context> &context, void *values, size_t n, uint32_t dtype,
		      const codec_spec &spec, const Options &options = {}, uint32_t tag = 0)
{
	Group(context, tag).allreduce(values, n, dtype, spec, options);
}

/** Perform one reduce-scatter. */
inline void reduce_scatter(const std::shared_ptr<::gloo::Context> &context, const void *values, void *out, size_t n,
			   uint32_t dtype, const codec_spec &spec, const Options &options = {}, uint32_t tag = 0)
{
	Group(context, tag).reduce_scatter(values, out, n, dtype, spec, options);
}

/** Perform one all-gather. */
inline void allgather(const std::shared_ptr<::gloo::Context> &context, const void *values, void *out, size_t n,
		      uint32_t dtype, const codec_spec &spec, const Options &options = {}, uint32_t tag = 0)
{
	Group(context, tag).allgather(values, out, n, dtype, spec, options);
}

} // namespace codec::gloo

#endif
