"""Every mode, codec and topology once, as typed behind --sync, --codec and --topology, for tests that say something of
each. Who adds one is told by `wire/sync_modes/test_every_setting.py` where it is missing here.
"""

from meshwire.codecs.registry import FAMILIES, parse_codec

MODES = (
    *("bsp", "bsp,accumulate=2", "demo", "ssp:2"),
    *("local:2", "local:2,after=2", "local:2,ssp:1"),
    *("local:4,stream=2", "local:4,stream=2,tau=1", "local:4,stream=2,random"),
    *("local:4,gossip=2", "diloco:4,gossip=1,over=ring"),
    *("diloco:2", "diloco:2,ssp:1", "diloco:4,stream=2", "diloco:4,stream=2,tau=1"),
    *("sparseloco:2", "sparseloco:2,ssp:1"),
    *("muloco:2", "muloco:2,ssp:1", "muloco:4,stream=2", "muloco:4,stream=2,tau=1"),
    "sma:2",
)

BRISK = {
    "topk": "topk:0.1",
    "sidco": "sidco:0.1",
    "randomk": "randomk:0.1",
    "dgc": "dgc:0.1,ramp=0",
    "powersgd": "powersgd:2,warmup=0",
    "lgc": "lgc:0.1,refresh=1,warmup=0,train=2+fp32",
}
"""By family, what is itself from its first rounds on, and sends enough for a few to show it."""

OTHERWISE = (
    *("int8:sr", "onebit:warmup=2", "onebit:momentum,warmup=2", "dgc:1", "powersgd:2,half,warmup=0"),
    "lgc:0.1,conv,latent=4,refresh=1,warmup=0,train=2",
)
"""Parameters by which a codec is exchanged or fed back in another way."""


def codecs() -> tuple[str, ...]:
    """Each family in each exchange that it allows."""
    made: list[str] = []
    for name, family in FAMILIES.items():
        usual = BRISK.get(name, name)
        made.append(usual)
        exchange = next((each for each in family.parameters if each.name == "exchange"), None)
        others = getattr(exchange, "words", ())[1:]
        made += [f"{usual}{',' if ':' in usual else ':'}{word}" for word in others]
    return tuple(str(parse_codec(text)) for text in (*made, *OTHERWISE))


TOPOLOGIES = ("ring", "tree", "butterfly", "grid", "sharded", "star", "hierarchical:1", "gather")
