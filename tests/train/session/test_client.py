"""The blocking client of a daemon's local endpoint."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, DaemonNotRunning, OtherVersion, RequestError
from meshwire.frames.header import WIRE_VERSION, Header, Kind
from meshwire.frames.parser import ControlReceived, FrameParser
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.learner import Waiting
from meshwire.messages.link import Refuse
from meshwire.messages.local import Attach, GetStatus

Answer = Callable[[Envelope], list[Envelope]]


def frame(envelope: Envelope) -> bytes:
    payload = encode(envelope)
    return Header(Kind.CONTROL, len(payload)).encode() + payload


def serve(stream: socket.socket, answer: Answer) -> None:
    """Answers every message with what `answer` says; an empty list after `Attach` closes."""
    parser = FrameParser()
    with stream:
        while count := stream.recv_into(parser.buffer()):
            event = parser.received(count)
            if isinstance(event, ControlReceived):
                envelope = decode(event.payload)
                assert isinstance(envelope, Envelope)
                stream.sendall(b"".join(frame(out) for out in answer(envelope)))
                if isinstance(envelope.body, GetStatus) and not answer(envelope):
                    return


@contextmanager
def endpoint(data_dir: Path, answer: Answer, *, tcp: bool = False) -> Iterator[Path]:
    """A data folder whose daemon answers like that."""
    (data_dir / "run").mkdir()
    (data_dir / "run" / "token").write_text("secret\n")
    listener = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if tcp else str(data_dir / "run" / "s"))
    listener.listen()
    where = f"tcp:127.0.0.1:{listener.getsockname()[1]}" if tcp else f"unix:{data_dir / 'run' / 's'}"
    described = {"pid": 1, "endpoint": where, "token_file": str(data_dir / "run" / "token"), "started_at_s": 0}
    (data_dir / "run" / "daemon.json").write_text(json.dumps(described))

    def accept() -> None:
        stream, _ = listener.accept()
        serve(stream, answer)

    thread = threading.Thread(target=accept)
    thread.start()
    yield data_dir
    thread.join(10.0)
    listener.close()
    assert not thread.is_alive()


def replies(*answers: Envelope) -> Answer:
    """Lets the client in, then answers its request with these, given its id."""

    def answer(asked: Envelope) -> list[Envelope]:
        if isinstance(asked.body, Attach):
            assert asked.body.token == "secret"
            return [Envelope(Role.REPLY, asked.id, Done())]
        return [Envelope(out.role, out.id and asked.id, out.body) for out in answers]

    return answer


@pytest.mark.parametrize("tcp", [False, True])
def test_events_come_before_the_reply_and_notices_are_kept(tmp_path: Path, tcp: bool) -> None:
    answer = replies(
        Envelope(Role.EVENT, 1, Waiting(reason="first")),
        Envelope(Role.NOTICE, 0, Waiting(reason="notice")),
        Envelope(Role.EVENT, 1, Waiting(reason="second")),
        Envelope(Role.REPLY, 1, Done()),
    )
    seen: list[Wire] = []
    with endpoint(tmp_path, answer, tcp=tcp):
        client = Client.connect(tmp_path)
        assert client.request(GetStatus(), timeout_s=5.0, name="status", on_event=seen.append) == Done()
        assert seen == [Waiting(reason="first"), Waiting(reason="second")]
        assert client.next_notice(5.0) == Waiting(reason="notice")
        assert client.next_notice(0.0) is None
        client.close()


def test_failure_is_told(tmp_path: Path) -> None:
    with endpoint(tmp_path, replies(Envelope(Role.FAILURE, 1, Failure(error="no such job: 1kx3")))):
        client = Client.connect(tmp_path)
        with pytest.raises(RequestError, match="no such job: 1kx3"):
            client.request(GetStatus(), timeout_s=5.0, name="status")
        client.close()


def test_no_answer_in_time_names_the_request(tmp_path: Path) -> None:
    with endpoint(tmp_path, replies(Envelope(Role.NOTICE, 0, Done()))):
        client = Client.connect(tmp_path)
        with pytest.raises(TimeoutError, match=r"status: no answer .* 0\.05 s"):
            client.request(GetStatus(), timeout_s=0.05, name="status")
        client.close()


def test_silence_is_a_lost_connection(tmp_path: Path) -> None:
    with endpoint(tmp_path, replies(Envelope(Role.NOTICE, 0, Done()))):
        client = Client.connect(tmp_path)
        with pytest.raises(ConnectionLost, match=r"status: no sign of life"):
            client.request(GetStatus(), timeout_s=5.0, name="status", silence_s=0.05)
        client.close()


def test_daemon_that_closes(tmp_path: Path) -> None:
    with endpoint(tmp_path, replies()):
        client = Client.connect(tmp_path)
        with pytest.raises(ConnectionLost, match="closed"):
            client.request(GetStatus(), timeout_s=5.0, name="status")
        client.close()


def test_refusal_is_told(tmp_path: Path) -> None:
    with endpoint(tmp_path, replies(Envelope(Role.NOTICE, 0, Refuse(reason="wire version 2 is spoken here")))):
        client = Client.connect(tmp_path)
        with pytest.raises(ConnectionLost, match="wire version 2"):
            client.request(GetStatus(), timeout_s=5.0, name="status")
        client.close()


def test_another_version_is_told_even_where_the_daemon_has_closed() -> None:
    """W6: `down` and `up` must know it from a daemon that is gone."""
    here, there = socket.socketpair()
    said = bytearray(frame(Envelope(Role.NOTICE, 0, Refuse(reason="?"))))
    said[4] = 77
    there.sendall(said)
    there.close()
    client = Client(here)
    with pytest.raises(OtherVersion, match=f"wire version 77, what is installed here {WIRE_VERSION}"):
        client.notify(GetStatus())
    client.close()


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(DaemonNotRunning, match=r"no daemon runs .*daemon\.json"):
        Client.connect(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"endpoint": 3, "token_file": 4}', "\x00", "x" * 20_000])
def test_run_file_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "daemon.json").write_text(content)
    with pytest.raises(DaemonNotRunning, match=r"daemon\.json"):
        Client.connect(tmp_path)


@pytest.mark.parametrize("where", ["unix:/nowhere/s", "tcp:127.0.0.1:1", "tcp:nonsense", "http://x"])
def test_daemon_that_died_and_left_its_file(tmp_path: Path, where: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "token").write_text("secret")
    described = {"endpoint": where, "token_file": str(tmp_path / "run" / "token")}
    (tmp_path / "run" / "daemon.json").write_text(json.dumps(described))
    with pytest.raises(DaemonNotRunning, match="no daemon answers"):
        Client.connect(tmp_path)
