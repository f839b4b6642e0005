"""Who is admitted, frame by frame; the handshakes themselves are in tests/integration."""

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from weightd.core.units import NodeId
from weightd.daemon.control.zap import Process, ZapGate, process_of

KEY = zmq.curve_keypair()[0]


@pytest.fixture
def gate() -> Iterator[ZapGate]:
    with zmq.Context() as context:
        gate = ZapGate(context)
        gate.admit_users("hooks", frozenset({1000}))
        gate.admit_nodes("peers", {NodeId("node-b"): KEY.decode()})
        yield gate


def ask(gate: ZapGate, domain: str, address: str, mechanism: str, *credentials: bytes) -> tuple[bytes, bytes]:
    """The status and the user of the reply."""
    request = [b"1.0", b"7", domain.encode(), address.encode(), b"", mechanism.encode(), *credentials]
    reply = gate._answer(request)
    assert [b"1.0", b"7"] == reply[:2]
    return reply[2], reply[4]


def test_a_process_of_an_admitted_user_is_named(gate: ZapGate) -> None:
    assert (b"200", b"1000:77") == ask(gate, "hooks", "localhost:1000:100:77", "NULL")
    assert Process(1000, 77) == process_of("1000:77")


def test_the_owner_of_a_known_key_is_named(gate: ZapGate) -> None:
    assert (b"200", b"node-b") == ask(gate, "peers", "10.0.0.2", "CURVE", z85.decode(KEY))


@pytest.mark.parametrize(
    "domain, address, mechanism, credentials, reason",
    [
        ("hooks", "localhost:1001:100:77", "NULL", [], "uid"),
        ("hooks", "localhost:-1:100:77", "NULL", [], "no credentials"),
        ("hooks", "10.0.0.2", "NULL", [], "no credentials"),
        ("hooks", "", "NULL", [], "no credentials"),
        ("peers", "10.0.0.2", "CURVE", [bytes(32)], "unknown key"),
        ("peers", "10.0.0.2", "CURVE", [], "domain"),
        ("peers", "10.0.0.2", "NULL", [], "domain"),
        ("hooks", "localhost:1000:100:77", "CURVE", [z85.decode(KEY)], "domain"),
        ("hooks", "localhost:1000:100:77", "PLAIN", [b"user", b"password"], "domain"),
        ("other", "localhost:1000:100:77", "NULL", [], "domain"),
        ("", "localhost:1000:100:77", "NULL", [], "domain"),
    ],
)
def test_everybody_else_is_refused_and_counted(
    gate: ZapGate, domain: str, address: str, mechanism: str, credentials: list[bytes], reason: str
) -> None:
    assert (b"400", b"") == ask(gate, domain, address, mechanism, *credentials)
    assert {reason: 1} == dict(gate.refused)


@pytest.mark.parametrize("request_", [[], [b"2.0", b"7", b"", b"", b"", b"NULL"], [b"1.0", b"7"]])
def test_what_is_no_request_is_an_error(gate: ZapGate, request_: list[bytes]) -> None:
    assert b"500" == gate._answer(request_)[2]
