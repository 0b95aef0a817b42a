"""DESIGN 5: gradients leave while earlier layers are still computed."""

import io
import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from meshtraind.replay.command import replay
from meshtraind.replay.replay import EXIT_SAME
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEPS = 4
BACKWARD_S = 0.2  # between the second layer's gradient and the first one's

SCRIPT = f"""
import json, time
import torch
import meshtrain as mt

torch.set_num_threads(1)
torch.manual_seed(0)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({BACKWARD_S})  # stands for the backward pass of many layers
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 128, bias=False)
        self.rest = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(6))

    def forward(self, x):
        x = Slow.apply(self.first(x))
        for layer in self.rest:
            x = torch.tanh(layer(x))
        return x


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last_hooks_s = []
model.first.weight.register_post_accumulate_grad_hook(lambda _: last_hooks_s.append(time.monotonic()))
model, optimizer = mt.prepare(model, optimizer)
for _ in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
(mt.output_dir() / "hooks.json").write_text(json.dumps(last_hooks_s))
mt.finish()
"""


def first_chunks_s(daemon: LocalDaemon, job: str) -> dict[int, dict[int, float]]:
    """By round and bucket: when the first chunk of program step 0 was given to the link; once all rounds are there."""
    path = daemon.data_dir / "jobs" / job / "trace.jsonl"
    deadline_s = time.monotonic() + jobs.TIMEOUT_S
    while True:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        sent: dict[int, dict[int, float]] = defaultdict(dict)
        for entry in (json.loads(line) for line in lines if line.endswith("\n")):
            if entry["what"] == "chunk" and entry["step"] == 0:
                sent[entry["round"]].setdefault(entry["bucket"], entry["t_s"])
        if len(sent) == STEPS and len({len(buckets) for buckets in sent.values()}) == 1:
            return sent
        assert time.monotonic() < deadline_s, f"{path} lacks rounds after {jobs.TIMEOUT_S} s: {dict(sent)}"
        time.sleep(0.05)


def test_the_first_chunk_leaves_before_the_last_gradient(tmp_path: Path) -> None:
    """WFBP: a bucket leaves as soon as it is full; only the last one waits for the first layer's gradient."""
    with LocalMesh(("anna", "bert"), print) as mesh:
        submitted = jobs.submit(mesh.daemons[0], tmp_path, SCRIPT, trace=True)
        summary = jobs.ended(mesh.daemons[0], submitted.job)
        assert summary.state == "succeeded", summary.error
        assert summary.rounds == STEPS
        by_name = {daemon.name: daemon for daemon in mesh.daemons}
        for rank, member in enumerate(submitted.members):
            hooks_s = json.loads(jobs.read(mesh.daemons[0], submitted.job, "output", rank, "hooks.json"))
            assert len(hooks_s) == STEPS
            sent_s = first_chunks_s(by_name[member.name], submitted.job)
            for round_, hook_s in enumerate(hooks_s, start=1):
                buckets_s = sent_s[round_]
                assert len(buckets_s) >= 4
                *early_s, last_s = (buckets_s[bucket] for bucket in sorted(buckets_s))
                assert min(early_s) < hook_s, f"rank {rank}, round {round_}"
                assert last_s > hook_s, "the last bucket holds the first layer, and both clocks are one"
            record, told = by_name[member.name].data_dir / "jobs" / submitted.job / "membership.jsonl", io.StringIO()
            assert replay(record, as_json=False, out=told, errors=told) == EXIT_SAME, told.getvalue()
            assert "in generation 1 of " in told.getvalue(), "the other machine is recorded, too"
