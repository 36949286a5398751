"""Calls inside of calls: from signal handlers, finalizers and arguments that use the library themselves."""

from support.processes import run


def test_signal_handler_may_encode_and_decode():
    """Frames of the handler and of the interrupted call are both right."""
    run(
        """
other = normal(5_000)
frames = {(i, t): codec.encode(x, s, threads=t) for i, (x, s) in enumerate(((small, codec.Lossless()), (big, ternary)))
          for t in (1, 3)}
mine = codec.encode(other, codec.Sign())
value = codec.decode(mine)
came = 0

def handler(*_):
    global came
    came += 1
    assert codec.encode(other, codec.Sign()) == mine
    assert (codec.decode(mine) == value).all()
    if came % 20 == 0:
        assert codec.encode(big, ternary, threads=3) == frames[1, 1]

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
for i in range(15_000):
    assert codec.encode(small) == frames[0, 1]
    assert (codec.decode(frames[0, 1]) == small).all()
    if i % 100 == 0:
        assert codec.encode(big, ternary, threads=3) == frames[1, 1]
        assert (codec.decode(frames[1, 1], threads=3) == codec.decode(frames[1, 1], threads=1)).all()
signal.setitimer(signal.ITIMER_REAL, 0)
assert came > 200
print("the end")
"""
    )


def test_finalizer_may_encode():
    """The garbage collector may run a finalizer at any point of a call; both frames are right."""
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
how = {"metric": codec.optimizers.SGD(0.1), "state": {"theta": small[::-1].copy()}, "spec": codec.Truncate(guard=0)}
cut = codec.encode(small, **how)
info = codec.inspect(frame)
room = codec.bound(small.shape, "float32")
for i in range(12_000):
    gc.set_threshold(1 + i % 40)
    Cycle()
    wrong += codec.encode(small) != frame
    Cycle()
    wrong += (codec.decode(frame) != small).any()
    Cycle()
    wrong += codec.encode(small, **how) != cut
    Cycle()
    wrong += codec.inspect(frame) != info or codec.bound(small.shape, "float32") != room
    if i % 500 == 0:
        wrong += codec.Codebook.from_tensors(big) != book
assert ended > 10_000 and not wrong, (wrong, ended)
print("the end")
"""
    )


def test_arguments_may_use_the_library():
    """Lazy tensors, state mappings and metrics encode and decode while a call reads them."""
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

class Mapping(dict):
    def items(self):
        return [(name, codec.decode(codec.encode(x))) for name, x in super().items()]

class Metric(codec.optimizers.SGD):
    __slots__ = ()
    def terms(self, state):
        codec.accumulate(codec.encode(big), np.zeros_like(big), threads=2)
        return codec.optimizers.SGD.terms(self, state)

x, theta = normal(2_000), normal(2_000)
for levels in ("coded", "shared"):
    spec = codec.Truncate(level_coding=levels, guard=0)
    plain = {"metric": codec.optimizers.SGD(0.1), "state": {"theta": theta}}
    left = np.empty_like(x)
    frame = codec.encode(x, spec, residual=left, **plain)
    value = codec.decode(frame, **plain)
    for metric in (plain["metric"], Metric(0.1)):
        for state in ({"theta": Lazy(theta)}, Mapping(theta=theta)):
            mine = np.full(4_000, 7, np.float32)
            assert codec.encode(Lazy(x), spec, metric=metric, state=state, residual=mine[1_000:3_000]) == frame
            assert (mine[1_000:3_000] == left).all() and (mine[:1_000] == 7).all() and (mine[3_000:] == 7).all()
            assert (codec.decode(frame, metric=metric, state=state) == value).all()
            out = np.zeros_like(x)
            assert (codec.accumulate(frame, out, metric=metric, state=state) == value).all()
            assert (codec.reduce([frame], metric=metric, state=state) == value).all()
print("the end")
"""
    )
