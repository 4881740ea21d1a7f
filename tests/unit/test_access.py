"""Tokens, roles, and the commands that make them: who gets in, who does not, and what is on the disk."""

import hashlib
import hmac
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.cli import Commands
from offbeat.cli.tokens import init, token
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server import access
from offbeat.server.access import Right, Role, TokenBook, bearer, check_name, write_private
from offbeat.storage.json_file import read_json
from offbeat.storage.lock import Lock

NAMES = st.text(st.characters(codec="utf-8"), max_size=120)


class Time:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def book(tmp_path: Path, time: Time) -> TokenBook:
    TokenBook.begin(tmp_path / "tokens.json")
    return TokenBook(tmp_path / "tokens.json", time)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(book: TokenBook) -> list[str]:
    return [entry.name for entry in book.entries()]


# --- roles -----------------------------------------------------------------------------------------------------------


def test_every_role_may_do_what_it_is_for_and_no_more() -> None:
    may = {role.value: {right.value for right in Right if role.may(right)} for role in Role}
    assert may == {
        "worker": {"work", "models"},
        "viewer": {"watch", "models"},
        "admin": {"work", "models", "watch", "manage"},
    }


@pytest.mark.parametrize("header", ["Bearer ob_x-Y9", "bearer ob_x-Y9", "BEARER ob_x-Y9"])
def test_a_bearer_header_gives_its_token(header: str) -> None:
    assert bearer(header) == "ob_x-Y9"


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", "ob_x", "Basic ob_x", "Bearer  ob_x", " Bearer ob_x", "Bearer ob_x "),
        *("Bearer ob_x\n", "Bearer\tob_x", "Bearer a b", "Bearer a,b", 'Bearer "a"', "Bearer é", "Bearer =a"),
        *("Bearer ob_\udcff", "Bearer ob_\u212a", "Bearer " + "x" * 513),
    ],
)
def test_any_other_header_gives_none(header: str | None) -> None:
    assert bearer(header) is None


@settings(deadline=None)
@given(st.text())
def test_no_header_makes_the_parser_fail(header: str) -> None:
    for text in (header, f"Bearer {header}"):
        found = bearer(text)
        assert found is None or text.lower() == f"bearer {found}".lower()


# --- adding and checking ---------------------------------------------------------------------------------------------


def test_a_new_token_is_known_by_its_name_and_role(book: TokenBook) -> None:
    worker, admin = book.add("device 7", Role.WORKER), book.add("root", Role.ADMIN)
    assert worker != admin
    assert worker.startswith("ob_")
    assert len(worker) == len("ob_") + 43  # 32 bytes in base64 without padding
    assert bearer(f"Bearer {worker}") == worker
    for given_, name, role in ((worker, "device 7", Role.WORKER), (admin, "root", Role.ADMIN)):
        entry = book.check(given_)
        assert entry is not None
        assert (entry.name, entry.role, entry.revoked) == (name, role, None)


def test_the_file_holds_hashes_and_is_its_owners_alone(book: TokenBook) -> None:
    made = book.add("a", Role.WORKER)
    text = book.path.read_text()
    assert made not in text
    assert made.removeprefix("ob_") not in text
    assert json.loads(text)["tokens"][0]["sha256"] == hashlib.sha256(made.encode()).hexdigest()
    assert mode(book.path) == 0o600
    assert [path.name for path in book.path.parent.iterdir()] == ["tokens.json"]


def test_a_leftover_of_a_dead_process_lends_nobody_its_mode(tmp_path: Path) -> None:
    leftover = tmp_path / f"key.{os.getpid()}.aside"
    leftover.write_text("old")
    leftover.chmod(0o666)
    write_private(tmp_path / "key", b"new")
    assert mode(tmp_path / "key") == 0o600
    assert (tmp_path / "key").read_bytes() == b"new"


@settings(deadline=None)
@given(st.text(st.characters(), max_size=50))
def test_nothing_but_the_token_gets_in(tmp_path_factory: pytest.TempPathFactory, guess: str) -> None:
    path = tmp_path_factory.getbasetemp() / "guessed" / "tokens.json"
    if not path.exists():
        path.parent.mkdir()
        TokenBook.begin(path).add("a", Role.ADMIN)
    assert TokenBook(path).check(guess) is None
    assert TokenBook(path).check(json.loads(path.read_text())["tokens"][0]["sha256"]) is None


