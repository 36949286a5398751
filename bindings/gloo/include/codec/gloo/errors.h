/* errors.h - exceptions of collectives. */
#pragma once

#include <stdexcept>
#include <string>

#include <codec/codec.h>

namespace codec::gloo
{

/** Base class of all exceptions of codec::gloo, for errors of this rank or of another rank. */
class Error : public std::runtime_error
{
public:
	/** Construct an error from a status of the C library and a message. */
	Error(codec_status status, const std::string &what) : std::runtime_error(what), status_(status)
	{
	}

	/** Return the status of the C library; CODEC_OK if the error did not come from the C library. */
	codec_status status() const noexcept
	{
		return status_;
	}

private:
	codec_status status_;
};

/** An argument is invalid, or the codec cannot encode the values (CODEC_NONFINITE). */
class ArgumentError : public Error
{
	using Error::Error;
};

/** The spec is invalid, or the collective does not support it. */
class SpecError : public Error
{
	using Error::Error;
};

/** A received frame is damaged, or has another codec, dtype or size than the collective expects. */
class FrameError : public Error
{
	using Error::Error;
};

/** Another rank is lost, does not answer in time, requests another collective, or has one of the errors above. */
class PeerError : public Error
{
public:
	/** Construct an error from a message, and the C library's status on the other rank if it is known. */
	explicit PeerError(const std::string &what, codec_status status = CODEC_OK) : Error(status, what)
	{
	}
};

namespace detail
{

/* Throw FrameError, SpecError or ArgumentError unless the status is CODEC_OK. */
inline void check(codec_status status, const codec_fault *fault = nullptr)
{
	if (status == CODEC_OK)
		return;
	std::string what = codec_strerror(status);
	if (status >= CODEC_TRUNCATED && status < CODEC_UNKNOWN_CODEBOOK) {
		if (fault)
			what += " (byte " + std::to_string(fault->offset) + ")";
		throw FrameError(status, what);
	}
	if (status == CODEC_BAD_SPEC || status == CODEC_BAD_SCALE || status == CODEC_ROUNDED_SCALE)
		throw SpecError(status, what);
	throw ArgumentError(status, what);
}

/* Return true if a codec has a property CODEC_TRAIT_*, false also if the spec is invalid: encoding then throws. */
inline bool has_trait(const codec_spec &spec, uint32_t trait)
{
	uint32_t traits = 0;

	return codec_traits(&spec, &traits) == CODEC_OK && traits & trait;
}

} // namespace detail
} // namespace codec::gloo
