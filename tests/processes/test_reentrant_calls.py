"""Calls inside calls: signal handlers, finalizers and lazy arguments use the library while a call runs."""

from support.processes import run


def test_signal_handler_may_encode_and_decode():
    """The signal handler's frame and the interrupted call's frame are both correct."""
    run(
        """
other = normal(5_000)
one, three = (codec.options(threads=n) for n in (1, 3))
frames = {(i, o): codec.encode(x, s, options=o) for i, (x, s) in enumerate(((small, codec.Lossless()), (big, ternary)))
          for o in (one, three)}
mine = codec.encode(other, codec.Sign())
value = codec.decode(mine)
came = 0

def handler(*_):
    global came
    came += 1
    assert codec.encode(other, codec.Sign()) == mine
    assert (codec.decode(mine) == value).all()
    if came % 20 == 0:
        assert codec.encode(big, ternary, options=three) == frames[1, one]

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
for i in range(15_000):
    assert codec.encode(small) == frames[0, one]
    assert (codec.decode(frames[0, one]) == small).all()
    if i % 100 == 0:
        assert codec.encode(big, ternary, options=three) == frames[1, one]
        values = [codec.decode(frames[1, one], options=o) for o in (one, three)]
        assert (values[0] == values[1]).all()
signal.setitimer(signal.ITIMER_REAL, 0)
assert came > 200
print("the end")
"""
    )


def test_finalizer_may_encode():
    """The garbage collector may run a finalizer at any point of a call; both calls return correct frames."""
    run(
        """
other = normal(3_000)
mine = codec.encode(other, codec.Float8())
wrong = ended = 0

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        global wrong, ended
        ended += 1
        wrong += codec.encode(other, codec.Float8()) != mine

frame, book = codec.encode(small), codec.Codebook.from_tensors(big)
bound = codec.Truncate(guard=0).bind(codec.optimizers.SGD(0.1), theta=small[::-1].copy())
cut = codec.encode(small, bound)
info = codec.inspect(frame)
room = codec.bound(small.shape, "float32")
for i in range(12_000):
    gc.set_threshold(1 + i % 40)
    Cycle()
    wrong += codec.encode(small) != frame
    Cycle()
    wrong += (codec.decode(frame) != small).any()
    Cycle()
    wrong += codec.encode(small, bound) != cut
    Cycle()
    wrong += codec.inspect(frame) != info or codec.bound(small.shape, "float32") != room
    if i % 500 == 0:
        wrong += codec.Codebook.from_tensors(big) != book
assert ended > 10_000 and not wrong, (wrong, ended)
print("the end")
"""
    )


def test_arguments_may_use_the_library():
    """Lazy tensors, lazy state and optimizers encode and decode while a call reads them."""
    run(
        """
class Lazy:
    "A tensor that is decoded when it is read."
    def __init__(self, x):
        self.frame = codec.encode(x)
    def __dlpack_device__(self):
        return (1, 0)
    def __dlpack__(self, **kw):
        codec.encode(big, codec.Sign(), residual=np.empty_like(big))
        return codec.decode(self.frame).__dlpack__()

class Optimizer(codec.optimizers.SGD):
    __slots__ = ()
    def terms(self, state):
        codec.accumulate(codec.encode(big), np.zeros_like(big), options=codec.options(threads=2))
        return codec.optimizers.SGD.terms(self, state)

x, theta = normal(2_000), normal(2_000)
for levels in ("coded", "shared"):
    spec = codec.Truncate(level_coding=levels, guard=0)
    plain = spec.bind(codec.optimizers.SGD(0.1), theta=theta)
    left = np.empty_like(x)
    frame = codec.encode(x, plain, residual=left)
    value = codec.decode(frame, plain)
    for optimizer in (codec.optimizers.SGD(0.1), Optimizer(0.1)):
        for given in (Lazy(theta), theta):
            bound = spec.bind(optimizer, theta=given)
            mine = np.full(4_000, 7, np.float32)
            assert codec.encode(Lazy(x), bound, residual=mine[1_000:3_000]) == frame
            assert (mine[1_000:3_000] == left).all() and (mine[:1_000] == 7).all() and (mine[3_000:] == 7).all()
            assert (codec.decode(frame, bound) == value).all()
            out = np.zeros_like(x)
            assert (codec.accumulate(frame, out, bound) == value).all()
            assert (codec.reduce([frame], bound) == value).all()
print("the end")
"""
    )
