"""Python environments for the packages that a job asks for, and which packages there are."""
