"""How far peers may run ahead of each other and what a round carries: `bsp`, `ssp:S`, `local:H`, as typed, with what
each allows.
"""
