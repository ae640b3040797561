"""The configuration of a keeper: what is understood, and that every mistake is told with its place."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import InvalidInput, NotFound
from holdfast.middleware.rules import AccessRule, Quota, RateLimit
from holdfast.server import documents
from holdfast.server.config import Config, Limits, Listen, SpaceSettings, defaults, load, read
from holdfast.server.documents import InvalidDocument
from holdfast.server.leaves import Address
from tests.soak import examples

DOCUMENT_D = """\
state_keeper_config:
  persistence:
    enabled: true
    wal_path: "/var/lib/state-keeper/wal"
    snapshot_interval: "5m"

  policies:
    access_control:
      - agent_pattern: "worker-*"
        allow: ["Get", "Set", "Increment"]
        deny: ["Delete", "Transaction"]
      - agent_pattern: "admin"
        allow: ["*"]

    rate_limits:
      - agent_pattern: "*"
        max_ops_per_second: 100
        burst: 200

    quotas:
      - agent_pattern: "*"
        max_keys_per_agent: 1000
        max_value_size: "10 MB"
        max_total_size: "1 GB"

  consistency: "strong"  # linearizable
  timeout_default: "5s"
"""

OURS = """\
store: sqlite:team.db
listen: {binary: "0.0.0.0:7000", http: null, unix: run/keeper.sock}
insecure: true
limits: {connections: 10, in_flight: 5, frame_bytes: 1 MB, idle: 90s}
spaces:
  contoso: {durability: async}
  2024: {audit_reads: true}
  plain:
