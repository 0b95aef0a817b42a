"""Plays the programs of a topology over a network that is described, and tells when everybody has everything.

The programs are those that daemons run; here each send takes time on the sender's way up, through the air that all
share, on the receiver's way down, and on the processors at both ends. Each of these serves one thing after another, in
the order in which it becomes possible. What is sent begins to arrive while it is being sent.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from meshwire.codecs.spec import Reduction
from meshwire.collectives.topology import Op, Program
from meshwire.planning.network import Network


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """What one bucket, or several that leave one after the other, brings to a round.

    Attributes:
        sizes_bytes: on the wire, by shard.
        frames: by shard; where there is none, the shard is empty and is not sent.
        encode_s: one encoding, by shard.
        add_s: decoding and adding to others, by shard.
        prepare_s: before anything of it can be sent.
        finish_s: after all of it has come.
        after: index of the bucket whose sums everybody needs first; None without one.
    """

    sizes_bytes: tuple[float, ...]
    frames: tuple[int, ...]
    encode_s: tuple[float, ...]
    add_s: tuple[float, ...]
    prepare_s: float = 0.0
    finish_s: float = 0.0
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a round that was played: when it was over, and how busy links and processors were.

    Attributes:
        finished_s: by position, when all of it was there.
        processor_s: by position, what its daemon has computed.
        up_s, down_s: by position, how long its link was busy in each direction.
        air_s: how long the shared air was.
        sent_bytes, received_bytes: by position.
    """

    finished_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    up_s: tuple[float, ...]
    down_s: tuple[float, ...]
    air_s: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]

    @property
    def busiest_link_s(self) -> float:
        """How long the busiest link was at work, where each direction is one: no round can be shorter."""
        return max(*self.up_s, *self.down_s)


class _Part:
    """What one position does in a program, by what has to come first.

    Attributes:
        sends: (step, shard, receiver's position).
        needs: by send, how many receipts it waits for.
        frees: by step at which something is received, the sends that wait for it.
        receipts: (step, shard).
    """

    def __init__(self, program: Program, positions: dict[int, int]) -> None:
        self.sends: list[tuple[int, int, int]] = []
        self.needs: list[int] = []
        self.frees: dict[int, list[int]] = {}
        self.receipts: list[tuple[int, int]] = []
        self.operations = [step.op for step in program.steps]
        self.received_shards = [step.recv_shard for step in program.steps]
        for at, step in enumerate(program.steps):
            if step.send_shard is not None:
                assert step.send_to is not None
                for before in program.needs[at]:
                    self.frees.setdefault(before, []).append(len(self.sends))
                self.sends.append((at, step.send_shard, positions[step.send_to]))
                self.needs.append(len(program.needs[at]))
            if step.recv_shard is not None:
                self.receipts.append((at, step.recv_shard))


class Playback:
    """The programs of all members for one topology, ready to be played with any vector over any network.

    Args:
        programs: by position.
    """

    def __init__(self, programs: Sequence[Program], reduction: Reduction) -> None:
        positions = {program.rank: at for at, program in enumerate(programs)}
        self._parts = [_Part(program, positions) for program in programs]
        self._linear = reduction is Reduction.LINEAR
        self._encodes_sums = reduction in (Reduction.LINEAR, Reduction.TWO_SIDED)

    def play(self, loads: Sequence[BucketLoad], ready_s: Sequence[Sequence[float] | None], network: Network) -> Played:
        """Plays a round of this topology with these buckets over a network.

        Args:
            ready_s: by position and load, when the member's own part is there; None for a hub, which has none (H1).
        """
        return _Round(self._parts, loads, ready_s, network, self._linear, self._encodes_sums).played()


_READY, _PREPARED, _SEND, _FREE, _ARRIVE = range(5)


