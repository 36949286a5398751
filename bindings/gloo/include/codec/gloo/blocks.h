/* blocks.h - use frames of a fixed size as elements of gloo::allreduce. */
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include <gloo/allreduce.h>

#include "algorithms.h"
#include "frames.h"

namespace codec::gloo
{

/**
 * A tensor as an array of elements for gloo::allreduce. Each element is a frame of `block` values. The reduce
 * function decodes two elements, adds them and encodes the sum, so that the errors of lossy codecs accumulate.
 *
 *     Blocks blocks(spec, CODEC_FLOAT32, n);
 *     blocks.encode(gradient);
 *     ::codec::gloo::Blocks::Options options(context);
 *     blocks.fill(options);
 *     ::gloo::allreduce(options);
 *     blocks.decode(gradient, size); // divides by size: the mean
 *
 * The reduce function does not throw, since other ranks would wait for this one. After an error it stores zeros, which
 * are not a valid frame, and decode() throws on all ranks that receive them.
 */
class Blocks
{
public:
	/** AllreduceOptions whose element size is given at run time. In Gloo's class it is the size of a C++ type. */
	class Options : public ::gloo::AllreduceOptions
	{
	public:
		using ::gloo::AllreduceOptions::AllreduceOptions;

		/** Set the buffer with the elements to reduce. Call set_output() instead of Gloo's setOutput(). */
		void set_output(uint8_t *elements, size_t count, size_t element_nbytes)
		{
			setOutput(elements, count * element_nbytes);
			impl_.elements = count;
			impl_.elementSize = element_nbytes;
		}
	};

	/** default number of values per element; the header takes 1% of a frame of 65,536 signs */
	static constexpr uint64_t BLOCK = 1 << 16;

	/**
	 * Prepare elements for n values. `stream` selects the random bits of stochastic codecs; it must differ
	 * between ranks and tensors.
	 */
	Blocks(const codec_spec &spec, uint32_t dtype, uint64_t n, Op op = Op::sum, uint64_t stream = 0,
	       uint64_t block = BLOCK)
	    : spec_(spec), dtype_(dtype), itemsize_(codec_dtype_nbytes(dtype)), n_(n), block_(block), op_(op),
	      stream_(stream)
	{
		codec_tensor like = detail::tensor_of(dtype, nullptr, block);
		size_t nbytes;

		if (!detail::has_trait(spec, CODEC_TRAIT_FIXED_RATE))
			throw SpecError(CODEC_BAD_SPEC,
					"blocks need a codec of fixed rate: the size of this codec's frames varies");
		/*
		 * the bound is the exact size of an element, which has no segments; the last element may be shorter,
		 * but its frame is not larger
		 */
		detail::check(codec_bound_segments(&spec, &like, nullptr, 0, &element_nbytes_));
		detail::check(codec_scratch(&spec, &like, &nbytes));
		scratch_.resize(nbytes);
		parameters_.emplace(spec, dtype, false, scratch_);
		total_.resize(block);
		halves_.resize(dtype == CODEC_FLOAT32 ? 0 : block);
		elements_.resize(count() * element_nbytes_);
	}

	/** Return the number of elements. */
	uint64_t count() const
	{
		return (n_ + block_ - 1) / block_;
	}

	/** Return the size of an element in bytes. */
	size_t element_nbytes() const
	{
		return element_nbytes_;
	}

	/**
	 * Encode n values. `residual` (n float32 values, or nullptr) is the residual of error feedback, as for
	 * codec_encode with CODEC_FEEDBACK.
	 */
	void encode(const void *values, float *residual = nullptr)
	{
		error_ = nullptr;
		for (uint64_t i = 0; i < count(); i++) {
			const auto *x = static_cast<const uint8_t *>(values) + i * block_ * itemsize_;

			put(x, values_of(i), &elements_[i * element_nbytes_],
			    residual ? residual + i * block_ : nullptr);
		}
	}

	/**
	 * After an error: fill the elements with zeros, which are not valid frames, so that all other ranks fail, too.
	 */
	void give_up()
	{
		std::fill(elements_.begin(), elements_.end(), 0);
	}

	/** Make the elements the buffer that gloo::allreduce reduces in place. */
	void fill(Options &options)
	{
		options.set_output(elements_.data(), count(), element_nbytes_);
		options.setReduceFunction(reduce_function());
	}

	/** Return the function for Gloo that computes out = a + b for n elements. */
	::gloo::AllreduceOptions::Func reduce_function()
	{
		return [this](void *out, const void *a, const void *b, size_t n) {
			for (size_t i = 0; i < n; i++)
				reduce(static_cast<uint8_t *>(out) + i * element_nbytes_,
				       static_cast<const uint8_t *>(a) + i * element_nbytes_,
				       static_cast<const uint8_t *>(b) + i * element_nbytes_);
		};
	}

	/**
	 * Decode the reduced elements, and divide the values by `divisor`. If decode() throws, `values` are
	 * unspecified.
	 */
	void decode(void *values, float divisor = 1)
	{
		if (error_)
			std::rethrow_exception(error_);
		for (uint64_t i = 0; i < count(); i++) {
			uint8_t *place = static_cast<uint8_t *>(values) + i * block_ * itemsize_;

			get(&elements_[i * element_nbytes_], values_of(i), CODEC_FLOAT32, total_.data(),
			    CODEC_INTO_FLOAT32, divisor);
			detail::narrow(dtype_, total_.data(), values_of(i), place);
		}
	}

private:
	uint64_t values_of(uint64_t i) const
	{
		return std::min(block_, n_ - i * block_);
	}

