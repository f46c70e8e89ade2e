"""Numbers that the papers print, and the settings in which they were measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A number of a paper.

    Args:
        policy: Name of the policy here; "full cache" for none.
        kept: What is kept, in the paper's words.
        score: The paper's number.
        of: What the number is.

    """

    policy: str
    kept: str
    score: float
    of: str


@dataclass(frozen=True)
class Paper:
    """A paper, its policies, and what differs here.

    Args:
        name: How it is called here.
        source: Its place.
        model: The model of the numbers.
        policies: Names of its policies, and of those that it compares with, here.
        printed: Its numbers.
        differs: What its settings and ours have not in common.

    """

    name: str
    source: str
    model: str
    policies: tuple[str, ...]
    printed: tuple[Printed, ...]
    differs: str


FULL = "full cache"
AWARE, AGNOSTIC = "LongBench average, question known", "LongBench average, not known"
LONG, WINOGRANDE = "long-text average, question known", "Winogrande, 5-shot"

PAPERS = (
    Paper(
        "Ada-KV",
        "Ada-KV, table 1",
        "Llama-3.1-8B-Instruct",
        ("streaming-llm", "snapkv", "ada-snapkv", "pyramidkv", "ada-pyramid"),
        (
            Printed(FULL, "all", 49.20, AWARE),
            Printed("streaming-llm", "1,024 tokens", 42.58, AWARE),
            Printed("snapkv", "1,024 tokens", 47.84, AWARE),
            Printed("ada-snapkv", "1,024 tokens", 48.16, AWARE),
            Printed("pyramidkv", "1,024 tokens", 47.70, AWARE),
            Printed("ada-pyramid", "1,024 tokens", 48.00, AWARE),
            Printed("streaming-llm", "1,024 tokens", 30.68, AGNOSTIC),
            Printed("snapkv", "1,024 tokens", 37.56, AGNOSTIC),
            Printed("ada-snapkv", "1,024 tokens", 37.99, AGNOSTIC),
            Printed("pyramidkv", "1,024 tokens", 36.49, AGNOSTIC),
            Printed("ada-pyramid", "1,024 tokens", 37.98, AGNOSTIC),
        ),
        "The paper evicts single tokens, with a budget in tokens whatever the length. Here budgets "
        "are shares, and whole blocks of 32 tokens are kept; heads keep at least 20% of the even "
        "share.",
    ),
    Paper(
        "NACL",
        "NACL, table 2",
        "LLaMA2-7B-Chat",
        ("nacl", "h2o", "scissorhands", "tova"),
        (
            Printed(FULL, "all", 31.5, LONG),
            Printed("nacl", "10%", 29.4, LONG),
            Printed("nacl", "20%", 30.8, LONG),
            Printed("nacl", "30%", 31.0, LONG),
            Printed("h2o", "10%", 27.4, LONG),
            Printed("h2o", "20%", 28.6, LONG),
            Printed("h2o", "30%", 29.1, LONG),
            Printed("tova", "10%", 27.5, LONG),
            Printed("tova", "20%", 28.5, LONG),
            Printed("tova", "30%", 29.5, LONG),
            Printed("scissorhands", "10%", 14.9, LONG),
            Printed("scissorhands", "20%", 21.9, LONG),
            Printed("scissorhands", "30%", 26.7, LONG),
        ),
        "The paper's proxy tokens are a share of the prompt (3 to 20%), here they are the window "
        "of 32 tokens. TOVA stands for the paper's MSRNN.",
    ),
    Paper(
        "H2O",
        "H2O, table 2",
        "OPT-30B",
        ("h2o", "streaming-llm"),
        (
            Printed(FULL, "all", 70.24, WINOGRANDE),
            Printed("h2o", "20%", 69.06, WINOGRANDE),
        ),
        "The paper evicts one token at each step from the first prompt token on; here prompts are "
        "evicted at their end, by the attention of all their queries. Local without heavy hitters "
        "has 49.17 in the paper, and streaming-llm keeps first tokens in addition.",
    ),
    Paper(
        "SubGen",
        "SubGen, section 3.2",
        "LongChat-7B",
        ("subgen", "subgen-stream", "h2o", "streaming-llm"),
        (Printed("subgen", "50%", 44.0, "line retrieval at 9,000 tokens"),),
        "The text names one number of the paper's table 1; H2O and the attention sink are 10 "
        "points lower there. The paper chooses centres once for the whole cache.",
    ),
)
