#!/usr/bin/env bash
# Makes .venv-clients: public clients of the OpenAI API that tests run against a server. They need
# other releases than vLLM of packages that it uses too. Always on CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROOT/.venv-clients"
LOCK="$ROOT/packaging/requirements-clients.lock"

one_at_a_time
stamp="$(hash_of "$ROOT"/packaging/{common.sh,setup_clients.sh} "$LOCK")"
is_current "$VENV" "$stamp" && exit 0
make_venv "$VENV"
rm -f "$VENV/.setup-stamp"
say "guidellm 0.8.1, langchain-openai 1.7.3 and lm-eval 0.4.13 (about 1.5 GB, a minute)"
install_lock "$VENV" "$LOCK"
env -C / "$VENV/bin/python" -c "import aiohttp, guidellm, langchain_openai, lm_eval, tiktoken" ||
    fail "the clients do not import"
say "ready: guidellm, langchain-openai and lm-eval in .venv-clients"
echo "$stamp" >"$VENV/.setup-stamp"
