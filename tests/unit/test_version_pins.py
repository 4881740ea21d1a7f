"""A version that an update is being judged against stays on the disk until the decision is there."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.server.version_store import VersionGone, VersionStore
from offbeat.storage.disk import Disk

X = Model.of({"x": np.zeros(1000, np.float32)})


@pytest.fixture
def versions(tmp_path: Path) -> VersionStore:
    """Five versions on the disk, of which memory has the newest only."""
    store = VersionStore(tmp_path / "versions", X.layout, Disk(), on_disk=True, bytes_max=1)
    for t in range(5):
        store.add(t, X)
    return store


def there(versions: VersionStore) -> set[int]:
    return {int(file.stem) for file in versions.path.glob("*.safetensors")}


def test_what_is_pinned_when_pruning_begins_stays(versions: VersionStore) -> None:
    with versions.pinned(1):
        versions.note_pins()
    versions.prune(needed={3}, newest=4)
    assert there(versions) == {1, 3, 4}


def test_what_is_pinned_and_judged_while_pruning_goes_on_stays(versions: VersionStore) -> None:
    versions.note_pins()
    with versions.pinned(2):  # the pruning read the ledger before this decision was written
        assert versions.lasts(2)
    versions.prune(needed=set(), newest=4)
    assert there(versions) == {2, 4}
    assert versions.of(2)


def test_the_next_pruning_knows_by_the_ledger(versions: VersionStore) -> None:
    with versions.pinned(2):
        pass
    versions.note_pins()
    versions.prune(needed=set(), newest=4)
    assert there(versions) == {4}


def test_a_version_that_only_memory_has_does_not_last(tmp_path: Path) -> None:
    versions = VersionStore(tmp_path / "versions", X.layout, Disk(), on_disk=True)
    for t in range(3):
        versions.add(t, X)
    versions.note_pins()
    versions.prune(needed=set(), newest=2)
    assert versions.pull(1) is not None
    with versions.pinned(1):
        assert not versions.lasts(1)
        assert versions.lasts(2)


def test_a_version_that_was_pruned_is_gone(versions: VersionStore) -> None:
    versions.note_pins()
    versions.prune(needed=set(), newest=4)
    with versions.pinned(0), pytest.raises(VersionGone):
        versions.of(0)


@pytest.mark.parametrize(
    ("leased_max", "bytes_max", "kept"), [(0, 1 << 30, 64), (200, 1 << 30, 200), (200, 400_000, 25)]
)
def test_as_many_versions_can_be_pulled_as_may_be_leased_at_a_time(
    leased_max: int, bytes_max: int, kept: int, tmp_path: Path
) -> None:
    store = VersionStore(tmp_path, X.layout, Disk(), on_disk=False, bytes_max=bytes_max, leased_max=leased_max)
    for t in range(300):
        store.add(t, X)
    assert [t for t in range(300) if store.pull(t) is not None] == [*range(300 - kept, 300)]
