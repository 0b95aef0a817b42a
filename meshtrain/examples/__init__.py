"""Models and scripts that the demo, the tests and the benchmarks train."""
