"""``vllm-kvevict plan | calibrate | measure | inspect | policy | audit``, by one name."""

import runpy
import sys

from vllm_kvevict.processes import guard

COMMANDS = {
    "plan": "how many requests a server would hold, before it starts",
    "calibrate": "make the profile of a model, by which --kv-eviction auto keeps more",
    "measure": "ask a running server your own questions at several budgets",
    "inspect": "run one prompt and draw which tokens were kept",
    "policy": "check the scorer of a policy against the contract",
    "audit": "what a running server's evictions lost, by its audits",
    "completion": "print completion for bash and zsh: source <(vllm-kvevict completion)",
}

COMPLETION = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
_vllm_kvevict() {
  local word=${COMP_WORDS[COMP_CWORD]}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "%(commands)s" -- "$word"))
  else
    COMPREPLY=($(compgen -W "%(flags)s" -- "$word") $(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _vllm_kvevict vllm-kvevict
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    if name == "completion":
        print(completion(), end="")
        return 0
    if name in COMMANDS:
        guard()
        sys.argv = [f"vllm-kvevict {name}", *argv[1:]]
        room = "" if name == "calibrate" else "tools."
        runpy.run_module(f"vllm_kvevict.{room}{name}", run_name="__main__", alter_sys=True)
        return 0
    usage = "\n".join(f"  vllm-kvevict {one:<11} {what}" for one, what in COMMANDS.items())
    asked = name in ("", "-h", "--help")
    problem = "" if asked else f"error: there is no command {name!r}; choose from:\n"
    print(f"{problem}{usage}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def completion() -> str:
    """Return the completion script for bash and zsh: commands and the flags of eviction."""
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.sentences import flag

    flags = " ".join(map(flag, EvictionConfig.model_fields))
    return COMPLETION % dict(commands=" ".join(COMMANDS), flags=flags)


if __name__ == "__main__":
    sys.exit(main())
