"""The prepared loader: one order of samples on all peers, of which this learner is dealt a part."""
