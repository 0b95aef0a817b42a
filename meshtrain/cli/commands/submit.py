"""`submit`: packs the working directory, hands it to the daemon, and follows the job."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtrain.cli.planning.job_choice import JobChoice, choose
from meshtrain.cli.planning.learner_count import learners_wanted, time_learners
from meshtrain.cli.planning.script_profiles import Shipped
from meshtrain.cli.submission.dry_run import MemoryNeeds, memory_of_members, show_dry_run
from meshtrain.cli.submission.measuring import NotMeasured, measure
from meshtrain.cli.submission.peers import peers_wanted
from meshtrain.cli.submission.requirements import interpreter_with, read_requirements
from meshtrain.cli.submission.resume import check_alone, resume_from
from meshtrain.cli.submission.send_and_follow import send, started
from meshtrain.cli.submission.shipping import pack, program_of
from meshtrain.cli.ui.completion import complete_jobs, complete_trainers
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import BadCommandLine, reported
from meshtrain.cli.ui.options import AsModule, DataDir, Json
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import at_terminal, say
from meshtrain.packing.imports import uses_process_groups
from meshtrain.packing.shipped_folders import DATA_FOLDER, data_place, write_manifest
from meshwire import limits
from meshwire.codecs.registry import FP32, CodecSpec
from meshwire.collectives.strategy import collective_for, topology_of
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY, schedule_of
from meshwire.jobs.files import human_bytes
from meshwire.jobs.partition_wait import PartitionWait
from meshwire.jobs.partition_wait import partition_wait as partition_wait_of
from meshwire.messages.group import GROUP_CODECS, GROUP_SETTINGS
from meshwire.messages.local import Resubmit, Submit
from meshwire.model.fragments import check_fragments
from meshwire.model.masks import MaskSettings, masks_of
from meshwire.planning.choose import NO_PERIODS, Pinned
from meshwire.planning.quality import Quality
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.rate_rule import rate_rule_of
from meshwire.sync_modes.several_learners import refusal_of_learners

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed

# Options of this command that no training script has: who types one behind SCRIPT means it for the job.
NEVER_THE_SCRIPTS = frozenset(
    {"--on", "--peers", "--sync", "--codec", "--topology", "--detach", "--dry-run", "--no-plan", "--max-restarts"}
)
ONE_RANK = "it has one rank on each laptop, and --learners is for scripts that call mt.prepare"
IN_STEP = "Keeping in step, when --sync alone is not enough"


class OnNan(StrEnum):
    STOP = "stop"
    SKIP = "skip"


class EngineName(StrEnum):
    MESH = "mesh"
    TORCHRUN = "torchrun"


@reported
def submit(
    context: typer.Context,
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="The training script, inside the working directory; with -m a module."),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="NAME", help="Name of the job; else the script's.")
    ] = None,
    module: AsModule = False,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            metavar="N|N:MAX",
            help="On N, this one included. N:MAX: on N or more, and devices that are paired or wake up later join, up "
            "to MAX in all (2:8; 2: for any number).",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="A,B", help="On exactly these: names or ids.", autocompletion=complete_trainers),
    ] = None,
    learners: Annotated[
        str,
        typer.Option(
            "--learners",
            metavar="N|auto",
            help="So many learners on each device, each with batches of its own, a share of the cores and its own GPU "
            "where there are several: as N times as many devices. For models whose step leaves cores idle, and for "
            "two GPUs; nothing else is chosen then. auto: as many as train faster here beside each other, by running "
            "some steps of the script; a job's other laptops have as many.",
        ),
    ] = "1",
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Data folder to ship; ./data if there is one."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", metavar="GLOB", help="Ship these although git ignores them, or they look like secrets."
        ),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Do not ship these.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Environment variable of the script.")
    ] = None,
    requirements: Annotated[
        list[Path] | None,
        typer.Option(
            "--requirements",
            "-r",
            metavar="FILE",
            help="Packages that the script needs, installed on every device into an environment for this job, beside "
            "its own torch: requirements.txt, or the dependencies of pyproject.toml; repeatable.",
        ),
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="MODE",
            help="bsp: all take every step together; bsp,accumulate=A: after each A steps, of all their gradients, as "
            "one batch A times as large. ssp:S: nobody waits for a device that is less than S steps late; "
            "ssp:2 suits laptops. local:H: H steps on each device's own weights, then their mean. "
            "diloco:H: then DiLoCo's outer step; ,rate= and ,momentum= set it. "
            "sparseloco:H: the same with 200 times fewer bytes. muloco:H: with Muon in place of AdamW for hidden "
            "matrices, and 16 times fewer. sma:H: each device's own weights go on, and every H steps are drawn to a "
            "central model, their mean with momentum. demo: plain SGD on "
            "the signs of momentum, of which next to nothing travels. Behind an H, ,ssp:1 lets the next H steps "
            "begin while the last ones travel, and who is slower take fewer; ,stream=P lets P parts of the model "
            "travel in turns, each every H steps, and ,tau=T each while T more steps are taken; behind local:H, "
            "stream=P,random draws each part from all values; behind local:H and diloco:H, ,gossip=G has devices mix "
            "their weights in pairs after each G of the H steps, with ,over=ring with both neighbours of a ring.",
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="NAME[:PARAMETERS]",
            help="Encoding of gradients: fp32 is exact; fp16 is half of it, int8 a quarter, topk:0.01 sends one "
            "value in a hundred; `meshtrain codecs` shows all.",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="NAME[:RANKS]",
            help="Who sends to whom: ring, the default of codecs that add up, suits most networks. star:2 with a cable "
            "at rank 2 takes the air of a WiFi cell least; tree, butterfly, grid:4x3 and sharded need fewer steps, "
            "which counts where models are small or latencies large; hierarchical:3 is for two sites, the second one "
            "from rank 3 on. Ranks are as in --on; else this device is 0, the others follow by name. `meshtrain "
            "topology` shows and draws all.",
        ),
    ] = None,
    quality: Annotated[
        Quality | None,
        typer.Option(
            "--quality",
            help="Of --sync and --codec what is not typed is chosen: exact: the exact mean in every step. safe (the "
            "default): no loss beyond the noise of seeds in our measurements. fast: what comes "
            "to a loss soonest, for which a little of each sample may be given up.",
        ),
    ] = None,
    no_plan: Annotated[
        bool,
        typer.Option(
            "--no-plan",
            envvar="MESHTRAIN_NO_PLAN",
            help="Choose nothing: what is not typed is --sync bsp, --codec fp32, on all linked devices.",
        ),
    ] = False,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks",
            metavar="PART[,every=N,move=PART,until=N]",
            help="Train without PART of the weights, 0.8: only the others travel. In every Nth round (100) a part of "
            "them (0.3, falling to 0 until round N) is exchanged for weights with larger gradients.",
        ),
    ] = None,
    scale_lr: Annotated[
        str | None,
        typer.Option(
            "--scale-lr",
            metavar="linear|sqrt[,warmup=N]|none",
            help="Multiply the script's learning rate, as a larger batch bears it: linear, for SGD, by how many of the "
            "script's batches a round holds; sqrt, for Adam, AdamW and RMSprop, by the root of that. It rises over N "
            "rounds (else 5 epochs, at most 780 rounds), and follows who is there. none, with local steps (local:H and "
            "its kin): those of Adam, AdamW and RMSprop are not multiplied by the root of how many learners there are.",
        ),
    ] = None,
    on_nan: Annotated[OnNan, typer.Option("--on-nan", help="A gradient with NaN or inf: stop, or skip.")] = OnNan.STOP,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Else a random one.")
    ] = None,
    hash_every: Annotated[
        int,
        typer.Option("--hash-every", metavar="N", min=0, help="Compare the replicas every N rounds; 0: at the end."),
    ] = 0,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            "--checkpoint-every",
            metavar="N|Nr|off",
            help="Two devices save the job every N minutes, or every N rounds (500r).",
        ),
    ] = CHECKPOINT_EVERY,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="JOB[@ROUND]",
            help="Go on from a job's newest checkpoint, or that after ROUND, as `meshtrain checkpoints` lists them; "
            "without SCRIPT all is as it was.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    partition_wait: Annotated[
        str | None,
        typer.Option(
            "--partition-wait",
            metavar="SECONDS|never",
            help="Devices that are cut off from most of the others wait so long for them, then train on by themselves; "
            "what they do yields to what the others do. 6 times the patience of `up`; with 600 a router may restart, "
            "and nothing is done twice.",
        ),
    ] = None,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Each device may train by itself: a job that has exchanged nothing has succeeded, too.",
        ),
    ] = False,
    restart: Annotated[
        int | None,
        typer.Option(
            "--restart",
            "--max-restarts",
            metavar="N",
            min=1,
            max=limits.WORLD_RESTARTS_MAX,
            help="For scripts of torch.distributed: when a script fails or a device is lost, start the scripts of all "
            "that are left again, at most N times, as torchrun --max-restarts does. They go on from the checkpoints "
            "that they have saved themselves; a device that comes back is taken in. Jobs with mt.prepare go on by "
            "themselves.",
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            "--engine",
            help="Who carries the gradients. mesh: the daemons, encrypted. torchrun: the script starts as under "
            "torchrun, with mt.prepare or torch.distributed, and gradients travel unencrypted, by gloo, on ports of "
            "its own: for a wired network that you trust. Exact and in step: nothing is chosen, nobody comes later, "
            "and the first failure ends the job.",
        ),
    ] = EngineName.MESH,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify",
            metavar="COMMAND",
            help="Run this on this device when the job ends or needs help, in place of what `meshtrain config notify` "
            "says; $MESHTRAIN_TEXT is what happened.",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Record what happens and why, for meshtraind replay: trace.jsonl, membership.jsonl."
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and return.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be sent to whom, and the memory it takes; start nothing."),
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
    straggler: Annotated[
        str | None,
        typer.Option(
            "--straggler",
            metavar="carry|wait",
            rich_help_panel=IN_STEP,
            help="A device that is late: the rounds go on and its gradient joins a later one (carry, the default with "
            "ssp), or they wait for it (wait).",
        ),
    ] = None,
    visibility: Annotated[
        str | None,
        typer.Option(
            "--visibility",
            metavar="eager|fixed",
            rich_help_panel=IN_STEP,
            help="A round is applied once it is complete (eager, the default), or exactly S+1 steps later (fixed: two "
            "runs are equal bit by bit).",
        ),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option(
            "--own",
            metavar="0|1/m|1",
            rich_help_panel=IN_STEP,
            help="Share of its own next updates with which a device goes on before their rounds are there: 1 (the "
            "default), 1/m (of m devices), or 0, which takes the least memory.",
        ),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(
            "--shares",
            metavar="equal|speed",
            rich_help_panel=IN_STEP,
            help="Batches of sizes that follow the measured speed where it differs by a third or more, with the joint "
            "batch kept: the default. Or of equal size, which gives the same run again.",
        ),
    ] = None,
) -> None:
    """Train SCRIPT on the linked devices. Follows the job until it ends; ctrl-C detaches and the job goes on.

    Who trains, and how gradients travel, is chosen as by `meshtrain plan`, and said first; what you type of --sync,
    --codec, --topology, --peers and --on stays. Links and a few steps of SCRIPT are measured for that, once. Where one
    device alone is faster it trains alone; on a terminal you are asked.

    What the script imports is looked for on all devices first; -r has it installed.

    Ships the working directory without what .gitignore names, and without secrets such as .env, .ssh or *.pem, of which
    a line tells. Everything after SCRIPT is the script's, but for a -- right behind it; so is everything after -m
    MODULE. The exit code is the job's outcome: 0 succeeded, 1 failed, 3 lost, 130 cancelled.
    """
    own_args = tuple(args or ())
    if own_args[:1] == ("--",):  # as with torchrun: it only says that what follows is the script's
        own_args = own_args[1:]
        misplaced = []
    else:
        misplaced = [arg for arg in own_args if arg.partition("=")[0] in NEVER_THE_SCRIPTS]
        if script is not None and "--" in own_args:
            _check_dashes(script, own_args, misplaced, module=module)
    count, count_max = peers_wanted(peers)
    if peers is not None and on is not None:
        raise BadCommandLine("--peers and --on exclude each other", "--on with as many names as you want")
    if script is None:
        chosen_members = _names(on), count, count_max
        raise typer.Exit(_resubmit(context, resume, chosen_members, notify, data_dir, detach=detach, json=json))
    if resume is not None and seed is not None:
        raise BadCommandLine("--resume keeps the seed of its job, so that no sample is used twice", "it without --seed")
    own_rate = scale_lr == "none"
    periods = None if own_rate or scale_lr is None else NO_PERIODS
    pinned = Pinned(sync, codec, topology, periods, own_rate)
    typed = JobChoice(pinned, _names(on), count, count_max, shares)
    settings, chosen_codec, chosen_masks = _settings(
        typed.sync, straggler, visibility, own, shares, checkpoint_every, codec, masks, topology, scale_lr
    )
    waits = _waits(partition_wait)
    root = Path.cwd()
    relative = program_of(root, script, as_module=module)
    job_name = name if name is not None else script.rpartition(".")[2] if module else Path(relative).stem
    if not 1 <= len(job_name) <= limits.NAME_CHARS_MAX:
        raise BadCommandLine(f"a job's name has 1 to {limits.NAME_CHARS_MAX} characters, this one {len(job_name)}")
    if data is None and (root / DATA_FOLDER).is_dir():
        data = Path(DATA_FOLDER)  # where mt.data_dir() finds it without a job, too
    environment = _environment(env or ())
    learners_count = learners_wanted(learners)
    reason = refusal_of_learners(
        settings,
        masks=masks is not None,
        by_torchrun=engine is EngineName.TORCHRUN,
        independent=independent,
        restarts=restart is not None,
    )
    if learners_count != 1 and reason is not None:
        raise BadCommandLine(reason)
    several = None if learners_count in (1, None) else learners_count
    own_ways = (resume, masks, straggler, visibility, own, several)  # nothing is known of their price
    source_of_no_plan = context.get_parameter_source("no_plan")
    if quality is not None and source_of_no_plan is not None and source_of_no_plan.name == "ENVIRONMENT":
        no_plan = False
    plans = (
        not no_plan
        and not independent
        and engine is EngineName.MESH
        and own_ways == (None,) * len(own_ways)
        and _open(typed)
    )
    if quality is not None and (not plans or learners_count is None):
        raise BadCommandLine("--quality is for what is chosen, and nothing is left to choose", "it without --quality")
    typed_bytes = sum(len(text.encode()) for text in (*own_args, *(env or ())))
    if typed_bytes > limits.JOB_SPEC_BYTES_MAX:
        raise BadCommandLine(
            f"arguments and environment hold {human_bytes(typed_bytes)}, at most "
            f"{human_bytes(limits.JOB_SPEC_BYTES_MAX)} are sent",
            "a file beside the script",
        )
    for option in misplaced:
        say(f"note: {option} stands behind {script}, so it is the script's; for the job it goes before {script}")
    packages = read_requirements(requirements or ())
    with connected(data_dir) as client, tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
        with Stages() as stages:
            source, shipped_data = pack(root, relative, data, include or (), exclude or (), stages)
        by_daemons = engine is EngineName.MESH and not independent
        if by_daemons and uses_process_groups(source.manifest, source.root, relative, as_module=module):
            if learners_count != 1:
                raise BadCommandLine(f"{script} uses torch.distributed: {ONE_RANK}", "it without --learners")
            of_rounds = typed.pinned.sync or masks or scale_lr or typed.pinned.topology
            if of_rounds or chosen_codec.name not in GROUP_CODECS:
                raise BadCommandLine(f"{script} uses torch.distributed: {GROUP_SETTINGS}", "it without them")
            sent = "" if chosen_codec == FP32 else f"; DistributedDataParallel's gradients travel as {chosen_codec}"
            say(f"{script} uses torch.distributed: one rank on each laptop, exact sums{sent}")
            plans = False
        place = None if data is None else data_place(root, data, source.manifest)
        python = sys.executable
        if packages:
            with Stages() as stages:
                python = interpreter_with(client, packages, stages)
        chosen = typed
        shipped = Shipped(
            relative,
            *(source, shipped_data, place, own_args, environment, python),
            script if module else None,
        )
        if learners_count is None:
            with Stages() as stages:
                timed = time_learners(shipped, os.cpu_count() or 1, stages)
            learners_count = timed.count
            say(timed.sentence())
            if learners_count > 1:
                plans = False
                if scale_lr is None:
                    say(f"note: a round's batch is {learners_count} times as large, and --scale-lr follows that")
        if plans:
            chosen = choose(shipped, typed, quality, data_dir, asks=at_terminal() and not (json or dry_run))
            settings, chosen_codec, chosen_masks = _settings(
                chosen.sync,
                *(straggler, visibility, own, chosen.shares, checkpoint_every),
                *(chosen.pinned.codec, masks, chosen.pinned.topology, scale_lr),
            )
        at = Path(folder)
        body = Submit(
            name=job_name,
            root=str(source.root),
            manifest=write_manifest(source.manifest, at / "source"),
            data_root=None if shipped_data is None else str(shipped_data.root),
            data_manifest=None
            if shipped_data is None
            else write_manifest(shipped_data.manifest, Path(folder) / "data"),
            data_path=place,
            script=relative,
            args=own_args,
            env=environment,
            on=chosen.on,
            peers=chosen.peers,
            peers_max=chosen.peers_max,
            sync=chosen.sync,
            straggler=straggler,
            visibility=visibility,
            own=own,
            shares=chosen.shares,
            codec=chosen.pinned.codec,
            topology=chosen.pinned.topology,
            masks=masks,
            scale_lr=scale_lr,
            on_nan=on_nan.value,
            seed=seed,
            bucket_bytes=None,
            hash_every=hash_every,
            trace=trace,
            dry_run=dry_run,
            independent=independent,
            partition_wait=waits,
            prediction=chosen.prediction,
            requirements=packages,
            restarts_max=restart,
            engine=engine.value,
            as_module=module,
            learners=learners_count,
            hubs=chosen.hubs and not typed.on,  # whoever says who trains says which hub, too
            modules=_modules(source, relative, environment, place, as_module=module),
            checkpoint_every=checkpoint_every,
            resume=None if resume is None else resume_from(client, resume),
        )
        with Stages() as stages:
            submitted = send(client, body, stages, None if dry_run else notify)
        notes = [*source.notes, *(shipped_data.notes if shipped_data is not None else ()), *submitted.notes]
        memory = None
        if dry_run:
            try:
                with Stages() as stages:
                    measurement = measure(
                        *(root, relative, own_args, dict(environment), data),
                        *(settings, chosen_codec, stages, python, script if module else None),
                        scale_lr=scale_lr,
                    )
                available = memory_of_members(client, submitted.members)
                memory = MemoryNeeds(
                    measurement,
                    str(chosen_codec),
                    settings,
                    submitted.members,
                    available,
                    count_max,
                    chosen_masks,
                    chosen.pinned.topology,
                    learners_count,
                )
            except NotMeasured as problem:
                notes.append(f"how much memory it takes is not known: {problem}")
    if dry_run:
        folders = {"source": source, **({"data": shipped_data} if shipped_data is not None else {})}
        show_dry_run(submitted, notes, folders, memory, json)
        return
    predicted = chosen.prediction is not None
    raise typer.Exit(started(submitted, notes, data_dir, detach=detach, json=json, predicted=predicted))


def _check_dashes(script: str, own_args: tuple[str, ...], misplaced: list[str], *, module: bool) -> None:
    """Raises BadCommandLine where options of the job stand between the script and two dashes: whoever types that means
    them for the job."""
    at = own_args.index("--")
    meant = [option for option in misplaced if option in own_args[:at]]
    if meant:
        ordered = ["meshtrain", "submit", *own_args[:at], *["-m"] * module, script, *own_args[at + 1 :]]
        raise BadCommandLine(
            f"{', '.join(meant)} {'stands' if len(meant) == 1 else 'stand'} behind {script}, where everything is the "
            "script's: options of the job go before it",
            shlex.join(ordered),
        )


def _open(typed: JobChoice) -> bool:
    """Whether anything is left to choose: not where one device trains, where all settings were typed, nor with ranks
    that somebody has given a place."""
    settings = typed.pinned
    if typed.peers == 1 or len(typed.on) == 1 or None not in (settings.sync, settings.codec, settings.topology):
        return False
    return settings.topology is None or not topology_of(settings.topology).named


def _resubmit(
    context: typer.Context,
    resume: str | None,
    members: tuple[tuple[str, ...], int | None, int | None],
    notify: str | None,
    data_dir: Path | None,
    *,
    detach: bool,
    json: bool,
) -> int:
    """Submits a job that goes on as it was. Returns the exit code."""
    on, count, count_max = members
    if resume is None:
        if context.params.get("module"):
            raise BadCommandLine("which module?", "meshtrain submit -m package.train")
        raise BadCommandLine("which script?", "meshtrain submit train.py")
    check_alone(context, resume)
    with connected(data_dir) as client, Stages() as stages:
        body = Resubmit(resume=resume_from(client, resume), on=on, peers=count, peers_max=count_max)
        submitted = send(client, body, stages, notify)
    return started(submitted, submitted.notes, data_dir, detach=detach, json=json)


def _settings(
    sync: str,
    straggler: str | None,
    visibility: str | None,
    own: str | None,
    shares: str | None,
    checkpoint_every: str,
    codec: str | None,
    masks: str | None,
    topology: str | None,
    scale_lr: str | None,
) -> tuple[SyncSettings, CodecSpec, MaskSettings | None]:
    """How the members keep in step, and what travels.

    Raises:
        BadCommandLine: it does not fit together, or a schedule does not exist.
    """
    try:
        schedule_of(checkpoint_every)
        settings = sync_settings(sync, straggler, visibility, own, shares)
        chosen_codec = codec_of(settings, codec)
        collective_for(chosen_codec, topology)
        rate_rule_of(scale_lr, settings)
        check_fragments(settings, chosen_codec, partial=masks is not None)
        return settings, chosen_codec, masks_of(masks, settings, chosen_codec)
    except ValueError as error:
        raise BadCommandLine(str(error)) from None


def _modules(
    source: "Packed",
    script: str,
    environment: Sequence[tuple[str, str]],
    data_place: str | None,
    *,
    as_module: bool,
) -> tuple[str, ...]:
    """What the script imports, to be looked for everywhere but in the data folder; nothing where its owner says where
    modules are found."""
    from meshtrain.packing.imports import modules_needed

    if any(name.startswith("PYTHON") for name, _ in environment):
        return ()
    needed = modules_needed(source.manifest, source.root, script, as_module=as_module)
    data = None if data_place is None else data_place.partition("/")[0]
    return tuple(name for name in needed if name != data)[: limits.MODULES_MAX]


def _waits(typed: str | None) -> PartitionWait | None:
    try:
        return None if typed is None else partition_wait_of(typed)
    except ValueError as error:
        raise BadCommandLine(str(error)) from None


def _environment(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    split = [pair.partition("=") for pair in pairs]
    for pair, (key, equals, _) in zip(pairs, split, strict=True):
        if not key or not equals:
            raise BadCommandLine(f"-e {pair!r} is not of the form K=V")
    return tuple((key, value) for key, _, value in split)


def _names(on: str | None) -> tuple[str, ...]:
    if on is None:
        return ()
    names = tuple(name.strip() for name in on.split(","))
    if not all(names):
        raise BadCommandLine(f"--on {on!r} has an empty name", "meshtrain peers")
    return names
