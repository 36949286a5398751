"""Delta: compose() merges consecutive updates, and decode_blocks() decodes shards of a tensor."""

import itertools

import numpy as np
import pytest

import codec
from support.weights import encode, weights

DELTA = codec.Delta()


class TestCompose:
    """compose() merges several consecutive updates into one."""

    @staticmethod
    def chain(n=200_000):
        rng = np.random.default_rng(5)
        x, _ = weights(n)
        chain = [x]
        for _ in range(4):
            step = np.where(rng.random(n) < 0.01, rng.choice([1, -1], n), 0).astype(np.uint16)
            chain.append(chain[-1] + step)
        return chain, [encode(new, old, "bfloat16") for old, new in itertools.pairwise(chain)]

    def test_equals_the_update_from_the_first_to_the_last(self):
        chain, frames = self.chain()
        before = chain[0].copy()
        frame = codec.compose_deltas(frames, base=chain[0])
        assert frame == encode(chain[-1], chain[0], "bfloat16")
        assert (chain[0] == before).all()
        assert len(frame) < sum(map(len, frames))
        large = codec.compose_deltas(frames[:1], codec.Delta(1 << 18), base=codec.view(chain[0], "bfloat16").tensor)
        assert large == encode(chain[1], chain[0], "bfloat16", codec.Delta(1 << 18))

    def test_updates_that_cancel_out_change_nothing(self):
        a, b = np.zeros(3000, np.int32), np.arange(3000, dtype=np.int32)
        there, back = codec.encode(b, DELTA, base=a), codec.encode(a, DELTA, base=b)
        assert len(codec.compose_deltas([there, back], base=a)) == 72

    def test_names_the_frame_that_does_not_follow(self):
        chain, frames = self.chain()
        with pytest.raises(codec.StateError, match=r"^1: the base is not the tensor"):
            codec.compose_deltas([frames[0], frames[2]], base=chain[0])
        with pytest.raises(codec.StateError, match=r"^0: already applied"):
            codec.compose_deltas(frames, base=chain[1])
        with pytest.raises(codec.ArgumentError, match="frames is empty"):
            codec.compose_deltas([], base=chain[0])
        with pytest.raises(codec.SpecError, match="compose"):
            codec.compose_deltas(frames, codec.Lossless(), base=chain[0])


class TestBlocks:
    """decode_blocks() decodes some blocks of a tensor, such as a shard."""

    def test_blocks_equal_those_of_the_whole(self, isa):
        base, new = weights()
        frame = encode(new, base, "bfloat16", codec.Delta(1 << 14))
        block, nblocks = codec.inspect(frame).block, codec.inspect(frame).nblocks
        for first, count in ((0, nblocks), (0, 1), (3, 4), (nblocks - 1, 1), (5, 0), (nblocks, 0)):
            part = base[first * block : (first + count) * block].copy()
            expected = new[first * block : (first + count) * block]
            out = np.empty_like(part)
            assert codec.apply_delta_blocks(frame, first, count, base=part, out=out) is out
            assert (out == expected).all()
            codec.apply_delta_blocks(frame, first, count, base=part, out=part)
            assert (part == expected).all()

    def test_unchanged_tensor_is_one_block(self):
        x = np.arange(100_000, dtype=np.float32)
        frame = codec.encode(x, DELTA, base=x)
        assert (codec.apply_delta_blocks(frame, 0, 1, base=x) == x).all()

    def test_refuses_other_blocks_frames_and_sizes(self):
        base, new = weights()
        frame = encode(new, base, "bfloat16", codec.Delta(1 << 16))
        with pytest.raises(codec.ArgumentError, match="at most 5, the number of blocks of the frame, got 6"):
            codec.apply_delta_blocks(frame, 4, 2, base=base)
        with pytest.raises(codec.ArgumentError, match=r"base= must have the 65536 \w+ values of these blocks, got"):
            codec.apply_delta_blocks(frame, 1, 1, base=base)
        with pytest.raises(codec.ArgumentError, match=r"out= must have the 65536 \w+ values of these blocks, got"):
            codec.apply_delta_blocks(frame, 1, 1, base=base[:65536], out=base[:65535].copy())
        with pytest.raises(codec.ArgumentError, match="takes frames of Delta, got a frame of Lossless"):
            codec.apply_delta_blocks(codec.encode(base), 0, 1, base=base)
        damaged = bytearray(frame)
        damaged[-1] ^= 128
        with pytest.raises(codec.FrameError):
            codec.apply_delta_blocks(damaged, 0, 1, base=base[:65536])

    def test_wrong_base_never_writes_outside_of_the_shard(self):
        base, new = weights()
        frame = encode(new, base, "bfloat16", codec.Delta(1 << 16))
        rng = np.random.default_rng(0)
        room = np.full(3 << 16, 7, np.uint16)
        shard = room[1 << 16 : 2 << 16]
        for _ in range(30):
            shard[:] = rng.integers(0, 1 << 16, 1 << 16)
            before = shard.copy()
            try:
                codec.apply_delta_blocks(frame, 2, 1, base=shard, out=shard)
            except codec.FrameError:
                assert (shard == before).all()
            assert (room[: 1 << 16] == 7).all()
            assert (room[2 << 16 :] == 7).all()
