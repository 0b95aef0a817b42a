"""An endpoint that speaks real frames in place of a daemon, and the `meshtrain` command run against it."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshwire.frames.header import WIRE_VERSION, Header, Kind
from meshwire.frames.parser import Broken, ChunkAnnounced, ControlReceived, FrameParser
from meshwire.jobs.files import FileManifest
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.job import Found, JobSummary, Member
from meshwire.messages.link import Software
from meshwire.messages.local import Attach, Status, Submit, SubmitProgress, Submitted

ANNA, BERT = "ab" * 32, "cd" * 32
JOB = "1kx3000000aa"
SOFTWARE = Software(meshtrain="0.1.0", python="3.11.7", torch="2.13.0", system="Linux x86_64")
TOKEN = "a token"
WAIT_S = 20.0

Emit = Callable[[Wire], None]
Answer = Callable[[Any, Emit], Wire]


class Endpoint:
    """A daemon's local endpoint with scripted answers: by type of request, the reply or a function that makes it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.answers: dict[type[Wire], Wire | Answer] = {}
        self.asked: list[Wire] = []
        self.version = WIRE_VERSION  # of what it says
        run = data_dir / "run"
        run.mkdir(parents=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        token_file = run / "token"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        description = {
            "pid": os.getpid(),
            "listen": "0.0.0.0:7433",
            "endpoint": f"tcp:127.0.0.1:{self._listener.getsockname()[1]}",
            "token_file": str(token_file),
            "started_at_s": time.time(),
        }
        (run / "daemon.json").write_text(json.dumps(description))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def of_type(self, kind: type[Wire]) -> list[Any]:
        return [body for body in self.asked if isinstance(body, kind)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="endpoint client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        parser = FrameParser()
        try:
            while count := connection.recv_into(parser.buffer()):
                event = parser.received(count)
                assert not isinstance(event, Broken | ChunkAnnounced), event
                if isinstance(event, ControlReceived):
                    self._answer(connection, event.payload)
        except OSError:
            return  # the command has ended

    def _answer(self, connection: socket.socket, payload: bytes) -> None:
        envelope = decode(payload)
        assert isinstance(envelope, Envelope), envelope
        body, lock = envelope.body, threading.Lock()

        def send(role: Role, reply: Wire) -> None:
            out = encode(Envelope(role, envelope.id, reply))
            with lock:
                said = bytearray(Header(kind=Kind.CONTROL, payload_bytes=len(out)).encode() + out)
                said[4] = self.version
                connection.sendall(said)

        if isinstance(body, Attach):
            send(Role.REPLY, Done() if body.token == TOKEN else Failure(error="wrong token"))
            return
        self.asked.append(body)
        answer = self.answers.get(type(body), Failure(error=f"nothing is known of {type(body).__name__}"))
        reply = answer if isinstance(answer, Wire) else answer(body, lambda event: send(Role.EVENT, event))
        send(Role.FAILURE if isinstance(reply, Failure) else Role.REPLY, reply)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args), prog_name="meshtrain", catch_exceptions=False)


def member(device: str, name: str) -> Member:
    return Member(device=device, incarnation=1, name=name)


MEMBERS = (member(ANNA, "anna"), member(BERT, "bert"))


def summary(state: JobState = JobState.SUCCEEDED, job: str = JOB, **changes: Any) -> JobSummary:
    fields: dict[str, Any] = {
        "job": job,
        "name": "train",
        "state": state.value,
        "members": MEMBERS,
        "submitter": ANNA,
        "created_at_s": 1_790_000_000.0,
        "started_at_s": 1_790_000_001.0,
        "ended_at_s": 1_790_000_036.0,
        "exit_code": None,
        "error": None,
        "script": "train.py",
    }
    return JobSummary(**(fields | changes))


STATUS = Status(
    device=ANNA,
    name="anna",
    software=SOFTWARE,
    pid=1,
    listen="0.0.0.0:7433",
    data_dir="/data",
    up_s=7300.0,
    peers_linked=1,
    peers_paired=2,
    jobs_running=0,
    warnings=("the clock is off",),
)


def known_jobs(*jobs: JobSummary) -> Answer:
    return lambda body, _: Found(jobs=tuple(job for job in jobs if job.job.startswith(body.prefix)))


def accepting(seen: dict[str, FileManifest], notes: tuple[str, ...] = ()) -> Answer:
    def submit(body: Submit, emit: Emit) -> Wire:
        seen["source"] = FileManifest.unpack(Path(body.manifest).read_bytes())
        if body.data_manifest is not None:
            seen["data"] = FileManifest.unpack(Path(body.data_manifest).read_bytes())
        emit(SubmitProgress(text="sending files to bert", done_bytes=1, total_bytes=2))
        return Submitted(job=JOB, members=MEMBERS, notes=notes)

    return submit
