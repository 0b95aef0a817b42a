"""G4: the chain of hashes that names a history. Members with equal hashes after round k hold the same rounds up to k.

Within a generation the result of a round is a function of its members, its binds and their bytes, so what identifies it
are the generation and the facts that every member has received. Broken memory is found by comparing bases, not here.
"""

import hashlib
import struct

import msgpack

from meshwire.rounds.effects import RoundComplete

CHAIN_BYTES = 16
START = bytes(CHAIN_BYTES)
"""h_0, before the first round of every job."""


def chain(previous: bytes, generation: int, done: RoundComplete) -> bytes:
    """h_k of h_(k-1), as 16 bytes.

    Args:
        previous: 16 bytes.
        generation: hash (`Generation.hash64`) of the one in which the round was completed. A member that was served the
            round takes the same one: it had entered it too, or else it would not have a part in the round (G3).
        done: round k.
    """
    facts = (
        done.round,
        done.void,
        [(rank, bind.pack()) for rank, bind in sorted(done.binds.items())],
        [(rank, poison.pack()) for rank, poison in sorted(done.poisons.items())],
        done.used,
        done.integers,
        struct.pack("<d", done.squared_norm),  # its bits: -0.0 is not 0.0 on a member that clips by it
    )
    digest = hashlib.blake2b(previous, digest_size=CHAIN_BYTES)
    digest.update(struct.pack("<Q", generation))
    digest.update(msgpack.packb(facts, use_bin_type=True))
    return digest.digest()
