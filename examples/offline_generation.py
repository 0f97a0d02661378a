"""Generate from Python: several prompts at once, first with a drafter and then without.

python examples/offline_generation.py --model smollm2-135m
"""

import argparse

from fledge import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2-135m", help="a folder, a GGUF file, a hub id or a built-in name")
parser.add_argument("--drafter", default="auto", help="auto, ngram, none, a folder or a hub id")
parser.add_argument("--max-tokens", type=int, default=64)
options = parser.parse_args()

questions = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Name three rivers in Europe.",
]
llm = LLM(options.model, options.drafter)
prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
params = SamplingParams(temperature=0, max_tokens=options.max_tokens)

drafted = llm.generate(prompts, params)
plain = llm.generate(prompts, params, speculate=False)
for question, with_drafter, without in zip(questions, drafted, plain, strict=True):
    print(f"> {question}\n{with_drafter.text.strip()}")
    print(f"  same text without the drafter: {with_drafter.token_ids == without.token_ids}")
    print(f"  acceptance length {with_drafter.stats.acceptance_length:.2f}")
    print(f"  {with_drafter.tokens_per_second:.0f} tokens/s; without the drafter {without.tokens_per_second:.0f}\n")
