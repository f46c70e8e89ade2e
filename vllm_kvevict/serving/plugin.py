"""The front door: vLLM calls :func:`register` in each of its processes, plugin used or not.

Importing this module imports neither torch nor vLLM. Without ``kv_eviction`` in the
configuration the wrapped methods do what vLLM's do.
"""

import argparse
import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, get_args

TITLE = "KV-Eviction"
"""Title of the flags' group; ``vllm serve --help=kv-eviction`` prints it."""

_WRAPPED = "_kv_eviction_wrapped"
_FROM_FLAGS = "_kv_eviction_from_flags"


def register() -> None:
    """Give vLLM the ``--kv-eviction`` flags and their configuration.

    Idempotent. Never raises: an exception here would break every ``vllm serve`` of the
    machine, also those that do not ask for eviction.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs

        if hasattr(EngineArgs.create_engine_config, _WRAPPED):
            return
        add, fold, create = (
            _wrap_add_cli_args(EngineArgs.add_cli_args),
            _wrap_from_cli_args(EngineArgs.from_cli_args.__func__),
            _wrap_create_engine_config(EngineArgs.create_engine_config),
        )
        EngineArgs.add_cli_args = staticmethod(add)
        EngineArgs.from_cli_args = classmethod(fold)
        EngineArgs.create_engine_config = create
    except Exception as error:
        _warn(f"vllm-kvevict does not fit this vLLM ({error!r})")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of :class:`~vllm_kvevict.config.config.EvictionConfig`.

    A flag that is not given leaves no attribute on the namespace, so that it cannot override
    ``--additional-config``. Values stay text: one place, the configuration, judges them.
    """
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.sentences import flag

    group = parser.add_argument_group(
        title=TITLE,
        description="Evict KV-cache entries per attention head and give whole blocks back.",
    )
    for name, field in EvictionConfig.model_fields.items():
        default = "off" if field.is_required() else field.default
        if default in ((), None) or name == "options":
            default = "not set"
        # A switch needs no value.
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        choices = {"policy": _choices, "options": _options}.get(name, str)()
        group.add_argument(
            flag(name),
            dest=_dest(name),
            metavar=name.upper(),
            default=argparse.SUPPRESS,
            help=f"{field.description} (default: {default}){choices}".replace("%", "%%"),
            **switch,
        )


def fold_flags(args: argparse.Namespace) -> argparse.Namespace:
    """Fold given flags into ``args.additional_config["kv_eviction"]``.

    Args:
        args: What the parser returned; left as it is.

    Returns:
        ``args`` itself if nothing asks for eviction, else a copy. Its additional
        configuration is validated and complete; the key is "none" where eviction is off, whatever
        the other flags are.

    Raises:
        ValueError: In one sentence, what is wrong.

    """
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.names import CONFIG_KEY, NONE
    from vllm_kvevict.config.plugins import policy_names
    from vllm_kvevict.config.sentences import flag

    given = {
        name: _typed(name, getattr(args, _dest(name)))
        for name in EvictionConfig.model_fields
        if hasattr(args, _dest(name))
    }
    additional = getattr(args, "additional_config", None)
    if additional is None:
        additional = {}
    if not isinstance(additional, dict) or not (given or CONFIG_KEY in additional):
        return args
    value = additional.get(CONFIG_KEY)
    if given:
        base = {"policy": value} if isinstance(value, str) else (value or {})
        if isinstance(base, dict):
            if "policy" not in base | given:
                raise ValueError(
                    f"KV eviction: {flag(next(iter(given)))} needs a policy; "
                    f"add --kv-eviction and one of {', '.join(policy_names())}, or {NONE} to "
                    "serve without eviction"
                )
            value = base | given
    config = EvictionConfig.parse(value)
    args = copy.copy(args)
    settings: Any = NONE
    if config is not None:
        _check_version()
        # Only what was given: auto fills in the rest.
        settings = config.model_dump(mode="json", exclude_unset=True)
    args.additional_config = additional | {CONFIG_KEY: settings}
    return args


def _wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        try:
            add_flags(parser)
        except argparse.ArgumentError as error:
            _warn(f"another plugin or vLLM itself has the flag already ({error})")
        return parser

    return _mark(add_cli_args)


def _wrap_from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        try:
            folded = fold_flags(args)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        engine_args = original(cls, folded)
        if folded is not args:
            setattr(engine_args, _FROM_FLAGS, True)
            # Further API servers get these arguments, and load plugins only after this method.
            args.additional_config = folded.additional_config
        return engine_args

    return _mark(from_cli_args)


