"""Every maximum of the protocol, in one place: what a peer sends is checked against these before it is used."""

KIB = 1024
MIB = 1024 * KIB

# Frames (W1, W4)
FRAME_PAYLOAD_BYTES_MAX = 1 * MIB  # one control message, or one run of encoded segments
CHUNK_BYTES = 256 * KIB  # what a sender aims at: the cheapest size for uvloop's BufferedProtocol on loopback and TLS
CONTROL_BYTES_MAX = 1 * MIB  # one frame of a control message; all of it, where nothing says that it may be longer
MESSAGE_BYTES_MAX = 12 * MIB  # of several frames, from those that are known: a model of 80,000 tensors, a deal
LINK_QUEUE_BYTES_MAX = 1 * MIB  # data queued on a link before the sender is held back, so that control can overtake
# Queued behind that; who lets more pile up does not read, and its link ends. Of memory it is up to 3.3 times as much
# (measured: 79 MiB), for TLS's buffer grows by being copied.
LINK_BACKLOG_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
NUMBER_MAX = 2**53  # of either sign, where a field says nothing smaller: exact in JSON; a thousand add up in 64 bits
SECONDS_MAX = 2**35  # a span, or a time since 1970 until the year 3058, as in a job's id: every clock can show it
MESSAGE_FIELDS_MAX = 64  # of one map in a message, which is always a class: lists may be long, classes are not
REQUESTS_PER_CONNECTION_MAX = 64  # being answered at once; more are refused one by one
REFUSAL_CHARS_MAX = 1000  # why a connection is closed
REFUSED_FIELD_CHARS_MAX = 64  # of the name of a wrong field in that reason
HANDSHAKE_TIMEOUT_S = 10.0  # TLS and hello together; a slow-drip client is closed at this point
LOCAL_CONNECTIONS_MAX = 256  # clients and learners of this machine
LOG_FILE_BYTES_MAX = 8 * MIB  # of the daemon; the one before is kept too. Weeks, as nobody can fill it by himself
CONFIG_BYTES_MAX = 64 * KIB  # DATA/config.toml
CONFIG_VALUE_CHARS_MAX = 1000  # of one value in it
RUN_FILE_BYTES_MAX = 16 * KIB  # DATA/run/daemon.json
HANDSHAKES_MAX = 32  # connections that have not said hello yet, over all addresses; guests of a pairing are among them

# The dashboard
DASHBOARD_TOKENS_MAX = 16  # one-time tokens that nobody has used yet, or that a second use would tell of
DASHBOARD_TOKEN_S = 60.0  # from the command to the page: a browser that starts cold takes half of it
DASHBOARD_SESSIONS_MAX = 16  # browsers that are let in; the oldest goes
DASHBOARD_SESSION_S = 12 * 3600.0  # a day's work
DASHBOARD_STREAMS_MAX = 8  # pages that watch at once
DASHBOARD_CONNECTIONS_MAX = 64  # a browser opens six
DASHBOARD_BODY_BYTES_MAX = 4 * KIB  # of one request: a job's id, a device's name
DASHBOARD_HEAD_BYTES_MAX = 16 * KIB  # of one request: what browsers send is below 2 KiB
DASHBOARD_REQUEST_S = 10.0  # for a request to arrive whole, and for a reader to take what is buffered for it
DASHBOARD_JOBS_MAX = 30  # the newest, on the page
DASHBOARD_EVENTS_MAX = 200  # the newest, on the page
DASHBOARD_POINTS_MAX = 300  # of one job's chart: beyond it every second point goes
DASHBOARD_CHARTS_MAX = 8  # jobs whose charts are kept, the newest
DASHBOARD_LINKS_MAX = 160  # of one job, in the picture: a ring of 64, not each with each
DASHBOARD_PRICES_BYTES_MAX = 256 * KIB  # of what was timed of codecs: thirty take 8 KiB
DASHBOARD_TEXT_CHARS_MAX = 4000  # of one text on the page; logs have the rest

# Measuring a link (W7)
CELSIUS_MAX = 300.0  # of a processor: a sensor that says more is broken
MEASURE_S_MAX = 2.0  # of one link, all in all: nobody waits longer for a figure
MEASURE_LEG_S = 0.4  # for which chunks are sent, one way or both
MEASURE_LEG_BYTES_MAX = 64 * MIB  # in one such leg: a tenth of a second of what the fastest links take
SPEED_S_MAX = 10.0  # of the calculation by which a device knows its speed; it takes a second, and longer on half a core
MEASURE_PAUSE_S = 3.0  # after one that others have asked for: they may take two fifths of a link, and no more
GOODPUT_BYTES_S_MAX = 1e12  # of any link: what is said to be faster was not measured

