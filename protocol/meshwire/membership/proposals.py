"""What a proposer works out, as pure functions: whom the next generation lists, and what its promises decide.

Before it proposes: `roll_of` lists the members (G7, who changes it). When all have promised: `worst_linked` finds two
without a link to each other, in which case somebody has to be left out; else `enter_message` says whose history is kept
(`keep`: G4, the longest), who has to load it anew, and how it goes on where no learner computes (J3); of a job that
restarts its scripts, whose run together from then on (`next_world`: P6).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwire import limits
from meshwire.checkpoints.resume_choice import WayOn, at_beginning, way_on
from meshwire.membership.lineage import rank_of
from meshwire.messages.generation import Enter, Standing
from meshwire.messages.group import GroupWorld
from meshwire.messages.job import Generation, Member
from meshwire.rounds.chain import START
from meshwire.sync_modes.settings_changes import SettingsChange, changed, differs_below


@dataclass(frozen=True, slots=True)
class Roll:
    """Whom a generation lists (fields as in `Generation`)."""

    members: tuple[Member, ...]
    ranks: tuple[int, ...]
    learning: tuple[int, ...]


def roll_of(
    last: Generation,
    entered: Generation,
    *,
    without: Collection[int],
    joining: Iterable[Member],
    learn: Collection[int],
    rest: Collection[int],
) -> Roll:
    """Whom the next generation lists.

    `last` is the newest one promised, `entered` the newest one entered, which `last` extends: whoever is in one of
    them stays, but for the ranks `without`. A device that returns takes its old rank with its new incarnation, a
    newcomer the next one while there are any; neither computes at first. `learn` and `rest` are the ranks that wish so.
    """
    members = list(last.members)
    # The last proposal left these out, and nobody has entered it: they are counted again.
    unlisted = {rank for rank in entered.ranks if rank not in last.ranks and members[rank] == entered.members[rank]}
    ranks = ({*last.ranks} | unlisted) - {*without}
    learning = {*last.learning} | (unlisted & {*entered.learning}) | {*learn}
    for member in sorted(joining, key=lambda member: member.device):
        rank = rank_of(last, member.device)
        if rank is None and len(members) < limits.MEMBERS_MAX:
            rank = len(members)
            members.append(member)
        elif rank is not None:
            members[rank] = member
        if rank is not None:
            ranks.add(rank)
            learning.discard(rank)
    return Roll(tuple(members), tuple(sorted(ranks)), tuple(sorted((learning & ranks) - {*rest})))


def lies_on(standing: Standing, history: Standing) -> bool:
    """Whether all rounds that `standing` holds are rounds of `history` (G4), so that it can be caught up.

    Each round's chain hash stands for all rounds up to it. So one comparison is enough: the newest hash of `standing`
    with that of the same round in `history`, which tells only of its newest few.
    """
    behind = history.complete - standing.complete
    known = standing.generation is not None and standing.chains and 0 <= behind < len(history.chains)
    return bool(known) and standing.chains[-1] == history.chains[-1 - behind]


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """The history that is kept: up to which round, who gives it to the others, and who has to load it anew."""

    cut: int
    chain: bytes
    source: int
    reload: tuple[int, ...]


def keep(standings: Mapping[int, Standing], proposer: int) -> KeptHistory:
    """G4: of those who entered the newest generation g* that any responder entered, the longest history.

    Its source is the holder from whose chain hashes most members can be caught up; of several the proposer, then the
    lowest rank. Two entered generations can share a number where neither made progress beyond a promise: then the
    proposer's is g*, or the longer one. If nobody brings a history all are told to reload, from round 0.
    """
    # 1. The newest generation that anybody has entered, and among those that entered it the longest history.
    with_history = {rank: standing for rank, standing in standings.items() if standing.generation is not None}
    if not with_history:
        return KeptHistory(0, START, proposer, tuple(sorted(standings)))
    number = max(standing.number for standing in with_history.values())
    newest = {rank: standing for rank, standing in with_history.items() if standing.number == number}
    first = max(newest, key=lambda rank: (rank == proposer, newest[rank].complete, -rank))
    among = {rank: held for rank, held in newest.items() if held.generation == newest[first].generation}
    cut = max(held.complete for held in among.values())

    def lacking(source: int) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, standing in standings.items() if not lies_on(standing, standings[source])))

    # 2. Several may hold it, and tell of more or fewer of its hashes: the one from which fewest have to load anew.
    longest = [rank for rank, held in among.items() if held.complete == cut]
    source = min(longest, key=lambda rank: (len(lacking(rank)), rank != proposer, rank))
    return KeptHistory(cut, standings[source].chains[-1], source, lacking(source))


def enter_message(
    generation: Generation,
    standings: Mapping[int, Standing],
    proposer: int,
    *,
    awaited: bool = True,
    missed: bool = False,
) -> Enter:
    """What all members are told once all have promised. Whoever reloads counts as holding the cut.

    Args:
        awaited: somebody who is not here may have the base.
        missed: such a one may come back soon, and is worth more than a checkpoint.
    """
    kept = keep(standings, proposer)
    begun = not at_beginning(standings, kept.cut)
    way = way_on(standings, kept.cut, kept.reload)
    if way.way == "back" and begun and (generation.provisional or missed):
        way = WayOn("wait")  # somebody who is silent may have the base, with all that was committed
    if way.way == "wait" and not (begun and awaited):
        # Nobody has what these lack. (Before the job has begun nobody who is elsewhere has it either.) Where it was
        # lost by an error of the script, that would come again.
        way = WayOn("failed" if any(held.holding.failed for held in standings.values()) else "lost")
    bases = {rank for rank in kept.reload if standings[rank].generation is not None and standings[rank].holding.base}
    if way.way in ("lost", "failed") and bases:  # no base is given up for none (G4)
        way, kept = WayOn("on"), keep({rank: _alone(held, rank in bases) for rank, held in standings.items()}, proposer)
    if not generation.trainers:
        way = WayOn("lost")  # hubs train nothing: it begins again from their disks when somebody comes (H3)
    if generation.learning:
        way = WayOn("on")  # while a learner computes, the rounds go on; else it depends on what is left to load (J3)
    if way.source is not None and (saved := standings[way.source].holding.saved) is not None:
        kept = KeptHistory(*saved, way.source, tuple(sorted(standings)))
        begun = not standings[way.source].holding.begins
    together = () if begun or generation.learning or way.way not in ("on", "back") else _that_come(standings)
    given = [rank for rank in together if way.way == "on" and standings[rank].holding.prepared]
    complete = {rank: kept.cut if rank in kept.reload else held.complete for rank, held in standings.items()}
    # The deal of samples follows the newest generation that any of those who keep their history has counted (X3).
    follows = max((held for rank, held in standings.items() if rank not in kept.reload), key=_counted, default=None)
    return Enter(
        job=generation.job,
        generation=generation.hash64(),
        cut=kept.cut,
        chain=kept.chain,
        source=kept.source,
        complete=tuple(sorted(complete.items())),
        reload=kept.reload,
        counted=0 if follows is None else follows.counted,
        learning=() if follows is None else follows.learning,
        way=way.way,
        awaited=together,
        giver=min(given or [rank for rank in together if standings[rank].holding.begins] or together, default=0),
        given=bool(given),
        world=next_world(generation, standings, kept.source, kept.reload),
        changes=_changes(generation, standings, kept),
    )


def _changes(
    generation: Generation, standings: Mapping[int, Standing], kept: KeptHistory
) -> tuple[SettingsChange, ...]:
    """C3: those of the history that is kept, and what is asked for while learners compute; by several, what a person
    asks for, and of the lowest rank: the others ask again."""
    asked = [held.asks for _, held in sorted(standings.items()) if held.asks is not None]
    asked.sort(key=lambda wish: wish.by != "person")
    ahead = max(held.ahead for held in standings.values())
    wish = asked[0] if asked and generation.learning else None
    furthest_back = min(
        (held.complete for rank, held in standings.items() if rank not in kept.reload), default=kept.cut
    )
    return changed(standings[kept.source].changes, kept.cut, ahead, wish, furthest_back)


def told_other_settings(enter: Enter, standings: Mapping[int, Standing]) -> int | None:
    """The first member that would not enter by this word, for it goes over to other settings in a round that the member
    may have bound than its promise tells of (C3); None: all would. Then this one tells a lie, or the source does."""
    for rank, held in sorted(standings.items()):
        rounds = range(held.complete + 1, held.complete + held.ahead + 1)
        if rank not in enter.reload and differs_below(held.changes, enter.changes, rounds) is not None:
            return rank
    return None


def lies_about_settings(one: int, source: int, standings: Mapping[int, Standing], proposer: int) -> int | None:
    """Which of both does, as the proposer can tell who was in the generation in which the source was; None: it was
    not, and has gone by older ones."""
    own, held = standings[proposer], standings[one]
    if own.generation is None or own.generation != standings[source].generation:
        return None
    rounds = range(held.complete + 1, held.complete + held.ahead + 1)
    return source if one == proposer or differs_below(held.changes, own.changes, rounds) is None else one


def next_world(
    generation: Generation, standings: Mapping[int, Standing], source: int, reload: Collection[int]
) -> GroupWorld | None:
    """P6: whose scripts run together from this generation on. None: the job has no worlds.

    The world stays as it is where all of its members are there, in the same process of their daemons, none says that it
    is broken, and nobody comes. Whose script has ended well is in no other one. What comes is begun again without
    counting as a failure, as torchrun does.
    """
    brought = standings[source].world
    if brought is None:
        return None
    last = brought.world
    told = {rank: held.world for rank, held in standings.items() if rank not in reload and held.world is not None}
    stay = [rank for rank in last.ranks if rank in told]
    done = {rank for rank in stay if told[rank].done}
    come = [rank for rank in generation.ranks if rank not in stay and not (rank in told and told[rank].done)]
    lost = [rank for rank in last.ranks if rank not in stay]
    failures = [_told(generation, lost, "was lost", "were lost")] if lost else []
    failures += [why for rank in stay if (why := told[rank].broken) is not None]
    if not failures and not come:
        return last
    return GroupWorld(
        number=generation.number,
        restarts=last.restarts + bool(failures),
        ranks=(*(rank for rank in stay if rank not in done), *come),
        why=(failures or [_told(generation, come, "has come", "have come")])[0][: limits.REASON_CHARS_MAX],
    )


def _told(generation: Generation, ranks: Sequence[int], one: str, several: str) -> str:
    """What has become of them, for people."""
    names = " and ".join(generation.members[rank].name for rank in ranks)
    return f"{names} {one if len(ranks) == 1 else several}"


def _that_come(standings: Mapping[int, Standing]) -> tuple[int, ...]:
    """Whose learners run, or will be started."""
    return tuple(sorted(rank for rank, held in standings.items() if held.holding.loads_after is not None))


def _alone(standing: Standing, counts: bool) -> Standing:
    """As it is, or without its history."""
    return standing if counts else standing.model_copy(update={"generation": None})


def _counted(standing: Standing) -> int:
    return standing.counted


def worst_linked(standings: Mapping[int, Standing], proposer: int) -> tuple[int, int] | None:
    """G7: (whom to leave out, whom it has no link to) if two members have none; None if all have.

    Of such two the one without history, then the one with fewer links, then the higher rank. The proposer has links to
    all: it has their promises.
    """

    def linked(one: int, other: int) -> bool:
        return proposer in (one, other) or (other in standings[one].linked and one in standings[other].linked)

    apart = {one: [other for other in standings if other != one and not linked(one, other)] for one in standings}
    suspects = [rank for rank in standings if apart[rank]]
    if not suspects:
        return None
    worst = max(suspects, key=lambda rank: (standings[rank].generation is None, len(apart[rank]), rank))
    return worst, min(apart[worst])
