"""HashedFile: what is written and hashed in a thread is what was given, however it is cut; errors of the thread reach the caller."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.shard_file import PIECE, HashedFile


@given(st.lists(st.lists(st.sampled_from([0, 1, 511, 9000, 70_000, 400_000, 2 * PIECE + 7]), max_size=6), max_size=5))
def test_the_file_has_what_was_given_and_the_digest_is_that_of_the_file(tmp_path_factory: pytest.TempPathFactory, lengths: Any) -> None:
    path = tmp_path_factory.mktemp("file") / "a"
    whole, at = b"", 0
    with HashedFile(str(path)) as file:
        for group in lengths:
            parts = [bytes([len(whole) % 251]) * length for length in group]
            whole += b"".join(parts)
            at += sum(group)
            file.write(parts, at)
        digest = file.finish()
    assert path.read_bytes() == whole
    assert digest == hashlib.sha256(whole).hexdigest()


def test_much_at_once_is_written_in_pieces_and_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def short(descriptor: int, parts: list[bytes]) -> int:
        pieces.append(sum(map(len, parts)))
        return os.write(descriptor, parts[0][:1000])

    monkeypatch.setattr(os, "writev", short)
    parts = [os.urandom(100_000) for _ in range(40)]
    with HashedFile(str(tmp_path / "a")) as file:
        file.write(parts, 4_000_000)
        digest = file.finish()
    assert max(pieces) < PIECE + 100_000
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    assert digest == hashlib.sha256(b"".join(parts)).hexdigest()


def test_an_error_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, parts: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with HashedFile(str(tmp_path / "a")) as file:
        file.write([bytes(PIECE)], PIECE)
        with pytest.raises(OSError, match="No space left"):
            file.finish()
