"""A job from its submission to its end: the states it passes, its files, when it saves its state."""
