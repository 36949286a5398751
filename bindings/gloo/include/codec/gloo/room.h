/* room.h - memory for the messages of a collective that carry frames. */
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace codec::gloo::detail
{

struct Bytes {
	uint8_t *p = nullptr;
	size_t nbytes = 0;

	explicit operator bool() const
	{
		return p;
	}
};

/* Memory that is zeroed, so that it holds only stamps of its channel. */
class Room
{
public:
	static constexpr size_t ALIGN = 64;

	uint8_t *data() const
	{
		const auto at = reinterpret_cast<uintptr_t>(p_.get());

		return p_.get() + (ALIGN - at % ALIGN) % ALIGN;
	}

	size_t size() const
	{
		return nbytes_;
	}

	void resize(size_t nbytes)
	{
		p_.reset();
		nbytes_ = 0;
		p_.reset(static_cast<uint8_t *>(std::calloc(1, nbytes + ALIGN)));
		if (!p_)
			throw std::bad_alloc();
		nbytes_ = nbytes;
	}

private:
	struct Free {
		void operator()(uint8_t *p) const
		{
			std::free(p);
		}
	};
	std::unique_ptr<uint8_t, Free> p_;
	size_t nbytes_ = 0;
};

/* Allocates messages of frames: the length of a frame, the frame, and a stamp (docs/spec/protocol/cpp.md, section 2).
 */
class FrameRoom
{
public:
	static constexpr size_t LENGTH = sizeof(uint64_t), STAMP = sizeof(uint64_t);

	/* Allocate a buffer of `room` bytes, from which take() allocates messages. */
	void begin(size_t room)
	{
		if (room_.size() < room)
			room_.resize(room);
		taken_ = 0;
	}

	/* Return the aligned size in bytes of a message whose frame has at most `nbytes` bytes. */
	static size_t room_for(size_t nbytes)
	{
		return (nbytes + LENGTH + STAMP + Room::ALIGN - 1) / Room::ALIGN * Room::ALIGN;
	}

	/* Allocate a message for a frame of at most `nbytes` bytes from the room of begin(). */
	Bytes take(size_t nbytes)
	{
		last_ = taken_;
		taken_ += room_for(nbytes);
		if (taken_ > room_.size())
			throw std::logic_error("a collective takes more room than it has asked for");
		return {room_.data() + last_, LENGTH + nbytes + STAMP};
	}

	/*
	 * Shrink the message that take() has allocated last to a frame of `nbytes` bytes, and write the frame's
	 * length.
	 */
	Bytes sized(Bytes room, size_t nbytes)
	{
		uint64_t length = nbytes;

		std::memcpy(room.p, &length, LENGTH);
		taken_ = last_ + room_for(nbytes);
		return {room.p, LENGTH + nbytes + STAMP};
	}

	/* Return the part of a message that is its frame. */
	static Bytes frame_of(Bytes message)
	{
		return {message.p + LENGTH, message.nbytes - LENGTH - STAMP};
	}

private:
	Room room_;
	size_t taken_ = 0, last_ = 0; /* bytes of room_ in use; offset of the message allocated last */
};

} // namespace codec::gloo::detail