def test_every_entry_is_compared_whatever_is_found(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = book.add_all({f"worker-{number}": Role.WORKER for number in range(10)})
    book.revoke("worker-4")
    real, compared = hmac.compare_digest, list[str]()

    def counting(a: str, b: str) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    everybody = [entry.sha256 for entry in book.entries()]
    for given_ in (tokens["worker-0"], tokens["worker-9"], tokens["worker-4"], "ob_unknown", ""):
        compared.clear()
        book.check(given_)
        assert compared == everybody


# --- revoking --------------------------------------------------------------------------------------------------------


def test_a_running_server_sees_a_change_within_a_second(book: TokenBook, time: Time) -> None:
    made, other = book.add("a", Role.WORKER), book.add("b", Role.WORKER)
    assert book.check(made) is not None
    TokenBook(book.path).revoke("a")  # as another process does
    added = TokenBook(book.path).add("c", Role.VIEWER)
    time.now += access.LOOK_S
    assert book.check(made) is None
    assert [entry is not None for entry in (book.check(other), book.check(added))] == [True, True]


def test_the_file_is_looked_at_once_a_second_and_read_when_it_changed(
    book: TokenBook, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reads = book.add("a", Role.WORKER), list[Path]()

    def reading(path: Path) -> dict[str, Any]:
        reads.append(path)
        return read_json(path)

    monkeypatch.setattr(access, "read_json", reading)
    for now in (0.0, 0.5, 0.999, 1.0, 5.0):
        time.now = now
        assert book.check(made) is not None
    assert len(reads) == 1
    os.utime(book.path, ns=(0, 0))
    assert book.check(made) is not None
    assert len(reads) == 1
    time.now = 6.0
    assert book.check(made) is not None
    assert len(reads) == 2


def test_a_revoked_name_can_be_given_again_and_the_old_token_stays_out(book: TokenBook) -> None:
    old = book.add("a", Role.WORKER)
    with pytest.raises(InvalidValue, match="there is a token named 'a'; revoke it first"):
        book.add("a", Role.ADMIN)
    first = book.revoke("a")
    assert first.revoked is not None
    assert book.revoke("a") == first
    new = book.add("a", Role.VIEWER)
    found = book.check(new)
    assert found is not None
    assert found.role is Role.VIEWER
    assert book.check(old) is None
    assert names(book) == ["a"]


def test_revoking_an_unknown_name_says_where_to_look(book: TokenBook) -> None:
    with pytest.raises(InvalidValue, match="no token is named 'x'; see: offbeat token list"):
        book.revoke("x")


# --- names and limits ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(NAMES)
def test_a_name_is_taken_as_it_is_or_refused(name: str) -> None:
    allowed = 1 <= len(name) <= 100 and name.isprintable() and name.strip() == name
    if allowed:
        assert check_name(name) == name
    else:
        with pytest.raises(InvalidValue, match="use 1 to 100 printable characters"):
            check_name(name)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.sampled_from(Role), max_size=5))
def test_what_was_added_reads_back_or_nothing_was(
    tmp_path_factory: pytest.TempPathFactory, roles: dict[str, Role]
) -> None:
    book = TokenBook.begin(tmp_path_factory.mktemp("book") / "tokens.json")
    try:
        tokens = book.add_all(roles)
    except InvalidValue:
        assert book.entries() == ()
        return
    assert [(entry.name, entry.role) for entry in book.entries()] == list(roles.items())
    found = {name: book.check(made) for name, made in tokens.items()}
    assert [entry and entry.name for entry in found.values()] == list(roles)


