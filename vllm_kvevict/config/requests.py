"""Settings of requests in ``vllm_xargs``, read equally by API servers and the engine core."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvevict.config.budget import budget_share, budget_tokens, parse_budget
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.handover import shares_prompt
from vllm_kvevict.config.names import CONFIG_KEY, NONE, keeps_by_layer
from vllm_kvevict.config.sentences import shown
from vllm_kvevict.rules.rule import EvictionRule

POLICY = "kv_eviction"
BUDGET = "kv_eviction_budget"
INTERVAL = "kv_eviction_interval"
PREFILL_INTERVAL = "kv_eviction_prefill_interval"
PROTECT = "kv_eviction_protect_first"
WHEN = "kv_eviction_when"
EVERY = "kv_eviction_every"
AT = "kv_eviction_at"
KEYS = (POLICY, BUDGET, INTERVAL, PREFILL_INTERVAL, EVERY, PROTECT, WHEN, AT)

MESSAGE, TEXT = "message", "text"
"""Keys of :data:`AT` as a mapping: the message after which the context ends, and the text before
which it ends. API servers turn both into tokens."""

BEAM_SEARCH = "kv_eviction_beam_search"
"""Key with which front ends mark the requests of a beam search for the engine core. Clients may not
use it."""

WHENS = ("always", "pressure")


@dataclass(frozen=True)
class RequestOptions:
    """Settings of one request; None for the server's setting.

    Args:
        policy: One of the policies that the server allows, or "none".
        budget: Tokens, or a share such as "25%" of the tokens so far.
        interval: Decode steps between evictions; 0 evicts once.
        protect_first: Tokens at the start of the prompt that no head ever evicts, at most the whole
            prompt.
        at: Eviction point in (0, prompt length], counted from the start of the prompt; None for the
            end of prefill.
        cap: The server's cap on budgets, tokens or a share such as "50%"; None for no cap.
        when: "always", or "pressure" for a request that is evicted only when memory is short.
        prefill_interval: Prompt tokens between evictions inside the prompt; 0 for none.
        recent: Last tokens that its policy never evicts; None for the server's.
        every: Tokens of prompt and answer between evictions; 0 for evictions at the end of the
            prompt and in intervals.

    """

    policy: str
    budget: int | str | None = None
    interval: int | None = None
    protect_first: int = 0
    at: int | None = None
    cap: int | str | None = None
    when: str = "always"
    prefill_interval: int | None = None
    recent: int | None = None
    every: int | None = None

    @property
    def evicts(self) -> bool:
        return self.policy != NONE

    def own_rule(self, rule: EvictionRule) -> EvictionRule:
        """Return the eviction rule of a KV-cache group for this request."""
        share = rule.share
        if share is not None and not keeps_by_layer(self.policy, share.steepest is None):
            rule = replace(rule, share=None)
        asked: dict[str, Any] = {}
        if self.budget is not None:
            asked["budget_tokens"] = budget_tokens(self.budget)
            asked["budget_share"] = budget_share(self.budget)
            asked["max_tokens"] = self.cap if isinstance(self.cap, int) else None
        if self.interval is not None:
            asked["interval"] = self.interval
        if self.prefill_interval is not None:
            asked["prefill_interval"] = self.prefill_interval
        if self.every is not None:
            asked["every"] = self.every
        if self.recent is not None:
            asked["recent"] = self.recent
        if self.protect_first:
            asked["protect_first"] = self.protect_first
            if self.cap is not None:
                asked["cap"] = budget_tokens(self.cap) or budget_share(self.cap)
        return replace(rule, **asked) if asked else rule


def asks(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether a request has any key of KV eviction, valid or not."""
    return bool(extra_args) and any(str(key).startswith(CONFIG_KEY) for key in extra_args or ())


