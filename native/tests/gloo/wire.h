/*
 * wire.h - a writev() that counts the bytes this process sends, damages them, or acts at a given byte.
 *
 * Gloo sends messages with writev(). The dynamic linker finds this program's writev() before the one of libc. A message
 * has two parts, Gloo's header of 48 bytes and the data. Only data is damaged: Gloo ends the receiving process if the
 * header is wrong.
 */
#pragma once

#include <cstdint>
#include <functional>

namespace wire
{

constexpr uint64_t HEADER = 48;

/* Return the number of bytes sent since the last call of restart() or at(). */
uint64_t sent_nbytes();
void restart();

/* Call act() once `nbytes` bytes have been sent, before the next byte. */
void at(uint64_t nbytes, const std::function<void()> &act);

/* Maximum size in bytes of a message of numbers; messages with frames are longer. */
constexpr uint64_t NUMBERS = 64;

/*
 * Flip bits of the byte at `offset` of a message with a frame. `number` is the message's index among such messages sent
 * from now on.
 */
void flip(uint64_t number, uint64_t offset, uint8_t bits);

/* Return true if a byte was flipped since flip(); otherwise cancel the flip. */
bool flipped();

} // namespace wire
