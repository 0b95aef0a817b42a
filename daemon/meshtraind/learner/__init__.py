"""The training process: how it is started, watched and ended, the memory shared with it, its script."""