def parse_options(
    config: EvictionConfig,
    extra_args: Mapping[str, Any] | None,
    prompt_len: int,
    rules: Sequence[EvictionRule],
) -> RequestOptions:
    """Read and check the settings of a request.

    Args:
        config: The server's settings.
        extra_args: ``SamplingParams.extra_args``; keys without the prefix of KV eviction are
            ignored.
        prompt_len: Tokens of the prompt.
        rules: The server's eviction rule of every layer or every KV-cache group that evicts.

    Raises:
        ValueError: A setting is invalid; the message names the key and its valid values in one
            sentence.

    """
    given = {
        key: value for key, value in (extra_args or {}).items() if str(key).startswith(CONFIG_KEY)
    }
    for key in given:
        if key not in KEYS:
            raise ValueError(f"KV eviction: unknown key {shown(key)} (known: {', '.join(KEYS)})")
    policy = _policy(config, given)
    recent = config.recent_tokens(policy)
    options = RequestOptions(
        policy=policy,
        budget=_budget(config, given, recent),
        interval=_interval(config, given, INTERVAL, 1, config.interval, "decode steps"),
        protect_first=_protect_first(given, prompt_len),
        at=_at(given, prompt_len),
        cap=config.max_budget,
        when=_when(config, given),
        prefill_interval=_interval(
            config,
            given,
            PREFILL_INTERVAL,
            config.min_prefill_interval,
            config.prefill_interval,
            "prompt tokens",
        ),
        recent=None if recent == config.recent_tokens(config.policy) else recent,
        every=_every(config, given),
    )
    if shares_prompt(extra_args):
        options = _before_last(config, options, prompt_len)
    if not options.evicts:
        # Invalid combinations of settings have no rule, not even an unused one.
        return replace(options, budget=None, interval=None, prefill_interval=None, every=None)
    _check_prefill(config, options)
    _check_store(config, options, prompt_len, rules)
    return options


def _protect_first(given: Mapping[str, Any], prompt_len: int) -> int:
    if PROTECT not in given:
        return 0
    return min(prompt_len, _number(given, PROTECT, minimum=0, what="tokens"))


def _policy(config: EvictionConfig, given: Mapping[str, Any]) -> str:
    name = given.get(POLICY, config.policy)
    if name not in config.choices:
        raise ValueError(
            f"KV eviction: {POLICY} must be one of the policies that this server allows "
            f"({', '.join(config.choices)}), not {shown(name)}"
        )
    return str(name)


def _budget(config: EvictionConfig, given: Mapping[str, Any], recent: int) -> int | str | None:
    if BUDGET not in given:
        return None
    value = given[BUDGET]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        budget = parse_budget(value)
    except ValueError as error:
        raise ValueError(f"KV eviction: {BUDGET}: {error}") from None
    tokens = budget_tokens(budget)
    if tokens is not None and tokens <= recent:
        what = "observation window of" if recent == config.window else "most recent"
        raise ValueError(
            f"KV eviction: {BUDGET} {tokens} leaves no room beyond the {what} {recent} tokens; "
            f"give at least {recent + 1}"
        )
    return budget


def _interval(
    config: EvictionConfig,
    given: Mapping[str, Any],
    key: str,
    shortest: int,
    own: int,
    what: str,
) -> int | None:
    """Return an interval in ``what``: 0, or at least ``shortest``; the server's ``own`` if budgets
    are capped.

    Clients are not trusted then: with a shorter interval they would buy more evictions than others,
    and with a longer one keep more than the cap.
    """
    if key not in given:
        return None
    interval = _number(given, key, minimum=0, what=what)
    if config.max_budget is not None and interval != own:
        raise ValueError(
            f"KV eviction: {key} must be {own} {what} on this server, which caps budgets, not "
            f"{interval}; omit the key"
        )
    if 0 < interval < shortest:
        raise ValueError(
            f"KV eviction: {key} must be 0, or at least {shortest} {what} on this server, not "
            f"{interval}"
        )
    return interval


