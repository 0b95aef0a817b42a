"""One rank of gloo's `all_reduce`, which `meshtrain bench allreduce` compares with. Commands come as JSON lines."""

import argparse
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import psutil


class GlooRank:
    """What the coordinator commands, one method each."""

    def __init__(self, rank: int, members: int, values: int, host: str, store: str, timeout_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self._rank = rank
        self._members = members
        self._host = host
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._vector = torch.empty(values, dtype=torch.float32)
        self._cpu_at_start_s = 0.0

    def do_connect(self) -> dict[str, Any]:
        """Joins the group, on the network interface that has this rank's address."""
        import torch.distributed as dist

        interfaces = (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address == self._host for address in addresses)
        )
        os.environ["GLOO_SOCKET_IFNAME"] = next(interfaces)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._store}",
            rank=self._rank,
            world_size=self._members,
            timeout=self._timeout,
        )
        return {}

    def do_ready(self) -> dict[str, Any]:
        """Before every round: the reduction is in place and has overwritten the input."""
        self._vector.fill_(self._rank + 1)
        return {}

    def do_round(self, start_s: float) -> dict[str, Any]:
        """One all-reduce of the whole vector from the common start."""
        import torch.distributed as dist

        time.sleep(max(0.0, start_s - time.monotonic()))
        self._cpu_at_start_s = time.process_time()
        dist.all_reduce(self._vector)
        return {"end_s": time.monotonic()}

    def do_usage(self) -> dict[str, Any]:
        """CPU seconds of this process, all its threads, since the round's start."""
        return {"cpu_s": time.process_time() - self._cpu_at_start_s}

    def do_check(self) -> dict[str, Any]:
        """Whether the result is the sum, and its digest."""
        expected = self._members * (self._members + 1) / 2
        low, high = self._vector.min().item(), self._vector.max().item()
        wrong = None if low == high == expected else f"values from {low} to {high}, expected {expected}"
        return {"wrong": wrong, "digest": hashlib.sha256(self._vector.numpy().data).hexdigest()}


def main() -> None:
    """Answers on standard output until standard input ends; gloo's own messages go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    rank = GlooRank(**vars(parser.parse_args()))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(rank, f"do_{command.pop('do')}")(**command)
        except (RuntimeError, OSError) as error:  # torch's errors of the network are RuntimeErrors
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
