"""What an audit shows of the answer that follows, whether it is right, and what it costs."""
