"""The smallest budget of a ladder that loses no more than was asked for."""