def test_a_book_has_a_limit(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ENTRIES_MAX", 2)
    book.add_all({"a": Role.WORKER, "b": Role.WORKER})
    with pytest.raises(InvalidValue, match="would have 3 tokens; at most 2"):
        book.add("c", Role.WORKER)
    assert names(book) == ["a", "b"]


def test_a_lock_that_is_never_let_go_is_waited_for_only_so_long(
    book: TokenBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOCK_TRIES", 3)
    lock = Lock.take(book.path.parent / access.LOCK)
    with pytest.raises(InvalidValue, match=f"being written by process {os.getpid()}"):
        book.add("a", Role.WORKER)
    lock.release()
    book.add("a", Role.WORKER)


ADDS = """
import sys
from pathlib import Path
from offbeat.server.access import Role, TokenBook
book, who = TokenBook(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for number in range(10):
    print(book.add(f"{who}-{number}", Role.WORKER))
"""


def test_four_processes_that_add_at_once_lose_nothing(book: TokenBook) -> None:
    commands = [[sys.executable, "-c", ADDS, str(book.path), str(who)] for who in range(4)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    made = [line for process in processes for line in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(names(book)) == sorted(f"{who}-{number}" for who in range(4) for number in range(10))
    found = [book.check(given_) for given_ in made]
    assert [entry and entry.name for entry in found] == [f"{who}-{number}" for who in range(4) for number in range(10)]


# --- files that are not as they should be ----------------------------------------------------------------------------

GOOD: dict[str, Any] = {"name": "a", "role": "admin", "sha256": "0" * 64, "created": "2026-01-31", "revoked": None}
DAMAGED = {
    "": "cannot read",
    "{": "cannot read",
    "[]": "must be a JSON object",
    "{}": "no list of tokens",
    '{"tokens": {}}': "no list of tokens",
    '{"tokens": [7]}': "token 1 in .* is damaged",
    json.dumps({"tokens": [GOOD, GOOD]}): "'a' is twice",
    json.dumps({"tokens": [GOOD, GOOD | {"name": " "}]}): r"token 2 in .* is damaged \(' ' is no name",
    json.dumps({"tokens": [GOOD | {"role": "god"}]}): "'god' is not a valid Role",
    json.dumps({"tokens": [GOOD | {"sha256": "0"}]}): "64 hexadecimal",
    json.dumps({"tokens": [GOOD | {"sha256": 0}]}): "is damaged",
    json.dumps({"tokens": [GOOD | {"created": "today"}]}): "is damaged",
    json.dumps({"tokens": [GOOD | {"revoked": ""}]}): "is damaged",
    json.dumps({"tokens": [GOOD | {"revoked": False}]}): "is damaged",
    json.dumps({"tokens": [{k: v for k, v in GOOD.items() if k != "revoked"}]}): "'revoked' is missing",
}


@pytest.mark.parametrize(("text", "says"), DAMAGED.items())
def test_a_damaged_file_is_one_clear_line_and_lets_nobody_in(book: TokenBook, time: Time, text: str, says: str) -> None:
    made, good = book.add("a", Role.ADMIN), book.path.read_bytes()
    assert book.check(made) is not None
    book.path.write_text(text)
    time.now += access.LOOK_S
    for _ in range(2):
        with pytest.raises(InvalidValue, match=says) as refused:
            book.check(made)
        assert "\n" not in str(refused.value)
    with pytest.raises(InvalidValue, match=says):
        book.add("b", Role.ADMIN)
    assert book.path.read_text() == text
    book.path.write_bytes(good)
    assert book.check(made) is not None


@settings(deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, 40))
def test_whatever_is_damaged_nothing_but_a_refusal_comes_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, cut: int
) -> None:
    path, good = tmp_path_factory.mktemp("damaged") / "tokens.json", json.dumps({"tokens": [GOOD]}).encode()
    path.write_bytes(good[:at] + data + good[at + cut :])
    try:
        entries = TokenBook(path).entries()
    except InvalidValue:
        return
    assert len(entries) <= 1


def test_a_missing_file_lets_nobody_in_and_says_what_to_do(book: TokenBook, time: Time) -> None:
    made = book.add("a", Role.ADMIN)
    assert book.check(made) is not None
    book.path.unlink()
    time.now += access.LOOK_S
    for _ in range(2):
        with pytest.raises(InvalidValue, match="No such file or directory; make one with: offbeat init"):
            book.check(made)
    with pytest.raises(InvalidValue, match="offbeat init"):
        book.add("b", Role.ADMIN)
    assert list(book.path.parent.iterdir()) == []


def test_a_book_is_begun_once(book: TokenBook) -> None:
    with pytest.raises(InvalidValue, match="is there already; add to it with: offbeat token add"):
        TokenBook.begin(book.path)
    with pytest.raises(OffbeatError, match=r"cannot write .*No such file or directory"):
        TokenBook.begin(book.path.parent / "nowhere" / "tokens.json")


# --- offbeat init and offbeat token ----------------------------------------------------------------------------------

MAIN = Commands("offbeat", commands={"init": init, "token": token})


def offbeat(*arguments: str | Path) -> Result:
    return CliRunner().invoke(MAIN, [str(argument) for argument in arguments])


def answer(*arguments: str | Path) -> Any:
    result = offbeat(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    """The one line that the user sees."""
    result = offbeat(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_init_shows_every_token_once_and_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "my access"
    result = offbeat("init", folder, "--host", "fed.example.org", "--host", "10.0.0.7", "--worker", "a")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[:4]]
    assert [row[:2] for row in rows] == [["name", "role"], ["admin", "admin"], ["viewer", "viewer"], ["a", "worker"]]
    book = TokenBook(folder / "tokens.json")
    for name, role, made in rows[1:]:
        entry = book.check(made)
        assert entry is not None
        assert (entry.name, entry.role) == (name, role)
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert f"offbeat serve TASK --access '{folder}' --host 0.0.0.0 --settings '{folder}/settings.toml'" in lines
    work = f"offbeat work TASK --server https://fed.example.org:7733 --ca '{folder}/ca.pem' --token {rows[3][2]}"
    assert work in lines
    files = {path.name: mode(path) & 0o077 for path in folder.iterdir() if path.suffix not in (".pem", ".toml")}
    assert files == {"ca.key": 0, "server.key": 0, "tokens.json": 0}
    assert not any(rows[1][2] in path.read_text() for path in folder.iterdir())


def test_init_as_json_has_tokens_paths_and_commands(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    said = answer("init", folder, "--host", "2001:db8::1")
    assert set(said["tokens"]) == {"admin", "viewer", "worker-1"}
    assert [Path(said[name]).is_file() for name in ("ca", "certificate", "key")] == [True] * 3
    assert (said["dir"], said["token_files"]) == (str(folder), {})
    assert said["hosts"] == ["2001:db8::1", "localhost", "127.0.0.1", "::1"]
    assert "https://[2001:db8::1]:7733" in said["next"]["work"]
    assert said["next"]["work"].endswith(said["tokens"]["worker-1"])


def test_init_writes_tokens_to_files_when_asked_and_then_shows_none(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    result = offbeat("init", folder, "--write-tokens")
    assert result.exit_code == 0, result.output
    assert "ob_" not in result.stdout
    assert f"--token-file {folder}/tokens/worker-1.token\n" in result.stdout
    assert f"for others: offbeat init {folder} --renew --host NAME" in result.stdout
    written = {path.name: path for path in (folder / "tokens").iterdir()}
    assert set(written) == {"admin.token", "viewer.token", "worker-1.token"}
    assert {mode(path) for path in written.values()} == {0o600}
    assert mode(folder / "tokens") == 0o700
    entry = TokenBook(folder / "tokens.json").check(written["worker-1.token"].read_text().strip())
    assert entry is not None
    assert entry.name == "worker-1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--worker", "a", "--worker", "a"), "'a' is given twice"),
        (("--worker", "admin"), "admin and viewer are made anyway"),
        (("--worker", "a\nb"), "printable characters"),
        (("--worker", "../a", "--write-tokens"), "cannot name a file"),
        (("--host", "https://fed.example.org"), "is no host; use a DNS name or an IP address"),
        (("--host", "0.0.0.0"), "give the name or address that workers connect to"),  # noqa: S104 (nothing listens)
        (("--renew", "--worker", "a"), "offbeat token add DIR NAME"),
        (("--renew",), "server.pem: No such file or directory"),
    ],
)
def test_init_refuses_before_it_makes_anything(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal("init", tmp_path / "access", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_init_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert f"{tmp_path} is not empty; choose a new folder" in refusal("init", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_init_renews_the_certificate_and_leaves_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "access"
    hosts = answer("init", folder, "--host", "one.example")["hosts"]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = answer("init", folder, "--renew")
    assert said["hosts"] == hosts
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.pem", "server.key"}
    result = offbeat("init", folder, "--renew", "--host", "two.example")
    assert result.stdout.startswith(f"Renewed {folder}/server.pem until ")
    assert "for two.example, localhost, 127.0.0.1, ::1." in result.stdout


def test_tokens_are_added_listed_and_revoked(tmp_path: Path) -> None:
    TokenBook.begin(tmp_path / "tokens.json")
    result = offbeat("token", "add", tmp_path, "device 7")
    made = result.stdout.strip()
    assert "device 7 (worker); it is not shown again" in result.stderr
    boss = answer("token", "add", tmp_path, "boss", "--role", "admin")
    book = TokenBook(tmp_path / "tokens.json")
    assert [e and e.role for e in (book.check(made), book.check(boss["token"]))] == [Role.WORKER, Role.ADMIN]
    assert offbeat("token", "revoke", tmp_path, "device 7").stdout.startswith("Revoked device 7;")
    assert answer("token", "revoke", tmp_path, "boss")["revoked"]
    listed = offbeat("token", "list", tmp_path).stdout
    assert listed.splitlines()[0].split() == ["name", "role", "created", "revoked"]
    assert [line.split("  ")[0] for line in listed.splitlines()[1:]] == ["device 7", "boss"]
    assert [entry["name"] for entry in answer("token", "list", tmp_path)["tokens"]] == ["device 7", "boss"]
    assert "ob_" not in listed


def test_token_commands_refuse_in_one_line(tmp_path: Path) -> None:
    assert "make one with: offbeat init" in refusal("token", "list", tmp_path / "nowhere")
    TokenBook.begin(tmp_path / "tokens.json").add("a", Role.WORKER)
    assert "revoke it first, or choose another name" in refusal("token", "add", tmp_path, "a")
    assert "no token is named 'b'" in refusal("token", "revoke", tmp_path, "b")
    (tmp_path / "tokens.json").write_text("{")
    assert "cannot read" in refusal("token", "add", tmp_path, "c")
