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
 *   - With Algorithm::blocks, gloo::allreduce sends the messages and does not check their lengths. Each element is a
 *     frame with a checksum, so that an element that arrives in part is an error, unless the receive buffer already
 *     contained the missing bytes.
 *
 * The first call with given arguments (operation, size, dtype, spec) waits until all ranks have agreed on them. The
 * Group remembers the agreement: later calls with these arguments send data at once, and compare arguments meanwhile.
 * If they differ between ranks, all ranks throw PeerError, and the connections stay usable.
 *
 * A rank computes in the calling thread; Gloo's thread sends and receives in the background. All ranks call the same
 * functions in the same order. Collectives of different groups over one context may run at the same time in different
 * threads, if the groups have different tags.
 *
 * One file: programs include only this header, most of which documents the collectives.
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
#include "gloo/blocks.h"
#include "gloo/channel.h"
#include "gloo/choosing.h"
#include "gloo/errors.h"
#include "gloo/frames.h"
#include "gloo/parameters.h"
#include "gloo/raw.h"
#include "gloo/slices.h"

namespace codec::gloo
{

/**
 * Return a spec of codec `codec` with the defaults of codec.h. The defaults of the Python package differ in two
 * codecs: Quantize has CODEC_OPTION_STOCHASTIC, and Truncate has CODEC_LEVEL_CODING_CODED and a guard of -8.
 */
inline codec_spec spec_of(uint32_t codec)
{
	auto spec = detail::blank<codec_spec>();

	spec.codec = codec;
	return spec;
}

/** Algorithm of an all-reduce. N is the number of ranks. */
enum class Algorithm {
	/**
	 * all_gather for two ranks or small tensors, else two_shot. If ranks spend much of their time encoding, the
	 * first calls with a size and spec also time raw, and later calls use raw if it was faster. The results of
	 * lossy codecs then depend on timing: pass another algorithm if runs must be reproducible.
	 */
	automatic,
	two_shot,   /**< each rank reduces one slice, and sends the bytes of 2 (N - 1) / N frames of the tensor */
	all_gather, /**< each rank reduces the whole tensor, and sends N - 1 frames, in one phase */
	ring,       /**< as many bytes as two_shot, to one neighbour; sums are encoded N - 1 times */
	raw,        /**< two_shot with uncompressed values */
	blocks,     /**< gloo::allreduce over frames of a fixed size, see Blocks */
};

/** Optional arguments of a collective. All pointers must stay valid until the call returns. */
struct Options {
	Op op = Op::mean;                           /**< operation of a reduction */
	Algorithm algorithm = Algorithm::automatic; /**< algorithm of an all-reduce */
	std::vector<codec_segment> segments;        /**< positions and shapes of the parameters in a flat bucket */
	/** for CODEC_TRUNCATE; its arrays have one entry per value of the tensor */
	const codec_metric *metric = nullptr;
	const codec_codebook *codebook = nullptr; /**< codebook for encoding, equal on all ranks */
	std::vector<codec_codebook> codebooks;    /**< codebooks that received frames may name */
	uint64_t stream = 0; /**< id of the random bits of stochastic codecs; must differ between tensors of a step */
	void *out = nullptr; /**< destination of the result; nullptr: the tensor itself, which is slower */
	/**
	 * Cut tensors into chunks of up to 4 MiB instead of 1 MiB, as codec.torch does. Set it if results must be
	 * bit-identical to those of codec.torch and the codec's scales or random bits depend on chunks. Slightly
	 * slower.
	 */
	bool cut_as_torch = false;
	/**
	 * Residuals of error feedback: n float32 values each, zero before the first call. A call adds them to the
	 * values that it encodes, and replaces them by the encoding error. `residual` belongs to this rank's own
	 * values, `sums_residual` to the sums that this rank encodes. The algorithm `ring` accepts neither, and
	 * `blocks` accepts only `residual`. CODEC_TOPK requires `residual` for all_gather and reduce_scatter, and both
	 * for two_shot.
	 */
	float *residual = nullptr;
	float *sums_residual = nullptr; /**< residual of the sums that this rank encodes: see `residual` */
	/** Timeout of each wait for another rank, from 1 ms to 10 years; 0: the context's timeout. */
	std::chrono::milliseconds timeout{0};
};

/**
 * Collectives over a connected gloo::Context. A group reuses its buffers from one call to the next. Only one thread at
 * a time may use a group.
 */
class Group
{
public:
	/** Use a connected context. Groups of one context that run at the same time need different tags. */
	explicit Group(std::shared_ptr<::gloo::Context> context, uint32_t tag = 0)
	    : channel_(std::move(context), tag), tag_(tag)
	{
	}