# Mesh and jobs
CODEC_CHARS_MAX = 256  # of a codec as typed, with all its parameters
TOPOLOGY_CHARS_MAX = 256  # of a topology as typed: a name, and up to MEMBERS_MAX ranks of two digits
MEMBERS_MAX = 64  # contributors are one u64 bitmap by rank
PEERS_MAX = 256  # pinned devices
INTRODUCED_MAX = PEERS_MAX // 2  # of them: by the words of others, so that there is room for codes typed here
INTRODUCTIONS_MAX = MEMBERS_MAX  # of one device, that it says and that are taken; waiting ones, of all together
REMOVED_MAX = 1024  # devices that a person has removed, and no word takes in again; beyond it none takes in any
REMOVALS_TOLD_MAX = 64  # the newest, to each other device
DEVICES_JOINED_TOLD_MAX = 64  # the newest that joined, for screens
NAME_CHARS_MAX = 64
ADDRESSES_PER_PEER_MAX = 16
ADDRESSES_PER_SIGHTING_MAX = 8  # of one mDNS announcement: a false one leaves room for what is known otherwise
DIALS_PER_DEVICE_MAX = 16  # at once: all its candidates, and no more where these keep being replaced
DIALS_MAX = 64  # at once, to all devices together: what a default limit of open files (256 on macOS) has room for
ADDRESSES_GOSSIPED_PER_PEER_MAX = 4  # the best ones: PEERS_MAX times this many host names fit into one message
HOST_CHARS_MAX = 253  # a DNS name (RFC 1035)
DEVICES_SEEN_MAX = 256  # unpaired devices that are remembered for display; anybody on the network can invent some
MDNS_TXT_BYTES_MAX = 400  # our own are under 200; a larger one is not ours
MDNS_RESOLVES_MAX = 32  # announcements that came in parts and are being asked for
JOBS_RUNNING_MAX = 16
OFFERS_OPEN_MAX = JOBS_RUNNING_MAX // 2  # of one device, that have not begun: there is room for those of others
OFFER_SILENCE_S_MAX = 180.0  # an offer that its submitter does not repeat expires: it hangs, or has forgotten it
OFFER_S_MAX = 7 * 86_400.0  # nor does repeating keep it for ever: what one waits for that submits
JOIN_SILENCE_S_MAX = 900.0  # of the members that have the files of a job which this device was asked to join
HASHES_OPEN_MAX = 64  # rounds whose base hashes are not complete yet
ENDED_JOBS_IN_MEMORY_MAX = 100  # with their last reports; older ones are listed from the history
CALLED_OFF_MAX = 256  # jobs that ended before they were offered here

# Job files: the manifest of a job's source or data folder
FILES_MAX = 100_000  # entries of one manifest: 60,000 images as files must fit, a home folder must not
FILE_PATH_BYTES_MAX = 512  # UTF-8 of a relative path; leaves room for the job's folder below the systems' 1024 to 4096
FILE_NAME_BYTES_MAX = 255  # one part of a path: what ext4, APFS and NTFS take
FOLDER_DEPTH_MAX = 32
FOLDERS_MAX = FILES_MAX  # of one manifest: each takes a block and an inode, and 100,000 files could have 3 million
BLOB_PART_S_MAX = 7 * 86_400.0  # a blob that nobody has gone on receiving for a week
FILE_ENTRY_BYTES_MAX = 4 * KIB  # of a packed manifest; a path and its hash take far less
MANIFEST_BYTES_MAX = 32 * MIB  # a packed manifest: FILES_MAX paths of 250 bytes; it travels as a blob
SOURCE_BYTES_MAX = 512 * MIB  # the working directory, sent anew with every change; data goes with --data
DATA_BYTES_MAX = 1024 * 1024 * MIB  # a --data folder: 1 TiB
DISK_RESERVE_BYTES_MIN = 1024 * MIB  # left free for the owner when a job's files are received, at least; systems swap,
DISK_RESERVE_BYTES_MAX = 20 * 1024 * MIB  # update and log into less than this
RESULTS_BYTES_MAX = 100 * 1024 * MIB  # of outputs, logs and checkpoints of ended jobs; beyond it the oldest are deleted
RESULTS_S_MAX = 90 * 86_400.0  # after their end they are: a quarter to fetch what is worth keeping
BLOB_CACHE_BYTES_MAX = 20 * 1024 * MIB  # of blobs that no live job holds: shipped once, but not kept for ever

