"""slime's delta folders, written and read by a reimplementation of slime's code, which no package index has."""

import argparse
import concurrent.futures
import json
import shutil
import zlib

import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard

import codec
from codec.integrations import slime
from codec.weight_sync import serve
from support.weight_updates import stepped, weights

HASHES = {"xxh3-128": lambda x: xxhash.xxh3_128(x).hexdigest(), "adler32": lambda x: f"{zlib.adler32(x):08x}"}
INDEX = "model.safetensors.index.json"


def raw(tensors):
    return {name: np.frombuffer(x.tobytes(), np.uint8) for name, x in tensors.items()}


def write_as_slime(folder, old, new, version, encoding="xor", checksum="xxh3-128", files=2):
    """Write a version's delta folder as slime does: changed tensors, split into `files` files, and the index."""
    folder.mkdir(parents=True)
    diffs, sums = {}, {}
    for name, x in raw(new).items():
        before = raw(old)[name]
        at = np.flatnonzero(x != before).astype("<u4")
        if len(at):
            parts = [np.array([len(at)], "<u4").view(np.uint8), at.view(np.uint8), x[at]]
            diff = x ^ before if encoding == "xor" else np.concatenate(parts)
            diffs[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(diff), np.uint8)
            sums[name] = HASHES[checksum](x)
    places = {}
    for k in range(files):
        mine = sorted(diffs)[k::files]
        file = f"model-{k:05d}-of-{files:05d}.safetensors"
        safetensors.numpy.save_file({n: diffs[n] for n in mine}, folder / file, {n: sums[n] for n in mine})
        places |= dict.fromkeys(mine, file)
    numbers = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}"}
    how = {"delta_encoding": encoding, "compression_format": "zstd", "checksum_format": checksum}
    (folder / INDEX).write_text(json.dumps({"metadata": numbers | how, "weight_map": places}))
    return folder


def apply_as_slime(folder, local, version):
    """Apply a version's XOR differences to the tensors in `local`, as slime's engine does to its checkpoint."""
    index = json.loads((folder / INDEX).read_text())["metadata"]
    assert (int(index["version"]), int(index["base_version"])) == (version, version - 1)
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as f:
            for name in f.offset_keys():
                diff = zstandard.ZstdDecompressor().decompress(f.get_tensor(name).tobytes())
                local[name] = local[name] ^ np.frombuffer(diff, np.uint8)
                assert HASHES[index["checksum_format"]](local[name]) == f.metadata()[name]


class Run:
    """A trainer and an engine that exchange delta folders through a store; each has its own disk folder."""

    def __init__(self, path, monkeypatch):
        self.path, self.trainer, self.engine, self.store = path, path / "trainer", path / "engine", path / "store"
        self.weights = [{name: x for name, x in weights().items() if x.nbytes}]
        for number, part in enumerate((slice(0, 5), slice(5, None))):
            some = dict(list(self.weights[0].items())[part])
            shards = path / "checkpoint" / f"model-{number}.safetensors"
            shards.parent.mkdir(exist_ok=True)
            shards.write_bytes(safetensors.numpy.save(some))
        self.args = argparse.Namespace(hf_checkpoint=str(path / "checkpoint"), update_weight_mode="delta")
        monkeypatch.setenv("CODEC_SLIME_STORE", str(self.store))
        monkeypatch.setenv("CODEC_SLIME_CHECKPOINT", self.args.hf_checkpoint)
        self.begin()

    def begin(self):
        """Start a run as slime does, with an empty folder for the trainer's versions."""
        shutil.rmtree(self.trainer, ignore_errors=True)
        self.trainer.mkdir()
        slime.publish(self.args, str(self.trainer), [])

    def write(self, **how):
        """Change the weights, and write the new version's delta folder."""
        self.weights.append(stepped(self.weights[-1], len(self.weights)))
        number = len(self.weights) - 1
        return write_as_slime(self.trainer / f"weight_v{number:06d}", *self.weights[-2:], number, **how)

    def publish(self, folder):
        slime.publish(self.args, str(folder), [])

    def versions(self):
        return sorted(p.name for p in self.engine.glob("weight_v*"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    yield Run(tmp_path, monkeypatch)
    for base in slime._trainers.values():
        base.close()
    slime._trainers.clear()


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_engine_reads_what_the_trainer_wrote(run, encoding, checksum, monkeypatch):
    local = raw(run.weights[0])
    with serve(run.store) as server:
        for version in range(1, 4):
            run.publish(run.write(encoding=encoding, checksum=checksum))
            monkeypatch.setenv("CODEC_SLIME_STORE", server.url)
            slime.fetch(str(run.engine), version)
            monkeypatch.setenv("CODEC_SLIME_STORE", str(run.store))
            apply_as_slime(run.engine / f"weight_v{version:06d}", local, version)
            assert all(np.array_equal(x, local[name]) for name, x in raw(run.weights[version]).items())
    slime.fetch(str(run.engine), 2)  # an older version: nothing is fetched
    assert run.versions() == ["weight_v000001", "weight_v000002", "weight_v000003"]


@pytest.mark.parametrize("store", ["folder", "bucket"])
def test_late_host_and_all_ranks_of_a_host_get_every_version(run, store, monkeypatch):
    if store == "bucket":
        monkeypatch.setenv("CODEC_SLIME_STORE", f"memory://{run.path}")
        run.begin()
    for _ in range(3):
        run.publish(run.write())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: slime.fetch(str(run.engine), 3), range(4)))
    local = raw(run.weights[0])
    for version in range(1, 4):
        apply_as_slime(run.engine / f"weight_v{version:06d}", local, version)
    assert all(np.array_equal(x, local[name]) for name, x in raw(run.weights[3]).items())


