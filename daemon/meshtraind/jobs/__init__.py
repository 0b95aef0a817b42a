"""What is offered, accepted, submitted, running and over, and the way of every message to its job."""