# Job history
REQUIREMENTS_MAX = 200  # packages that a job may ask for
REQUIREMENT_CHARS_MAX = 300
MODULES_MAX = 256  # that a script imports, which are looked for before it is shipped
MODULE_CHARS_MAX = 100
JOB_SPEC_BYTES_MAX = 64 * KIB  # arguments and environment of one job, packed or as JSON
JOBS_REMEMBERED_MAX = 1000  # that have ended; no more are listed
UNBEGUN_REMEMBERED_MAX = 100  # of them: that never began, so that offers in a loop drive out nothing that was trained
JOBS_REMEMBERED_S_MAX = 180 * 86_400.0  # half a year after their end
HISTORY_BYTES_MAX = 32 * MIB  # of DATA/jobs.db; a job that failed takes some 20 KiB with its traceback
JOB_FILE_BYTES_MAX = CONTROL_BYTES_MAX  # one job's specification and members, as they travel in an offer
JOBS_LISTED_MAX = 1000  # rows of one answer
JOBS_LISTED_BYTES_MAX = CONTROL_BYTES_MAX // 2  # they travel in one message

# Process groups (P1, P2)
RELAY_WINDOW_BYTES = 4 * MIB  # of one learner for another, under way: what a gigabit link holds in 32 ms
RELAY_QUEUE_BYTES_MAX = 2 * RELAY_WINDOW_BYTES  # of one rank, in a daemon: of the group of now and of the one before
EAGER_MESSAGE_BYTES_MAX = 64 * KIB  # a message that goes before anybody has asked for it
EAGER_BYTES_MAX = 1 * MIB  # of them, of one learner for another, that nobody has asked for yet
STORE_KEY_CHARS_MAX = 4096
STORE_VALUE_BYTES_MAX = 1 * MIB
STORE_BYTES_MAX = 64 * MIB  # of one job's store, keys and values
STORE_KEYS_MAX = 100_000
STORE_WAIT_S_MAX = 7 * 86_400.0  # for a key: scripts say how long

# Rounds (R0, V2)
GOSSIP_PIECE_BYTES = (
    CHUNK_BYTES  # of what is shown to a neighbour (R9); a daemon holds one of each until all of it is here
)
PERIOD_MAX = 500  # H, DiLoCo's; a claim of two periods stays below CLAIM_BATCHES_MAX
PERIODS_AFTER_MAX = 99_999  # rounds of one step before those of a period
STALENESS_MAX = 64  # the bound s: retained rounds are at most 3(s+1)
FORECASTS_MAX = 48  # of codecs with periods that a job may go over to by itself: those of which a loss was measured
SETTINGS_CHANGES_MAX = 4 * (STALENESS_MAX + 1) + 1  # one for each round in flight (R5) or ahead, and one before
CLAIM_BATCHES_MAX = 4096  # of one bind: a step that accumulates so many batches is none
BARRIERS_OPEN_MAX = 64  # of one member that others have not passed: one, unless its script goes on after their errors
CHAINS_MAX = 3 * (STALENESS_MAX + 1) + 1  # of the rounds that not all members have announced complete (G4)
ANCESTORS_MAX = 64  # generations that a member names as those before its own
ATTEMPTS_MAX = 16  # entitled generations promised and not entered: each is a change that failed, one after the other
SAMPLES_MAX = 2**31  # of one step, and of what one learner computes in a second
WEIGHT_MIN = 2.0**-80  # of one contribution: no sum that is divided by it is beyond fp32
WEIGHT_MAX = 2.0**53  # samples that a float counts; more would be infinite in fp32, or in a sum
SQUARED_NORM_MAX = 1e100  # of one run: fp32 in VALUES_MAX values gives 1e87, and sums of many stay finite
STEP_HISTORY_MAX = 100  # steps behind a learner's median and 95th percentile: several minutes, and cheap to sort

# Model (M1)
TENSORS_MAX = 100_000
TENSOR_DIMS_MAX = 16
FRAGMENTS_MAX = 64  # P, of a model whose parts take turns; more of them would be small, and wait for latency
STRETCHES_MAX = 4_096  # of rounds in which vectors differ in length: a model grows in a few stages
TENSOR_NAME_CHARS_MAX = 512  # nested wrappers add a prefix each
TENSOR_ALIASES_MAX = 256  # other names of a tied tensor
MODEL_BYTES_MAX = MESSAGE_BYTES_MAX - 4 * KIB  # a packed model manifest; its messages add a few fields
OPTIMIZER_CHARS_MAX = 64 * KIB  # description of an optimizer with one param group per tensor
ENCODER_ROW_VALUES = 512  # of LGC's values, in a row that its autoencoder learns from
ENCODER_SAMPLE_BYTES_MAX = 256 * KIB  # of such rows, in one message to the learner
ENCODER_WEIGHTS_BYTES_MAX = 32 * KIB  # the largest autoencoder has 17
INTEGER_BUFFER_VALUES_MAX = 16 * KIB  # they travel in every seal: step counters and position tables, not masks
VALUES_MAX = 2**33
SEGMENT_VALUES_MAX = 64 * KIB  # C1: one encoded unit
BUCKETS_MAX = 65_535  # bucket is a u16 on the wire
BUCKET_BYTES_MAX = 256 * MIB

