"""Every maximum of the protocol, in one place. A value that a peer sends is checked against these before it is used."""

KIB = 1024
MIB = 1024 * KIB

# Frames (W1, W4)
FRAME_PAYLOAD_BYTES_MAX = 1 * MIB  # one control message, or one run of encoded segments
CHUNK_BYTES = (
    256 * KIB
)  # what a sender aims at: the cheapest size for uvloop's BufferedProtocol on loopback and TLS
CONTROL_BYTES_MAX = 1 * MIB  # one control message
CONTROL_NESTING_MAX = 16
LINK_QUEUE_BYTES_MAX = (
    1 * MIB
)  # data queued on a link before the sender is held back, so that control can overtake
HANDSHAKE_TIMEOUT_S = 10.0  # TLS and hello together; a slow-drip client is closed at this point
HANDSHAKES_MAX = 32  # connections that have not said hello yet, over all addresses

# Mesh and jobs
MEMBERS_MAX = 64  # contributors are one u64 bitmap by rank
PEERS_MAX = 256  # pinned devices
NAME_CHARS_MAX = 64
ADDRESSES_PER_PEER_MAX = 16
JOBS_RUNNING_MAX = 16

# Model (M1)
TENSORS_MAX = 100_000
TENSOR_DIMS_MAX = 16
VALUES_MAX = 2**33
SEGMENT_VALUES_MAX = 64 * KIB  # C1: one encoded unit
BUCKETS_MAX = 65_535  # bucket is a u16 on the wire

assert CHUNK_BYTES <= FRAME_PAYLOAD_BYTES_MAX
assert SEGMENT_VALUES_MAX * 4 <= FRAME_PAYLOAD_BYTES_MAX, "a dense segment must fit into one frame"
