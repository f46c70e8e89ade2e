"""Host memory and files behind the KV cache: stores leave to there, and come back."""
