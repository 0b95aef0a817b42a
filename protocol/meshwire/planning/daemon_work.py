"""What a round takes of a daemon's processor beside its codec, fitted to rounds that were measured on this one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.planning.choose import job_settings
from meshwire.planning.network import DaemonWork, cables
from meshwire.planning.price import CodecPrice, Pricing

FEW_VALUES = 1024  # of a round that is its frames, and hardly anything else
MANY_VALUES = 2_097_152
FRAMES = 4  # of a round of few values between two: two are sent, two received
# What surrounds the exchange in a daemon, in rounds of few values: messages of the learner, binds, seals, timers. Of a
# model of 10,000 values daemons were seen to take 12 to 21 times what links and executor alone took at that time.
ROUND_OF_FEW = 20.0
EXACT = "fp32"


@dataclass(frozen=True, slots=True)
class MeasuredRounds:
    """What one of two members computes for a round of each codec, in seconds: links with TLS, and the executor."""

    few_s: Mapping[str, float]
    many_s: Mapping[str, float]


def fitted(prices: Mapping[str, CodecPrice], measured: MeasuredRounds) -> tuple[DaemonWork, dict[str, CodecPrice]]:
    """What frames, bytes and rounds take by themselves, from fp32; and codecs with what their rounds take beyond that.

    A codec whose rounds were not measured stays as it is.
    """
    message_s = measured.few_s[EXACT] / FRAMES
    work = DaemonWork(byte_s=0.0, message_s=message_s, round_s=ROUND_OF_FEW * measured.few_s[EXACT])
    bytes_ = 2.0 * MANY_VALUES * 4  # two members send what they have once, and receive as much
    work = replace(work, byte_s=max(0.0, measured.many_s[EXACT] - _counted_s(EXACT, prices, work)) / bytes_)
    found = dict(prices)
    for codec, many_s in measured.many_s.items():
        if codec in prices and codec != EXACT:
            rest_s = max(0.0, many_s - _counted_s(codec, prices, work)) / MANY_VALUES
            found[codec] = replace(prices[codec], rest_s=rest_s)
    return work, found


def _counted_s(codec: str, prices: Mapping[str, CodecPrice], work: DaemonWork) -> float:
    """What is counted of that round."""
    spec = TensorSpec(name="t", shape=(MANY_VALUES,), dtype="float32", kind="parameter")
    pricing = Pricing(ModelManifest(tensors=(spec,), optimizer="SGD"), prices)
    return pricing.processor_s(job_settings(codec, "bsp"), replace(cables(2, 1e12, 0.0), work=work))