def _wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = self.additional_config
        if not isinstance(additional, dict) or "kv_eviction" not in additional:
            return original(self, *args, **kwargs)
        return _create(original, self, *args, **kwargs)

    return _mark(create_engine_config)


def _create(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.names import CONFIG_KEY

    additional = engine_args.additional_config
    config = EvictionConfig.parse(additional[CONFIG_KEY])
    if config is None:
        # Another mapping: further API servers read this one, and switch eviction off as well.
        engine_args.additional_config = {k: v for k, v in additional.items() if k != CONFIG_KEY}
        vllm_config = original(engine_args, *args, **kwargs)
        _switch_off(vllm_config)
        return vllm_config
    with _sentence(engine_args):
        _check_version()
    with _interrupts(engine_args):
        vllm_config = original(engine_args, *args, **kwargs)
    from vllm_kvevict.serving.activate import activate, check_statistics
    from vllm_kvevict.serving.calibrate import calibrated, check_nodes
    from vllm_kvevict.serving.host_memory import check_store_memory

    with _sentence(engine_args):
        check_nodes(vllm_config, config, headless=kwargs.get("headless", False))
        check_statistics(config, getattr(engine_args, "disable_log_stats", False))
        check_store_memory(vllm_config, config)
        activate(vllm_config, *calibrated(engine_args, vllm_config, config))
    return vllm_config


def _switch_off(vllm_config: Any) -> None:
    # A rollback must not fail because of what it rolls back.
    try:
        from vllm_kvevict.serving.switched_off import switch_off

        switch_off(vllm_config)
    except Exception as error:
        _warn(f"keys of requests cannot be ignored by this vLLM ({error!r})")


@contextmanager
def _sentence(engine_args: Any) -> Iterator[None]:
    """On the command line a refusal is one sentence, and a signal ends the start at once."""
    try:
        with _interrupts(engine_args):
            yield
    except ValueError as error:
        if getattr(engine_args, _FROM_FLAGS, False):
            raise SystemExit(f"error: {error}") from None
        raise


@contextmanager
def _interrupts(engine_args: Any) -> Iterator[None]:
    """On the command line a signal ends the start at once. vLLM's event loop would only note it,
    and a calibration would follow."""
    from vllm_kvevict.processes import Interrupted, end, interruptible

    from_flags = getattr(engine_args, _FROM_FLAGS, False)
    try:
        with interruptible(from_flags):
            yield
    except Interrupted as interrupt:
        if from_flags:
            end(interrupt.number)
        raise


def _warn(why: str) -> None:
    # Only loggers below "vllm" print.
    logging.getLogger("vllm.kv_eviction").warning("KV eviction is not available: %s.", why)


def _check_version() -> None:
    import vllm

    from vllm_kvevict.compat.versions import check_vllm

    if problem := check_vllm(vllm.__version__):
        raise ValueError(problem)


def _mark(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _WRAPPED, True)
    return function


def _dest(name: str) -> str:
    return "kv_eviction" if name == "policy" else f"kv_eviction_{name}"


def _choices() -> str:
    from vllm_kvevict.config.names import POLICIES
    from vllm_kvevict.config.plugins import plugin_policies

    lines = [(name, summary) for name, (_, summary) in POLICIES.items()]
    lines += [(name, p.summary) for name, p in plugin_policies().items() if not p.problem]
    return "".join(f"\n- {name}: {summary}" for name, summary in lines)


def _options() -> str:
    from vllm_kvevict.config.names import POLICIES
    from vllm_kvevict.config.policy_options import PolicyOptions, options_of

    lines = []
    for name, field in PolicyOptions.model_fields.items():
        readers = [policy for policy in POLICIES if name in options_of(policy)]
        of = "all" if len(readers) == len(POLICIES) else ", ".join(readers)
        lines.append(f"\n- {name} ({of}; default: {field.default}): {field.description}")
    return "".join(lines)


def _typed(name: str, text: Any) -> Any:
    """The flag's text as the number its field holds; text that is no number stays text."""
    from vllm_kvevict.config.config import EvictionConfig

    annotation = EvictionConfig.model_fields[name].annotation
    kinds = {*(get_args(annotation) or (annotation,))} - {type(None)}
    for kind in (int, float):
        if kinds == {kind}:
            try:
                return kind(text)
            except ValueError:
                pass
    return text