def test_host_that_stopped_between_folder_and_copy_goes_on(run, monkeypatch):
    run.publish(run.write())
    run.publish(run.write())
    monkeypatch.setattr(codec.weight_sync.bases.folder.FolderBase, "apply", lambda self, update: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        slime.fetch(str(run.engine), 2)
    assert run.versions() == ["weight_v000001"]
    monkeypatch.undo()
    monkeypatch.setenv("CODEC_SLIME_STORE", str(run.store))
    monkeypatch.setenv("CODEC_SLIME_CHECKPOINT", run.args.hf_checkpoint)
    slime.fetch(str(run.engine), 2)
    local = raw(run.weights[0])
    for version in (1, 2):
        apply_as_slime(run.engine / f"weight_v{version:06d}", local, version)


def test_trainer_whose_copy_could_not_be_written_goes_on_with_the_next_version(run, monkeypatch):
    """The store has a version that the trainer's copy lacks, such as after a full disk."""
    run.publish(run.write())
    monkeypatch.setattr(codec.weight_sync.bases.folder.FolderBase, "apply", lambda self, update: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.publish(run.write())
    monkeypatch.undo()
    monkeypatch.setenv("CODEC_SLIME_STORE", str(run.store))
    monkeypatch.setenv("CODEC_SLIME_CHECKPOINT", run.args.hf_checkpoint)
    run.publish(run.write())
    slime.fetch(str(run.engine), 3)
    assert run.versions() == ["weight_v000001", "weight_v000002", "weight_v000003"]


def test_deleted_folder_of_an_old_version_is_an_error(run):
    run.publish(run.write())
    run.publish(run.write())
    slime.fetch(str(run.engine), 2)
    shutil.rmtree(run.engine / "weight_v000001")
    with pytest.raises(codec.StateError, match="was written before, but is missing: empty"):
        slime.fetch(str(run.engine), 1)


def test_version_without_changes_and_a_second_run(run):
    run.weights.append(run.weights[0])
    run.publish(write_as_slime(run.trainer / "weight_v000001", *run.weights, 1, files=0))
    slime.fetch(str(run.engine), 1)
    assert [p.name for p in (run.engine / "weight_v000001").iterdir()] == [INDEX]
    run.weights = run.weights[:1]
    run.begin()
    run.publish(run.write())
    shutil.rmtree(run.engine)
    slime.fetch(str(run.engine), 1)
    assert len(list((run.engine / "weight_v000001").iterdir())) == 2


def edit(change):
    """Return a function that applies `change` to the index of a folder."""

    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def first_file(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def cut(folder):
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-3])


def flip(folder):
    path = first_file(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace(folder, diff):
    """Replace the stored difference of the folder's first tensor."""
    with safetensors.safe_open(first_file(folder), "np") as f:
        tensors, metadata = {n: f.get_tensor(n) for n in f.offset_keys()}, f.metadata()
    tensors[min(tensors)] = np.frombuffer(zstandard.ZstdCompressor().compress(diff), np.uint8)
    safetensors.numpy.save_file(tensors, first_file(folder), metadata)


DAMAGE = {
    "no index": lambda folder: (folder / INDEX).unlink(),
    "half an index": lambda folder: (folder / INDEX).write_text('{"metadata": {"version": "1"'),
    "nested index": lambda folder: (folder / INDEX).write_text("[" * 200_000),
    "missing file": lambda folder: first_file(folder).unlink(),
    "cut file": cut,
    "flipped bit": flip,
    "bomb": lambda folder: replace(folder, bytes(1 << 28)),
    "short difference": lambda folder: replace(folder, bytes(3)),
    "other difference": lambda folder: replace(folder, bytes(50 * 24 * 2)),
    "tensor that no file has": edit(lambda i: i["weight_map"].update(x="model-00000-of-00002.safetensors")),
    "file outside": edit(lambda i: i["weight_map"].update(x="../checkpoint/model-0.safetensors")),
    "another compression": edit(lambda i: i["metadata"].update(compression_format="lz4")),
    "another checksum": edit(lambda i: i["metadata"].update(checksum_format="adler32")),
    "full checkpoint": edit(lambda i: i.update(metadata={"total_size": 5})),
    "version before its base": edit(lambda i: i["metadata"].update(version="000000")),
    "huge version": edit(lambda i: i["metadata"].update(version="9" * 30)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_torn_and_hostile_folders_are_errors(run, name):
    whole = run.write()
    shutil.copytree(whole, run.path / "whole")
    DAMAGE[name](whole)
    with pytest.raises((codec.FrameError, codec.ArgumentError)) as e:
        run.publish(whole)
    assert str(e.value)
    assert [p.name for p in run.store.iterdir()] == ["head"]
    shutil.rmtree(whole)
    shutil.move(run.path / "whole", whole)
    run.publish(whole)  # succeeds, because the failed call did not change the trainer's base


def test_overwrite_positions_outside_a_tensor_are_errors(run):
    folder = run.write(encoding="overwrite")
    replace(folder, np.array([1, 1 << 30], "<u4").tobytes() + b"x")
    with pytest.raises(codec.FrameError, match="does not fit"):
        run.publish(folder)


def test_doubled_versions_gaps_and_other_bases_are_errors(run, monkeypatch):
    one, two = run.write(), run.write()
    with pytest.raises(codec.StateError, match="has base version 1, but the last version of the trainer is 0"):
        run.publish(two)
    run.publish(one)
    with pytest.raises(codec.StateError, match="has base version 0, but the last version of the trainer is 1"):
        run.publish(one)
    with pytest.raises(codec.StateError, match=r"the last version in the store .* is 1"):
        slime.fetch(run.engine, 2)
    run.publish(two)
    other = {name: x for name, x in stepped(run.weights[0], 9).items()}
    folder = run.path / "other"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(other))
    monkeypatch.setenv("CODEC_SLIME_CHECKPOINT", str(folder))
    with pytest.raises(codec.StateError, match="no chain of updates leads from version 0 of these weights"):
        slime.fetch(run.path / "other_engine", 2)
    assert not list((run.path / "other_engine").glob("weight_v*"))
    monkeypatch.delenv("CODEC_SLIME_CHECKPOINT")
    with pytest.raises(codec.ArgumentError, match="CODEC_SLIME_CHECKPOINT"):
        slime.fetch(run.path / "third", 2)


@pytest.mark.parametrize("beside", ["consolidated", "model", "stale tensor in a shard", "no index"])
def test_checkpoint_has_the_tensors_that_its_index_names(tmp_path, beside):
    """Other copies of tensors in the folder of a checkpoint are not read."""
    tensors = {f"layers.{k}.weight": np.full((4, 3), k, np.float32) for k in range(4)}
    places = {name: f"model-{k // 2}.safetensors" for k, name in enumerate(tensors)}
    for file in set(places.values()):
        shard = {name: x for name, x in tensors.items() if places[name] == file}
        if beside == "stale tensor in a shard" and file == "model-1.safetensors":
            shard["layers.0.weight"] = np.zeros((4, 3), np.float32)
        safetensors.numpy.save_file(shard, tmp_path / file)
    if beside in ("model", "no index"):
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    if beside == "consolidated":
        others = {name.replace("layers", "blocks"): x for name, x in tensors.items()}
        safetensors.numpy.save_file(others, tmp_path / "consolidated.safetensors")
    if beside != "no index":
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    base = slime._opened(tmp_path / "base", tmp_path)
    found = {name: slot.memory.tobytes() for name, slot in base.weights.items()}
    base.close()
    assert found == {name: x.tobytes() for name, x in tensors.items()}


def test_checkpoint_without_a_tensor_that_its_index_names_is_an_error(tmp_path):
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model-0.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-0.safetensors", "b": "model-0.safetensors"}}))
    with pytest.raises(codec.ArgumentError, match="has no tensor 'b'"):
        slime._opened(tmp_path / "base", tmp_path)


def test_store_is_signed_by_the_trainer_and_verified_by_engines(run, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    for name in ("CODEC_SIGN_KEY_FILE", "CODEC_VERIFY_KEY_FILE"):
        monkeypatch.setenv(name, str(key))
    run.begin()
    run.publish(run.write())
    run.publish(run.write())  # after it has checked what it has published
    slime.fetch(str(run.engine), 2)
    assert run.versions() == ["weight_v000001", "weight_v000002"]
    head, update = run.store / "head", run.store / f"{3:020d}.update"
    run.publish(run.write())
    listing, data = head.read_bytes(), update.read_bytes()
    head.write_bytes(listing.partition(b', "signature"')[0] + b"}")
    with pytest.raises(codec.FrameError, match="list of updates is not signed"):
        slime.fetch(str(run.engine), 3)
    head.write_bytes(listing)
    update.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(codec.FrameError, match="signature of the update does not match"):
        slime.fetch(str(run.engine), 3)
    assert run.versions() == ["weight_v000001", "weight_v000002"]
    update.write_bytes(data)
    slime.fetch(str(run.engine), 3)
    assert run.versions()[-1] == "weight_v000003"
