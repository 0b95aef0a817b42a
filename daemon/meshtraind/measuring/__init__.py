"""What the links to the other devices carry: measured when somebody asks, never beside a job."""
