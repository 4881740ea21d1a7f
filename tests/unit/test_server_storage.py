"""UpdateStore, checkpoints and versions of a served run on the disk, and the mixer that reads them."""

import hashlib
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.kernel import Updater
from offbeat.core.layout import Layout, Model, Slot, layout_from, layout_to
from offbeat.core.rules import Mix
from offbeat.core.vectors import Standing, Vectors
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.protocol.messages import Decision, Lease, MixUpdate, Outcome, PublishVersion
from offbeat.server import mixer as mixer_module
from offbeat.server.driver import Clock
from offbeat.server.mixer import Mixer, MixOrder, next_pass
from offbeat.server.update_store import DiskFull, UpdateStore, WrongDigest, WrongOffset
from offbeat.server.version_store import VersionStore
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.wire import BadPayload, body_of, header_of

X_0 = Model.of({"x": np.arange(1000, dtype=np.float32), "n": np.array(3)}, buffers=["n"])


def model(seed: int) -> Model:
    x = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    return Model.of({"x": x, "n": np.array(seed)}, buffers=["n"])


def packed(of: Model) -> bytes:
    return header_of(of.layout) + b"".join(bytes(part) for part in body_of(of))


DATA = packed(model(7))
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def updates(tmp_path: Path) -> UpdateStore:
    return UpdateStore(tmp_path / "updates", X_0.layout, Disk(), bytes_max=10 * len(DATA))


# --- updates ---------------------------------------------------------------------------------------------------------


def test_an_update_comes_in_and_reads_back(updates: UpdateStore) -> None:
    upload = updates.begin(7, len(DATA))
    for start in range(0, len(DATA), 999):
        upload.write(DATA[start : start + 999])
    assert not updates.has(7)
    upload.finish(DIGEST)
    assert updates.has(7)
    assert updates.tasks() == {7}
    assert updates.bytes() == len(DATA)
    there = updates.mapped(7)
    assert np.array_equal(there.vector, model(7).vector)
    assert there.carried["n"] == 7
    assert updates.digest(7) == DIGEST
    assert updates.offset(7) == 0


def test_an_upload_that_was_cut_off_goes_on_where_it_stood(updates: UpdateStore) -> None:
    upload = updates.begin(7, len(DATA))
    upload.write(DATA[:1500])
    upload.close()
    assert updates.offset(7) == 1500
    with pytest.raises(WrongOffset) as wrong:
        updates.resume(7, len(DATA), 1400)
    assert wrong.value.offset == 1500
    upload = updates.resume(7, len(DATA), 1500)
    upload.write(DATA[1500:])
    upload.finish(DIGEST)
    assert updates.digest(7) == DIGEST


def test_a_wrong_digest_starts_over(updates: UpdateStore) -> None:
    upload = updates.begin(7, len(DATA))
    upload.write(DATA)
    with pytest.raises(WrongDigest, match="again from its start"):
        upload.finish("0" * 64)
    assert (updates.offset(7), updates.has(7), updates.bytes()) == (0, False, 0)


def test_what_is_wrong_is_noticed_while_it_comes_in(updates: UpdateStore) -> None:
    upload = updates.begin(1, 100)
    with pytest.raises(BadPayload, match="more than the 100 bytes"):
        upload.write(b"\0" * 101)
    with pytest.raises(BadPayload, match="no safetensors file"):
        updates.begin(2, 100).write(b"garbage garbage")
    other = packed(Model.of({"y": np.zeros(5, np.float32)}))
    with pytest.raises(LayoutMismatch, match="'x' is missing"):
        updates.begin(3, len(other)).write(other)
    short = updates.begin(4, len(DATA))
    short.write(DATA[:-1])
    with pytest.raises(BadPayload, match="of the"):
        short.finish(DIGEST)
    assert updates.tasks() == set()


def test_the_room_on_the_disk_is_bounded(tmp_path: Path) -> None:
    updates = UpdateStore(tmp_path / "updates", X_0.layout, Disk(), bytes_max=2 * len(DATA) + 10)
    for task in (1, 2):
        upload = updates.begin(task, len(DATA))
        upload.write(DATA)
        upload.finish(DIGEST)
    with pytest.raises(DiskFull, match="used up"):
        updates.begin(3, len(DATA))
    updates.remove({1})
    coming = updates.begin(3, len(DATA))
    with pytest.raises(DiskFull):
        updates.begin(4, len(DATA))
    coming.close()  # cut off: whoever needs the room gets it
    updates.begin(4, len(DATA)).close()
    assert updates.offset(3) == 0
    assert not (tmp_path / "updates" / "3.part").exists()
    assert UpdateStore(tmp_path / "updates", X_0.layout, Disk(), bytes_max=10**9).tasks() == {2}