metrics: {public: true}
log: {level: debug, format: json}
"""


def check_verb(verb: str) -> None:
    if verb not in ("Get", "Set", "Increment", "Delete", "Transaction"):
        raise InvalidInput(f"there is no verb {verb}")


def config_of(text: str | bytes, folder: Path = Path("/srv")) -> Config:
    data = text.encode() if isinstance(text, str) else text
    return read(data, "keeper.yaml", folder=folder, check_verb=check_verb)


def mistakes(text: str | bytes) -> list[str]:
    """What is said about a file, a line each."""
    with pytest.raises(InvalidDocument) as caught:
        config_of(text)
    return str(caught.value).split("\n")


# --- what is understood ---


@pytest.mark.parametrize("rooted", [True, False])
def test_document_ds_file_means_what_it_says(rooted: bool) -> None:
    inner = "\n".join(line[2:] for line in DOCUMENT_D.splitlines()[1:])
    config = config_of(DOCUMENT_D if rooted else inner)
    assert config.store == "resident:/var/lib/state-keeper/wal"
    assert config.persistence.snapshot_interval_ms == 300_000
    assert config.policies.access_control == (
        AccessRule("worker-*", ("Get", "Set", "Increment"), ("Delete", "Transaction")),
        AccessRule("admin", ("*",)),
    )
    assert config.policies.rate_limits == (RateLimit("*", 100, 200),)
    assert config.policies.quotas == (Quota("*", 1000, 10 * 1024 * 1024, 1024 * 1024 * 1024),)
    assert (config.consistency, config.timeout_default_ms) == ("strong", 5000)


def test_our_own_keys_mean_what_they_say() -> None:
    config = config_of(OURS)
    assert config.store == "sqlite:/srv/team.db"
    assert config.listen == Listen(Address("0.0.0.0", 7000), None, "/srv/run/keeper.sock")
    assert config.limits == Limits(10, 5, 1024 * 1024, 90_000)
    assert config.spaces == {
        "contoso": SpaceSettings("async"),
        "2024": SpaceSettings(audit_reads=True),
        "plain": SpaceSettings(),
    }
    assert (config.metrics.enabled, config.metrics.public) == (True, True)
    assert (config.log.level, config.log.format) == ("debug", "json")


def test_without_settings_everything_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_of("{}", tmp_path) == config_of("policies:\nlisten:\nspaces:\n", tmp_path) == defaults()
    config = defaults()
    assert config.store == f"resident:{tmp_path}/.holdfast/store.db"
    assert [str(config.listen.binary), str(config.listen.http)] == ["127.0.0.1:7420", "127.0.0.1:7421"]
    assert (config.policies.access_control, config.policies.rate_limits, config.policies.quotas) == (None, None, None)
    assert config.tls is None


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("store: 'memory:'", "memory:"),
        ("persistence: {enabled: false}", "memory:"),
        ("persistence: {enabled: false, wal_path: x}", "memory:"),
        ("store: team.db", "sqlite:/srv/team.db"),
        ("store: resident:data/team.db", "resident:/srv/data/team.db"),
        ("store: resident:/data/team.db", "resident:/data/team.db"),
        ("persistence: {wal_path: wal}", "resident:/srv/wal"),
        ("store: redis://h/0", "redis://h/0"),
        ("store: postgresql://u:p@h/d", "postgresql://u:p@h/d"),
    ],
)
def test_the_store_is_named_in_one_way_or_the_other(text: str, url: str) -> None:
    assert config_of(text).store == url


@pytest.mark.parametrize(
    ("size", "number"),
    [("1", 1), ('"1 KB"', 1024), ("2kb", 2048), ('"1.5 MB"', 1572864), ("1GiB", 2**30), ("64 B", 64), ("1 TB", 2**40)],
)
def test_sizes_are_powers_of_1024(size: str, number: int) -> None:
    quotas = config_of(f"policies: {{quotas: [{{agent_pattern: x, max_value_size: {size}}}]}}").policies.quotas
    assert quotas is not None
    assert quotas[0].max_value_size == number


def test_a_file_begins_with_a_mark_of_its_encoding_or_not() -> None:
    assert config_of(b"\xef\xbb\xbftimeout_default: 1s\r\n").timeout_default_ms == 1000


# --- mistakes, with their place ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("polices: {}", "keeper.yaml:1:1: polices: there is no such key; did you mean policies?"),
        (
            "\nlisten:\n  htp: null",
            "keeper.yaml:3:3: listen.htp: there is no such key; did you mean http?",
        ),
        (
            "limits: {zzz: 1}",
            "limits.zzz: there is no such key; there are connections, connections_before_hello, "
            "connections_for_administrators, connections_per_token, frame_bytes, idle, in_flight",
        ),
        (
            "policies:\n  rate_limits:\n    - agent_pattern: x\n      burst: many",
            'keeper.yaml:4:14: policies.rate_limits[0].burst: expected a whole number of at least 1, got "many"',
        ),
        ("policies: {rate_limits: [{burst: 1}]}", "1:26: policies.rate_limits[0]: agent_pattern is missing"),
        ("policies: {rate_limits: {burst: 1}}", "policies.rate_limits: expected a list, got keys and values"),
        ("policies: {rate_limits: [7]}", "policies.rate_limits[0]: expected keys and values, got 7"),
        ("policies: {rate_limits: [{agent_pattern: 7}]}", "expected a pattern of agents' names in quotes"),
        ("policies: {rate_limits: [{agent_pattern: x, burst: true}]}", "a whole number of at least 1, got true"),
        ("policies: {rate_limits: [{agent_pattern: x, burst: 1.5}]}", "a whole number of at least 1, got 1.5"),
        (
            "policies: {rate_limits: [{agent_pattern: x, max_ops_per_second: .inf}]}",
            "a number greater than 0, got .inf",
        ),
        (
            "policies: {rate_limits: [{agent_pattern: x, max_ops_per_second: .nan}]}",
            "a number greater than 0, got .nan",
        ),
        ("policies: {quotas: [{agent_pattern: x, max_value_size: 0}]}", "a size of at least 1 bytes"),
        ("policies: {quotas: [{agent_pattern: x, max_value_size: 5 parsecs}]}", 'a size such as 65536, "512 KB"'),
        ("policies: {access_control: [{agent_pattern: x, allow: '*'}]}", 'allow: expected a list, got "*"'),
        (
            "policies: {access_control: [{agent_pattern: x, allow: [Get, Gett]}]}",
            "keeper.yaml:1:61: policies.access_control[0].allow[1]: there is no verb Gett",
        ),
        ("consistency: eventual", 'consistency: expected "strong", got "eventual"'),
        ("log: {level: inof}", 'expected "debug" or "info" or "warning" or "error", got "inof"; did you mean info?'),
        ("insecure: 'yes'", 'insecure: expected true or false, got "yes"'),
        ("timeout_default: 0", "timeout_default: expected a duration such as 30, 250ms, 90s, 5m or 1h, got 0"),
        ("timeout_default: [5]", "got a list"),
        ("timeout_default: 31d", "keeper.yaml:1:18: timeout_default: a lock is held for at most 30 days"),
        ("timeout_default: 2020-13-45", "expected a duration"),
        ("timeout_default:", "expected a duration such as 30, 250ms, 90s, 5m or 1h, got nothing"),
        (
            "listen: {binary: 7420}",
            'listen.binary: expected host:port such as "127.0.0.1:7420", or null for none, got 7420',
        ),
        ("listen: {binary: '127.0.0.1:70000'}", "a port of at most 65535"),
        ("listen: {binary: '::1:7420'}", "expected host:port"),
        ("listen: {binary: null, http: null}", "listen: everything is turned off"),
        ("listen: {binary: '127.0.0.1:1', http: '127.0.0.1:1'}", "listen.http: binary listens on 127.0.0.1:1 already"),
        ("listen: {unix: " + "x" * 120 + "}", "is longer than 107 bytes"),
        ("limits: {frame_bytes: 1}", "a size of at least 64 KB and at most 24 MB, got 1"),
        ("limits: {connections: 0}", "a whole number between 1 and 1,000,000, got 0"),
        ("spaces: {no/slash: {}}", "spaces.no/slash: a space's name is 1 to 128 letters"),
        ("spaces: {_holdfast: {}}", "spaces._holdfast: a space's name is 1 to 128 letters"),
        ("spaces: {a: {durability: snyc}}", "did you mean sync?"),
        ("spaces: [a]", "spaces: expected keys and values, got a list"),
        ("store: 7", "store: expected a file's path or a URL"),
        ("store: 'mysql://u:hunter2@h'", "store: no engine for mysql://"),
        ("store: a.db\npersistence: {wal_path: b}", "1:8: store: persistence.wal_path names the store's file as well"),
        ("store: a.db\npersistence: {enabled: false}", "store: persistence.enabled is false"),
        ("tls: {certificate: a.pem}", "tls: key is missing"),
        (
            f"tls: {{certificate: /a.pem, key: '{__file__}'}}",
            "tls.certificate: there is no file /a.pem that can be read",
        ),
        ("a: 1\nstate_keeper_config: {}", "1:1: stands beside state_keeper_config; with that key everything is inside"),
        ("state_keeper_config:", "state_keeper_config: expected keys and values, got nothing"),
        ("store: a\nstore: b", "keeper.yaml:2:1: store: is given twice; the first is on line 1"),
        ("{[a]: 1}", "1:2: a key is a word, not a list"),
        ("'': 1", '"": there is no such key'),
        ("<<: {store: a}", "<<: there is no such key"),
        # files that are no configuration at all
        ("", "keeper.yaml:1:1: the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "keeper.yaml:1:1: expected keys and values such as 'store: team.db', got a list"),
        ("just words", 'got "just words"'),
        ("listen:\n\tbinary: x", "keeper.yaml:2:1: the line is indented with a tab"),
        ("a: [1", "keeper.yaml:1:6: "),
        ("a: b: c", "mapping values are not allowed here"),
        ("a: &x 1\nb: *x", "keeper.yaml:2:4: aliases are not used here; write the value out"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: !!python/object/apply:os.system [ls]", "a: there is no such key"),
        ("store: !!python/name:os.system x", "store: expected a file's path or a URL"),
        ("listen: !mine {}", 'got something with the tag "!mine"; tags are not used'),
        ("a: \x07", "the character #x0007 is not allowed in YAML"),
        (b"ok: 1\nbad: \xff", "keeper.yaml:2:6: not UTF-8 text (byte 0xff)"),
        ('a: "\\UFFFFFFFF"', "keeper.yaml:1:"),
        ("a: " + "[" * 5000, "nested deeper than 32 levels"),
        ("a: " + "{a: " * 5000, "nested deeper than 32 levels"),
        ("a: [" + "1," * 30_000 + "]", "more than 20,000 keys and values"),
        ("#" * (1024 * 1024 + 1), "at most 1,048,576 are read"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str | bytes, said: str) -> None:
    [told] = mistakes(text)
    assert told.startswith("keeper.yaml:")
    assert said in told
    assert "hunter2" not in told


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    told = mistakes(
        "timeout_default: soon\nlistn: {}\npolicies:\n  quotas:\n    - max_keys_per_agent: -1\nconsistency: weak\n"
    )
    assert [line.split(": ")[1] for line in told] == [
        "timeout_default",
        "listn",
        "policies.quotas[0]",
        "policies.quotas[0].max_keys_per_agent",
        "consistency",
    ]
    with pytest.raises(InvalidDocument) as caught:
        config_of("a: 1\nb: 2\n")
    assert [(problem.line, problem.column, problem.path) for problem in caught.value.problems] == [
        (1, 1, "a"),
        (2, 1, "b"),
    ]


def test_a_message_stays_readable_however_wrong_the_file_is() -> None:
    told = mistakes("\n".join(f"key{number}: 1" for number in range(1000)))
    assert len(told) == documents.PROBLEMS_MAX + 1
    assert told[-1] == "keeper.yaml: and 980 more"


class Range(msgspec.Struct):
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InvalidInput("low must not be above high")


def test_what_a_struct_refuses_itself_is_told_with_its_place() -> None:
    reading = documents.Reading("r.yaml", {})
    assert reading.struct(documents.parse("r.yaml", b"\n  low: 2\n  high: 1\n"), Range) is documents.MISSING
    with pytest.raises(InvalidDocument, match=r"^r.yaml:2:3: low must not be above high$"):
        reading.finish()


@pytest.mark.parametrize("address", ["0.0.0.0:7420", "[::]:7420", "10.1.2.3:1", "keeper.example.org:7420"])
def test_a_keeper_that_others_can_reach_needs_tls_or_a_clear_word(address: str, tmp_path: Path) -> None:
    text = f'listen: {{binary: "{address}"}}\n'
    [told] = mistakes(text)
    assert told.startswith("keeper.yaml:1:18: listen.binary: ")
    assert "insecure: true" in told
    assert str(config_of(text + "insecure: true").listen.binary) == address
    (tmp_path / "cert.pem").touch()
    (tmp_path / "key.pem").touch()
    config = config_of(text + "tls: {certificate: cert.pem, key: key.pem}", tmp_path)
    assert config.tls is not None
    assert (config.tls.certificate, config.tls.key) == (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7420", "[::1]:7420", "127.8.8.8:1"])
def test_a_keeper_on_loopback_needs_none(address: str) -> None:
    assert str(config_of(f'listen: {{binary: "{address}"}}').listen.binary) == address


def test_a_file_that_is_not_there_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no configuration file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        load("nul\0")
    (tmp_path / "k.yaml").write_text("timeout_default: 2s\nstore: t.db")
    config = load(tmp_path / "k.yaml")
    assert (config.timeout_default_ms, config.store) == (2000, f"sqlite:{tmp_path}/t.db")
    (tmp_path / "k.yaml").write_text("oops: 2s")
    with pytest.raises(InvalidInput, match=rf"^{tmp_path}/k.yaml:1:1: oops: "):
        load(str(tmp_path / "k.yaml"))


# --- whatever is written there ---

WORDS = st.sampled_from(
    ["store", "listen", "policies", "quotas", "spaces", "rate_limits", "agent_pattern", "tls", "persistence", "limits"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def said_of(data: bytes) -> str:
    """What a file is refused with, "" if it is taken; anything but a refusal with a place fails the test."""
    try:
        config_of(data)
    except InvalidInput as exc:
        return str(exc)
    return ""


@given(st.dictionaries(WORDS, VALUES, max_size=5))
@settings(max_examples=examples(120), deadline=None)
def test_any_document_is_taken_or_refused_with_a_place(document: dict[str, object]) -> None:
    said = said_of(yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))
    assert all(line.startswith("keeper.yaml:") for line in said.split("\n") if said)
    assert said.replace("\n", "").isprintable()


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_damage_to_a_good_file_is_survived(data: st.DataObject) -> None:
    damaged = bytearray((DOCUMENT_D + "\n").encode() if data.draw(st.booleans()) else OURS.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(damaged)))
        length = data.draw(st.integers(0, 20))
        damaged[start : start + length] = data.draw(
            st.binary(max_size=6)
            | st.sampled_from([b"\t", b"&a ", b"*a", b"[", b"{", b"!!int ", b": ", b"\n", b"|", b"\\"])
        )
    said = said_of(bytes(damaged))
    assert not said or said.startswith("keeper.yaml:")


@given(st.binary(max_size=200))
@settings(max_examples=examples(150), deadline=None)
def test_any_bytes_are_survived(data: bytes) -> None:
    said = said_of(data)
    assert not said or said.startswith("keeper.yaml:")