def _every(config: EvictionConfig, given: Mapping[str, Any]) -> int | None:
    """Return the tokens between evictions that depend on tokens alone.

    A request that names its own points or intervals is not evicted so, unless it asks for it, or
    unless budgets are capped: it would keep more than the cap inside its prompt.
    """
    own = [key for key in (AT, INTERVAL, PREFILL_INTERVAL) if key in given]
    if EVERY not in given and not (config.every and own and config.max_budget is not None):
        return 0 if config.every and own else None
    if not config.every and _number(given, EVERY, minimum=0, what="tokens"):
        raise ValueError(
            f"KV eviction: {EVERY} needs a server that was started with --kv-eviction-every; "
            "omit the key or give 0"
        )
    every = _interval(config, given, EVERY, config.min_every, config.every, "tokens")
    if own and config.max_budget is not None and config.every:
        raise ValueError(
            f"KV eviction: {own[0]} is not for this server, which caps budgets and evicts every "
            f"{config.every} tokens; omit the key"
        )
    if own and every:
        raise ValueError(
            f"KV eviction: {own[0]} cannot be combined with {EVERY} {every}, which evicts at "
            f"fixed positions only; give {EVERY} 0 or omit {own[0]}"
        )
    return every


def _check_prefill(config: EvictionConfig, options: RequestOptions) -> None:
    """Reject settings that conflict with evictions inside the prompt."""
    if (config.every if options.every is None else options.every) and options.when == "pressure":
        raise ValueError(
            f"KV eviction: {WHEN} pressure cannot be combined with evictions at fixed positions; "
            f"give {WHEN} always or {EVERY} 0"
        )
    interval = options.prefill_interval
    if not (config.prefill_interval if interval is None else interval):
        return
    budget = config.budget if options.budget is None else options.budget
    if options.when == "pressure":
        raise ValueError(
            f"KV eviction: {WHEN} pressure cannot be combined with evictions inside the prompt; "
            f"give {WHEN} always or {PREFILL_INTERVAL} 0"
        )
    if budget_tokens(budget) is None:
        raise ValueError(
            f"KV eviction: a budget of {budget} cannot be combined with evictions inside the "
            f"prompt, because it does not limit their blocks; give {BUDGET} in tokens or "
            f"{PREFILL_INTERVAL} 0"
        )


def _when(config: EvictionConfig, given: Mapping[str, Any]) -> str:
    when = given.get(WHEN, config.when)
    # Without a cap, a request may ask for any budget, which has the same effect.
    allowed = WHENS[: 1 + (config.when == "pressure" or config.max_budget is None)]
    if when not in allowed:
        raise ValueError(
            f"KV eviction: {WHEN} must be {' or '.join(allowed)} on this server, not {shown(when)}"
        )
    return str(when)


def message_index(value: Any, count: int) -> int:
    """Return the index of the message that a request refers to; negative values count from the end.

    Raises:
        ValueError: The value is not a whole number, there is no such message, or no message follows
            it.

    """
    key = f"{AT} {MESSAGE}"
    index = _number({key: value}, key, minimum=None, what="messages")
    position = index + count if index < 0 else index
    if not 0 <= position < count - 1:
        raise ValueError(
            f"KV eviction: {key} must be the index of one of the chat's {count} messages, "
            f"except the last (0 to {count - 2}, or {-count} to -2), not {index}"
            if count > 1
            else f"KV eviction: {key} needs a chat with at least two messages"
        )
    return position


def _at(given: Mapping[str, Any], prompt_len: int) -> int | None:
    if AT not in given:
        return None
    if isinstance(given[AT], Mapping):
        raise ValueError(
            f"KV eviction: {AT} as a mapping is for chat completions and completions of the API "
            "server; give prompt tokens here"
        )
    at = _number(given, AT, minimum=None, what="prompt tokens")
    point = at + prompt_len if at < 0 else at
    if not 0 < point <= prompt_len:
        raise ValueError(
            f"KV eviction: {AT} must be between 1 and the prompt's {prompt_len} tokens, or "
            f"between {1 - prompt_len} and -1 to count from its end, not {at}"
        )
    return point


