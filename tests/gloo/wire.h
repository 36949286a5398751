/*
 * wire.h - what this process writes to its connections: counted, damaged, or cut short by its end.
 *
 * Gloo sends by writev(), which it finds by name in the program that it is loaded into: ours stands before libc's. A
 * message is two parts, Gloo's own header of 48 bytes and what is sent; the second part is the one to be damaged. (A
 * damaged header ends the receiver's process, by Gloo's own checks.)
 */
#pragma once

#include <cstdint>
#include <functional>

namespace wire
{

constexpr uint64_t HEADER = 48;

/* Bytes that this process has sent since the last call of one of these. */
uint64_t sent_nbytes();
void restart();

/* Do this as soon as so many bytes have been sent, before any more is; then go on, if there is still anyone to. */
void at(uint64_t nbytes, const std::function<void()> &act);

/* Messages of numbers are not longer than that, those with frames are. */
constexpr uint64_t NUMBERS = 64;

/* Flip these bits of the byte at `offset` in what is sent: of message number `number` of those with frames. */
void flip(uint64_t number, uint64_t offset, uint8_t bits);

/* Whether that has happened. If not it is not asked for any more. */
bool flipped();

} // namespace wire