def test_what_all_updates_take_is_known_without_looking_at_them(updates: UpdateStore) -> None:
    """It is asked for on every turn of the driver, and there may be millions of them."""
    for task in (1, 2):
        upload = updates.begin(task, len(DATA))
        upload.write(DATA)
        upload.finish(DIGEST)
    updates.begin(3, 500).close()

    class Watched(dict[int, int]):
        looked = 0

        def values(self) -> Any:
            Watched.looked += 1
            return super().values()

    updates._sizes, updates._coming = Watched(updates._sizes), Watched(updates._coming)
    assert updates.bytes() == 2 * len(DATA) + 500
    updates.discard(3)
    updates.remove({1, 7})
    assert updates.bytes() == len(DATA)
    updates.begin(2, len(DATA)).close()
    assert updates.bytes() == 2 * len(DATA), "the whole one stays until the new one is whole"
    assert Watched.looked == 0


def test_a_missing_or_damaged_update_is_named(updates: UpdateStore) -> None:
    with pytest.raises(InvalidValue, match=r"5\.safetensors is missing"):
        updates.mapped(5)
    updates.whole(5).write_bytes(b"")
    with pytest.raises(InvalidValue, match="empty"):
        updates.mapped(5)
    updates.whole(5).write_bytes(DATA[:-1])
    with pytest.raises(BadPayload, match="describes"):
        updates.mapped(5)


# --- checkpoints and versions ----------------------------------------------------------------------------------------


def test_checkpoints_read_back_and_the_newest_two_stay(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "checkpoints", X_0.layout, Disk())
    for mark in (3, 10, 24):
        kept.write(Checkpoint(mark, {"mark": mark}, Standing(model(mark).freeze(), X_0)))
    assert kept.prune() == 10
    assert kept.marks() == [24, 10]
    newest = next(kept.usable())
    assert (newest.mark, newest.state) == (24, {"mark": 24})
    assert np.array_equal(newest.w.vector, model(24).vector)
    assert np.array_equal(newest.x.vector, X_0.vector)


@pytest.mark.parametrize("name", ["24.json", "24.w.safetensors", "24.x.safetensors"])
def test_a_damaged_checkpoint_costs_time_only(name: str, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "checkpoints", X_0.layout, Disk())
    for mark in (10, 24):
        kept.write(Checkpoint(mark, {}, Standing(model(mark).freeze(), X_0)))
    (kept.path / name).write_bytes(b"{ damaged")
    assert [checkpoint.mark for checkpoint in kept.usable()] == [10]
    with pytest.raises(InvalidValue, match=r"checkpoint 24 .* is damaged"):
        kept.read(24)


def test_versions_are_few_in_memory_and_all_that_is_needed_on_disk(tmp_path: Path) -> None:
    room = 3 * 4 * X_0.layout.size
    versions = VersionStore(tmp_path / "versions", X_0.layout, Disk(), on_disk=True, bytes_max=room)
    for t in range(6):
        versions.add(t, model(t).freeze())
    assert [versions.pull(t) is not None for t in range(6)] == [False, False, False, False, True, True]
    assert np.array_equal(versions.of(1).vector, model(1).vector)
    versions.prune({1}, newest=4)
    assert sorted(int(file.stem) for file in versions.path.iterdir()) == [1, 4, 5]
    with pytest.raises(InvalidValue, match="version 2"):
        versions.of(2)
    light = VersionStore(tmp_path / "none", X_0.layout, Disk(), on_disk=False)
    light.add(0, X_0)
    light.prune(set(), 0)
    assert not light.path.exists()


def test_most_of_the_room_is_for_those_who_still_read(tmp_path: Path) -> None:
    room = 5 * 4 * X_0.layout.size
    versions = VersionStore(tmp_path / "versions", X_0.layout, Disk(), on_disk=False, bytes_max=room)
    readers, cut = [ExitStack() for _ in range(5)], list[int]()

    def now_cut() -> list[int]:
        cut.clear()
        versions.cut_off_oldest()
        return cut

    for t, reader in enumerate(readers):
        versions.add(t, model(t).freeze())
        assert reader.enter_context(versions.reading(t, partial(cut.append, t))) is not None
    assert now_cut() == [], "two are kept, and three older ones are being read"
    versions.add(5, model(5).freeze())
    assert now_cut() == [0]
    readers[1].close()
    assert now_cut() == []
    assert [t for t in range(6) if versions.pull(t) is not None] == [0, 2, 3, 4, 5]
    for reader in readers:
        reader.close()
    with versions.reading(1, cut.clear) as gone:
        assert gone is None
    assert [t for t in range(6) if versions.pull(t) is not None] == [4, 5]


