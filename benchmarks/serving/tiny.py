"""What the serving benchmarks serve: a tiny Llama in float32, and memory for two full prompts."""

PROMPT, OUTPUT, BLOCK = 2048, 192, 32
LAYERS, KV_HEADS, HEAD_SIZE, FLOAT32 = 4, 4, 32, 4
BLOCK_BYTES = LAYERS * KV_HEADS * BLOCK * 2 * HEAD_SIZE * FLOAT32
KV_BLOCKS = 2 * -(-(PROMPT + OUTPUT) // BLOCK) + 1


def server_args() -> list[str]:
    """Arguments of ``vllm serve``: KV memory for two full prompts with their answers."""
    return [
        "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(KV_BLOCKS * BLOCK_BYTES), "--seed", "0",
    ]  # fmt: skip
