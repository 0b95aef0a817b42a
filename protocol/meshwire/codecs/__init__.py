"""How a codec is typed, what it allows and goes with, and how many bytes each segment takes."""