	/** Reduce n values of float32, bfloat16 or float16 over all ranks, in place. */
	void allreduce(void *values, size_t n, uint32_t dtype, const codec_spec &spec, const Options &options = {})
	{
		uint8_t *out = static_cast<uint8_t *>(options.out);

		run(
			Kind::allreduce,
			[&] {
				detail::Reduction r = reduction(values, n, dtype, spec, options);

				if ((r.residual || r.sums_residual) && chosen(options, r) == Algorithm::ring)
					throw ArgumentError(CODEC_BAD_ARGUMENT,
							    "a ring has no error feedback, because each rank encodes "
							    "sums of other ranks' values: use "
							    "two_shot or all_gather");
				if (chosen(options, r) == Algorithm::blocks)
					check_blocks(options, r);
				if (chosen(options, r) != Algorithm::raw)
					require_feedback(r, chosen(options, r) != Algorithm::all_gather);
				return r;
			},
			[&](detail::Reduction &r, Algorithm algorithm) {
				r.late = !out && r.is_large() && detail::has_trait(r.spec, CODEC_TRAIT_FIXED_RATE) &&
					 algorithm != Algorithm::raw && algorithm != Algorithm::blocks;
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
			Kind::reduce_scatter,
			[&] {
				const size_t all = of_all(n, out);
				detail::Reduction r = reduction(values, all, dtype, spec, options);

				only_plain(options);
				require_feedback(r, false);
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
			Kind::allgather,
			[&] {
				const size_t all = of_all(n, out);
				Options plain = options;
				plain.op = Op::sum; /* any operation: an all-gather reduces nothing */
				detail::Reduction r = reduction(values, n, dtype, spec, plain);

				only_plain(options);
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
	static constexpr uint64_t PROTOCOL = 3;  /* protocol version: docs/spec/protocol/cpp.md */
	static constexpr size_t SMALL = 1 << 16; /* bytes of a tensor up to which all_gather is faster than two_shot */
	static constexpr std::chrono::milliseconds MOST_TIMEOUT = std::chrono::hours(24 * 3652); /* about 10 years */
	static constexpr std::chrono::milliseconds GLOO_TIMEOUT = std::chrono::seconds(30); /* the default of Gloo */
	enum class Kind { allreduce, reduce_scatter, allgather };

	/*
	 * Return n times the number of ranks. Throws ArgumentError if the product is too large, or if `out` is null.
	 */
	size_t of_all(size_t n, const void *out) const
	{
		if (!out && n)
			throw ArgumentError(CODEC_BAD_ARGUMENT, "the destination of the result must not be null");
		if (n > SIZE_MAX / sizeof(float) / channel_.size)
			throw ArgumentError(CODEC_BAD_SHAPE, "the result has more values than memory can hold");
		return n * channel_.size;
	}

	/* Return the arguments as a Reduction. Throws ArgumentError or SpecError if one is invalid. */
	detail::Reduction reduction(const void *values, size_t n, uint32_t dtype, const codec_spec &spec,
				    const Options &options)
	{
		if (dtype != CODEC_FLOAT32 && dtype != CODEC_BFLOAT16 && dtype != CODEC_FLOAT16)
			throw ArgumentError(CODEC_BAD_DTYPE, "dtype must be float32, bfloat16 or float16");
		if (!values && n)
			throw ArgumentError(CODEC_BAD_ARGUMENT, "the tensor must not be null");
		if (detail::has_trait(spec, CODEC_TRAIT_BASE))
			throw SpecError(CODEC_BAD_SPEC, "CODEC_DELTA needs a base, which collectives do not have: use "
							"CODEC_LOSSLESS for exact results");
		detail::check_segments(options.segments, n);
		if (options.codebook)
			detail::check(codec_codebook_check(options.codebook));

		detail::Reduction r(work_);
		r.x = static_cast<const uint8_t *>(values);
		r.n = n;
		r.dtype = dtype;
		r.itemsize = codec_dtype_nbytes(dtype);
		r.spec = spec;
		r.op = options.op;
		r.stream = options.stream;
		r.segments = options.segments;
		r.cut_as_torch = options.cut_as_torch;
		r.metric = options.metric;
		r.codebook = options.codebook;
		r.codebooks = options.codebooks;
		r.residual = options.residual;
		r.sums_residual = options.sums_residual;
		r.bound(n); /* throws if the spec or the size is invalid */
		r.parameters.emplace(spec, dtype, options.metric, work_.scratch);
		detail::check_metrics(options.metric, n);
		check_memory(r, static_cast<const uint8_t *>(options.out));
		return r;
	}

	/*
	 * Throw ArgumentError unless tensor, `out` and residuals are aligned and do not overlap. Overlap is refused
	 * because one is written while another is still read.
	 */
	static void check_memory(const detail::Reduction &r, const uint8_t *out)
	{
		const struct {
			const void *p;
			size_t itemsize;
		} each[] = {{r.x, r.itemsize}, {out, r.itemsize}, {r.residual, 4}, {r.sums_residual, 4}};

		for (const auto &a : each) {
			const auto begin = reinterpret_cast<uintptr_t>(a.p), end = begin + r.n * a.itemsize;
			bool good = begin % a.itemsize == 0;

			for (const auto *b = each; a.p && b < &a; b++) {
				const auto other = reinterpret_cast<uintptr_t>(b->p);

				good = good && (!b->p || begin >= other + r.n * b->itemsize || other >= end);
			}
			if (!good)
				throw ArgumentError(CODEC_BAD_ARGUMENT, "tensor, out and residuals must be aligned to "
									"their values, and must not overlap");
		}
	}

	/* Set the destination of the result: `out`, or a buffer of the group if `out` is null. */
	void place(detail::Reduction &r, uint8_t *out, size_t n)
	{
		r.result = out ? out : detail::Workspace::room(work_.result, n * r.itemsize);
	}

	static void only_plain(const Options &options)
	{
		if (options.algorithm != Algorithm::automatic || options.out || options.sums_residual ||
		    !options.segments.empty())
			throw ArgumentError(
				CODEC_BAD_ARGUMENT,
				"algorithm, segments, out and sums_residual of Options are for all-reduces only");
	}

	static void check_blocks(const Options &options, const detail::Reduction &r)
	{
		if (!detail::has_trait(r.spec, CODEC_TRAIT_FIXED_RATE))
			throw SpecError(CODEC_BAD_SPEC,
					"blocks need a codec of fixed rate: the size of this codec's frames varies");
		if (options.sums_residual || !options.segments.empty())
			throw ArgumentError(CODEC_BAD_ARGUMENT,
					    "Options::segments and Options::sums_residual cannot be used with blocks");
	}

	/*
	 * Throw SpecError if CODEC_TOPK has no residual to keep the values that it drops. `sums` is true if the
	 * algorithm also encodes sums, which need sums_residual.
	 */
	static void require_feedback(const detail::Reduction &r, bool sums)
	{
		if (r.spec.codec == CODEC_TOPK && r.n && (!r.residual || (sums && !r.sums_residual)))
			throw SpecError(
				CODEC_BAD_SPEC,
				"CODEC_TOPK drops most values: pass Options::residual, which sends them later, and "
				"Options::sums_residual if this algorithm encodes sums (all_gather does not)");
	}

	Algorithm chosen(const Options &options, const detail::Reduction &r) const
	{
		bool automatic = options.algorithm == Algorithm::automatic;

		if (channel_.size == 1 || (automatic && (channel_.size == 2 || r.n * r.itemsize <= SMALL)))
			return Algorithm::all_gather;
		return automatic ? Algorithm::two_shot : options.algorithm;
	}

	std::unique_ptr<detail::Collective> collective(Algorithm algorithm, detail::Reduction &r)
	{
		switch (algorithm) {
		case Algorithm::all_gather: return std::make_unique<detail::AllGather>(channel_, r);
		case Algorithm::ring: return std::make_unique<detail::Ring>(channel_, r);
		case Algorithm::raw: return std::make_unique<detail::Raw>(channel_, r);
		case Algorithm::blocks: return std::make_unique<detail::OfBlocks>(channel_, r, tag_);
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
	void run(Kind kind, Prepare &&prepare, Make &&make, void *values, size_t n, const Options &options)
	{
		std::optional<detail::Reduction> r;
		std::optional<Keep> keep;
		std::exception_ptr error;
		const bool automatic = kind == Kind::allreduce && options.algorithm == Algorithm::automatic;
		detail::Choice *choice = nullptr;
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
			mine.signature = signature_of(*r, kind, options.algorithm, algorithm);
			keep.emplace(work_.residuals, options, *r, channel_);
			if (automatic) {
				choice = choices_.find(mine.signature);
				if (!choice)
					choice = choices_.add(mine.signature, {});
				if (choice->begin() && n * r->itemsize > SMALL) {
					algorithm = Algorithm::raw;
					mine.signature = signature_of(*r, kind, options.algorithm, algorithm);
				}
			}
			if (const uint64_t *key = keys_.find(mine.signature))
				mine.key = *key;
			mine.able = true;
		} catch (const std::exception &) { /* an Error, or std::bad_alloc */
			error = std::current_exception();
			mine = {};
		}
		const detail::Timer timer(channel_.sent_nbytes);
		std::unique_ptr<detail::Collective> of;

		counted_on([&] {
			channel_.request(mine);
			if (mine.able) {
				of = make(*r, algorithm);
				of->prepare();
			}
			if (mine.key)
				of->run();
			if (!channel_.agree()) {
				choices_.clear();
				choice = nullptr;
				keys_.clear();
			}
		});
		if (error)
			std::rethrow_exception(error);
		check_agreed(mine.signature);
		counted_on([&] {
			if (mine.key && channel_.agree())
				return;
			if (mine.key) { /* another rank has no key for this signature: restart the collective */
				keep->restore();
				of = make(*r, algorithm);
				of->prepare();
			}
			const uint64_t key = channel_.open();
			if (algorithm != Algorithm::blocks) { /* gloo::allreduce uses slots of its own */
				keys_.drop([&](uint64_t other) { return (key - other) % detail::Channel::KEYS == 0; });
				keys_.add(mine.signature, key);
			}
			of->run();
		});
		error = of->error();
		conclude(error, automatic ? timer.stop(raw_nbytes(*r)) : detail::Times(), choice);
		keep->commit();
		counted_on([&] { of->deliver(); });
		if (n && r->result != values)
			std::memcpy(values, r->result, n * r->itemsize);
	}

	/* Return the number of bytes that a rank sends in an all-reduce of uncompressed values. */
	uint64_t raw_nbytes(const detail::Reduction &r) const
	{
		return 2 * r.n * r.itemsize * (channel_.size - 1) / channel_.size;
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

	/* Backup of the residuals. The destructor restores the residuals, unless commit() was called after success. */
	class Keep
	{
	public:
		Keep(std::vector<float> &room, const Options &options, const detail::Reduction &r,
		     const detail::Channel &channel)
		    : residual_(options.residual), sums_(options.sums_residual), n_(residual_ ? r.n : 0)
		{
			if (sums_) {
				const auto slices = detail::cut(r.n, channel.size, r.itemsize, r.segments);
				const detail::Slice &mine = slices[channel.rank];

				sums_ += mine.front().begin;
				sums_n_ = mine.back().end - mine.front().begin;
			}
			copy_ = detail::Workspace::room(room, n_ + sums_n_);
			if (n_)
				std::memcpy(copy_, residual_, n_ * sizeof *copy_);
			if (sums_n_)
				std::memcpy(copy_ + n_, sums_, sums_n_ * sizeof *copy_);
		}

		~Keep()
		{
			restore();
		}

		Keep(const Keep &) = delete;
		Keep &operator=(const Keep &) = delete;

		void restore()
		{
			if (n_)
				std::memcpy(residual_, copy_, n_ * sizeof *copy_);
			if (sums_n_)
				std::memcpy(sums_, copy_ + n_, sums_n_ * sizeof *copy_);
		}

		void commit()
		{
			n_ = sums_n_ = 0;
		}

	private:
		float *residual_, *sums_, *copy_;
		uint64_t n_, sums_n_ = 0;
	};

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

	/*
	 * Exchange outcomes with all ranks, and record the largest times of all ranks in `choice`, unless it is null.
	 * Returns only if all ranks have succeeded.
	 */
	void conclude(std::exception_ptr error, const detail::Times &times, detail::Choice *choice)
	{
		using detail::Outcome;
		const Outcome mine = outcome_of(error);
		const detail::Verdict verdict = channel_.verdict(mine, times);
		const std::string who = detail::Channel::name(verdict.rank);

		if (choice)
			choice->record(verdict.times);

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

	/* Return a hash of all arguments that must be equal on all ranks. */
	static uint64_t signature_of(const detail::Reduction &r, Kind kind, Algorithm asked, Algorithm algorithm)
	{
		uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
		const auto mix = [&](const auto &word) {
			uint64_t wide = 0;

			static_assert(sizeof word <= sizeof wide);
			std::memcpy(&wide, &word, sizeof word);
			for (int i = 0; i < 8; i++)
				hash = (hash ^ (wide >> 8 * i & 0xff)) * 0x100000001b3;
		};
		const codec_spec &s = r.spec;

		mix(PROTOCOL);
		mix(kind);
		mix(uint32_t(CODEC_FORMAT_VERSION));
		for (uint32_t word :
		     {s.codec, s.max_code_length, s.model, s.variant, s.options, s.bits, s.group_size, s.kept, s.seed})
			mix(word);
		mix(s.scale);
		mix(s.clip);
		mix(s.guard);
		mix(r.dtype);
		mix(r.n);
		mix(r.op);
		mix(r.cut_as_torch);
		mix(asked); /* hashed as well, because an automatic choice may change later */
		mix(algorithm);
		mix(uint64_t(r.metric != nullptr));
		mix(r.codebook ? r.codebook->id : 0);
		for (const codec_segment &segment : r.segments) {
			mix(segment.offset);
			for (uint32_t d = 0; d < segment.rank; d++)
				mix(segment.shape[d]);
			mix(segment.rank);
		}
		return hash;
	}

	detail::Channel channel_;
	detail::Workspace work_;
	detail::Recent<detail::Choice> choices_; /* by signature: choice between frames and uncompressed values */
	detail::Recent<uint64_t> keys_;          /* by signature: key, if all ranks have agreed on the signature */
	const uint32_t tag_;
};

/**
 * Perform one all-reduce. For several, a Group is faster: it reuses buffers, sends data before ranks have compared
 * arguments, and chooses between frames and uncompressed values.
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
