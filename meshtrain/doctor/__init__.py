"""`meshtrain doctor`: why laptops do not meet, or are slow."""
