"""Use OpenAI's Python client with Fledge. Start a server first:

fledge serve smollm2-135m --port 8000
pip install openai
python examples/openai_client.py --url http://localhost:8000/v1
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="none", help="the server's --api-key")
parser.add_argument("--max-tokens", type=int, default=128)
options = parser.parse_args()

client = OpenAI(base_url=options.url, api_key=options.api_key)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Write a Python function that checks if a number is prime."}]

print(f"--- {model}, streamed")
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=options.max_tokens, temperature=0, stream=True
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)

print("\n--- the same again, with and without speculation")
for speculate in (True, False):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=options.max_tokens,
        temperature=0,
        extra_body={"speculate": speculate, "include_speculation": True},  # Fledge's own fields
    )
    figures = answer.usage.model_extra["speculation"]
    print(f"speculate={speculate}: {answer.usage.completion_tokens} tokens, speculation {figures}")
