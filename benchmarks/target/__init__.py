"""What requests with a target come to, and what their answers lose."""