@pytest.mark.parametrize(("megabytes", "kept"), [(1, 64), (10, 26), (100, 2), (300, 2), (500, 1), (2000, 1)])
def test_of_large_models_few_are_kept_that_nobody_reads(megabytes: int, kept: int, tmp_path: Path) -> None:
    layout = Layout((Slot("x", (megabytes * 250_000,), 0),), parameter_size=megabytes * 250_000)
    versions = VersionStore(tmp_path, layout, Disk(), on_disk=False)
    for t in range(70):
        versions.add(t, X_0)
    assert [t for t in range(70) if versions.pull(t) is not None] == [*range(70 - kept, 70)]


def test_a_layout_reads_back() -> None:
    tied = np.zeros((2, 3), np.float32)
    of = Model.of({"a": tied, "b": tied, "m": np.ones(2, np.float32), "n": np.array(1)}, buffers=["m", "n"]).layout
    assert layout_from(layout_to(of)) == of
    assert layout_from(layout_to(of)).fingerprint == of.fingerprint
    with pytest.raises(InvalidValue, match="no layout"):
        layout_from({"slots": [[1]]})


def test_the_clock_goes_on_and_never_back() -> None:
    moments = iter([100.0, 101.0, 100.5, 103.0])
    clock = Clock(40.0, lambda: next(moments))
    assert [clock.now(), clock.now(), clock.now()] == [41.0, 41.0, 43.0]


# --- mixing ----------------------------------------------------------------------------------------------------------


def order(task: int, *, publish: bool = True, keep: float = 0.5, new: float = 0.5) -> MixUpdate:
    lease = Lease(task, 0, 0, 0, 0, 0.0, 1.0)
    return MixUpdate(Decision(task, 0.0, lease, Outcome.APPLIED, task, 0, Mix(keep, new, 0.0, publish), 1, 1))


def mixer_of(done: object = None) -> Mixer:
    vectors = Vectors(Standing.first(X_0), Updater())
    return Mixer(vectors, model, lambda _tau: X_0, done or (lambda _: None))  # type: ignore[arg-type]


def test_one_pass_gives_the_bits_of_one_by_one() -> None:
    together, alone = mixer_of(), mixer_of()
    mixed = together.apply([order(1), order(2), order(3)])
    for task in (1, 2, 3):
        alone.apply([order(task)])
    assert mixed.sequences == (1, 2, 3)
    assert mixed.t == 3
    assert together.x.vector.tobytes() == alone.x.vector.tobytes()
    assert together.x.carried["n"] == 3
    assert X_0.vector.tobytes() == np.arange(1000, dtype=np.float32).tobytes()


def test_a_pass_ends_with_the_last_version_that_it_publishes() -> None:
    """What is mixed after a version is not in it."""
    waiting: deque[MixOrder] = deque(
        [order(1, publish=False), order(2), order(3, publish=False), order(4, publish=False)]
    )
    assert [o.decision.sequence for o in next_pass(waiting) if isinstance(o, MixUpdate)] == [1, 2]
    assert [o.decision.sequence for o in next_pass(waiting) if isinstance(o, MixUpdate)] == [3, 4]
    assert next_pass(waiting) == []
    assert len(next_pass(deque(order(n) for n in range(100)))) == mixer_module.PASS_MAX
    mixer = mixer_of()
    assert mixer.apply([order(1, publish=False)]).t is None
    assert mixer.x is X_0
    assert mixer.apply([PublishVersion(1)]).t == 1
    assert mixer.x is mixer.w


def test_the_mixers_thread_mixes_everything_in_order_and_then_ends() -> None:
    passes: list[object] = []
    mixer, alone = mixer_of(passes.append), mixer_of()
    mixer.start()
    for task in range(1, 30):
        mixer.put(order(task))
        alone.apply([order(task)])
    mixer.stop()
    assert [n for done in passes for n in done.sequences] == list(range(1, 30))  # type: ignore[attr-defined]
    assert mixer.x.vector.tobytes() == alone.x.vector.tobytes()


def test_a_failure_of_the_mixer_is_told() -> None:
    told: list[object] = []
    mixer = mixer_of(told.append)
    mixer._update_of = lambda _task: (_ for _ in ()).throw(InvalidValue("gone"))
    mixer.start()
    mixer.put(order(1))
    mixer.stop()
    assert [str(error) for error in told] == ["gone"]
