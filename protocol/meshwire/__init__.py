"""What peers must agree on: frames, messages, topologies, rounds. Pure: no sockets, clocks, threads or torch."""
