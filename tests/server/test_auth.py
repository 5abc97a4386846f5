"""Keys, hosts and origins: who may come in, and what is never said about a key."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from paceline.server import auth
from paceline.server.auth import Doorkeeper, KeyRing
from paceline.shared.errors import AuthError, UsageError

KEY = "correct-horse-battery"


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    file = tmp_path / "keys"
    file.write_text(f"# for tests\n\nalice:{KEY}\nbob : another:key:with:colons \n", encoding="utf-8")
    return KeyRing.load(file)


def test_no_file_lets_everybody_in() -> None:
    assert KeyRing.load(None).check(None) == ""


def test_key_names_its_holder(ring: KeyRing) -> None:
    assert ring.check(f"Bearer {KEY}") == "alice"
    assert ring.check("bearer another:key:with:colons") == "bob"


@pytest.mark.parametrize("header", [None, "", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"])
def test_wrong_or_missing_key_is_refused_without_repeating_it(ring: KeyRing, header: str | None) -> None:
    with pytest.raises(AuthError) as caught:
        ring.check(header)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "nokeyhere\n", "a:short\n", "a:long-enough\na:long-enough-2\n", ":long-enough\n"]
)
def test_bad_key_file_is_refused_by_line_without_its_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        KeyRing.load(file)
    assert "long-enough" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot read"):
        KeyRing.load(tmp_path / "missing")


def test_keys_are_compared_in_constant_time() -> None:
    """U074, statically: the module compares digests with hmac and with nothing else."""
    source = inspect.getsource(KeyRing.check)
    assert "hmac.compare_digest" in source
    assert "== digest" not in inspect.getsource(auth)


@pytest.mark.parametrize(
    ("host", "header", "admitted"),
    [
        ("127.0.0.1", "127.0.0.1:8765", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "[::1]:8765", True),
        ("127.0.0.1", None, True),
        ("127.0.0.1", "example.com", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("0.0.0.0", "example.com", True),
    ],
)
def test_loopback_server_answers_to_loopback_names_only(host: str, header: str | None, admitted: bool) -> None:
    assert Doorkeeper.of(host, (), ()).admits_host(header) is admitted


def test_operator_may_list_hosts() -> None:
    keeper = Doorkeeper.of("0.0.0.0", ("api.example.com",), ())
    assert keeper.admits_host("API.example.com:443")
    assert not keeper.admits_host("other.example.com")
    assert Doorkeeper.of("127.0.0.1", ("*",), ()).admits_host("example.com")


@pytest.mark.parametrize(
    ("origins", "origin", "admitted"),
    [
        ((), None, True),
        ((), "http://127.0.0.1:8765", True),
        ((), "http://127.0.0.1:9999", False),
        ((), "https://evil.example", False),
        ((), "null", False),
        (("localhost",), "http://localhost:3000", True),
        (("localhost",), "https://evil.example", False),
        (("https://app.example",), "https://app.example", True),
        (("*",), "https://evil.example", True),
    ],
)
def test_pages_of_other_sites_stay_out(origins: tuple[str, ...], origin: str | None, admitted: bool) -> None:
    assert Doorkeeper.of("127.0.0.1", (), origins).admits_origin(origin, "127.0.0.1:8765") is admitted
