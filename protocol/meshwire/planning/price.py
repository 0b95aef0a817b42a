"""The price of a training step: how long it takes with a codec over a topology, in a mode, on a network.

Steady rounds alone are priced: not a job's start, the warm-up of codecs, evaluations, checkpoints, or a laptop that is
late by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from meshwire import limits
from meshwire.codecs.registry import CodecSpec
from meshwire.codecs.spec import Reduction
from meshwire.collectives.strategy import Collective
from meshwire.collectives.topology import bucket_shards
from meshwire.encoded_layout.by_round import RoundLayouts
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import HEADER_BYTES
from meshwire.model.fragments import manifest_under
from meshwire.model.manifest import ModelManifest
from meshwire.model.plan import Plan, plan_buckets
from meshwire.planning.network import NO_WORK, Network
from meshwire.planning.playback import BucketLoad, Playback, Played
from meshwire.planning.quality import Quality, quality_of, recommendable, worth_of
from meshwire.planning.step_trace import StepTrace
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.neighbours import Turn, neighbours, turns_in, value_bytes

STEADY_ROUND = 9_999_990  # after every warm-up and ramp
STEADY_ROUNDS = 2  # which may be laid out in turns
LOADS_MAX = 24  # more buckets than this are played as runs of them: those at the end, which count, one by one
LOADS_MIN = 6
LAST_LOADS = 4
TRANSFERS_MAX = 12_000  # of one round that is played
EXPOSED_PART = 0.1  # of a step: below it the network is no matter


class Binds(StrEnum):
    """What a step mostly waits for."""

    COMPUTE = "compute"
    LINK = "link"
    AIR = "air"
    PROCESSOR = "codec"  # and encryption: what the daemon's processor does
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class CodecPrice:
    """What a codec takes of one core of this processor, and of the bytes that it may take.

    Attributes:
        encode_s, add_s: for each value: encoding it, with error feedback, and decoding it and adding it to another.
        encode_segment_s, add_segment_s: for each segment, however short it is: small models have them of 1024 values.
        rest_s: for each value of a round, what a daemon does beyond that: feedback, bookkeeping of segments.
        filled: of the largest size of a segment, the part that gradients take; 1 where sizes are fixed.
    """

    encode_s: float
    add_s: float
    filled: float = 1.0
    encode_segment_s: float = 0.0
    add_segment_s: float = 0.0
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What is chosen about how gradients travel."""

    collective: Collective
    sync: SyncSettings

    @property
    def codec(self) -> CodecSpec:
        """The codec in which gradients travel."""
        return self.collective.codec

    @property
    def quality(self) -> Quality:
        """What these settings do to the loss, as measured. The topology makes no difference but in rounding."""
        return quality_of(str(self.codec), self.sync.measured_as)

    @property
    def measured(self) -> bool:
        """Whether it is known how soon such a job comes to a loss."""
        return recommendable(str(self.codec), self.sync.measured_as)

    @property
    def worth(self) -> float:
        """What a sample of such a job is worth, in samples of the exact mean, as measured."""
        return worth_of(str(self.codec), self.sync.measured_as)


@dataclass(frozen=True, slots=True)
class Price:
    """What a step costs with some settings, in the mean over a period if there is one.

    Attributes:
        members: that train.
        step_s: from one step's beginning to the next one's.
        compute_s: of it, what the slowest member computes.
        samples_s: of all members together.
        alone_samples_s: of the fastest one without a job.
        sent_bytes, received_bytes: by member that trains.
        burst_bytes: that one of them sends in one round, at most: of the largest part, where parts take turns.
        link_part, processor_part: of the time, how much the busiest link, or the air, and how much the least busy
            member's training is at work.
    """

    settings: JobSettings
    members: int
    step_s: float
    compute_s: float
    samples_s: float
    alone_samples_s: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    burst_bytes: float
    link_part: float
    processor_part: float

    @property
    def useful_samples_s(self) -> float:
        """Samples of the exact mean that would bring as much in a second: what settings are chosen by."""
        return self.samples_s * self.settings.worth

    @property
    def against_one(self) -> float:
        """How many times as soon a loss is reached as by the fastest member alone, if equal samples bring it there."""
        return self.useful_samples_s / self.alone_samples_s