	void put(const void *x, uint64_t n, uint8_t *element, float *residual)
	{
		codec_tensor src = detail::tensor_of(dtype_, x, n);
		auto with = detail::blank<codec_context>();
		size_t written;

		with.stream = stream_ + draws_++;
		with.flags = residual ? CODEC_FEEDBACK : 0;
		detail::check(codec_encode(&spec_, &src, element, element_nbytes_, &written, residual, &with,
					   scratch_.data(), scratch_.size()));
		std::memset(element + written, 0, element_nbytes_ - written);
	}

	/*
	 * Throw PeerError if an element begins with zeros, which means that a rank could not encode the element: frames
	 * begin with their magic number.
	 */
	static void check_there(const uint8_t *element)
	{
		const uint8_t nothing[4] = {};

		if (!std::memcmp(element, nothing, sizeof nothing))
			throw PeerError("a rank has failed, and has sent no element");
	}

	/* Return the number of values in an element. Throws FrameError unless it is a frame of the agreed spec. */
	uint64_t checked(const uint8_t *element) const
	{
		auto info = detail::blank<codec_info>();

		check_there(element);
		detail::check(codec_inspect(element, element_nbytes_, &info), &info.fault);
		if (info.dtype != dtype_ || info.rank != 1 || info.n > block_)
			throw FrameError(CODEC_SHAPE_MISMATCH,
					 "an element was received whose dtype or shape is not that of the tensor");
		parameters_->check(info, false);
		return info.n;
	}

	/* Decode an element. Throws FrameError unless it has n values. */
	void get(const uint8_t *element, uint64_t n, uint32_t dtype, void *values, uint32_t into, float divisor)
	{
		codec_tensor dst = detail::tensor_of(dtype, values, n);
		codec_fault fault{};
		auto with = detail::blank<codec_context>();

		if (checked(element) != n)
			throw FrameError(CODEC_SHAPE_MISMATCH,
					 "an element was received that has another number of values");
		with.flags = CODEC_ALLOW_SLACK;
		with.into = into;
		with.weight = 1;
		with.divide = divisor;
		with.fault = &fault;
		detail::check(codec_decode(element, element_nbytes_, &dst, &with, scratch_.data(), scratch_.size()),
			      &fault);
	}

	void reduce(uint8_t *out, const uint8_t *a, const uint8_t *b)
	{
		const void *sum = total_.data();

		try {
			if (error_)
				std::rethrow_exception(error_);
			const uint64_t n = checked(a);
			get(a, n, CODEC_FLOAT32, total_.data(), CODEC_INTO_FLOAT32, 1);
			get(b, n, CODEC_FLOAT32, total_.data(), op_ == Op::max ? CODEC_INTO_MAX : CODEC_INTO_ADD, 1);
			if (dtype_ != CODEC_FLOAT32) {
				detail::narrow(dtype_, total_.data(), n, halves_.data());
				sum = halves_.data();
			}
			put(sum, n, out, nullptr);
		} catch (...) {
			if (!error_)
				error_ = std::current_exception();
			/* zeros are not a valid frame, so ranks that receive this element fail */
			std::memset(out, 0, element_nbytes_);
		}
	}

	codec_spec spec_;
	std::optional<detail::Parameters> parameters_;
	uint32_t dtype_, itemsize_;
	uint64_t n_, block_;
	Op op_;
	uint64_t stream_, draws_ = 0;
	size_t element_nbytes_ = 0;
	std::vector<uint8_t> scratch_, elements_;
	std::vector<float> total_;
	std::vector<uint16_t> halves_;
	std::exception_ptr error_;
};

namespace detail
{

/*
 * All-reduce by gloo::allreduce over blocks. Each rank's share has several blocks, so that Gloo's ring can send one
 * segment while it reduces another.
 */
class OfBlocks : public Collective
{
public:
	OfBlocks(Channel &channel, Reduction &r, uint32_t tag)
	    : Collective(channel, r), tag_(tag),
	      blocks_(r.spec, r.dtype, r.n, r.op, (r.stream * channel.size + channel.rank) << 32,
		      std::clamp(r.n / (PARTS * channel.size) / CUT_ALIGN * CUT_ALIGN, CUT_ALIGN, Blocks::BLOCK))
	{
	}

	void prepare() override
	{
		attempt_([&] { blocks_.encode(r_.x, r_.residual); });
		if (attempt_.error)
			blocks_.give_up();
	}

	void run() override
	{
		Blocks::Options options(channel_.context());

		blocks_.fill(options);
		options.setTag(tag_);
		options.setTimeout(channel_.timeout);
		channel_.sent_nbytes +=
			2 * (channel_.size - 1) * blocks_.count() * blocks_.element_nbytes() / channel_.size;
		try {
			::gloo::allreduce(options);
		} catch (const ::gloo::Exception &e) {
			channel_.close();
			throw PeerError(std::string("a rank is gone or does not answer: ") + e.what());
		}
		attempt_([&] {
			blocks_.decode(r_.result, r_.op == Op::mean ? static_cast<float>(channel_.size) : 1);
			check_finite(r_, r_.dtype, r_.result, r_.n);
		});
	}

private:
	static constexpr uint64_t PARTS = 8;

	const uint32_t tag_;
	Blocks blocks_;
};

} // namespace detail
} // namespace codec::gloo
