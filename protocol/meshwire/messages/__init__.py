"""Control messages: what they are (`link`, `job`, `rounds`, `local`) and how they travel (`envelope`)."""
