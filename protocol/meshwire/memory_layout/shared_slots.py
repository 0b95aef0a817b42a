"""The shared memory between a daemon and its learner: fp32 slots in plan order (M1, DESIGN section 13).

The daemon makes it before it spawns the learner, who finds it by MEMORY_FD_VARIABLE, sizes it for the
prepared model and reports the size; both map it. Raw slots take w*g (W3) from the learner; the result slot takes the
means from the daemon. Where learners mix weights within a period (R9), one more slot takes what the own ones are apart
from the base by, and others take the neighbours'.
"""

from dataclasses import dataclass
from functools import cached_property

from meshwire.codecs.spec import CodecSpec
from meshwire.collectives.strategy import Collective
from meshwire.model.plan import VALUE_BYTES
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.neighbours import NEIGHBOURS_MAX, value_bytes

PAGE_BYTES = 4096

# What a daemon gives its learner in the environment
ENDPOINT_VARIABLE = "MESHTRAIN_ENDPOINT"  # unix:PATH or tcp:HOST:PORT
TOKEN_VARIABLE = "MESHTRAIN_TOKEN"
JOB_VARIABLE = "MESHTRAIN_JOB_ID"
MEMORY_FD_VARIABLE = "MESHTRAIN_MEMORY_FD"  # an inherited descriptor's number, or where nothing is inherited
FILE_PREFIX = "file:"  # and a path

# What the command line gives a script that it runs itself, without a job
SCRIPT_DATA_VARIABLE = "MESHTRAIN_DATA"  # what mt.data_dir() returns
SCRIPT_OUTPUT_VARIABLE = "MESHTRAIN_OUTPUT"  # what mt.output_dir() returns under torchrun, as a job may be (P9)
SCRIPT_SEED_VARIABLE = "MESHTRAIN_SEED"  # of the order of samples there
MEASURE_VARIABLE = "MESHTRAIN_MEASURE"  # a file: mt.prepare writes the model's size there and ends the script
MEASURE_SYNC_VARIABLE = "MESHTRAIN_MEASURE_SYNC"  # the job's --sync,
MEASURE_CODEC_VARIABLE = "MESHTRAIN_MEASURE_CODEC"  # its codec,
MEASURE_SCALE_LR_VARIABLE = "MESHTRAIN_MEASURE_SCALE_LR"  # and its --scale-lr: what these refuse is refused there too
MEASURE_TOGETHER_VARIABLE = "MESHTRAIN_MEASURE_TOGETHER"  # COUNT:FOLDER, of so many copies that step at once
MEASURE_STEPS_VARIABLE = "MESHTRAIN_MEASURE_STEPS"  # so many steps are timed too, before the script is ended
WHY_NOT_SUFFIX = ".why"  # of a file beside it: what the script does, so that its steps cannot be timed

DATA_DIR_VARIABLE = "MESHTRAIN_DATA_DIR"  # the daemon's data folder, for every command
PORTABLE_VARIABLE = "MESHTRAIN_PORTABLE"  # 1: what Windows would use is used here, too


@dataclass(frozen=True)
class MemoryLayout:
    """Byte offsets of the slots. Each slot starts on a page and holds `values` fp32; of weights that are mixed as many
    values of `mixed_bytes` each.

    Attributes:
        mixed_slots: the own one, and for each neighbour one for the turn of now and one for the next; 0: none is mixed.
    """

    values: int
    raw_slots: int
    mixed_slots: int = 0
    mixed_bytes: int = VALUE_BYTES

    @classmethod
    def for_job(cls, values: int, sync: SyncSettings, codec: CodecSpec) -> "MemoryLayout":
        """That of a job's learners, in the codec that it has begun with."""
        layout = cls.for_bound(values, sync.staleness)
        if not sync.gossip:
            return layout
        return cls(values, layout.raw_slots, 1 + 2 * NEIGHBOURS_MAX[sync.over], value_bytes(codec))

    @classmethod
    def for_bound(cls, values: int, staleness: int) -> "MemoryLayout":
        """M1: two raw slots let the next step's buckets be written while the last one's are still being encoded.

        With s=0 a step begins only after its predecessor's round is complete, so one is enough.
        """
        return cls(values, 1 if staleness == 0 else 2)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.values * VALUE_BYTES // PAGE_BYTES) * PAGE_BYTES

    def raw_offset(self, step: int) -> int:
        """Where step `step` (from 0) writes its gradients."""
        return (step % self.raw_slots) * self.slot_bytes

    @property
    def result_offset(self) -> int:
        """Where the means of the round to be applied lie."""
        return self.raw_slots * self.slot_bytes

    def mixed_offset(self, slot: int) -> int:
        """Where one of the slots lies whose values are mixed: 0 is the learner's own."""
        assert 0 <= slot < self.mixed_slots
        return self.result_offset + self.slot_bytes + slot * self._mixed_slot_bytes

    @property
    def _mixed_slot_bytes(self) -> int:
        return -(-self.values * self.mixed_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the mapping; at least one page."""
        rounds_bytes = (self.raw_slots + 1) * self.slot_bytes
        return max(rounds_bytes + self.mixed_slots * self._mixed_slot_bytes, PAGE_BYTES)


def round_bytes(encoded_bytes: int, staleness: int, collective: Collective, members: int = 1) -> int:
    """Memory of a daemon's own that one round takes, from its first chunk until every member holds it and the learner
    has applied it.

    Args:
        encoded_bytes: of one encoded vector (`EncodedLayout.total_bytes`), which the codec decides.
        staleness: with s > 0 a round has, beside what is passed on, this member's own part, because raw slots are free
            once they are encoded (M1). With s=0 the own part stays in the raw slot.
        collective: decides how much is on its way, and whether the own part is encoded at any s.
        members: of the job, at most.
    """
    return collective.round_vectors(staleness, members) * encoded_bytes
