"""What a learner contributes to a round: the values of one step, bucket by bucket, in shared memory.

A step is here what the rounds count: one synchronised backward pass, or with a period (R9) H local steps. Its values
are written into the raw slot, times the number of samples behind them. A bucket of the plan is announced to the daemon
when it is full and all buckets before it have been: so all peers send their buckets in the same order.
"""

from collections.abc import Mapping

import torch

from meshtrain.train.data.step_samples import BoundSamples, StepSamples
from meshtrain.train.link.channel import Channel
from meshtrain.train.link.shared_slots import view
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.partial.mask_choice import packed
from meshtrain.train.step.buffers import ModelBuffers
from meshtrain.train.step.finite import are_finite, write_scaled
from meshtrain.train.step.means import RoundMeans
from meshwire.messages.learner import LearnerBucket, LearnerSealed, RoundDone, StepLost
from meshwire.messages.rounds import Poison
from meshwire.model.plan import Bucket


class StepContribution:
    """The contribution at hand of one learner; after each step it begins anew.

    Its life: `aim_at` a round, with accumulation (O6) `hold` and `keep` in each pass but the last, `begin` (the weight
    is fixed: R2, bind), `write` or `leave_out` each span, `send_full` between them, `seal`, then with s=0 `wait_round`;
    `next_step`.

    Args:
        samples: what was handed to the script.
        options: of the optimizer, which go with every bind (O3, leader's options); None: they do not.
        what: is contributed, for people: "gradient".

    Attributes:
        trained: indices of the spans of trained parameters.
        spans: those of them that travel in the round at hand, in the plan's order.
        step: number of the step that is being computed, from 1.
        round: that it is for, as far as is known (T1).
        passes: backward passes whose gradients are in it so far (O6).
        samples: how many it covers.
        hyperparameters: what its bind said.
        filled: spans that hold something.
        poisoned: whether any bucket was not finite (V1, non-finite values).
        sealed: whether all of it has left.
        done: s=0: its round, while it is in `p.grad` and not in the base; None before that, and for a lost step.
    """

    def __init__(
        self,
        means: RoundMeans,
        buffers: ModelBuffers,
        samples: StepSamples,
        options: LeaderOptions | None,
        channel: Channel,
        what: str,
    ) -> None:
        plan, specs = means.plan, means.tensors.manifest.tensors
        self._means = means
        self._buffers = buffers
        self._drawn = samples
        self.done: RoundDone | None = None
        self._options = options
        self._channel = channel
        self._what = what
        self._buffer_spans = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "buffer"]
        self._raw = means.slots.raw(1)
        self._taken = BoundSamples(1.0, 1.0, (), 0)
        self.trained = [index for index, span in enumerate(plan.spans) if specs[span.tensor].kind == "parameter"]
        self.step = 1
        self.passes = 0
        self._weight = self._alone = 0.0  # of its passes together: their samples, and those of a learner by itself
        self._portion = 1.0  # the weight of the newest
        self.hyperparameters = b""
        self._plan = plan
        # Else all lies where it always does, also of a part whose round is on its way (R9), and padding stays zero.
        shorter = (zip(each.spans, plan.spans, strict=True) for each in means.plans.all)
        self._packs = any(span.count and span != whole for spans in shorter for span, whole in spans)
        self.aim_at(1)
        self._reset()

    def aim_at(self, round_: int, passes: int = 1) -> None:
        """The step that begins is for this round, whose plan says what travels, by T1 (travel), and takes so many
        backward passes."""
        self._passes_due = passes
        plan = self._means.plans.of(round_)
        self.round = round_
        if plan is not self._plan and self._packs:
            for step in range(self._means.slots.layout.raw_slots):
                for bucket in plan.buckets:  # what was written where padding lies now
                    self._means.slots.raw(step)[bucket.start : bucket.start + bucket.count].zero_()
        self._plan = plan
        self._bucket_of = {index: bucket.index for bucket in plan.buckets for index in bucket.spans}
        self.spans: Mapping[int, None] = dict.fromkeys(index for index in self.trained if plan.spans[index].count)
        self._open = [len(bucket.spans) for bucket in plan.buckets]  # spans that are missing, by bucket

    @property
    def is_last(self) -> bool:
        """Whether the backward pass that begins is the one behind which the contribution leaves."""
        return self.passes + 1 >= self._passes_due

    @property
    def holds(self) -> bool:
        """Whether there are gradients of earlier passes that are still to leave."""
        return self.passes > 0 and not self.sealed

    def hold(self) -> None:
        """A backward pass begins whose gradients stay here for a later one, each by the samples of its own pass."""
        self._raw = self._means.slots.raw(self.step)
        portion = self._drawn.portion()
        self._portion = portion.weight
        self._weight += portion.weight
        self._alone += portion.alone
        self.passes += 1

    def begin(self, *, last: bool = True) -> None:
        """The next write is the step's first that may leave: its weight and samples are what was handed out until now
        (R2, bind).

        Args:
            last: a backward pass begins, too; else all gradients are there.
        """
        if self.passes and last:
            self.hold()
        self._taken = self._drawn.take(self.step)
        if self.passes:
            self._taken = self._taken._replace(weight=self._weight, alone=self._alone / self.passes)
        else:
            self._portion = self._taken.weight
        self.samples = int(self._taken.weight) if self._taken.blocks else 0
        self.hyperparameters = b"" if self._options is None else self._options.pack(self._taken.alone)
        self._raw = self._means.slots.raw(self.step)

    @property
    def weight(self) -> float:
        """That of the step that has begun, in samples."""
        return self._taken.weight

    def weigh(self, weight: float) -> None:
        """It stands for so many samples, those of earlier ones among them."""
        self._taken, self._portion = self._taken._replace(weight=weight), weight

    def write(self, index: int, values: torch.Tensor, divisor: float = 1.0) -> None:
        """w * values / divisor into the place of span `index`, whose tensor counts as used (O5), beside what earlier
        passes have left there. Where not all values travel, the kept ones."""
        self._put(index, values, divisor)
        self.filled.add(index)
        self._open[self._bucket_of[index]] -= 1

    def keep(self, index: int, values: torch.Tensor, divisor: float = 1.0) -> None:
        """As `write`, in a pass of which nothing leaves."""
        self._put(index, values, divisor)
        self._kept.add(index)

    def _put(self, index: int, values: torch.Tensor, divisor: float) -> None:
        span = self._plan.spans[index]
        if span.count < values.numel() and (places := self._means.places(self.round, span.tensor)) is not None:
            values = packed(values, places.to(values.device))
        place, factor = self._raw[span.start : span.start + span.count], self._portion / divisor
        plain = values.dtype is torch.float32 and values.device.type == "cpu"
        if index in self._kept:
            view(self._raw, span, values.shape).add_(values.to(place), alpha=factor)
            finite = are_finite(place)
        elif plain and values.is_contiguous():
            finite = write_scaled(values.view(-1), factor, place)
        else:
            shaped = view(self._raw, span, values.shape)
            if plain:
                torch.mul(values, factor, out=shaped)
            else:
                shaped.copy_(values).mul_(factor)
            finite = are_finite(place)
        if not finite:
            self._broken.add(index)
        self._used.add(span.tensor)

    def leave_out(self, index: int) -> None:
        """This learner has nothing, or nothing more, for span `index`: it counts as what earlier passes have left, or
        as zero."""
        span = self._plan.spans[index]
        if index in self._kept:
            self.filled.add(index)
        else:
            self._raw[span.start : span.start + span.count].zero_()
        self._open[self._bucket_of[index]] -= 1

    def send_full(self, *, overflows: bool = False) -> None:
        """Tells the daemon of the buckets that are full and whose turn it is.

        Args:
            overflows: what is not finite is a GradScaler's overflow.
        """
        while self._next < len(self._open) and not self._open[self._next]:
            bucket = self._plan.buckets[self._next]
            poison = self._poison(bucket, overflows)
            self.poisoned |= poison is not None
            self._channel.tell(
                LearnerBucket(
                    step=self.step,
                    bucket=bucket.index,
                    weight=self._taken.weight,
                    samples=self._taken.blocks,
                    hyperparameters=self.hyperparameters,
                    claim=self._taken.claim,
                    poison=poison,
                ),
                more=self._next == len(self._open) - 1,  # the seal follows
            )
            self._next += 1

    def seal(self, *, overflows: bool = False) -> None:
        """All parameters are written or left out: buffers follow, and the rest of the buckets."""
        self._buffers.write(self._raw, self._taken.weight, self._plan)
        for index in self._buffer_spans:
            if index in self._bucket_of:
                self._open[self._bucket_of[index]] -= 1
        self.send_full(overflows=overflows)
        integers = self._buffers.integers()
        self._channel.tell(LearnerSealed(step=self.step, used=self._used_bitmap(), integers=integers))

    def keep_buffers(self) -> None:
        """All of it has left, into a round that nobody waits for: buffers go on from what they hold."""
        self._buffers.keep(self.step, self._plan)

    def wait_round(self) -> RoundDone | None:
        """s=0: the step's own round, which is the next one; None when the step is lost."""
        rounds = self._channel.rounds
        self._channel.wait(
            lambda: self._lost or (bool(rounds) and rounds[0].step == self.step), f"step {self.step} for its round"
        )
        return None if self._lost else rounds.popleft()

    def forget_promise(self) -> None:
        """What its round has said of the next step's start counts no more: rounds may go on meanwhile (R5, absent)."""
        done = self.done
        self.done = None if done is None else done.model_copy(update={"start": 0})

    def step_lost(self, notice: StepLost) -> None:
        """A step of this learner is in no round: V2 (cut off), R5 (absent)."""
        if notice.step == self.step and notice.retry:
            self._lost = True
            self.samples = 0
        self._drawn.step_lost(notice.step, retry=notice.retry)

    def next_step(self) -> None:
        """The step has ended."""
        self.step += 1
        self._reset()

    def _poison(self, bucket: Bucket, overflows: bool) -> Poison | None:
        """The first tensor of the bucket that holds NaN or an infinity, by V1 (non-finite values); None without one."""
        broken = next((index for index in bucket.spans if self._is_broken(index)), None)
        if broken is None:
            return None
        of_parameter = broken in self.filled
        return Poison(
            bucket=bucket.index,
            parameter=self._plan.spans[broken].name,
            reason=f"its {self._what if of_parameter else 'buffer'} holds NaN or infinity",
            overflow=of_parameter and overflows,
        )

    def _is_broken(self, index: int) -> bool:
        """Whether a span holds NaN or an infinity; what was written by `write` was seen then."""
        if index in self.spans:
            return index in self._broken
        span = self._plan.spans[index]
        return not are_finite(self._raw[span.start : span.start + span.count])

    def _used_bitmap(self) -> bytes:
        bits = bytearray(self._means.tensors.manifest.used_bytes)
        for tensor in self._used:
            bits[tensor // 8] |= 1 << tensor % 8
        return bytes(bits)

    def _reset(self) -> None:
        self.sealed = self.poisoned = self._lost = False
        self.done = None
        self.samples = 0
        self.passes = 0
        self._weight = self._alone = 0.0
        self._portion = 1.0
        self._kept: set[int] = set()  # spans that earlier passes have written
        self.filled: set[int] = set()
        self._broken: set[int] = set()  # of them, those that are not finite
        self._used: set[int] = set()  # their tensors
        self._open = [len(bucket.spans) for bucket in self._plan.buckets]  # spans that are missing, by bucket
        self._next = 0  # the bucket to be sent next
