"""`python -m tests.bench.one_process`: the demo's script in one process, without daemons, on the samples of a job.

Every batch is what all peers of the job together are dealt in a round (X4), in the order of their ranks.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from meshtrain.examples import train_gpt
from meshwire.samples.epochs import epoch_seed, rounds_per_epoch
from tests.plannedeal import deal


class JointBatches(Sampler[list[int]]):
    """The rounds of one epoch after the other; every iteration is the next epoch."""

    def __init__(self, samples: int, batch_sizes: list[int], seed: int) -> None:
        self._samples, self._batch_sizes, self._seed = samples, batch_sizes, seed
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(epoch_seed(self._seed, self._epoch))
        order = torch.randperm(self._samples, generator=generator).tolist()
        self._epoch += 1
        for round_index in range(rounds_per_epoch(self._samples, self._batch_sizes)):
            dealt = deal(self._samples, self._batch_sizes, round_index)
            yield [index for first, end in dealt for index in order[first:end]]


def main() -> None:
    """Reads ./data or $MESHTRAIN_DATA and writes ./out, as the script does anywhere outside a job."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.one_process", description=__doc__)
    parser.add_argument("--peers", type=int, required=True, help="of the job that this is compared with")
    parser.add_argument("--batch-size", type=int, required=True, help="of one peer")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()

    def joint_loader(dataset: Any, **_: object) -> DataLoader[Any]:
        batches = JointBatches(len(dataset), [options.batch_size] * options.peers, options.seed)
        return DataLoader(dataset, batch_sampler=batches)

    vars(train_gpt)["DataLoader"] = joint_loader
    sys.argv[1:] = ["--steps", str(options.steps), "--seed", str(options.seed)]
    train_gpt.main()


if __name__ == "__main__":
    main()
