"""What can be wrong with messages of a generation change, whoever sent them: text if something is, else None."""

from collections.abc import Collection

from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import topology_after
from meshwire.membership.lineage import rank_of
from meshwire.messages.generation import Enter, Promised, Standing
from meshwire.messages.group import GroupWorld
from meshwire.messages.job import Generation, JobSpec, Member
from meshwire.model.fragments import check_fragments
from meshwire.sync_modes.settings_changes import SettingsWish, differs_below, refusal_of_codec, refusal_of_period

NUMBER_MAX = 2**32 - 1
NUMBER_LEAP_MAX = 2**20  # above what is known: more changes than a job sees, and a few lies do not use the numbers up


def number_wrong(number: int, known: int) -> str | None:
    """Numbers far above what is known would use them up."""
    if number > min(known + NUMBER_LEAP_MAX, NUMBER_MAX):
        return f"its number {number} is far above {known}, the highest known"
    return None


def list_wrong(generation: Generation) -> str | None:
    """G2: does the generation name members and ranks that can be?"""
    ranks = generation.ranks
    if list(ranks) != sorted(set(ranks)) or ranks[-1] >= len(generation.members):
        return "its ranks are not sorted, or not those of its members"
    if list(generation.learning) != sorted(set(generation.learning)) or not {*generation.learning} <= {*ranks}:
        return "its learning ranks are not sorted, or not among its ranks"
    counted, gone = generation.counted, generation.gone
    for electors in (counted, gone):
        if list(electors) != sorted(set(electors)) or (electors and electors[-1] >= len(generation.members)):
            return "the ranks that it counts, or knows to be gone, are not sorted, or not those of its members"
    if {*counted} & {*gone} or generation.root > generation.number:
        return "it counts who is gone, or its root comes after it"
    if not generation.provisional and (gone or not counted or not {*counted} <= {*ranks}):
        return "it is entitled and counts others than its members, or nobody"
    if len({member.device for member in generation.members}) < len(generation.members):
        return "it lists a device twice"
    if rank_of(generation, generation.proposer) not in ranks:
        return "its proposer is not in it"
    return None


def proposal_wrong(generation: Generation, me: Member, sender: str) -> str | None:
    """May `me` look at this proposal at all? `sender` is a device."""
    if wrong := list_wrong(generation):
        return wrong
    if generation.proposer != sender:
        return "it was sent by somebody else than its proposer"
    if (me.device, me.incarnation) not in {(member.device, member.incarnation) for member in generation.live.values()}:
        return "it does not list this device, or an incarnation of it that is gone"
    return None


def extension_wrong(generation: Generation, entered: Generation | None) -> str | None:
    """May it follow what was entered? A proposal that is outdated anyway may come from before the newest members."""
    known = [] if entered is None else [member.device for member in entered.members]
    if [member.device for member in generation.members[: len(known)]] != known:
        return "it alters the list of members of all times"
    return None


def promise_wrong(promised: Promised, generation: Generation) -> str | None:
    """G4: is what the member says of itself possible?"""
    standing = promised.standing
    if standing.generation is not None and not 1 <= len(standing.chains) <= standing.complete + 1:
        return f"its standing has {len(standing.chains)} chain hashes for {standing.complete} rounds"
    if standing.number >= generation.number or any(vote.number > generation.number for vote in standing.votes):
        return "its standing is of a later generation than it promised"
    if (standing.generation is None) != (standing.history is None):
        return "it brings a history and does not say who decides what follows it, or the other way round"
    if standing.world is not None and _is_elsewhere(standing.world.world, generation, range(len(generation.members))):
        return "its world is of later, or of others than the members"
    if standing.history is not None and standing.history.number > standing.number:
        return "the root of its history comes after it"
    return None


def enter_wrong(enter: Enter, generation: Generation, rank: int, standing: Standing) -> str | None:
    """Does what was decided fit what this member promised?"""
    told = dict(enter.complete)
    if tuple(sorted(told)) != generation.ranks or len(told) != len(enter.complete):
        return "it does not tell what each member holds"
    if not {*enter.reload} <= {*generation.ranks} or enter.source not in generation.ranks:
        return "it names ranks that are not in the generation"
    if not {*enter.awaited} <= {*generation.ranks} or (enter.awaited and enter.giver not in enter.awaited):
        return "it awaits learners of others than its members, or their giver is none of these"
    if (standing.world is not None and enter.world is None) or _is_elsewhere(enter.world, generation, generation.ranks):
        return "its world is not of this generation, or of an earlier one"
    if enter.way == "back" and (enter.reload != generation.ranks or generation.learning):
        return "it gives rounds up that a learner has computed with"
    if rank in enter.reload:
        nobody = enter.reload == generation.ranks
        return "its source holds no history" if enter.source in enter.reload and not nobody else None
    if standing.generation is None or told[rank] != standing.complete or not standing.complete <= enter.cut:
        return f"it cuts at {enter.cut} and keeps {told[rank]} rounds of this member, which holds {standing.complete}"
    if standing.complete == enter.cut and standing.chains[-1] != enter.chain:
        return "this member's history is not the one that it keeps"
    if enter.source == rank and standing.complete < enter.cut:
        return "its source lacks rounds"
    bound = standing.complete + standing.ahead
    rounds = range(standing.complete + 1, bound + 1)
    if (other := differs_below(standing.changes, enter.changes, rounds)) is not None:
        return f"it changes what round {other} goes by, which this member may have bound"
    return None


def changes_wrong(body: Enter | Promised, spec: JobSpec) -> str | None:
    """C3: can the job go over to the settings that a commit brings, or that a promise tells of and asks for? What a
    promise has wrong would be wrong in the commit, for which its proposer would be refused."""
    changes = body.changes if isinstance(body, Enter) else body.standing.changes
    firsts = [change.first for change in changes]
    if firsts != sorted(set(firsts)):
        return f"its changes of settings begin at the rounds {firsts}"
    asked = None if isinstance(body, Enter) else body.standing.asks
    for wish in (*changes, *([asked] if asked is not None else [])):
        if why := change_refusal(spec, wish):
            return f"it goes over to other settings, or asks for them: {why}"
    return None


def change_refusal(spec: JobSpec, wish: SettingsWish) -> str | None:
    """Why a job that runs cannot go over to settings as they were typed; None if it can."""
    if wish.codec is None and wish.period is None:
        return "nothing is named that is to change: a codec, a period, or both"
    if wish.period is not None and (why := refusal_of_period(spec.sync, wish.period)):
        return why
    if wish.codec is None:
        return None
    before = parse_codec(spec.codec)
    try:
        codec = parse_codec(wish.codec)
        topology_after(spec.topology, before, codec)
        check_fragments(spec.sync, codec, partial=False)
    except ValueError as error:
        return str(error)
    return refusal_of_codec(spec.sync, before, codec)


def _is_elsewhere(world: GroupWorld | None, generation: Generation, among: Collection[int]) -> bool:
    """P6: is it of other ranks than those, or of a later generation?"""
    if world is None:
        return False
    ranks = {*world.ranks}
    return len(ranks) < len(world.ranks) or not ranks <= {*among} or world.number > generation.number


assert NUMBER_LEAP_MAX < NUMBER_MAX
