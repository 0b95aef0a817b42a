"""A job's specification, for parts that want one and read little of it."""

from meshwire.messages.job import BlobRef, JobSpec
from meshwire.sync_modes.mode import SyncSettings

SPEC = JobSpec(
    job="1kx3000000aa", name="test", submitter="0" * 64, created_at_s=0.0, script="train.py", args=(), env=(),
    files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=SyncSettings(), codec="fp32", on_nan="stop",
    seed=0, bucket_bytes=1024, hash_every=0, trace=False,
)  # fmt: skip
