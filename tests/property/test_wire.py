"""Random damage to real frames: a valid message or a named refusal, and nothing else."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire_samples import BODIES, envelope
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import ProtocolError
from weightd.core.wire.messages import Envelope
from weightd.link.fd_messages import Datagram, decode_answer, decode_request

FRAMES = [encode(envelope(body)) for body in BODIES]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real frame with bytes changed, cut out, doubled or put in; or two frames spliced."""
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        match draw(st.sampled_from(["change", "cut", "insert", "double", "splice"])):
            case "change" if frame:
                frame[at] = draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + draw(st.integers(1, 40))]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=8))
            case "double":
                frame[at:at] = frame[at : at + draw(st.integers(1, 40))]
            case _:
                other = draw(st.sampled_from(FRAMES))
                frame[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(frame)


@given(st.one_of(damaged(), st.binary(max_size=200)))
@settings(max_examples=600)
@example(b"\xc1")
@example(b"\x81\xa8protocol\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
def test_a_damaged_frame_is_a_message_or_a_refusal(frame: bytes) -> None:
    try:
        message = decode(frame, "node-b")
    except ProtocolError:
        return
    assert isinstance(message, Envelope)
    assert message == decode(encode(message))


@given(st.one_of(damaged(), st.binary(max_size=60)))
def test_a_damaged_datagram_is_refused(frame: bytes) -> None:
    for decoded in (decode_request, decode_answer):
        try:
            decoded(Datagram(frame, []), "pid 1")
        except ProtocolError:
            continue
