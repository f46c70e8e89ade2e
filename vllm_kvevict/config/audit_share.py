"""Share of the requests to audit, as written by an operator."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.config.sentences import shown


def parse_share(value: Any) -> float:
    """Read a share in [0, 1]: ``1%``, or a number.

    Raises:
        ValueError: The value is neither; the message does not name a flag.

    """
    text = str(value).strip()
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0 <= share <= 1:
        raise ValueError(f"give a share of the requests such as 1% or 0, not {shown(value)}")
    return share


def _checked(value: Any) -> Any:
    parse_share(value)
    return value


Share = Annotated[int | float | str, BeforeValidator(_checked)]
