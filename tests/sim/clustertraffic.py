"""What the daemons of a cluster say to each other, counted by kind: messages, and the bytes of their frames.

A chunk counts with its header alone: how many there are, and what is in them, follows from model, codec and topology.
Heartbeats and the hashes of bases do not pass the cluster's network; `tests.bench.scale` counts them from what ships.
"""

from collections import Counter

from meshwire.frames.header import HEADER_BYTES
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Role, encode
from meshwire.messages.job import Metrics, RankReport
from tests.sim.clusterexchange import Chunk, News
from tests.sim.clusternetwork import Node

CHUNK, REPORT = "chunk", "RankReport"
USUAL_REPORT = RankReport(
    job="j" + "0" * 11,
    rank=63,
    state="running",
    metrics=Metrics(
        step=12_345,
        round=12_345,
        samples=987_654,
        values=(("loss", 2.345),),
        step_s=0.5,
        exposed_s=123.4,
        exchange_s=1234.5,
        sent_bytes=2**40,
        payload_bytes=2**40,
        ages=(12_000, 300, 45),
        age=0,
        samples_per_s=64.3,
        batch=32,
        throughput_samples_s=60.1,
        epochs=1.5,
        receipts=(12_346, 126),
    ),
)
"""As a daemon sends it in the middle of a job: the clusters' own reports are empty."""


class Traffic:
    """A `tests.sim.clusternetwork.SentWatcher` that counts.

    Attributes:
        messages, frame_bytes: by kind, which is the message's class; of an answer with its role.
        control_by_node: messages but chunks, by the number of their sender.
        newest: a message of each kind, as it travels.
    """

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.frame_bytes: Counter[str] = Counter()
        self.control_by_node: Counter[int] = Counter()
        self.newest: dict[str, bytes] = {}
        self._sized: tuple[Wire, int] | None = None  # what goes to all members is the same on each link

    def sent(self, sender: Node, body: object) -> None:
        """Counts a message or chunk that a node sends on one of its links."""
        if isinstance(body, Chunk):
            kind, size_bytes = CHUNK, HEADER_BYTES
        elif isinstance(body, News) and body.message is None:
            kind, size_bytes = REPORT, self._size(REPORT, Role.NOTICE, 0, USUAL_REPORT)
        elif isinstance(body, News):
            assert body.message is not None
            kind = type(body.message).__name__
            size_bytes = self._size(kind, Role.NOTICE, 0, body.message)
        elif isinstance(body, Envelope):
            kind = type(body.body).__name__
            kind = kind if body.role is Role.REQUEST else f"{kind} ({body.role.name.lower()})"
            size_bytes = self._size(kind, body.role, body.id, body.body)
        else:
            assert isinstance(body, Wire), body
            kind = type(body).__name__
            size_bytes = self._size(kind, Role.NOTICE, 0, body)
        self.messages[kind] += 1
        self.frame_bytes[kind] += size_bytes
        if kind != CHUNK:
            self.control_by_node[sender.number] += 1

    def _size(self, kind: str, role: Role, number: int, message: Wire) -> int:
        if self._sized is None or self._sized[0] is not message:
            payload = self.newest[kind] = encode(Envelope(role, number, message))
            self._sized = message, HEADER_BYTES + len(payload)
        return self._sized[1]
