/* errors.h - what collectives throw. */
#pragma once

#include <stdexcept>
#include <string>

#include <codec/codec.h>

namespace codec::gloo
{

/* Anything that went wrong, on this rank or on another one. */
class Error : public std::runtime_error
{
public:
	Error(codec_status status, const std::string &what) : std::runtime_error(what), status_(status)
	{
	}

	/* Why, if the codec says so; CODEC_OK if it has no part in it. */
	codec_status status() const noexcept
	{
		return status_;
	}

private:
	codec_status status_;
};

/* An argument that cannot be used, or values that the codec does not take (CODEC_NONFINITE). */
class SpecError : public Error
{
	using Error::Error;
};

/* What another rank sent is not a frame of this collective, or was damaged. */
class FrameError : public Error
{
	using Error::Error;
};

/* Another rank is gone, does not answer in time, asks for something else, or has one of the errors above. */
class PeerError : public Error
{
public:
	explicit PeerError(const std::string &what, codec_status status = CODEC_OK) : Error(status, what)
	{
	}
};

namespace detail
{

/* Throw unless the status is CODEC_OK. */
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
	throw SpecError(status, what);
}

} // namespace detail
} // namespace codec::gloo