LEARNERS_MAX = 16  # of one device in one job (R6)
WORLD_RESTARTS_MAX = 10_000  # of the scripts of one job, by `submit --restart`

# Membership
VIOLATIONS_MAX = 3  # of one device in one job: then it stays out of it. Once can be a flipped bit
PATIENCE_S = 5.0  # silence after which a peer is lost, unless its owner says otherwise
PATIENCE_S_MIN = 0.5  # below it a burst on the radio looks like a loss
PATIENCE_S_MAX = 120.0
PARTITION_WAIT_S_MAX = 7 * 86_400.0  # of a part for the others: who would wait for longer waits for ever

# Checkpoints
CHECKPOINT_MANIFEST_BYTES_MAX = 32 * MIB  # one line for each of TENSORS_MAX units, and the blocks of a deal

# The course of a job, as `meshtrain report` draws it
COURSE_POINTS_MAX = 600  # beyond it every second one goes
COURSE_VALUES_MAX = 6  # of the script's own values, the first that it has logged
COURSE_PRESENCE_MAX = 500  # changes of who takes part: the first, and the newest
COURSE_BYTES_MAX = MESSAGE_BYTES_MAX // 2  # its file, which travels in one message

GIVEN_UP_CHECKPOINTS_MAX = 2  # of one job on one device: a state is the largest thing that a job has

# Text and files in messages
ERROR_CHARS_MAX = 16 * KIB  # an error may hold a traceback with its context
GIVEN_UP_MAX = 16  # partitions of one job whose losing side is told of: the latest
GIVEN_UP_REASON_CHARS_MAX = 100  # why what was given up was not saved: each member repeats those of all partitions
REASON_CHARS_MAX = 500  # why one member does not answer: those of all members fit into one message
LOG_VALUES_MAX = 64  # of one mt.log; all ranks' newest travel in one message
LOG_NAME_CHARS_MAX = 64
PATH_CHARS_MAX = 1024
LOG_TIMES_MAX = 2_000  # of one piece of a log: a piece ends where there are more
FETCH_BYTES_MAX = 256 * KIB  # one piece of a file: small enough for others to pass between two pieces
FETCH_WAIT_S_MAX = 10.0
OUTPUTS_LISTED_MAX = 5_000  # output files of one rank: their list fits into one message
OUTPUT_ENTRIES_MAX = 200_000  # of all kinds that are looked at for that list: seconds on a slow disk
OUTPUT_LIST_BYTES_MAX = 512 * KIB  # paths in one list of output files, all ranks together

# Identity and pairing
CERTIFICATE_BYTES_MAX = 2 * KIB  # DER; our own are under 500
IDENTITY_FILE_BYTES_MAX = 16 * KIB  # certificate and key as PEM; our own are under 1 KiB
PAIRING_FRAME_BYTES_MAX = 4 * KIB  # a certificate and an element of the curve, with room
PAIRING_LIFETIME_S = 300.0  # a code that nobody used dies
PAIRING_TRIES_MAX = 3  # wrong codes before it dies: 3 in 10**6 to guess it
PAIRING_ANSWERS_MAX = 50  # of one code, right or wrong: how often its holder's computing can be timed before it dies
PAIRING_ANSWER_DELAY_S = 0.25  # from request to answer, whatever was computed, which takes 0.1 s on a slow laptop
PAIRING_EXCHANGE_TIMEOUT_S = 15.0  # one guest, from the end of its handshake to the last frame
PAIRING_DIAL_TIMEOUT_S = 5.0  # to one address: TCP and TLS; a firewall that drops says nothing
PAIRING_SEARCH_S = 10.0  # how long a guest looks for the device that shows a code; mDNS takes 2 s after a start
PAIRING_SEARCH_MORE_S = 3.0  # how long it goes on looking when one has answered that the code is not its own
PAIRING_DIALS_MAX = 128  # at once: anybody can announce addresses where nobody answers
PAIRING_ADDRESSES_MAX = 4  # of one device that announces that it shows a code
PAIRING_PLACES_MAX = 1024  # addresses that one search knows: those of DEVICES_SEEN_MAX devices
PAIRING_GUESSES_MAX = 16  # devices that may answer one typed code; each false one has a chance of 1 in 10**6
PAIRING_GUESSES_PER_HOST_MAX = 2  # of them from one IP address, so that one machine cannot be all that answer

assert CHUNK_BYTES <= FRAME_PAYLOAD_BYTES_MAX
assert SEGMENT_VALUES_MAX * 4 <= FRAME_PAYLOAD_BYTES_MAX, "a dense segment must fit into one frame"