def _before_last(
    config: EvictionConfig, options: RequestOptions, prompt_len: int
) -> RequestOptions:
    """Evict a prompt that another server answers one token before its end.

    The server that answers needs a token to compute. A request with its own eviction point, or with
    evictions inside the prompt, is not changed.
    """
    interval = options.prefill_interval
    inside = config.prefill_interval if interval is None else interval
    inside = inside or (config.every if options.every is None else options.every)
    fits = config.store_path and prompt_len > 1 and options.when == WHENS[0]
    if options.at is not None or inside or not fits:
        return options
    return replace(options, at=prompt_len - 1)


def _number(given: Mapping[str, Any], key: str, minimum: int | None, what: str) -> int:
    value = given[key]
    number: int | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # This is False for NaN and infinity as well.
        if abs(value) < 2**53 and value == int(value):
            number = int(value)
    elif isinstance(value, str):
        text = value.strip()
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 15:
            number = int(text)
    if number is None:
        raise ValueError(f"KV eviction: {key} must be a whole number of {what}, not {shown(value)}")
    if minimum is not None and number < minimum:
        raise ValueError(f"KV eviction: {key} must be at least {minimum} {what}, not {number}")
    return number


def _check_store(
    config: EvictionConfig, options: RequestOptions, prompt_len: int, rules: Sequence[EvictionRule]
) -> None:
    """Reject a request that keeps more than the cap, or less than its policy needs."""
    length = prompt_len if options.at is None else options.at
    rule = rules[0]
    if config.max_budget is not None:
        capped = RequestOptions(
            config.policy, budget=config.max_budget, prefill_interval=0, every=0
        )
        cap = capped.own_rule(rule)
        own = options.own_rule(rule)
        asked = replace(options, cap=None).own_rule(rule).budget(length)
        allowed = cap.budget(length)
        if options.budget is not None and asked > allowed:
            raise ValueError(
                f"KV eviction: {BUDGET} {options.budget} is {asked} tokens here, but "
                f"this server allows at most {config.max_budget}, here {allowed} tokens"
            )
        first, limit = own.first_blocks * rule.page_tokens, max(allowed, asked)
        # A share of a prompt that is not evicted grows with the answer.
        counts = isinstance(config.max_budget, int) or any(
            replace(options, protect_first=0).own_rule(group_rule).evictable(length)
            for group_rule in set(rules)
        )
        if first and counts and limit - first < own.protected + rule.page_tokens:
            raise ValueError(
                f"KV eviction: {PROTECT} {options.protect_first} takes {first} tokens, in whole "
                f"blocks of {rule.page_tokens}, but this server's --kv-eviction-max-budget "
                f"{config.max_budget} allows {limit} tokens here, including the last "
                f"{own.protected} and at least one other block"
            )
        # If nothing is evicted later, all tokens after the point are kept.
        held = min(own.chosen(length) + first, length) + prompt_len - length
        allowed = max(cap.budget(prompt_len), rule.budget(prompt_len))
        # A single token after the point is allowed: it does not fit into a full budget, and a point
        # needs a token after it.
        if prompt_len - length > 1 and not rule.interval and held > allowed:
            raise ValueError(
                f"KV eviction: {AT} {options.at} makes this request hold {held} tokens of its "
                f"prompt on a server that evicts once, the {prompt_len - length} after the point "
                f"included, but this server allows at most {allowed} tokens"
            )
    needed = config.min_slots(options.policy)
    own_rules = {options.own_rule(group_rule) for group_rule in rules}
    room = (
        min(own_rule.store_blocks(length) - own_rule.first_blocks for own_rule in own_rules)
        * rule.page_tokens
    )
    if room < needed:
        raise ValueError(
            f"KV eviction: {BUDGET} {options.budget or config.budget} leaves {room} tokens outside "
            f"the window, in whole blocks of {rule.page_tokens}, but {options.policy} needs "
            f"{needed}"
        )