class Pricing:
    """Prices steps of one model. What was laid out once is kept.

    Args:
        codec_prices: by the codec's text.
    """

    def __init__(self, manifest: ModelManifest, codec_prices: Mapping[str, CodecPrice]) -> None:
        self.manifest = manifest
        self._codec_prices = codec_prices
        self._laid_out: dict[tuple[str, int, bool], tuple[Plan, tuple[EncodedLayout, ...]]] = {}
        self._playbacks: dict[tuple[str, Reduction, int], Playback] = {}
        self._loads: dict[tuple[str, str, int, int, bool], list[_Loads]] = {}

    def knows(self, codec: CodecSpec) -> bool:
        """Whether the codec's price is known."""
        return str(codec) in self._codec_prices

    def round_bytes(self, codec: CodecSpec) -> float:
        """How many bytes an encoded vector has, in the mean over rounds behind the warm-up, where no parts take
        turns."""
        return fmean(layout.total_bytes for layout in self._layouts(codec, SyncSettings())[1])

    def price(self, settings: JobSettings, steps: Sequence[StepTrace], network: Network) -> Price:
        """What a step costs with these settings over a network: the round is played, beside what members compute.

        Args:
            steps: by position in the ring: how each member computes. Members behind these are hubs, which have no part
                of their own (H1).
        """
        assert len(steps) <= len(network.links)
        sync = settings.sync
        period = sync.round_steps
        # In step, a round is over for all at once; who then takes longer to apply it begins the next step later.
        in_step = not sync.period and not sync.staleness
        applied_s = min(step.after_s for step in steps)
        late_s = [step.after_s - applied_s if in_step else 0.0 for step in steps]
        rounds = [
            self._round(settings, each, steps, late_s, network)
            for each in self._all_loads(settings, len(network.links))
        ]
        played = [one for one, _ in rounds]
        round_s = fmean(each for _, each in rounds) + network.round_s
        compute_s = max(step.alone_s + (0 if sync.period else step.copy_s) for step in steps)
        after_s = max(step.after_s for step in steps)
        copy_s = max(step.copy_s for step in steps)
        if sync.overlaps:
            # A round is hidden behind the steps that are taken until it is taken in.
            compute_s += _beside_s(played, steps, network) / period
            exposed_s = fmean(max(0.0, each_s + network.round_s - sync.delay * compute_s) for _, each_s in rounds)
            step_s = compute_s + (copy_s + exposed_s) / period
        elif sync.period and sync.staleness:
            # What the next periods begin ahead by is kept and applied once more. A round that began behind period k
            # must be there before period k + s + 1; and nothing can be busy for longer than a period.
            compute_s += (2 * copy_s + _beside_s(played, steps, network)) / period
            cycle_s = (copy_s + round_s) / (period * (sync.staleness + 1))
            step_s = max(compute_s, cycle_s, *(_busiest_s(one, network.round_s) / period for one in played))
        elif sync.period:
            step_s = compute_s + (copy_s + round_s) / period
        elif sync.staleness:
            # The own gradient is taken ahead by a copy of the optimizer, so that this runs twice; a round that began
            # with step k must be there before step k + s + 1; and nothing can be busy for longer than a step.
            compute_s += after_s + _beside_s(played, steps, network)
            cycle_s = (round_s + 2 * after_s) / (sync.staleness + 1)
            step_s = max(compute_s, cycle_s, *(_busiest_s(one, network.round_s) for one in played))
        else:
            # Of several steps the last one alone has a round, behind its backward pass; the others add up.
            step_s = (round_s + applied_s + (period - 1) * compute_s) / period
        sent = _means([one.sent_bytes[: len(steps)] for one in played], period)
        received = _means([one.received_bytes[: len(steps)] for one in played], period)
        busy_s = fmean(max(one.busiest_link_s, one.air_s) for one in played) / period
        if turns := turns_in(sync.period, sync.gossip):
            # Neighbours are waited for as long as a local step takes, and what comes later is taken in later.
            mixed = self._mixed(settings, len(steps), network)
            step_s += turns * min(mixed.turn_s, compute_s) / period
            busy_s += turns * mixed.link_s / period
            step_s = max(step_s, busy_s)  # the round comes behind it on the same links
            sent, received = (tuple(each + turns * mixed.bytes / period for each in of) for of in (sent, received))
        alone_s = min(step.alone_s for step in steps)
        return Price(
            settings=settings,
            members=len(steps),
            step_s=step_s,
            compute_s=compute_s,
            samples_s=sum(step.samples for step in steps) / step_s,
            alone_samples_s=max(step.samples_s for step in steps),
            sent_bytes=sent,
            received_bytes=received,
            burst_bytes=max(max(one.sent_bytes[: len(steps)]) for one in played),
            link_part=min(1.0, busy_s / step_s),
            processor_part=min(1.0, alone_s / step_s),
        )

    def waits_for(self, settings: JobSettings, steps: Sequence[StepTrace], network: Network) -> Binds:
        """What a step mostly waits for: without which it would be shortest."""
        price = self.price(settings, steps, network)
        if price.step_s - price.compute_s <= EXPOSED_PART * price.step_s:
            return Binds.COMPUTE
        without = {
            Binds.LINK: self.price(settings, steps, network.without_rates()),
            Binds.AIR: self.price(settings, steps, network.without_air()),
            Binds.LATENCY: self.price(settings, steps, network.without_latency()),
            Binds.PROCESSOR: Pricing(self.manifest, dict.fromkeys(self._codec_prices, CodecPrice(0.0, 0.0))).price(
                settings, steps, replace(network, work=NO_WORK)
            ),
        }
        return min(without, key=lambda each: without[each].step_s)

    def processor_s(self, settings: JobSettings, network: Network) -> float:
        """What the busiest member's daemon computes for a round, but for what each round takes whatever is in it."""
        members = len(network.links)
        playback = self._playback(settings.collective, members)
        played = [
            playback.play(each.loads, [[0.0] * len(each.loads)] * members, network)
            for each in self._all_loads(settings, members)
        ]
        return fmean(max(each.processor_s) for each in played)

    def _mixed(self, settings: JobSettings, members: int, network: Network) -> "_Mixed":
        """What a turn of mixing within a period takes (R9), in the mean over all that come one after the other."""
        sync, codec = settings.sync, settings.codec
        vector = self._layouts(codec, sync)[0].total_values * value_bytes(codec)
        frames = -(-vector // limits.GOSSIP_PIECE_BYTES)
        vector += frames * HEADER_BYTES
        work, learning = network.work, tuple(range(members))
        link_s, more_s, count = [], [], []
        for number in range(1, 1 + max(1, (members - 1).bit_length())):
            pairs = [
                (one.rank, place)
                for place in learning
                for one in neighbours(sync.over, Turn(0, number), place, learning)
            ]
            each = [sum(sender == place for sender, _ in pairs) for place in learning]
            links = network.links[:members]
            rates = [max(vector / link.up_bytes_s, vector / link.down_bytes_s) for link in links]
            air_s = sum(network.air_s(*pair, vector) for pair in pairs)
            link_s.append(max(air_s, *(times * rate for times, rate in zip(each, rates, strict=True))))
            latency_s = max((network.latency_s(*pair) for pair in pairs), default=0.0)
            ends_s = 2 * (vector * work.byte_s + frames * work.message_s)
            more_s.append(latency_s + max(times * ends_s / link.speed for times, link in zip(each, links, strict=True)))
            count.append(len(pairs) / members)
        turn_s = fmean(one + more for one, more in zip(link_s, more_s, strict=True))
        return _Mixed(vector * fmean(count), fmean(link_s), turn_s)

    def _round(
        self,
        settings: JobSettings,
        loads: "_Loads",
        steps: Sequence[StepTrace],
        late_s: Sequence[float],
        network: Network,
    ) -> tuple[Played, float]:
        """A round as it is played, and when the last member has it: in seconds from the step's beginning, or with a
        period from the round's."""
        period = settings.sync.period
        ready = [
            [0.0] * len(loads.loads) if period else [late + each_s for each_s in loads.ready_s(step)]
            for step, late in zip(steps, late_s, strict=True)
        ]
        members, training = len(network.links), len(steps)
        hubs = [None] * (members - training)
        played = self._playback(settings.collective, members).play(loads.loads, [*ready, *hubs], network)
        finished = played.finished_s[:training]
        if period:
            return played, max(finished)
        ends = [
            max(finished_s, late + _computed_s(step, finished_s - late, processor_s))
            for step, late, finished_s, processor_s in zip(
                steps, late_s, finished, played.processor_s[:training], strict=True
            )
        ]
        return played, max(ends)

    def _playback(self, collective: Collective, members: int) -> Playback:
        key = str(collective.topology), collective.reduction, members
        if key not in self._playbacks:
            ranks = tuple(range(members))
            self._playbacks[key] = Playback(collective.topology.programs(ranks), collective.reduction)
        return self._playbacks[key]

    def _layouts(self, codec: CodecSpec, sync: SyncSettings) -> tuple[Plan, tuple[EncodedLayout, ...]]:
        key = str(codec), sync.fragments, sync.random
        if key not in self._laid_out:
            plan = plan_buckets(manifest_under(self.manifest, sync), codec=codec)
            layouts = RoundLayouts(plan, codec)
            rounds = range(STEADY_ROUND, STEADY_ROUND + max(STEADY_ROUNDS, sync.fragments))
            self._laid_out[key] = plan, tuple(dict.fromkeys(layouts.of(number) for number in rounds))
        return self._laid_out[key]

    def _all_loads(self, settings: JobSettings, members: int) -> list["_Loads"]:
        collective = settings.collective
        key = str(collective.codec), str(collective.topology), members, settings.sync.fragments, settings.sync.random
        if key not in self._loads:
            plan, layouts = self._layouts(collective.codec, settings.sync)
            program = collective.topology.program(tuple(range(members)), 0)
            sends = members * max(1, len(program.steps))
            most = min(LOADS_MAX, max(LOADS_MIN, TRANSFERS_MAX // sends))
            self._loads[key] = [
                _Loads(plan, layout, collective, program.shard_count, most, self._codec_prices) for layout in layouts
            ]
        return self._loads[key]


class _Mixed(NamedTuple):
    """A turn of mixing.

    Attributes:
        bytes: that a member sends, and receives.
        link_s: how long the busiest link, or the air, is at it.
        turn_s: until all have what they mix.
    """

    bytes: float
    link_s: float
    turn_s: float


class _Loads:
    """What the buckets of a model bring to a round.

    Args:
        plan: the model's.
        layout: of the round.
        shard_count: of each bucket.
        most: about how many loads, where it has more buckets.
    """

    def __init__(
        self,
        plan: Plan,
        layout: EncodedLayout,
        collective: Collective,
        shard_count: int,
        most: int,
        codec_prices: Mapping[str, CodecPrice],
    ) -> None:
        self._plan = plan
        order = _sending_order(layout)
        each = [_load(plan, layout, bucket, collective, shard_count, codec_prices) for bucket in order]
        if layout.precursors:  # buckets that wait for each other are played one by one
            loads = [(at, load) for at, load in enumerate(each)]
        elif len(each) > most:
            loads = [(group[-1], _together([each[at] for at in group])) for group in _groups(len(each), most)]
        else:
            loads = [(at, piece) for at, load in enumerate(each) for piece in _pieces(load, most // len(each))]
        self.loads = tuple(load for _, load in loads)
        self._last_buckets = [layout.followers.get(order[at], order[at]) for at, _ in loads]

    def ready_s(self, step: StepTrace) -> list[float]:
        """When each is there, from the step's beginning."""
        ready = list(accumulate((self._part_ready(bucket, step) for bucket in range(len(self._plan.buckets))), max))
        during_s = step.backward_s + step.copy_s
        return [step.before_s + ready[bucket] * during_s for bucket in self._last_buckets]

    def _part_ready(self, bucket: int, step: StepTrace) -> float:
        if bucket >= self._plan.parameter_buckets:
            return 1.0  # float buffers leave with the seal
        return max(step.ready[self._plan.spans[span].tensor] for span in self._plan.buckets[bucket].spans)


def _sending_order(layout: EncodedLayout) -> list[int]:
    """All buckets of a layout, precursors before all others, which some of them wait for."""
    model = list(layout.model_buckets)
    return [*range(len(model), len(layout.plan.buckets)), *model]


def _load(
    plan: Plan,
    layout: EncodedLayout,
    index: int,
    collective: Collective,
    shard_count: int,
    codec_prices: Mapping[str, CodecPrice],
) -> BucketLoad:
    bucket, codec = layout.plan.buckets[index], layout.codecs[index]
    price = _price_of(codec, codec_prices)
    whole = codec_prices[str(collective.codec)]
    values, segments, sizes, frames = [], [], [], []
    for shard in bucket_shards(bucket.segment_count, shard_count, bucket.home):
        first = shard.first_segment * bucket.segment_values
        end = min(bucket.count, first + shard.segment_count * bucket.segment_values)
        chunks = layout.chunks(index, shard) if shard.segment_count else []
        _, length = layout.span(index, shard.first_segment, shard.segment_count)
        values.append(max(0, end - first))
        segments.append(shard.segment_count)
        frames.append(len(chunks))
        sizes.append(length * price.filled + HEADER_BYTES * len(chunks))
    precursor = layout.precursors.get(index)
    order = {each: at for at, each in enumerate(_sending_order(layout))}
    model_values = plan.buckets[index].count if layout.projected and index in layout.model_buckets else 0
    kept = collective.reduction is not Reduction.LINEAR
    pieces = list(zip(values, segments, strict=True))
    rest_s = whole.rest_s * sum(values) / 2  # some of it before anything leaves, some when all has come
    encode_s = tuple(price.encode_s * count + price.encode_segment_s * cut for count, cut in pieces)
    add_s = tuple(price.add_s * count + price.add_segment_s * cut for count, cut in pieces)
    return BucketLoad(
        sizes_bytes=tuple(sizes),
        frames=tuple(frames),
        encode_s=encode_s,
        add_s=add_s,
        prepare_s=whole.encode_s * model_values + (sum(encode_s) if kept else 0.0) + rest_s,
        finish_s=whole.add_s * model_values + rest_s,
        after=None if precursor is None else order[precursor],
    )


def _price_of(codec: CodecSpec, codec_prices: Mapping[str, CodecPrice]) -> CodecPrice:
    """A bucket's own codec may be one that nobody was asked the price of: how what the job's is not for travels. That
    is little, and as dear as fp32 here."""
    return codec_prices.get(str(codec), codec_prices["fp32"])


def _groups(count: int, most: int) -> list[list[int]]:
    """Cuts buckets 0 to count, which are more than `most`, into runs that are played as one: the last ones stay apart,
    for what they take is exposed."""
    first = count - LAST_LOADS
    runs = most - LAST_LOADS
    borders = [first * run // runs for run in range(runs + 1)]
    joined = [list(range(begin, end)) for begin, end in pairwise(borders)]
    return [*joined, *([at] for at in range(first, count))]


def _together(loads: Sequence[BucketLoad]) -> BucketLoad:
    return BucketLoad(
        sizes_bytes=tuple(map(sum, zip(*(load.sizes_bytes for load in loads), strict=True))),
        frames=tuple(map(sum, zip(*(load.frames for load in loads), strict=True))),
        encode_s=tuple(map(sum, zip(*(load.encode_s for load in loads), strict=True))),
        add_s=tuple(map(sum, zip(*(load.add_s for load in loads), strict=True))),
        prepare_s=sum(load.prepare_s for load in loads),
        finish_s=sum(load.finish_s for load in loads),
    )


def _pieces(load: BucketLoad, most: int) -> list[BucketLoad]:
    """The same in pieces of whole frames: a daemon sends a frame on while the next ones still come."""
    count = min(most, max(load.frames))
    pieces = []
    for at in range(count):
        frames = [whole * (at + 1) // count - whole * at // count for whole in load.frames]
        parts = [part / whole if whole else 0.0 for part, whole in zip(frames, load.frames, strict=True)]
        pieces.append(
            BucketLoad(
                sizes_bytes=_scaled(load.sizes_bytes, parts),
                frames=tuple(frames),
                encode_s=_scaled(load.encode_s, parts),
                add_s=_scaled(load.add_s, parts),
                prepare_s=load.prepare_s / count,
                finish_s=load.finish_s / count,
            )
        )
    return pieces or [load]


def _scaled(values: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(value * part for value, part in zip(values, parts, strict=True))


def _computed_s(step: StepTrace, played_s: float, processor_s: float) -> float:
    """When a member has its gradients, from the step's beginning. Its daemon's work takes cores from a training that
    uses all of them, as far as it is done by then; behind that the training only waits."""
    computes_s = step.before_s + step.backward_s + step.copy_s
    meanwhile = min(1.0, computes_s / played_s) if played_s else 0.0
    return computes_s + processor_s * meanwhile / step.threads


def _beside_s(played: Sequence[Played], steps: Sequence[StepTrace], network: Network) -> float:
    """By how much computing takes longer at most while the daemon works on a round beside it."""
    return max(
        (one.processor_s[at] + network.work.round_s / network.links[at].speed) / step.threads
        for one in played
        for at, step in enumerate(steps)
    )


def _busiest_s(played: Played, round_s: float) -> float:
    return max(played.busiest_link_s, played.air_s, max(played.processor_s) + round_s)


def _means(rounds: Sequence[tuple[float, ...]], period: int) -> tuple[float, ...]:
    return tuple(fmean(of_member) / period for of_member in zip(*rounds, strict=True))
