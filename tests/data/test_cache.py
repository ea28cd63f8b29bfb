import threading
from pathlib import Path

import pytest

from atoll.data.cache import cached_folder


def test_processes_that_start_together_build_once() -> None:
    built: list[Path] = []
    together = threading.Barrier(4)

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "result").write_text("done")

    def ask() -> None:
        together.wait()
        folder = cached_folder("things/key", build)
        assert folder is not None
        results.append((folder / "result").read_text())

    results: list[str] = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 4
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing(cache_home: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("things/key", build)
    assert not [path for path in (cache_home / "atoll" / "things").iterdir() if path.is_dir()]
    assert cached_folder("things/key", lambda folder: (folder / "whole").touch()) is not None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_folder("things/key", lambda folder: None) is None
