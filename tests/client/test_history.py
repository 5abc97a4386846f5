"""The file of earlier conversations: private, bounded, whole, shared by processes, and gone when told to."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.history import History, _bytes, _parse, forget, history_folder

SERVERS = ["http://127.0.0.1:8765"]


def conversation(*ids):
    return np.array(ids, np.int32)


def lists(conversations):
    return [tokens.tolist() for tokens in conversations]


@pytest.fixture
def history(tmp_path):
    return History("a-tokenizer", SERVERS, 1000, tmp_path / "history")


def test_history_keeps_conversations_oldest_first(history):
    history.add(conversation(1, 2, 3))
    history.add(conversation(4, 5))
    assert lists(history.load()) == [[1, 2, 3], [4, 5]]


def test_conversation_that_goes_on_replaces_its_beginning(history):
    history.add(conversation(1, 2, 3, 4, 5))
    history.add(conversation(9, 9))
    history.add(conversation(1, 2, 3, 7, 8, 6, 6))  # the last two tokens of the earlier turn read otherwise now
    history.add(conversation(9, 9))
    assert lists(history.load()) == [[1, 2, 3, 7, 8, 6, 6], [9, 9]]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30), max_size=12), st.integers(1, 60))
def test_history_never_holds_more_than_its_bound_and_keeps_the_latest(tmp_path_factory, conversations, bound):
    history = History("a-tokenizer", SERVERS, bound, tmp_path_factory.mktemp("history"))
    for tokens in conversations:
        history.add(conversation(*tokens))
        kept = lists(history.load())
        assert sum(map(len, kept)) <= bound
        assert kept[-1] == tokens[-bound:]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=8))
def test_file_gives_back_what_was_put_in(conversations):
    assert lists(_parse(_bytes([conversation(*tokens) for tokens in conversations]))) == conversations


@given(st.binary(max_size=200))
def test_any_bytes_are_a_history_or_refused(data):
    for one in (data, b"paceline history 1\n" + data):
        try:
            _parse(one)
        except ValueError:
            continue
        assert one == _bytes(_parse(one))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "text"])
def test_damaged_file_is_left_out_with_a_warning_and_replaced(history, caplog, damage):
    history.add(conversation(1, 2, 3))
    data = bytearray(history.path.read_bytes())
    data[-3] ^= 1
    broken = {"flipped": bytes(data), "cut": bytes(data[:-4]), "empty": b"", "text": b"hello"}[damage]
    history.path.write_bytes(broken)
    with caplog.at_level(logging.WARNING):
        assert history.load() == []
    assert "leaving out earlier conversations" in caplog.text
    history.add(conversation(7))
    assert caplog.text.count("leaving out earlier conversations") == 1
    assert lists(history.load()) == [[7]]


def test_file_that_is_far_too_large_is_left_out_unread(history, caplog):
    history.add(conversation(1))
    with history.path.open("r+b") as file:
        file.truncate(1 << 27)
    assert history.load() == []
    assert "MiB" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_only_the_owner_can_read_what_is_kept(history):
    history.add(conversation(1, 2))
    history.add(conversation(3))
    assert stat.S_IMODE(history.path.parent.stat().st_mode) == 0o700
    for path in history.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_other_tokenizers_and_other_servers_have_histories_of_their_own(tmp_path):
    def history(tokenizer, *servers):
        return History(tokenizer, servers, 1000, tmp_path)

    history("a", "http://one").add(conversation(1, 2))
    assert history("b", "http://one").load() == []
    assert history("a", "http://two").load() == []
    assert history("a", "http://one", "http://two").load() == []
    history("a", "http://two", "http://one").add(conversation(5))
    assert lists(history("a", "http://one", "http://two").load()) == [[5]]
    hostile = history("../../etc/passwd", "../..")
    assert hostile.path.parent == tmp_path


def test_forget_deletes_every_history_and_what_was_half_written(history, tmp_path):
    folder = history.path.parent
    History("another", SERVERS, 100, folder).add(conversation(1))
    history.add(conversation(2))
    (folder / f"{history.path.name}.123.part").write_bytes(b"half")
    assert forget(folder) == 2
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert history.load() == []
    assert forget(folder) == 0
    assert forget(tmp_path / "nowhere") == 0


def test_histories_are_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    assert history_folder() == tmp_path / "history"


_WRITER = """
import sys
import numpy as np
from pathlib import Path
from paceline.client.history import History
history = History("shared", ["http://one"], 100_000, Path(sys.argv[1]))
for number in range(25):
    history.add(np.array([int(sys.argv[2]), number, 5, 5], np.int32))
"""


def test_several_processes_lose_nothing_of_each_other(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(each)]) for each in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    kept = lists(History("shared", ["http://one"], 100_000, tmp_path).load())
    assert sorted(kept) == sorted([writer, number, 5, 5] for writer in range(3) for number in range(25))
    assert not list(tmp_path.glob("*.part"))
