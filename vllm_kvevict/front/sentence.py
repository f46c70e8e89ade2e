"""Errors of vLLM's in one sentence, for the commands."""


def first_line(error: Exception) -> str:
    """The sentence in an error of vLLM's; pydantic wraps it in lines of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = [line for line in lines if line.startswith("Value error, ")]
    line = (wrapped or lines or [type(error).__name__])[0]
    return line.removeprefix("Value error, ").split(" [type=")[0]