class _Round:
    """The state of one round while it is played."""

    def __init__(
        self,
        parts: Sequence[_Part],
        loads: Sequence[BucketLoad],
        ready_s: Sequence[Sequence[float] | None],
        network: Network,
        linear: bool,
        encodes_sums: bool,
    ) -> None:
        members = range(len(parts))
        self._parts, self._loads, self._ready_s, self._network = parts, loads, ready_s, network
        self._encodes_sums = encodes_sums
        # Own parts of codecs that add up are encoded as they leave; all others when they are ready.
        self._stale = [[[linear] * len(load.sizes_bytes) for load in loads] for _ in members]
        self._waiting = [[[1 + need for need in parts[at].needs] for _ in loads] for at in members]
        self._missing = [
            [1 + sum(load.frames[shard] > 0 for _, shard in parts[at].receipts) for load in loads] for at in members
        ]
        self._processor = [0.0 for _ in members]  # free from then on
        self._down = [0.0 for _ in members]
        self._air = 0.0
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in members]  # (load, send) that wait for the link
        self._sending = [False for _ in members]
        self._finished = [0.0 for _ in members]
        self._processor_s = [0.0 for _ in members]
        self._up_s = [0.0 for _ in members]
        self._down_s = [0.0 for _ in members]
        self._air_s = 0.0
        self._sent = [0.0 for _ in members]
        self._received = [0.0 for _ in members]
        self._events: list[tuple[float, int, int, int, int, int]] = []
        self._order = 0

    def played(self) -> Played:
        for at in range(len(self._parts)):
            for index, load in enumerate(self._loads):
                if load.after is None:
                    self._push_own(0.0, index, at)
        while self._events:
            now_s, _, what, index, at, step = heappop(self._events)
            if what == _READY:
                self._push(self._compute(at, now_s, self._loads[index].prepare_s), _PREPARED, index, at)
            elif what == _PREPARED:
                self._prepared(now_s, index, at)
            elif what == _SEND:
                self._queues[at].append((index, step))
                if not self._sending[at]:
                    self._send_next(now_s, at)
            elif what == _FREE:
                self._send_next(now_s, at)
            else:
                self._arrive(now_s, index, at, step)
        assert not any(missing for of_member in self._missing for missing in of_member), "a program that waits in vain"
        return Played(
            tuple(self._finished),
            tuple(self._processor_s),
            tuple(self._up_s),
            tuple(self._down_s),
            self._air_s,
            tuple(self._sent),
            tuple(self._received),
        )

    def _push_own(self, now_s: float, index: int, at: int) -> None:
        """A member's own part is there from now on, or from when its learner has it; a hub has none to prepare."""
        ready_s = self._ready_s[at]
        if ready_s is None:
            self._push(now_s, _PREPARED, index, at)
        else:
            self._push(max(now_s, ready_s[index]), _READY, index, at)

    def _push(self, time_s: float, what: int, index: int, at: int, step: int = 0) -> None:
        self._order += 1
        heappush(self._events, (time_s, self._order, what, index, at, step))

    def _compute(self, at: int, now_s: float, cost_s: float) -> float:
        """When a member's daemon has done another piece of work, which costs so much at speed 1."""
        if cost_s:
            cost_s /= self._network.links[at].speed
            self._processor[at] = now_s = max(now_s, self._processor[at]) + cost_s
            self._processor_s[at] += cost_s
        return now_s

    def _handling_s(self, load: BucketLoad, shard: int) -> float:
        work = self._network.work
        return load.frames[shard] * work.message_s + load.sizes_bytes[shard] * work.byte_s

    def _prepared(self, now_s: float, index: int, at: int) -> None:
        for send in range(len(self._parts[at].sends)):
            self._freed(now_s, index, at, send)
        self._came(now_s, index, at)

    def _freed(self, now_s: float, index: int, at: int, send: int) -> None:
        """Something has come that a send waits for; with the last of it, it is computed, and waits for the link."""
        waiting = self._waiting[at][index]
        waiting[send] -= 1
        if waiting[send]:
            return
        _, shard, _ = self._parts[at].sends[send]
        load = self._loads[index]
        if not load.frames[shard]:
            return
        cost_s = self._handling_s(load, shard)
        if self._stale[at][index][shard]:
            self._stale[at][index][shard] = False
            cost_s += load.encode_s[shard]
        self._push(self._compute(at, now_s, cost_s), _SEND, index, at, send)

    def _send_next(self, now_s: float, at: int) -> None:
        """A member's link is free: what has waited longest leaves."""
        if not self._queues[at]:
            self._sending[at] = False
            return
        self._sending[at] = True
        index, send = self._queues[at].popleft()
        step, shard, receiver = self._parts[at].sends[send]
        network, size = self._network, self._loads[index].sizes_bytes[shard]
        up_s = size / network.links[at].up_bytes_s
        down_s = size / network.links[receiver].down_bytes_s
        began_s, air_s = now_s, network.air_s(at, receiver, size)
        if air_s:
            began_s = max(now_s, self._air)
            self._air = began_s + air_s
            self._air_s += air_s
            up_s = max(up_s, air_s)
        landed_s = max(max(began_s, self._down[receiver]) + down_s, began_s + up_s)
        self._down[receiver] = landed_s
        self._up_s[at] += size / network.links[at].up_bytes_s
        self._down_s[receiver] += down_s
        self._sent[at] += size
        self._received[receiver] += size
        self._push(began_s + up_s, _FREE, 0, at)
        self._push(landed_s + network.latency_s(at, receiver), _ARRIVE, index, receiver, step)

    def _arrive(self, now_s: float, index: int, at: int, step: int) -> None:
        part, load = self._parts[at], self._loads[index]
        shard = part.received_shards[step]
        assert shard is not None
        now_s = self._compute(at, now_s, self._handling_s(load, shard) + load.add_s[shard])
        if part.operations[step] is Op.REDUCE:
            self._stale[at][index][shard] = self._encodes_sums
        elif part.operations[step] is Op.COPY:
            self._stale[at][index][shard] = False
        for send in part.frees.get(step, ()):
            self._freed(now_s, index, at, send)
        self._came(now_s, index, at)

    def _came(self, now_s: float, index: int, at: int) -> None:
        """A receipt, or the own part, is there."""
        missing = self._missing[at]
        missing[index] -= 1
        if missing[index]:
            return
        now_s = self._compute(at, now_s, self._loads[index].finish_s)
        self._finished[at] = max(self._finished[at], now_s)
        for follower, load in enumerate(self._loads):
            if load.after == index:
                self._push_own(now_s, follower, at)
